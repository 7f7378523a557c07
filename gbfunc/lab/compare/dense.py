"""A smaller dense net of the same family, trained as it is: what most people would do."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from gbfunc.lab.compare.base import Problem, Settings, Trained, grid
from gbfunc.lab.compare.family import Sizes, narrow_pnets
from gbfunc.lab.compare.store import pack, restore, state_of, unpack
from gbfunc.lab.compare.training import train_net
from gbfunc.tasks import Net, Task
from gbfunc.tasks.pnets import PNet, find_pnet, n_params

RATES = (3e-3, 1e-2, 3e-2, 1e-1)


def dense_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of the `mlp` of these sizes."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i, (n_in, n_out) in enumerate(pairwise(sizes)):
        shapes |= {f"{2 * i}.weight": (n_out, n_in), f"{2 * i}.bias": (n_out,)}
    return shapes


@dataclass(frozen=True)
class Dense:
    """The safetensors file of the net."""

    def candidates(self, problem: Problem) -> list[Settings]:
        """Depths, each as wide as fits, and learning rates."""

        def fits(pnet: PNet) -> bool:
            # Its parameters and buffers have shapes alone on that device.
            with torch.device("meta"):
                state = state_of(pnet.make())
            return len(pack({k: torch.zeros(t.shape, dtype=t.dtype) for k, t in state.items()}, problem.dtype)) <= (
                problem.budget
            )

        return grid(pnet=[dict(pnet.config) for pnet in narrow_pnets(problem.task, fits)], lr=RATES)

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """Adam on all weights."""
        task = problem.task
        net = find_pnet(task.pnet.name, task.interface, settings["pnet"]).build(seed)
        train_net(problem, net.parameters(), net, settings["lr"], seed)
        return Trained(pack(state_of(net), problem.dtype), n_params(net))

    def load(self, data: bytes, task: Task) -> Net:
        """The net; its widths are those of the tensors."""
        state, _ = unpack(data)
        assert task.pnet.fitted is not None
        buffers = {name for name, _ in task.build(0).named_buffers()}
        return restore(
            task.pnet.fitted({k: tuple(t.shape) for k, t in state.items() if k not in buffers}).build(0), state
        )
