"""Low-rank training: every matrix as a product of two thin ones, which are what is trained and stored.

T. N. Sainath et al., "Low-rank matrix factorization for deep neural network training with high-dimensional output
targets" (2013). A matrix that is smaller than its factors stays one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from gbfunc.lab.compare.base import Problem, Settings, Trained, Unfit, grid
from gbfunc.lab.compare.family import Sizes, largest, perceptron_sizes
from gbfunc.lab.compare.store import pack, packed_size, unpack
from gbfunc.lab.compare.training import train_net
from gbfunc.tasks import Net, Task
from gbfunc.types import Params

RATES = (1e-2, 3e-2, 1e-1)
RANKS = (1, 2, 4, 8, 16)


def factored_shapes(sizes: Sizes, rank: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters: factors of a layer where they are fewer numbers than its matrix."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i, (n_in, n_out) in enumerate(pairwise(sizes)):
        if rank * (n_in + n_out) < n_in * n_out:
            shapes |= {f"{i}.left": (n_out, rank), f"{i}.right": (rank, n_in), f"{i}.bias": (n_out,)}
        else:
            shapes |= {f"{i}.weight": (n_out, n_in), f"{i}.bias": (n_out,)}
    return shapes


def factored_net(leaves: Params) -> Net:
    """The perceptron with these parameters: [B, ...] -> [B, K]."""
    n_layers = len({name.split(".")[0] for name in leaves})

    def net(x: Tensor) -> Tensor:
        x = x.flatten(1)
        for i in range(n_layers):
            if f"{i}.left" in leaves:
                x = F.linear(F.linear(x, leaves[f"{i}.right"]), leaves[f"{i}.left"], leaves[f"{i}.bias"])
            else:
                x = F.linear(x, leaves[f"{i}.weight"], leaves[f"{i}.bias"])
            x = x if i == n_layers - 1 else F.relu(x)
        return x

    return net


@dataclass(frozen=True)
class LowRankTraining:
    """The safetensors file of the factors."""

    def candidates(self, problem: Problem) -> list[Settings]:
        """Ranks, each with as many hidden units as fit (at most the p-net's), and learning rates."""
        n_in, *hidden_units, n_out = perceptron_sizes(problem.task)
        width = max(hidden_units, default=1)
        found = []
        for rank in RANKS:

            def fits(h: int, rank: int = rank) -> bool:
                return packed_size(factored_shapes((n_in, h, n_out), rank), problem.dtype) <= problem.budget

            hidden = largest(lambda h, rank=rank: fits(max(h, rank + 1), rank), width)
            # A narrower first matrix would be smaller than its factors, and the net a dense one.
            if rank * (n_in + hidden) < n_in * hidden:
                found.append({"sizes": (n_in, hidden, n_out), "rank": rank})
        if not found:
            raise Unfit(f"no factors of rank 1 between {n_in} inputs and {n_out} outputs are as small as that")
        return [{**shape, **rate} for shape in found for rate in grid(lr=RATES)]

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """Adam on the factors and biases."""
        generator = torch.Generator().manual_seed(seed)
        leaves = {}
        for name, shape in factored_shapes(tuple(settings["sizes"]), settings["rank"]).items():
            # He's gain of a rectifier once for each matrix, not for both of its factors.
            gain = {"weight": 2, "left": 2, "right": 1, "bias": 0}[name.split(".")[1]]
            std = (gain / shape[-1]) ** 0.5
            leaves[name] = (torch.randn(shape, generator=generator) * std).requires_grad_()
        train_net(problem, leaves.values(), factored_net(leaves), settings["lr"], seed)
        return Trained(pack(leaves, problem.dtype), sum(leaf.numel() for leaf in leaves.values()))

    def load(self, data: bytes, task: Task) -> Net:
        """The net of the factors."""
        return factored_net(unpack(data)[0])
