"""Training checkpoints, written in the background. A training resumes from the newest valid checkpoint.

A checkpoint is one safetensors file with the state's tensors by name (`opt/leaves/direct/0.bias/exp_avg`), a hash of
the plan, the optimizer's options and schedule, values of the training loop, and the file's SHA-256. Writes are atomic.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import re
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes

from gbfunc.files import fcntl, replace_file
from gbfunc.parallel import Mesh, from_rank_0, gather_objects, text_of
from gbfunc.plan import Plan
from gbfunc.train.param_groups import ROLES
from gbfunc.train.step import TrainStep
from gbfunc.trees import compare_trees, flatten_tree, unflatten_tree
from gbfunc.types import DTYPES, JSON, Params
from gbfunc.untrusted import parse_json

_FORMAT = "gbfunc-checkpoint-1"
_NO_DIGEST = "0" * 64
_IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")  # Optimizer options without effect on updates
_EXTRA, _TAG = "extra/", "$type"
_NAME = re.compile(r"step-(\d{8,})\.safetensors")
_LEFTOVER = re.compile(rf"\.{_NAME.pattern}\.[0-9a-f]{{16}}")  # Temporary files that a killed `replace_file` left


class Checkpointer:
    """Writes training checkpoints to a folder in the background, and keeps the newest ones.

    Only one training at a time can use a folder. Incomplete files of a killed training are removed. In distributed
    training, every rank creates a `Checkpointer` and calls `save`, but only rank 0 writes to the folder.

    Args:
        folder: the folder; created if it does not exist.
        train_step: the training step.
        keep: number of checkpoints to keep. After a checkpoint is written, the oldest checkpoints of earlier steps are
            removed. Checkpoints of later steps (from before a restart) are never removed.

    Raises:
        ValueError: if `keep` is below 1.
        OSError: if the folder cannot be created or written, or if another training (also in this process) uses it.

    >>> import tempfile, torch, gbfunc as gb
    >>> pnet = torch.nn.Linear(30, 20)
    >>> plan = gb.make_plan(pnet, gb.periodic(features=2))
    >>> sgd = gb.torch_optimizer(torch.optim.SGD, lr=0.1)
    >>> train_step = gb.make_train_step(plan, pnet, lambda net, x: net(x).square().mean(), sgd)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state, _ = train_step(train_step.init(seed=0), torch.ones(4, 30))
    ...     with gb.Checkpointer(folder, train_step) as checkpointer:
    ...         checkpointer.save(state, {"epoch": 1})
    ...     last = gb.load_checkpoint(folder, train_step, train_step.init(seed=0))
    >>> last.path.name, last.extra, int(last.state.step)
    ('step-00000001.safetensors', {'epoch': 1}, 1)
    """

    def __init__(self, folder: str | os.PathLike[str], train_step: TrainStep, *, keep: int = 3) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep must be an int >= 1, got {keep!r}")
        _check_step(train_step)
        self._folder, self._keep, self._train_step = Path(folder), keep, train_step
        self._plan = json.dumps(_plan_summary(train_step.plan))
        self._unlock: Callable[[], object] = lambda: None

        def lock() -> None:
            # Release the lock on `close`, on garbage collection, and in forked children, which would keep the lock.
            self._unlock = weakref.finalize(self, os.close, _lock(self._folder))
            if fcntl is not None:
                os.register_at_fork(after_in_child=self._unlock)

        _on_rank_0(train_step.mesh, lock)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Path] | None = None

    def save(self, state: Any, extra: Mapping[str, Any] | None = None) -> None:
        """Copies a state and writes the copy in the background; waits only for the previous write.

        Args:
            state: a `TrainState`; in distributed training, the rank's own state, with its rows of split leaves.
            extra: values of the training loop, such as states of generators and data loaders, saved from rank 0:
                numbers, strings, bytes, tensors, None, and dicts, lists and tuples of supported values. A NamedTuple is
                restored as a tuple.

        Raises:
            TypeError: if the state has a value that is not a tensor, or if `extra` has a value of an unsupported type.
            ValueError: if `extra` is nested too deeply for `load_checkpoint`.
            OSError: on rank 0, if the previous write failed. The new checkpoint is written nevertheless.
            CollectiveError: if a rank is missing.
        """
        state = self._train_step.gather(state)
        if self._train_step.mesh.rank:
            return
        # Copy everything now: a step with `donate=True` overwrites the state, and the caller may change `extra`.
        tensors = {k: leaf.detach().to("cpu", copy=True).contiguous() for k, leaf in flatten_tree(state).items()}
        packed = json.dumps(pack_values(dict(extra or {}), tensors))
        parse_json(packed, "extra", parse_constant=float, parse_float=float)
        training = json.dumps(describe_training(self._train_step.settings, int(state.step)))
        about = {"plan": self._plan, "training": training, "extra": packed}
        failure = self._pending and self._pending.exception()
        self._pending = self._writer.submit(self._write, int(state.step), tensors, about)
        if failure:
            raise failure

    def wait(self) -> Path | None:
        """Waits until the last checkpoint is written. Returns the checkpoint's file on rank 0, otherwise None.

        Raises:
            OSError: if the checkpoint could not be written. Earlier checkpoints are intact.
        """
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def close(self) -> None:
        """Waits until the last checkpoint is written and releases the folder; raises the errors of `wait`."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            self._unlock()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        # If the block ends with an error, raise that error instead of an error of writing.
        with contextlib.suppress(OSError) if kind else contextlib.nullcontext():
            self.close()

    def _write(self, step: int, tensors: Params, about: dict[str, str]) -> Path:
        path = self._folder / f"step-{step:08d}.safetensors"
        try:
            replace_file(path, _encode(tensors, about))
        except OSError as error:
            why = error.strerror or str(error)
            message = f"the checkpoint of step {step} could not be written ({why}); earlier ones are intact: make space"
            raise OSError(error.errno, message, str(path)) from error
        older = [file for n, file in _list_steps(self._folder).items() if n <= step]
        for file in older[self._keep :]:
            with contextlib.suppress(OSError):
                file.unlink()
        return path


