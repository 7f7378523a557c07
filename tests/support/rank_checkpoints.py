"""Trainings on ranks that save, are killed, and go on."""

import os
import signal
from pathlib import Path
from typing import Any

from torch import nn

import gbfunc as gb
from gbfunc.parallel import CollectiveError, Mesh
from gbfunc.train.step import TrainStep
from tests.support.rank_cases import ADAMW, batches, pnet_of, squared
from tests.support.ranks import PATIENCE


def make(mesh: Mesh | None, placement: Any = "auto") -> TrainStep:
    pnet = pnet_of()
    plan = gb.make_plan(pnet, gb.periodic(2), max_tile=(4, 4))
    return gb.make_train_step(plan, pnet, squared, ADAMW, mesh=mesh, placement=placement, donate=True)


def course(
    mesh: Mesh | None, folder: Path, until: int, placement: Any = "auto", kill: tuple[int, int, str] | None = None
) -> dict[str, Any]:
    step, data = make(mesh, placement), batches()
    found = gb.load_checkpoint(folder, step, step.init(3))
    state = found.state
    with gb.Checkpointer(folder, step, keep=99) as checkpointer:
        for done in range(int(state.step), until):
            batch = data[done % len(data)]
            state, _ = step(state, batch if mesh is None else mesh.shard_batch(batch))
            if kill is not None and mesh is not None and kill[:2] == (mesh.rank, done + 1):
                checkpointer.wait()
                die_at(kill[2])
            checkpointer.save(state, {"after": done + 1})
    name = found.path and found.path.name
    return {"state": step.gather(state), "from": name, "extra": found.extra, "skipped": found.skipped}


def die_at(moment: str) -> None:
    """Be killed now, or when the next file is complete but does not have its name yet."""
    if moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # pyright: ignore


def refusals(init_method: str, folder: Path) -> list[str]:
    with gb.mesh(init_method=init_method, timeout=30 * PATIENCE) as mesh:
        step, told = make(mesh), []
        other_pnet = nn.Linear(6, 5).double()
        other = gb.make_train_step(gb.make_plan(other_pnet), other_pnet, squared, ADAMW, mesh=mesh)
        missing = folder / "step-00000099.safetensors"
        for attempt in (
            lambda: gb.Checkpointer("/proc/checkpoints", step),
            lambda: gb.load_checkpoint(folder, other, other.init()),
            lambda: gb.load_checkpoint(missing, step, step.init()),
        ):
            try:
                attempt()
            except (ValueError, OSError) as error:
                told.append(f"{type(error).__name__}: {error}")
        return told


def killed(init_method: str, folder: str, victim: int, moment: str, timeout: float) -> str:
    mesh = gb.mesh(init_method=init_method, timeout=timeout)
    try:
        course(mesh, Path(folder), 50, "sharded", (victim, 3, moment))
    except CollectiveError as error:
        return str(error)
    return ""
