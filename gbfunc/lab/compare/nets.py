"""Smaller dense nets of the p-net's family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from gbfunc.lab.compare import base
from gbfunc.lab.compare.base import Problem, Settings, Trained
from gbfunc.tasks import Net, Task
from gbfunc.tasks.pnets.base import PNet, n_params
from gbfunc.types import Params


@dataclass(frozen=True)
class Dense:
    """The weights of the net, as deep and wide as fits."""

    rates: ClassVar[tuple[float, ...]] = (3e-3, 1e-2, 3e-2, 1e-1)

    def candidates(self, problem: Problem) -> list[Settings]:
        def fits(pnet: PNet) -> bool:
            return len(self._encode(base.blank(pnet), pnet, problem)) <= problem.budget

        return base.of_nets(base.narrow_pnets(problem.task, fits), problem.task, lr=self.rates)

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        pnet = base.pnet_about(settings, problem.task)
        net = pnet.build(seed)
        base.train_net(problem, net.parameters(), net, settings["lr"], seed)
        return Trained(self._encode(base.in_use(net), pnet, problem), n_params(net))

    def load(self, data: bytes, task: Task) -> Net:
        net = base.pnet_about(base.text_of(data), task).build(0)
        return base.restore(net, self._decode(data, base.in_use(net), net))

    def _encode(self, state: Params, pnet: PNet, problem: Problem) -> bytes:
        return base.pack(state, problem.dtype, base.about_pnet(pnet, problem.task))

    def _decode(self, data: bytes, like: Params, net: nn.Module) -> Params:
        return base.unpack(data, like)
