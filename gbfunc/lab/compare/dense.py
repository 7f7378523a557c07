"""Smaller nets of the same family, trained as they are: dense, of low rank, and quantised.

Low rank: every matrix is a product of two thin ones, which are what is trained and stored (T. N. Sainath et al.,
"Low-rank matrix factorization for deep neural network training with high-dimensional output targets", 2013). A matrix
that is smaller than its factors stays one.

Quantised: a dense net is stored in whole numbers of few bits after training. Affine, per row of a matrix:
`w = scale * (q - zero)` with q of 4 or 8 bits (B. Jacob et al., 2018). The range of a row is shrunk to where the
squared error is least; scales and biases are stored as float16.

Suffixes: R rows and C columns of a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import Tensor

from gbfunc.lab.compare.base import (
    BudgetTooSmall,
    Problem,
    Settings,
    Sizes,
    Trained,
    grid,
    largest,
    narrow_pnets,
    narrow_sizes,
    pack,
    packed_size,
    perceptron_sizes,
    restore,
    state_of,
    train_net,
    unpack,
)
from gbfunc.tasks import Net, Task
from gbfunc.tasks.pnets import PNet, find_pnet, mlp, n_params
from gbfunc.types import Params

DENSE_RATES = (3e-3, 1e-2, 3e-2, 1e-1)


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

        return grid(pnet=[dict(pnet.config) for pnet in narrow_pnets(problem.task, fits)], lr=DENSE_RATES)

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


LOW_RANK_RATES = (1e-2, 3e-2, 1e-1)
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
            raise BudgetTooSmall(f"no factors of rank 1 between {n_in} inputs and {n_out} outputs are as small as that")
        return [{**shape, **rate} for shape in found for rate in grid(lr=LOW_RANK_RATES)]

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


QUANTISED_RATES = (3e-3, 1e-2, 3e-2)
_SHRINKS = tuple(1 - 0.05 * i for i in range(11))


class Quantised(NamedTuple):
    """A matrix in whole numbers.

    Attributes:
        levels_RC: uint8, below 2^bits.
        scale_R: float16.
        zero_R: uint8, the level that stands for 0.
    """

    levels_RC: Tensor
    scale_R: Tensor
    zero_R: Tensor


def quantise(weight_RC: Tensor, bits: int) -> Quantised:
    """The nearest matrix in `bits` a weight, row by row."""
    most = 2**bits - 1
    low_R, high_R = weight_RC.amin(1).clamp(max=0), weight_RC.amax(1).clamp(min=0)
    best, least_R = None, torch.full((len(weight_RC),), torch.inf)
    for shrink in _SHRINKS:
        # The smallest normal float16 keeps rows of zeros from a division by 0.
        scale_R = (shrink * (high_R - low_R) / most).clamp(min=6.2e-5).half()
        zero_R = (-shrink * low_R / scale_R.float()).round().clamp(0, most).byte()
        levels_RC = (weight_RC / scale_R.float()[:, None] + zero_R[:, None]).round().clamp(0, most).byte()
        found = Quantised(levels_RC, scale_R, zero_R)
        error_R = (dequantise(found) - weight_RC).square().sum(1)
        better_R = error_R < least_R
        least_R = torch.where(better_R, error_R, least_R)
        if best is None:
            best = found
        else:
            best = Quantised(
                torch.where(better_R[:, None], levels_RC, best.levels_RC),
                torch.where(better_R, scale_R, best.scale_R),
                torch.where(better_R, zero_R, best.zero_R),
            )
    assert best is not None
    return best


def dequantise(quantised: Quantised) -> Tensor:
    """The matrix [R, C] that whole numbers stand for, float32."""
    levels_RC, scale_R, zero_R = quantised
    return scale_R.float()[:, None] * (levels_RC.float() - zero_R.float()[:, None])


def pack_levels(levels_RC: Tensor, bits: int) -> Tensor:
    """Levels [R, C] of 4 bits two a byte, in a row of bytes; of 8 bits as they are."""
    flat = levels_RC.flatten()
    if bits == 8:
        return flat
    pairs = torch.nn.functional.pad(flat, (0, len(flat) % 2)).view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4


def unpack_levels(packed: Tensor, shape: tuple[int, int], bits: int) -> Tensor:
    """Undo `pack_levels` for a matrix of this shape."""
    if bits == 4:
        packed = torch.stack((packed & 15, packed >> 4), 1).flatten()
    return packed[: shape[0] * shape[1]].view(shape)


@dataclass(frozen=True)
class DenseQuantised:
    """The safetensors file of levels, scales, zeros and biases.

    Attributes:
        bits: of a weight, 4 or 8.
    """

    bits: int

    def candidates(self, problem: Problem) -> list[Settings]:
        """Depths, each as wide as fits, and learning rates."""

        def fits(sizes: Sizes) -> bool:
            return len(self._encode({k: torch.zeros(s) for k, s in dense_shapes(sizes).items()})) <= problem.budget

        return grid(sizes=narrow_sizes(problem.task, fits), lr=QUANTISED_RATES)

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """Adam on all weights, which are quantised at the end."""
        net = mlp(tuple(settings["sizes"]), seed)
        train_net(problem, net.parameters(), net, settings["lr"], seed)
        return Trained(self._encode(net.state_dict()), sum(p.numel() for p in net.parameters()))

    def load(self, data: bytes, task: Task) -> Net:
        """The net with the weights that the levels stand for."""
        tensors = load(data)
        biases = {int(name.split(".")[0]): b.float() for name, b in tensors.items() if name.endswith("bias")}
        sizes = (perceptron_sizes(task)[0], *(len(biases[i]) for i in sorted(biases)))
        state: Params = {f"{i}.bias": b for i, b in biases.items()}
        for name, shape in dense_shapes(sizes).items():
            if len(shape) == 2:
                levels_RC = unpack_levels(tensors[name], (shape[0], shape[1]), self.bits)
                state[name] = dequantise(Quantised(levels_RC, tensors[f"{name}.scale"], tensors[f"{name}.zero"]))
        net = mlp(sizes, 0)
        net.load_state_dict(state)
        return net

    def _encode(self, state: Params) -> bytes:
        stored: Params = {}
        for name, tensor in state.items():
            if tensor.ndim == 2:
                q = quantise(tensor, self.bits)
                packed = pack_levels(q.levels_RC, self.bits)
                stored |= {name: packed, f"{name}.scale": q.scale_R, f"{name}.zero": q.zero_R}
            else:
                stored[name] = tensor.half()
        return save(stored)
