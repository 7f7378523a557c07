"""A random-subspace genome: the p-net's seeded first weights, and a seeded random combination of a few trained numbers.

C. Li, H. Farkhoor, R. Liu, J. Yosinski, "Measuring the intrinsic dimension of objective landscapes" (2018):
`theta = theta_0 + P z`; only z and the seed are stored. Every tensor's part of P z is in units of its first deviation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gbfunc.lab.compare.base import Problem, Settings, Trained, Unfit, grid
from gbfunc.lab.compare.family import largest
from gbfunc.lab.compare.projection import Projection
from gbfunc.lab.compare.store import pack, restore, unpack
from gbfunc.lab.compare.training import train_net
from gbfunc.pnet import PureNet, buffers_of, parameter_infos
from gbfunc.tasks import Net, Task
from gbfunc.tasks.pnets import n_params
from gbfunc.types import Params

RATES = (3e-2, 1e-1, 3e-1, 1.0)


def subspace_weights(task: Task, d: int, seed: int) -> Callable[[Tensor], Params]:
    """From z [d] to every parameter of the task's p-net."""
    pnet = task.build(seed)
    first = {o.name: o.tensor.detach() for o in parameter_infos(pnet)}
    sizes = [t.numel() for t in first.values()]
    projection = Projection(d, sum(sizes), seed)
    # So that z of unit deviation moves every weight by about its own first deviation.
    scales = {name: float(t.std()) if t.numel() > 1 else 1.0 for name, t in first.items()}

    def weights(z_d: Tensor) -> Params:
        pieces = (projection(z_d) * (projection.D / d) ** 0.5).split(sizes)
        return {
            name: torch.add(t, piece.view_as(t), alpha=scales[name] or 1.0)
            for (name, t), piece in zip(first.items(), pieces, strict=True)
        }

    return weights


@dataclass(frozen=True)
class RandomSubspace:
    """The safetensors file of z, with the seed beside it."""

    def candidates(self, problem: Problem) -> list[Settings]:
        """As many numbers as fit, and learning rates."""
        pnet = problem.task.build(0)
        buffers = {name: b for name, (b, _) in buffers_of(pnet).items()}

        def fits(d: int) -> bool:
            return len(_encode(torch.zeros(d), buffers, problem.dtype, 0)) <= problem.budget

        d = largest(fits, n_params(pnet))
        if not d:
            raise Unfit("no file has room for a single number")
        return grid(d=(d,), lr=RATES)

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """Adam on z, from the p-net's first weights."""
        d, pnet = settings["d"], problem.task.build(seed)
        weights, call = subspace_weights(problem.task, d, seed), PureNet(pnet)
        buffers = {name: b.clone() for name, (b, _) in buffers_of(pnet).items()}
        z_d = torch.zeros(d, requires_grad=True)
        train_net(problem, [z_d], lambda x: call(weights(z_d), buffers, x), settings["lr"], seed)
        return Trained(_encode(z_d, buffers, problem.dtype, seed), d)

    def load(self, data: bytes, task: Task) -> Net:
        """The p-net with the weights that seed and z give."""
        state, about = unpack(data)
        seed, z_d = int(about["seed"]), state.pop("z")
        return restore(task.build(seed), state | subspace_weights(task, len(z_d), seed)(z_d))


def _encode(z_d: Tensor, buffers: Params, dtype: torch.dtype, seed: int) -> bytes:
    return pack({"z": z_d, **buffers}, dtype, {"seed": str(seed)})
