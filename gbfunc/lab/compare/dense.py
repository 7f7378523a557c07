"""Smaller nets of the same family, trained as they are: dense, and quantised.

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
from torch import Tensor

from gbfunc.lab.compare import base
from gbfunc.lab.compare.base import Problem, Settings, Trained, grid
from gbfunc.tasks import Net, Task
from gbfunc.tasks.pnets import PNet, n_params
from gbfunc.types import Params

DENSE_RATES = (3e-3, 1e-2, 3e-2, 1e-1)
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
class Dense:
    """The weights of the net; with `bits` (4 or 8) as levels, scales and zeros of the matrices, beside the rest."""

    bits: int = 0

    def candidates(self, problem: Problem) -> list[Settings]:
        """Depths, each as wide as fits, and learning rates."""

        def fits(pnet: PNet) -> bool:
            return len(self._encode(base.blank(pnet), pnet, problem)) <= problem.budget

        nets = base.narrow_pnets(problem.task, fits)
        return grid(pnet=[dict(pnet.config) for pnet in nets], lr=QUANTISED_RATES if self.bits else DENSE_RATES)

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """Adam on all weights, which are quantised at the end."""
        pnet = base.with_config(problem.task, settings["pnet"])
        net = pnet.build(seed)
        base.train_net(problem, net.parameters(), net, settings["lr"], seed)
        return Trained(self._encode(base.state_of(net), pnet, problem), n_params(net))

    def load(self, data: bytes, task: Task) -> Net:
        """The net, with the weights that levels stand for."""
        net = base.pnet_about(base.text_of(data), task).build(0)
        state = base.state_of(net)
        tensors = base.unpack(data, self._stored(state))
        found = {name: tensors[name] for name in state}
        for name, matrix_RC in base.matrices(state).items() if self.bits else ():
            levels_RC = unpack_levels(tensors[name], (len(matrix_RC), matrix_RC.shape[1]), self.bits)
            levels = Quantised(levels_RC, tensors[f"{name}.scale"], tensors[f"{name}.zero"])
            found[name] = dequantise(levels).view(state[name].shape)
        return base.restore(net, found)

    def _encode(self, state: Params, pnet: PNet, problem: Problem) -> bytes:
        dtype = torch.float16 if self.bits else problem.dtype
        return base.pack(self._stored(state), dtype, base.about_pnet(pnet, problem.task))

    def _stored(self, state: Params) -> Params:
        stored = dict(state)
        for name, matrix_RC in base.matrices(state).items() if self.bits else ():
            levels_RC, scale_R, zero_R = quantise(matrix_RC, self.bits)
            stored |= {name: pack_levels(levels_RC, self.bits), f"{name}.scale": scale_R, f"{name}.zero": zero_R}
        return stored
