"""Which checkpoint to go on from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import optree

from gbfunc.parallel import from_rank_0
from gbfunc.plan import Plan
from gbfunc.storage.checkpoint_file import NAME, list_steps, restore, unseal
from gbfunc.storage.ranks import ask_rank_0
from gbfunc.train import TrainStep
from gbfunc.types import JSON


class Checkpoint(NamedTuple):
    """What `load_checkpoint` found.

    Attributes:
        state: the state, in the structure and on the devices of `like`.
        extra: what was saved with it; {} where nothing was found.
        path: the file; None where nothing was found.
        skipped: a line for each newer checkpoint that is damaged, saying why; newest first.
    """

    state: Any
    extra: JSON
    path: Path | None
    skipped: tuple[str, ...]


def load_checkpoint(
    path: str | os.PathLike[str],
    train_step: TrainStep,
    like: Any,
    *,
    check: Callable[[JSON], None] = lambda extra: None,
) -> Checkpoint:
    """Read the newest sound checkpoint of a folder, or the one of a file; everything is checked.

    On many ranks all of them call, rank 0 alone reads, and each gets its part of the state, whatever the number of
    ranks was that saved it.

    Args:
        path: a folder that a `Checkpointer` writes to, or one of its files. A folder in which there is no sound
            checkpoint, or that does not exist, gives `like` back with `path=None`.
        train_step: the step that trains.
        like: a state with the structure, shapes, dtypes and devices to restore, such as a fresh one.
        check: gets the `extra` of the checkpoint before all else is compared; raises ValueError to refuse it.

    Raises:
        FileNotFoundError: for a file that does not exist.
        CollectiveError: if a rank is missing.
        ValueError: for a file that is damaged; for a sound checkpoint of another plan or optimizer.
    """
    mesh, found = train_step.mesh, None
    whole: Any = train_step.gather(like)

    def find() -> JSON:
        nonlocal found
        found = _find(Path(path), train_step.plan, whole, check)
        return {"extra": found.extra, "path": found.path and str(found.path), "skipped": found.skipped}

    told = ask_rank_0(mesh, find)
    skipped = tuple(told["skipped"])
    if told["path"] is None:
        return Checkpoint(like, {}, None, skipped)
    leaves, structure = optree.tree_flatten(whole if found is None else found.state)
    state: Any = optree.tree_unflatten(structure, from_rank_0(mesh, leaves))
    return Checkpoint(train_step.shard(state), told["extra"], Path(told["path"]), skipped)


def _find(path: Path, plan: Plan, like: Any, check: Callable[[JSON], None]) -> Checkpoint:
    skipped: list[str] = []
    named = path.is_file() or NAME.fullmatch(path.name)
    for file in [path] if named else list_steps(path):
        try:
            metadata, tensors = unseal(file.read_bytes())
        except (ValueError, OSError) as error:
            if not named:
                skipped.append(f"{file.name}: {error}")
                continue
            if isinstance(error, OSError):
                raise
            raise ValueError(f"{file} is not a checkpoint to go on from: {error}") from error
        # A sound checkpoint that does not fit is no damage: to begin again in its folder would be a mistake.
        try:
            state, extra = restore(metadata, tensors, plan, like, check)
        except ValueError as error:
            raise ValueError(f"{file} is not a checkpoint to go on from: {error}") from error
        return Checkpoint(state, extra, file, tuple(skipped))
    return Checkpoint(like, {}, None, tuple(skipped))