class Checkpoint(NamedTuple):
    """The result of `load_checkpoint`. If no file is valid, `state` is `like`, `extra` is {}, and `path` is None."""

    state: Any  # Has the structure and devices of `like`
    extra: JSON
    path: Path | None
    skipped: tuple[str, ...]  # A line for each damaged file newer than `path`, with the reason, newest first


def load_checkpoint(
    path: str | os.PathLike[str],
    train_step: TrainStep,
    like: Any,
    *,
    check: Callable[[JSON], None] = lambda extra: None,
    changed: Callable[[str], None] | None = None,
) -> Checkpoint:
    """Reads and checks a checkpoint file, or the newest valid checkpoint in a folder.

    Every rank calls this function. Rank 0 reads the file, and every rank receives the state with its rows of split
    leaves. The number of ranks may differ from the number that saved the checkpoint.

    Args:
        path: a folder that a `Checkpointer` writes to, or a checkpoint file. If the folder is missing or has no valid
            checkpoint, the result has the state `like` and `path=None`.
        train_step: the training step.
        like: a state with the structure, shapes, dtypes and devices of the result, such as `train_step.init()`.
        check: called with the checkpoint's `extra` before plan and optimizer are compared. The function raises
            ValueError to refuse the checkpoint.
        changed: called for each option, schedule or clipping norm of the optimizer that differs from the checkpoint's,
            with a string such as `"lr 0.1, now 0.05"`. If `changed` is None, a difference raises ValueError.

    Raises:
        FileNotFoundError: if `path` is a checkpoint file that does not exist.
        CollectiveError: if a rank is missing.
        ValueError: if the file is damaged, or the checkpoint has a different plan or optimizer.
    """
    _check_step(train_step)
    mesh, state = train_step.mesh, train_step.gather(like)
    flat = flatten_tree(state)

    def restore() -> tuple[Checkpoint, list[str]]:
        found, training = _restore(Path(path), train_step, flat, check)
        differing = _differing(training, describe_training(train_step.settings, int(flat["step"])))
        if differing and changed is None:
            words = f"{found.path} cannot be resumed: it was trained with other options"
            raise ValueError(f"{words} ({', '.join(differing)}); changed= allows that")
        return found, differing

    found, differing = _on_rank_0(mesh, restore)
    if changed is not None:
        for line in differing:
            changed(line)
    if found.path is None:
        return found._replace(state=like)
    restored = dict(zip(flat, from_rank_0(mesh, list(flat.values())), strict=True))
    return found._replace(state=train_step.shard(unflatten_tree(restored, state)))


def _check_step(train_step: TrainStep) -> None:
    if not isinstance(train_step, TrainStep):
        raise TypeError(f"expected a step of gb.make_train_step, got {type(train_step).__name__}")


