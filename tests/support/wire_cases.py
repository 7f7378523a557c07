"""What ranks of the distributed bench must find as one process does, in float64."""

from __future__ import annotations

from typing import Any

import torch

import gbfunc as gb
from gbfunc.lab.bench.cases import mlp_case
from gbfunc.lab.bench.dense_parallel import layer_styles
from gbfunc.lab.bench.variants import first_net, loss_fn, plan_of
from gbfunc.parallel import Mesh
from tests.support.ranks import PATIENCE


def train(mesh: Mesh | None, width: int, steps: int = 3) -> dict[str, Any]:
    """Steps on an MLP as the bench has it, by gradients as they are: losses, norms and the state."""
    case = mlp_case((width, width, width, 10), 256, (), h=32)
    assert case.periodic is not None
    net, (x, target) = first_net(case).double(), case.batch()
    plan = plan_of(net, case.periodic)
    parallel = None if mesh is None else layer_styles(net, mesh.sizes["tensor"])
    optimizer = gb.torch_optimizer(torch.optim.SGD, lr=1e-2)
    step = gb.make_train_step(plan, net, loss_fn, optimizer, mesh=mesh, parallel=parallel)
    state, reports = step.init(0), []
    for _ in range(steps):
        state, info = step(state, (x.double(), target))
        reports.append(torch.stack([info.loss, info.grad_norm]))
    return {"reports": torch.stack(reports), "state": step.gather(state)}


def run(init_method: str, width: int, tensor: int) -> dict[str, Any]:
    """The same on this rank of a mesh."""
    with gb.mesh(tensor=tensor, timeout=60 * PATIENCE, init_method=init_method) as mesh:
        return train(mesh, width)
