"""What layouts send and store on ranks, for the planner's tests."""

from collections import Counter
from typing import Any

import optree
import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.parallel.mesh import AXES
from gbfunc.parallel.styles import tensor_styles
from gbfunc.plan import Plan
from gbfunc.tasks.pnets.gpt import GPT
from tests.support.live import LiveBytes
from tests.support.ranks import PATIENCE, said
from tests.support.tensor_cases import next_token

LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"data": 4},
    "data tensor": {"data": 2, "tensor": 2},
    "tensor": {"tensor": 4},
    "pipeline": {"pipeline": 4, "pipeline_schedule": "1f1b", "microbatches": 4},
    "data gpipe": {"data": 2, "pipeline": 2, "pipeline_schedule": "gpipe", "microbatches": 4},
    "data interleaved": {"data": 2, "pipeline": 2, "pipeline_schedule": "interleaved", "microbatches": 4},
    "tensor zbv": {"tensor": 2, "pipeline": 2, "pipeline_schedule": "zbv", "microbatches": 4},
    "gnets tiles": {"gnets": 4, "placement": "sharded"},
    "gnets factors": {"gnets": 4, "placement": "factors"},
    "data gnets again": {"data": 2, "gnets": 2, "placement": "sharded", "remat": "layer"},
    "gnets tensor": {"gnets": 2, "tensor": 2, "placement": "sharded"},
    "data again": {"data": 4, "remat": "layer", "lazy": False},
    "data factors": {"data": 4, "lazy": True},
    "tensor factors": {"data": 2, "tensor": 2, "lazy": True},
    "pipeline dense": {"data": 2, "pipeline": 2, "pipeline_schedule": "1f1b", "microbatches": 4, "lazy": False},
}
"""Layouts of four ranks: axes of the mesh, and options of the step."""


def make_case(width: int = 32, layers: int = 4) -> tuple[nn.Module, Plan, Tensor]:
    torch.manual_seed(0)
    pnet = GPT(64, 16, layers, width, 4, 4 * width)
    plan = gb.make_plan(pnet, gb.periodic(4), max_tile=width)
    return pnet, plan, torch.randint(0, 64, (16, 17))


def _state_tensors(state: gb.TrainState) -> list[Tensor]:
    return [*(x for leaves in state.gnets.values() for x in leaves.values()), *state.direct.values()]


def measure(layout: dict[str, Any]) -> dict[str, Any]:
    options = dict(layout)
    sizes = {axis: options.pop(axis) for axis in AXES if axis in options}
    mesh = gb.mesh(**{"gnets": 1, **sizes})
    pnet, plan, batch = make_case()
    options["pipeline"] = options.pop("pipeline_schedule", None)
    options["parallel"] = tensor_styles(pnet) if mesh.sizes["tensor"] > 1 else None
    optimizer = gb.torch_optimizer(torch.optim.AdamW, lr=0.01)
    # The planner counts what graphs of PyTorch's operators keep, as on a GPU.
    given: dict[str, Any] = {"kernel": "eager", "placement": "replicated", "mesh": mesh, **options}
    step = gb.make_train_step(plan, pnet, next_token, optimizer, **given)
    state, _ = step(step.init(0), mesh.shard_batch(batch))
    before, optimizer_state = Counter(mesh.traffic), optree.tree_leaves(state.opt.leaves)
    with LiveBytes(0) as live:
        # The state is there before the step; its optimizer's part is used at the end alone.
        for x in (*_state_tensors(state), *optimizer_state):
            x.view_as(x)
        step(state, mesh.shard_batch(batch))
    return {
        "sent": {axis: n - before[axis] for axis, n in mesh.traffic.items() if n > before[axis]},
        "optimizer": sum(x.nbytes for x in optimizer_state if x.ndim),
        "genome": sum(x.nbytes for x in _state_tensors(state)),
        "live": live.peak,
    }


def run_layouts(init_method: str, names: list[str]) -> dict[str, Any]:
    with gb.mesh(4, 1, timeout=60 * PATIENCE, init_method=init_method):
        return {name: said(measure, LAYOUTS[name]) for name in names}
