"""Weights in whole numbers of few bits, for which they are trained: what quantised and pruned nets share.

    weight = step * level        |level| < 2^(bits - 1)

with a step for a tensor or for each of its rows (output channels). From 60 % of the training on the net is that of the
rounded weights, by torch's operator of fake quantisation, whose gradients go straight through (Y. Bengio et al., 2013;
B. Jacob et al., 2018). Weights are a function's arguments here, so that nets of all kinds of layers can have it. Steps
are those of the least squared error, found again a few times; trained by gradients (S. Esser et al., "Learned step size
quantization", 2020) they were no better.

Steps are powers of 2^(1/16), a byte each. Vectors that are not trained for it have 8 bits, and a step of their own.

Suffixes: R rows, C columns, S steps to choose from; what has one step counts as one row.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gbfunc.lab.compare import base
from gbfunc.pnet import PureNet, buffers_of, parameter_infos
from gbfunc.types import Params

FITTED_AT = (0.6, 0.7, 0.8, 0.9)
"""Parts of the training after which steps are found and the file is made to fit; rounding begins with the first."""

VECTOR_BITS = 8
_PER_OCTAVE, _ONE, _SHRINKS = 16, 192, 33
"""Steps in an octave; the byte of a step of 1; how many below that of the whole range are tried."""

COARSER = 8 * _PER_OCTAVE
"""By how many steps more a tensor can be rounded than with its nearest, at most."""


class Levels(NamedTuple):
    """A tensor in whole numbers."""

    levels: Tensor  # int16, in its shape
    steps: Tensor  # uint8 [R]


def largest_level(bits: int) -> int:
    """Levels are as many below zero as above."""
    return 2 ** (bits - 1) - 1


def _step(steps_R: Tensor) -> Tensor:
    """The numbers that bytes stand for, float32."""
    return torch.exp2((steps_R.float() - _ONE) / _PER_OCTAVE)


def rounded(weight_RC: Tensor, steps_R: Tensor, bits: int) -> Tensor:
    """What the nearest levels stand for [R, C]; differentiable, but where levels end."""
    most, zeros_R = largest_level(bits), torch.zeros(len(steps_R), dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(weight_RC, _step(steps_R), zeros_R, 0, -most, most)


def _whole_range(weight_RC: Tensor, bits: int) -> Tensor:
    """The steps [R] with which no level is cut, not yet in a byte."""
    if not bool(weight_RC.isfinite().all()):
        raise FloatingPointError("the training diverged: weights are not finite")
    top_R = (weight_RC.abs().amax(1) / largest_level(bits)).clamp(min=1e-9)
    return (top_R.log2() * _PER_OCTAVE).ceil().int() + _ONE


def nearest_steps(weight_RC: Tensor, bits: int) -> Tensor:
    """The steps [R] that round each row with the least squared error.

    Raises:
        FloatingPointError: for weights that are not finite.
    """
    first_R = _whole_range(weight_RC, bits)
    steps_SR = (first_R - torch.arange(_SHRINKS, dtype=torch.int32)[:, None]).clamp(0, 255).to(torch.uint8)
    error_SR = torch.stack([(rounded(weight_RC, steps_R, bits) - weight_RC).square().sum(1) for steps_R in steps_SR])
    return steps_SR[error_SR.argmin(0), torch.arange(len(weight_RC))]


def to_levels(weight: Tensor, steps_R: Tensor, bits: int) -> Levels:
    """The levels of a tensor [R, ...]."""
    most = largest_level(bits)
    rows_RC = weight.detach().reshape(len(steps_R), -1)
    levels = (rows_RC / _step(steps_R)[:, None]).clamp(-most, most).round()
    return Levels(levels.to(torch.int16).view(weight.shape), steps_R)


def from_levels(coded: Levels) -> Tensor:
    """The tensor that levels stand for, float32."""
    rows_RC = coded.levels.reshape(len(coded.steps), -1).float()
    return (_step(coded.steps)[:, None] * rows_RC).view(coded.levels.shape)


def vector_levels(vector: Tensor) -> Levels:
    """A vector in 8 bits, over its whole range."""
    steps = _whole_range(vector.detach().reshape(1, -1), VECTOR_BITS).clamp(0, 255).to(torch.uint8)
    return to_levels(vector, steps, VECTOR_BITS)


class RoundedNet:
    """A net whose weights are rounded in training: `net(x)`, a function of `leaves`, which are trained in place.

    Attributes:
        leaves: the net's parameters by name.
        steps: of those that are rounded, uint8 [R] each; none till `round` is called.
    """

    def __init__(self, net: nn.Module, bits: int, by_row: bool, names: Collection[str] | None = None) -> None:
        """Of some parameters, with a step each; of all matrices if there are no `names`, maybe with one `by_row`."""
        self._net, self._call, self._bits = net, PureNet(net), bits
        self.leaves = {info.name: info.tensor.detach().clone().requires_grad_() for info in parameter_infos(net)}
        self._buffers = {name: b.clone() for name, (b, _) in buffers_of(net).items()}
        names = list(base.matrices(self.leaves)) if names is None else names
        self._rows = {name: len(self.leaves[name]) if by_row else 1 for name in names}
        self.steps: Params = {}

    def __call__(self, x: Tensor) -> Any:
        """The output of the net as it is rounded now."""
        weights = dict(self.leaves)
        # In full precision, as the weights of a genome.
        with torch.autocast(x.device.type, enabled=False):
            for name, steps_R in self.steps.items():
                weights[name] = rounded(self._matrix(name), steps_R, self._bits).view(self.leaves[name].shape)
        return self._call(weights, self._buffers, x)

    def _matrix(self, name: str) -> Tensor:
        return self.leaves[name].reshape(self._rows[name], -1)

    def nearest_steps(self) -> Params:
        """The nearest steps of what is rounded."""
        return {name: nearest_steps(self._matrix(name).detach(), self._bits) for name in self._rows}

    def state(self) -> Params:
        """What is stored, before any rounding: `base.in_use` of it."""
        state = {name: leaf.detach() for name, leaf in self.leaves.items()}
        saved = {name: self._buffers[name] for name, (_, saved) in buffers_of(self._net).items() if saved}
        return base.in_use(self._net, state | saved)

    def levels(self, steps: Params, coarser: int = 0) -> dict[str, Levels]:
        """What is rounded, with steps that are so many coarser."""
        wider = coarsened(steps, coarser)
        return {name: to_levels(self.leaves[name], wider[name], self._bits) for name in self._rows}


def coarsened(steps: Params, by: int) -> Params:
    """Steps that are so many coarser."""
    return {name: (steps_R.int() + by).clamp(max=255).to(torch.uint8) for name, steps_R in steps.items()}


def fitting_steps(steps: int) -> set[int]:
    """After which of so many training steps, counted from 0, files are made to fit."""
    return {min(steps - 1, round(part * steps)) for part in FITTED_AT}
