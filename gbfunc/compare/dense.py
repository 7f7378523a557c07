"""A smaller dense net of the same family, trained as it is: what most people would do."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from gbfunc.compare.base import Problem, Settings, Trained, grid
from gbfunc.compare.family import Sizes, narrow_sizes
from gbfunc.compare.store import pack, packed_size, unpack
from gbfunc.compare.training import train_net
from gbfunc.tasks import Net, Task, mlp, mlp_sizes

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
        found = narrow_sizes(problem.task, lambda s: packed_size(dense_shapes(s), problem.dtype) <= problem.budget)
        return grid(sizes=found, lr=RATES)

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """Adam on all weights."""
        net = mlp(tuple(settings["sizes"]), seed)
        train_net(problem, net.parameters(), net, settings["lr"], seed)
        return Trained(pack(net.state_dict(), problem.dtype), sum(p.numel() for p in net.parameters()))

    def load(self, data: bytes, task: Task) -> Net:
        """The net; its sizes are those of the tensors."""
        tensors, _ = unpack(data)
        net = mlp(mlp_sizes({name: tuple(t.shape) for name, t in tensors.items()}), 0)
        net.load_state_dict(tensors)
        return net
