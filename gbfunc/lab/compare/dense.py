"""Smaller nets of the same family, trained as they are: dense, of low rank, and quantised.

Low rank: every matrix is a product of two thin ones, which are what is trained and stored (T. N. Sainath et al.,
"Low-rank matrix factorization for deep neural network training with high-dimensional output targets", 2013). A matrix
that is smaller than its factors stays one.

Quantised: a dense net is stored in whole numbers of few bits after training. Affine, per row of a matrix:
`w = scale * (q - zero)` with q of 4 or 8 bits (B. Jacob et al., 2018). The range of a row is shrunk to where the
squared error is least; scales and biases are stored as float16.

Suffixes: R rows and C columns of a matrix, S shrunk ranges to choose from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import Tensor

from gbfunc.lab.compare import base
from gbfunc.lab.compare.base import BudgetTooSmall, Problem, Settings, Sizes, Trained, grid
from gbfunc.tasks import Net, Task
from gbfunc.tasks.pnets import PNet, find_pnet, mlp, n_params
from gbfunc.types import Params

DENSE_RATES = (3e-3, 1e-2, 3e-2, 1e-1)


@dataclass(frozen=True)
class Dense:
    """The safetensors file of the net."""

    def candidates(self, problem: Problem) -> list[Settings]:
        """Depths, each as wide as fits, and learning rates."""

        def fits(pnet: PNet) -> bool:
            # Its parameters and buffers have shapes alone on that device.
            with torch.device("meta"):
                state = base.state_of(pnet.make())
            stored = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in state.items()}
            return len(base.pack(stored, problem.dtype)) <= problem.budget

        return grid(pnet=[dict(pnet.config) for pnet in base.narrow_pnets(problem.task, fits)], lr=DENSE_RATES)

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """Adam on all weights."""
        task = problem.task
        net = find_pnet(task.pnet.name, task.interface, settings["pnet"]).build(seed)
        base.train_net(problem, net.parameters(), net, settings["lr"], seed)
        return Trained(base.pack(base.state_of(net), problem.dtype), n_params(net))

    def load(self, data: bytes, task: Task) -> Net:
        """The net; its widths are those of the tensors."""
        state, _ = base.unpack(data)
        assert task.pnet.fitted is not None
        buffers = {name for name, _ in task.build(0).named_buffers()}
        return base.restore(
            task.pnet.fitted({k: tuple(t.shape) for k, t in state.items() if k not in buffers}).build(0), state
        )


LOW_RANK_RATES = (1e-2, 3e-2, 1e-1)
RANKS = (1, 2, 4, 8, 16)


def factored_net(leaves: Params) -> Net:
    """The perceptron with these parameters: [B, ...] -> [B, K]."""
    layers = sorted({int(name.split(".")[0]) for name in leaves})

    def net(x: Tensor) -> Tensor:
        x = x.flatten(1)
        for i in layers:
            if f"{i}.left" in leaves:
                x = F.linear(F.linear(x, leaves[f"{i}.right"]), leaves[f"{i}.left"], leaves[f"{i}.bias"])
            else:
                x = F.linear(x, leaves[f"{i}.weight"], leaves[f"{i}.bias"])
            x = x if i == layers[-1] else F.relu(x)
        return x

    return net


@dataclass(frozen=True)
class LowRankTraining:
    """The safetensors file of the factors."""

    def candidates(self, problem: Problem) -> list[Settings]:
        """Ranks, each with as many hidden units as fit (at most the p-net's), and learning rates."""
        n_in, *hidden_units, n_out = base.perceptron_sizes(problem.task)
        width = max(hidden_units, default=1)
        shapes = []
        for rank in RANKS:

            def fits(h: int, rank: int = rank) -> bool:
                factors = base.zeros(base.perceptron_shapes((n_in, max(h, rank + 1), n_out), rank))
                return len(base.pack(factors, problem.dtype)) <= problem.budget

            hidden = base.largest(fits, width)
            # A narrower first matrix would be smaller than its factors, and the net a dense one.
            if rank * (n_in + hidden) < n_in * hidden:
                shapes.append({"sizes": (n_in, hidden, n_out), "rank": rank})
        if not shapes:
            raise BudgetTooSmall(f"no factors of rank 1 between {n_in} inputs and {n_out} outputs are as small as that")
        return [{**shape, "lr": lr} for shape in shapes for lr in LOW_RANK_RATES]

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """Adam on the factors and biases."""
        generator = torch.Generator().manual_seed(seed)
        leaves = {}
        for name, shape in base.perceptron_shapes(tuple(settings["sizes"]), settings["rank"]).items():
            # He's gain of a rectifier once for each matrix, not for both of its factors.
            gain = {"weight": 2, "left": 2, "right": 1, "bias": 0}[name.split(".")[1]]
            std = (gain / shape[-1]) ** 0.5
            leaves[name] = (torch.randn(shape, generator=generator) * std).requires_grad_()
        base.train_net(problem, leaves.values(), factored_net(leaves), settings["lr"], seed)
        return Trained(base.pack(leaves, problem.dtype), sum(leaf.numel() for leaf in leaves.values()))

    def load(self, data: bytes, task: Task) -> Net:
        """The net of the factors."""
        return factored_net(base.unpack(data)[0])


QUANTISED_RATES = (3e-3, 1e-2, 3e-2)
_SHRINKS = tuple(1 - 0.05 * i for i in range(11))


class Quantised(NamedTuple):
    """A matrix in whole numbers."""

    levels_RC: Tensor  # uint8, below 2^bits
    scale_R: Tensor  # float16
    zero_R: Tensor  # uint8, the level that stands for 0


def quantise(weight_RC: Tensor, bits: int) -> Quantised:
    """The nearest matrix in `bits` a weight, row by row."""
    most, shrinks_S1 = 2**bits - 1, torch.tensor(_SHRINKS)[:, None]
    low_R, high_R = weight_RC.amin(1).clamp(max=0), weight_RC.amax(1).clamp(min=0)
    # The smallest normal float16 keeps rows of zeros from a division by 0.
    scale_SR = (shrinks_S1 * (high_R - low_R) / most).clamp(min=6.2e-5).half()
    zero_SR = (-shrinks_S1 * low_R / scale_SR.float()).round().clamp(0, most).byte()
    levels_SRC = (weight_RC / scale_SR.float()[..., None] + zero_SR[..., None]).round().clamp(0, most).byte()
    error_SR = (dequantise(Quantised(levels_SRC, scale_SR, zero_SR)) - weight_RC).square().sum(2)
    best = error_SR.argmin(0), torch.arange(len(weight_RC))
    return Quantised(levels_SRC[best], scale_SR[best], zero_SR[best])


def dequantise(quantised: Quantised) -> Tensor:
    """The matrix [R, C] that whole numbers stand for, float32."""
    levels_RC, scale_R, zero_R = quantised
    return scale_R.float()[..., None] * (levels_RC.float() - zero_R.float()[..., None])


def pack_levels(levels_RC: Tensor, bits: int) -> Tensor:
    """Levels [R, C] of 4 bits two a byte, in a row of bytes; of 8 bits as they are."""
    flat = levels_RC.flatten()
    if bits == 8:
        return flat
    pairs = F.pad(flat, (0, len(flat) % 2)).view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4


def unpack_levels(packed: Tensor, shape: tuple[int, int], bits: int) -> Tensor:
    """Undo `pack_levels` for a matrix of this shape."""
    if bits == 4:
        packed = torch.stack((packed & 15, packed >> 4), 1).flatten()
    return packed[: shape[0] * shape[1]].view(shape)


@dataclass(frozen=True)
class DenseQuantised:
    """The safetensors file of levels, scales, zeros and biases, with `bits` (4 or 8) a weight."""

    bits: int

    def candidates(self, problem: Problem) -> list[Settings]:
        """Depths, each as wide as fits, and learning rates."""

        def fits(sizes: Sizes) -> bool:
            return len(self._encode(base.zeros(base.perceptron_shapes(sizes)))) <= problem.budget

        return grid(sizes=base.narrow_sizes(problem.task, fits), lr=QUANTISED_RATES)

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """Adam on all weights, which are quantised at the end."""
        net = mlp(tuple(settings["sizes"]), seed)
        base.train_net(problem, net.parameters(), net, settings["lr"], seed)
        return Trained(self._encode(net.state_dict()), n_params(net))

    def load(self, data: bytes, task: Task) -> Net:
        """The net with the weights that the levels stand for."""
        tensors = load(data)
        state = {name: t.float() for name, t in tensors.items() if name.endswith(".bias")}
        for name, shape in base.coded_matrices(data, task).items():
            levels_RC = unpack_levels(tensors[name], shape, self.bits)
            state[name] = dequantise(Quantised(levels_RC, tensors[f"{name}.scale"], tensors[f"{name}.zero"]))
        return base.perceptron(state)

    def _encode(self, state: Params) -> bytes:
        stored = {name: tensor.half() for name, tensor in state.items() if tensor.ndim != 2}
        for name, tensor in state.items():
            if tensor.ndim == 2:
                levels_RC, scale_R, zero_R = quantise(tensor, self.bits)
                packed = pack_levels(levels_RC, self.bits)
                stored |= {name: packed, f"{name}.scale": scale_R, f"{name}.zero": zero_R}
        return save(stored)