def _restore(
    path: Path, train_step: TrainStep, flat: Params, check: Callable[[JSON], None]
) -> tuple[Checkpoint, Mapping[str, str]]:
    skipped: list[str] = []
    named = path.is_file() or _NAME.fullmatch(path.name)
    for file in [path] if named else _list_steps(path).values():
        try:
            try:
                metadata, tensors = _decode(file.read_bytes())
            except (ValueError, OSError) as error:
                if named:
                    raise
                skipped.append(f"{file.name}: {error}")
                continue
            # Raise an error for an intact file of another training, and try no older file: do not mix trainings.
            if metadata.get("format") != _FORMAT:
                raise ValueError(f"its format must be {_FORMAT!r}, got {metadata.get('format')!r}: update gbfunc")
            # Unset the `object_pairs_hook` of `parse_json`: with both hooks, `json.loads` ignores `object_hook`.
            hooks = {"object_hook": partial(unpack_values, tensors), "object_pairs_hook": None}
            extra = _object(metadata, "extra", parse_constant=float, parse_float=float, **hooks)
            check(extra)
            plan, expected = _object(metadata, "plan"), _plan_summary(train_step.plan)
            if plan["sha256"] != expected.pop("sha256"):
                differing = [f"{k} {plan.get(k)} instead of {v}" for k, v in expected.items() if plan.get(k) != v]
                same_size = "of the same size; make the p-net after the same torch.manual_seed: the plan has its scales"
                raise ValueError(f"it was saved with another plan ({', '.join(differing) or same_size})")
            training = _object(metadata, "training")
            if not all(isinstance(value, str) for value in training.values()):
                raise ValueError("expected texts as its options of the training, got others")
            saved = {name: x for name, x in tensors.items() if not name.startswith(_EXTRA)}
            tensors = train_step.fitted(saved)
            compare_trees(flat, tensors, "it was saved with another optimizer or p-net")
            if int(tensors["step"]) < 0:
                raise ValueError(f"its step must be at least 0, got {int(tensors['step'])}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raw = f"its metadata cannot be read ({type(error).__name__}: {error}); take another file"
            why = error if isinstance(error, ValueError) else raw
            raise ValueError(f"{file} cannot be resumed: {why}") from error
        for name, leaf in flat.items():
            # Use the memory layout of `like`, so that training continues bit by bit: sums may depend on the layout.
            flat[name] = torch.empty_like(leaf, requires_grad=False).copy_(tensors[name])
        return Checkpoint(None, extra, file, tuple(skipped)), training
    return Checkpoint(None, {}, None, tuple(skipped)), {}


def _object(metadata: dict[str, str], name: str, **options: Any) -> JSON:
    found = parse_json(metadata.get(name, "null"), f"the {name!r} of its metadata", **options)
    if not isinstance(found, dict):
        raise ValueError(f"expected an object as the {name!r} of its metadata, got {type(found).__name__}")
    return found


def _plan_summary(plan: Plan) -> JSON:
    return {
        "genome_params": plan.genome_params,
        "pnet_params": plan.pnet_params,
        "ensembles": [e.name for e in plan.ensembles],
        "sha256": plan.digest(),
    }


def describe_training(settings: Mapping[str, Any], step: int) -> dict[str, str]:
    """Describes optimizer options as comparable strings: a schedule by its rate at `step` and a hash of its rates."""
    if "cls" not in settings:
        return {k: text_of(v) for k, v in settings.items()}  # An optimizer that `torch_optimizer` did not make
    by_role = {f"{role}.{k}": v for role in ROLES for k, v in (settings[role] or {}).items()}
    parameters = inspect.signature(settings["cls"]).parameters.items()
    default = {k: p.default for k, p in parameters if p.default is not p.empty}
    every = {**default, **settings["options"], "lr": settings["lr"], **by_role, "clip_norm": settings["clip_norm"]}
    every = {k: v for k, v in every.items() if k.rpartition(".")[2] not in _IMPLEMENTATIONS}
    described = {k: _described(v, step) for k, v in every.items()}
    return {"optimizer": settings["cls"].__name__, **described}


def _described(x: Any, step: int) -> str:
    if not callable(x):
        return text_of(float(x) if isinstance(x, int) and not isinstance(x, bool) else x)
    rate: Callable[[int], Any] = x
    values = []
    with contextlib.suppress(Exception):  # A schedule may raise after its last step
        for n in sorted({round(1.03**i) - 1 for i in range(468)}):
            values.append(f"{rate(n):.6g}")
    digest = hashlib.sha256(" ".join(values).encode()).hexdigest()[:8]
    return f"{rate(step):.6g} at step {step:,} (schedule {digest})"


def _differing(saved: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    def of(training: Mapping[str, str], name: str) -> str | None:
        # If an option is not set for a role (`code.lr`), the role has the option of all roles (`lr`).
        return training.get(name, training.get(name.rpartition(".")[2]))

    pairs = {name: (of(saved, name), of(current, name)) for name in {**saved, **current}}
    return [f"{name} {a}, now {b}" for name, (a, b) in pairs.items() if a != b and None not in (a, b)]


def _encode(tensors: Params, about: dict[str, str]) -> bytes:
    data = to_bytes(tensors, {"format": _FORMAT, "sha256": _NO_DIGEST, **about})
    # Fill the hash into the entry `"sha256":"000..."`. No other metadata contain this text: their quotes are escaped.
    return data.replace(_entry(_NO_DIGEST), _entry(hashlib.sha256(data).hexdigest()), 1)


def _decode(data: bytes) -> tuple[dict[str, str], Params]:
    try:
        metadata = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")], "its header")["__metadata__"]
        digest = metadata["sha256"]
        intact = hashlib.sha256(data.replace(_entry(digest), _entry(_NO_DIGEST), 1)).hexdigest() == digest
        tensors = from_bytes(data) if intact else {}
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(f"it is damaged: no checkpoint's header can be read in its {len(data):,} bytes") from error
    if not intact:
        raise ValueError("it is damaged: its digest does not fit its content; resume from an earlier one")
    return metadata, tensors


def pack_values(x: Any, tensors: Params) -> Any:
    """Encode a value as JSON: put copies of tensors into `tensors`, and mark types that JSON lacks, such as tuples."""
    if isinstance(x, torch.Tensor):
        if x.layout != torch.strided or x.is_meta or x.dtype not in DTYPES.values():
            got = f"{x.dtype}, {x.layout}, on {x.device}"
            raise TypeError(f"extra must hold dense tensors with values, of {', '.join(DTYPES)}, got {got}")
        name = f"{_EXTRA}{len(tensors)}"
        tensors[name] = x.detach().to("cpu", copy=True).contiguous()
        return {_TAG: "tensor", "of": name}
    if isinstance(x, bytes):
        return {_TAG: "bytes", "of": x.hex()}
    if isinstance(x, Mapping):
        if _TAG not in x and all(isinstance(k, str) for k in x):
            return {k: pack_values(v, tensors) for k, v in x.items()}
        return {_TAG: "dict", "of": [[pack_values(k, tensors), pack_values(v, tensors)] for k, v in x.items()]}
    if isinstance(x, tuple):
        return {_TAG: "tuple", "of": [pack_values(v, tensors) for v in x]}
    return [pack_values(v, tensors) for v in x] if isinstance(x, list) else x


def unpack_values(tensors: Mapping[str, Any], x: JSON) -> Any:
    """Undo `pack_values` for one JSON object, as an `object_hook` of `json.loads`."""
    make = {"tensor": tensors.__getitem__, "bytes": bytes.fromhex, "tuple": tuple, "dict": dict}
    return make[x[_TAG]](x["of"]) if _TAG in x else x


def _entry(digest: str) -> bytes:
    return f'"sha256":"{digest}"'.encode()


def _list_steps(folder: Path) -> dict[int, Path]:
    with contextlib.suppress(FileNotFoundError):
        steps = {int(match[1]): path for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
        return dict(sorted(steps.items(), reverse=True))
    return {}


def _lock(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise OSError(error.errno, f"cannot keep checkpoints there ({error.strerror})", str(folder)) from error
    if fcntl is None:
        return lock
    try:
        # Use flock, not lockf: lockf would allow a second lock in the same process, and would release the first lock
        # when the second file is closed.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        os.close(lock)
        raise OSError(error.errno, "another training is keeping checkpoints there; use another", str(folder)) from error
    except OSError:
        return lock  # The file system has no locks: do not remove files that another training may be writing
    for file in folder.iterdir():
        if _LEFTOVER.fullmatch(file.name):
            file.unlink(missing_ok=True)
    return lock


def _on_rank_0(mesh: Mesh, do: Callable[[], Any]) -> Any:
    """Run `do` on rank 0. All ranks call this function, and get the result or the ValueError or OSError of `do`."""
    answer = failure = None
    if mesh.rank == 0:
        try:
            answer = do()
        except (ValueError, OSError) as error:
            failure = error
    answer, reported = gather_objects(mesh, (answer, failure))[0]
    if failure is not None:
        raise failure
    if reported is not None:
        raise type(reported)(f"on rank 0: {reported}")
    return answer
