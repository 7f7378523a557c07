"""What layouts really send and keep on ranks, to hold the planner to: bytes by axis, and tensors kept for backward."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.generate import Generator
from gbfunc.lab.bench.memory import LiveBytes
from gbfunc.parallel import CollectiveError
from gbfunc.parallel.styles import tensor_styles
from gbfunc.plan import Plan
from gbfunc.tasks.pnets.gpt import GPT
from tests.support.ranks import PATIENCE
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

AXES = ("data", "pipeline", "gnets", "tensor")


def make_case(width: int = 32, layers: int = 4) -> tuple[nn.Module, Plan, Tensor]:
    """A small GPT, its plan, and a global batch of 16 rows."""
    torch.manual_seed(0)
    pnet = GPT(64, 16, layers, width, 4, 4 * width)
    plan = gb.make_plan(pnet, gb.periodic(4), max_tile=width)
    return pnet, plan, torch.randint(0, 64, (16, 17))


def _state_tensors(state: gb.TrainState) -> list[Tensor]:
    return [*(x for leaves in state.gnets.values() for x in leaves.values()), *state.direct.values()]


class Kept:
    """Bytes of the tensors that graphs keep for backward, at most, those of `known` left out."""

    def __init__(self) -> None:
        self.alive: Counter[int] = Counter()
        self.known: dict[int, Any] = {}
        self.bytes = self.peak = 0

    def know(self, tensors: Any) -> None:
        """Tensors that do not count."""
        for x in tensors:
            self.known[x.untyped_storage()._cdata] = x.untyped_storage()

    def pack(self, x: Tensor) -> Any:
        """Keep a tensor."""
        return _Held(self, x)

    def change(self, x: Tensor, by: int) -> None:
        """A tensor is kept, or no longer."""
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        before = self.alive[key] > 0
        self.alive[key] += by
        self.bytes += storage.nbytes() * ((self.alive[key] > 0) - before)
        self.peak = max(self.peak, self.bytes)


class _Held:
    def __init__(self, kept: Kept, x: Tensor) -> None:
        self.kept, self.x = kept, x
        kept.change(x, 1)

    def __del__(self) -> None:
        self.kept.change(self.x, -1)


def measure(layout: dict[str, Any]) -> dict[str, Any]:
    """The second step of a layout on this rank: bytes sent by axis, and bytes kept."""
    options = dict(layout)
    sizes = {axis: options.pop(axis) for axis in AXES if axis in options}
    mesh = gb.mesh(**{"gnets": 1, **sizes})
    pnet, plan, batch = make_case()
    styles = tensor_styles(pnet) if mesh.sizes["tensor"] > 1 else None
    options["pipeline"] = options.pop("pipeline_schedule", None)
    optimizer = gb.torch_optimizer(torch.optim.AdamW, lr=0.01)
    placement = {"placement": "replicated", **options}
    # The planner counts what graphs of PyTorch's operators keep, as on a GPU.
    options: dict[str, Any] = {"kernel": "eager", **placement}
    step = gb.make_train_step(plan, pnet, next_token, optimizer, mesh=mesh, parallel=styles, **options)
    state, _ = step(step.init(0), mesh.shard_batch(batch))
    before, kept, made = Counter(mesh.traffic.by_axis), Kept(), [0]
    call: Callable[..., Any] = Generator.__call__
    direct = {t.name for t in plan.direct}
    generating = [False]

    def generate(self: Generator, *args: Any, **kwargs: Any) -> Any:
        generating[0] = True
        weights = call(self, *args, **kwargs)
        generating[0] = False
        generated = {n: w for n, w in weights.items() if n not in direct}
        storages = {w.untyped_storage()._cdata: w.untyped_storage().nbytes() for w in generated.values()}
        made[0] = sum(storages.values())
        kept.know(weights.values())
        made[0] += inside.bytes
        return weights

    inside = Kept()
    inside.know(_state_tensors(state))

    def pack(x: Tensor) -> Any:
        return inside.pack(x) if generating[0] else kept.pack(x)

    Generator.__call__ = generate
    kept.know([*_state_tensors(state), batch])
    # Weights that are made again take their gradients under torch.func, which has no such hooks.
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.x if isinstance(x, _Held) else x)
    try:
        with nullcontext() if placement.get("remat") == "layer" else hooks:
            state, _ = step(state, mesh.shard_batch(batch))
    finally:
        Generator.__call__ = call
    sent = {axis: n - before[axis] for axis, n in mesh.traffic.by_axis.items() if n > before[axis]}
    with LiveBytes(0) as live:
        # The state is there before the step; its optimizer's part is used at the end alone.
        for x in (*_state_tensors(state), *(x for of in state.opt.leaves.values() for x in of.values())):
            x.view_as(x)
        step(state, mesh.shard_batch(batch))
    opt = sum(x.nbytes for leaves in state.opt.leaves.values() for x in leaves.values() if x.ndim)
    genome = sum(x.nbytes for leaves in state.gnets.values() for x in leaves.values())
    genome += sum(x.nbytes for x in state.direct.values())
    return {"sent": sent, "kept": kept.peak, "weights": made[0], "optimizer": opt, "genome": genome, "live": live.peak}


def run_layouts(init_method: str, names: list[str]) -> dict[str, Any]:
    """All layouts on this rank; an error as its words."""
    results = {}
    with gb.mesh(4, 1, timeout=60 * PATIENCE, init_method=init_method):
        for name in names:
            try:
                results[name] = measure(LAYOUTS[name])
            except CollectiveError:
                raise
            except Exception:
                results[name] = traceback.format_exc()
    return results
