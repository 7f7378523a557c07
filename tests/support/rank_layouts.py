"""Trainings of a GPT on meshes of every kind, which save, and go on from each other's checkpoints."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

import gbfunc as gb
from gbfunc.parallel import Mesh
from gbfunc.parallel.styles import tensor_styles
from gbfunc.train.step import TrainStep
from tests.support.rank_cases import TYPES
from tests.support.ranks import PATIENCE
from tests.support.tensor_cases import language_model, next_token

LAYOUTS: dict[str, dict[str, int]] = {
    "data": {"data": 2},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "gnets": {"gnets": 2},
    "tensor and pipeline": {"tensor": 2, "pipeline": 2},
    "gnets and tensor": {"gnets": 2, "tensor": 2},
    "gnets and pipeline": {"gnets": 2, "pipeline": 2},
}
ADAMW = gb.torch_optimizer(torch.optim.AdamW, lr=0.02)


class Course(NamedTuple):
    """A stretch of a training, from a checkpoint in `source`, if there is one, to `until` steps in all."""

    layout: str
    source: Path
    folder: Path
    until: int


def make(mesh: Mesh | None) -> TrainStep:
    pnet = language_model("gpt", 4).double()
    plan = gb.make_plan(pnet, TYPES["periodic"], max_tile=10)
    sizes = {} if mesh is None else mesh.sizes
    split: dict[str, Any] = {"mesh": mesh, "placement": "sharded" if sizes.get("gnets", 1) > 1 else "auto"}
    if sizes.get("tensor", 1) > 1:
        split["parallel"] = tensor_styles(pnet)
    if sizes.get("pipeline", 1) > 1:
        split |= {"pipeline": "1f1b", "microbatches": 2}
    return gb.make_train_step(plan, pnet, next_token, ADAMW, **split)


def take(mesh: Mesh | None, course: Course) -> dict[str, Any]:
    step = make(mesh)
    found = gb.load_checkpoint(course.source, step, step.init(3))
    state = found.state
    for done in range(int(state.step), course.until):
        batch = torch.randint(0, 22, (8, 9), generator=torch.Generator().manual_seed(done))
        state, _ = step(state, batch if mesh is None else mesh.shard_batch(batch))
    with gb.Checkpointer(course.folder, step) as checkpointer:
        checkpointer.save(state)
    whole = step.gather(state)
    genome = course.folder / f"genome-{0 if mesh is None else mesh.rank}.safetensors"
    genome.parent.mkdir(exist_ok=True)
    gb.save(genome, step.plan, whole)
    return {"loaded": step.gather(found.state), "state": whole, "genome": genome.read_bytes()}


def run_courses(init_method: str, courses: list[tuple[str, str, str, int]]) -> list[dict[str, Any]]:
    taken = []
    with gb.mesh(init_method=init_method, timeout=30 * PATIENCE):
        for layout, source, folder, until in courses:
            sizes: dict[str, Any] = {"gnets": 1, **LAYOUTS[layout]}
            mesh = gb.mesh(**sizes, timeout=30 * PATIENCE)
            taken.append(take(mesh, Course(layout, Path(source), Path(folder), until)))
    return taken
