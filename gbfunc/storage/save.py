"""Checkpoints written in the background, while training goes on."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors.torch import save as to_bytes

from gbfunc.files import replace_file
from gbfunc.storage.checkpoint_file import FORMAT, HOLE, list_steps, named_leaves, plan_summary, seal
from gbfunc.storage.ranks import ask_rank_0
from gbfunc.train import TrainStep
from gbfunc.types import Params

try:
    import fcntl
except ImportError:  # Windows has no such locks: there, leftovers of killed processes stay.
    fcntl = None

_LEFTOVER = re.compile(r"\.step-\d{8,}\.safetensors\.[0-9a-f]{16}")
_LOCK = ".lock"


class Checkpointer:
    """Writes checkpoints of a training into a folder, in the background, and keeps the newest.

    One training at a time can hold a folder. What a killed one left half-written there is removed. On many ranks, all
    of them make one and call `save`; rank 0 alone needs the folder and writes.

    Args:
        folder: where to; made if need be.
        train_step: the step that trains.
        keep: how many to keep. Older ones are removed once a new one is on disk, later ones never.

    Raises:
        ValueError: for `keep` below 1.
        OSError: if the folder cannot be made or written, or another process holds it.

    >>> import tempfile, torch, gbfunc as gb
    >>> pnet = torch.nn.Linear(30, 20)
    >>> plan = gb.make_plan(pnet, gb.periodic(features=2))
    >>> sgd = gb.torch_optimizer(torch.optim.SGD, lr=0.1)
    >>> train_step = gb.make_train_step(plan, pnet, lambda net, x: net(x).square().mean(), sgd)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state, _ = train_step(train_step.init(seed=0), torch.ones(4, 30))
    ...     with gb.Checkpointer(folder, train_step) as checkpointer:
    ...         checkpointer.save(state, {"epoch": 1})
    ...     found = gb.load_checkpoint(folder, train_step, train_step.init(seed=0))
    >>> found.path.name, found.extra, int(found.state.step)
    ('step-00000001.safetensors', {'epoch': 1}, 1)
    """

    def __init__(self, folder: str | os.PathLike[str], train_step: TrainStep, *, keep: int = 3) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep must be an int >= 1, got {keep!r}")
        self._folder, self._keep = Path(folder), keep
        self._train_step = train_step
        self._plan = json.dumps(plan_summary(train_step.plan))
        self._lock: int | None = None

        def hold() -> None:
            self._lock = _hold(self._folder)

        ask_rank_0(train_step.mesh, hold)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Path] | None = None

    def save(self, state: Any, extra: Mapping[str, Any] | None = None) -> None:
        """Copy a state and write it in the background; waits only for the write before, if that is still going on.

        Args:
            state: a `TrainState`; on many ranks, each gives its own part.
            extra: what else the loop must know to go on, as JSON: position in the data, states of generators, history.

        Raises:
            TypeError: if the state holds anything but tensors, or `extra` anything but JSON.
            OSError: if the write before failed, on rank 0; this one is tried nevertheless.
            CollectiveError: if a rank is missing.
        """
        state = self._train_step.gather(state)
        if self._train_step.mesh.rank:
            return
        # A donated state is overwritten by the next step, and what a caller does with `extra` is its own.
        tensors = {k: leaf.detach().to("cpu", copy=True).contiguous() for k, leaf in named_leaves(state).items()}
        metadata = {"format": FORMAT, "plan": self._plan, "extra": json.dumps(dict(extra or {})), "sha256": HOLE}
        before, failure = self._pending, None
        if before is not None:
            failure = before.exception()
        self._pending = self._writer.submit(self._write, int(state.step), tensors, metadata)
        if failure is not None:
            raise failure

    def wait(self) -> Path | None:
        """Wait until the last checkpoint is on disk.

        Returns:
            Its file; None where nothing was saved since the last call, and on all ranks but 0.

        Raises:
            OSError: if it could not be written; those before are intact.
        """
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def close(self) -> None:
        """Wait for what is being written, and let go of the folder.

        Raises:
            OSError: if the last checkpoint could not be written; those before are intact.
        """
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The error that ends the block matters more than one in writing.
        with contextlib.suppress(OSError) if kind else contextlib.nullcontext():
            self.close()

    def _write(self, step: int, tensors: Params, metadata: dict[str, str]) -> Path:
        path = self._folder / f"step-{step:08d}.safetensors"
        try:
            replace_file(path, seal(to_bytes(tensors, metadata)))
        except OSError as error:
            why = error.strerror or str(error)
            message = f"the checkpoint of step {step} could not be written ({why}); those before it are intact"
            raise OSError(error.errno, message, str(path)) from error
        for old in list_steps(self._folder, up_to=step)[self._keep :]:
            # It costs only its space.
            with contextlib.suppress(OSError):
                old.unlink()
        return path


def _hold(folder: Path) -> int | None:
    """Make and lock a folder, and remove what killed processes left in it; the lock goes with the process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise OSError(error.errno, f"cannot keep checkpoints there ({error.strerror})", str(folder)) from error
    if fcntl is None:
        return lock
    try:
        # Unlike flock's, these locks are not inherited: a worker that outlives a killed parent does not hold them.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            os.close(lock)
            raise OSError(error.errno, "another process is keeping checkpoints there", str(folder)) from error
        return lock  # A file system without locks: what looks left over may be in the making.
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            path.unlink(missing_ok=True)
    return lock
