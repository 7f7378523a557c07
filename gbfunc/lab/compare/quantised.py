"""Post-training quantisation: a smaller dense net, trained as it is, then stored in whole numbers of few bits.

Affine, per row of a matrix: `w = scale * (q - zero)` with q of 4 or 8 bits (B. Jacob et al., 2018). The range of a row
is shrunk to where the squared error is least; scales and biases are stored as float16.

Suffixes: R rows and C columns of a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

from gbfunc.lab.compare.base import Problem, Settings, Trained, grid
from gbfunc.lab.compare.dense import dense_shapes
from gbfunc.lab.compare.family import Sizes, narrow_sizes, perceptron_sizes
from gbfunc.lab.compare.training import train_net
from gbfunc.tasks import Net, Task
from gbfunc.tasks.pnets import mlp
from gbfunc.types import Params

RATES = (3e-3, 1e-2, 3e-2)
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

        return grid(sizes=narrow_sizes(problem.task, fits), lr=RATES)

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
