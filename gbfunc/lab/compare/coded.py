"""Weights trained for rounding to whole numbers of few bits, and their entropy code.

    weight = step * level        |level| < 2^(bits - 1)

with a step per tensor or per row (output channel). From 60 % of the training on, torch's fake quantisation rounds the
weights, and gradients go straight through (Y. Bengio et al., 2013; B. Jacob et al., 2018). Steps minimise the squared
error, a few times during the training; steps trained by gradients (S. Esser et al., "Learned step size quantization",
2020) were no better. Steps are powers of 2^(1/16), a byte each. Other vectors have 8 bits, and one step.

A file is a stream of the package `constriction`'s range coder. A bell curve codes levels. Sparse levels are coded as
positions (row by row, each column with the density of the rows above), then sizes (a geometric distribution from the
smallest one on) and signs.

Suffixes: R rows, C columns, S steps to choose from, K nonzero entries; a tensor with one step is one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gbfunc.extras import import_extra
from gbfunc.lab.compare import base
from gbfunc.pnet.describe import parameter_infos
from gbfunc.types import Params

VECTOR_BITS = 8
_PER_OCTAVE, _ONE, _SHRINKS = 16, 192, 33
"""Steps per octave; the byte of a step of 1; the number of finer steps to try, from the one that cuts no level on."""

COARSEST = 8 * _PER_OCTAVE
"""Largest distance of a step from the nearest one."""

_PRIOR, _TAIL = 2.0, 16
"""Weight of the overall density, in rows; resolution of the mean distance from the smallest level."""

Ints = NDArray[np.int32]
Code = Callable[..., Ints]
"""`code(symbols, model, *params)` writes symbols, or reads as many, ignoring the given values."""


class Levels(NamedTuple):
    """A tensor in whole numbers."""

    levels: Tensor  # int16, in its shape
    steps: Tensor  # uint8 [R]
    bits: int  # levels are below 2^(bits - 1)

    def values(self) -> Tensor:
        """The tensor that levels stand for, float32."""
        rows_RC = self.levels.reshape(len(self.steps), -1).float()
        return (_step(self.steps)[:, None] * rows_RC).view(self.levels.shape)


def largest_level(bits: int) -> int:
    """Return the largest level; there are as many levels below zero as above."""
    return 2 ** (bits - 1) - 1


def _step(steps_R: Tensor) -> Tensor:
    return torch.exp2((steps_R.float() - _ONE) / _PER_OCTAVE)


def rounded(weight_RC: Tensor, steps_R: Tensor, bits: int) -> Tensor:
    """Round to the nearest levels [R, C]; differentiable, but where levels end."""
    most, zeros_R = largest_level(bits), torch.zeros(len(steps_R), dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(weight_RC, _step(steps_R), zeros_R, 0, -most, most)


def nearest_steps(weight_RC: Tensor, bits: int, shrinks: int = _SHRINKS) -> Tensor:
    """Find the steps [R] that round each row with the least squared error; one shrink cuts no level.

    Raises:
        FloatingPointError: for weights that are not finite.
    """
    if not bool(weight_RC.isfinite().all()):
        raise FloatingPointError("the training diverged: weights are not finite")
    top_R = (weight_RC.abs().amax(1) / largest_level(bits)).clamp(min=1e-9)
    first_R = (top_R.log2() * _PER_OCTAVE).ceil().int() + _ONE
    steps_SR = (first_R - torch.arange(shrinks, dtype=torch.int32)[:, None]).clamp(0, 255).to(torch.uint8)
    error_SR = torch.stack([(rounded(weight_RC, steps_R, bits) - weight_RC).square().sum(1) for steps_R in steps_SR])
    return steps_SR[error_SR.argmin(0), torch.arange(len(weight_RC))]


def to_levels(weight: Tensor, steps_R: Tensor, bits: int) -> Levels:
    """Round a tensor [R, ...]."""
    most = largest_level(bits)
    rows_RC = weight.detach().reshape(len(steps_R), -1)
    levels = (rows_RC / _step(steps_R)[:, None]).clamp(-most, most).round()
    return Levels(levels.to(torch.int16).view(weight.shape), steps_R, bits)


def vector_levels(vector: Tensor) -> Levels:
    """Round a vector to 8 bits, over its whole range."""
    return to_levels(vector, nearest_steps(vector.detach().reshape(1, -1), VECTOR_BITS, 1), VECTOR_BITS)


def _constriction() -> Any:
    return import_extra("constriction", "coding small nets", "gbfunc[cli]").stream


def _byte(code: Code, value: float) -> int:
    return int(code(np.array([value], np.int32), _constriction().model.Uniform(256))[0])


def _bell(code: Code, x: Ints, low: int, high: int, mean: float = 0.0) -> Ints:
    """Code whole numbers by a bell curve, its deviation in steps of an eighth of an octave."""
    deviation = np.sqrt(np.mean((x - mean) ** 2)) if x.size else 1.0
    byte = _byte(code, np.clip(np.rint(8 * np.log2(max(deviation, 2.0**-4))) + 32, 0, 255))
    return code(
        x, _constriction().model.QuantizedGaussian(low, high), *np.full((2, x.size), [[mean], [2 ** (byte / 8 - 4)]])
    )


def _sparse(code: Code, levels_RC: Ints, bits: int) -> Ints:
    """Code a matrix, mostly zeros."""
    model, mask_RC = _constriction().model, (levels_RC != 0).astype(np.int32)
    density = _byte(code, np.rint(-16 * np.log2(max(mask_RC.mean(), 2.0**-15.9)))) if mask_RC.size else 255
    above_C = np.full(mask_RC.shape[1], _PRIOR * 2 ** (-density / 16))
    for i, mask_C in enumerate(mask_RC):
        odds_C = np.clip(above_C / (i + _PRIOR), 1e-4, 1 - 1e-4)
        mask_RC[i] = code(mask_C, model.Bernoulli(perfect=False), odds_C)
        above_C = above_C + mask_RC[i]
    found = mask_RC.astype(bool)
    values_K = levels_RC[found]
    sizes_K = np.abs(values_K)
    if not len(values_K):
        return mask_RC
    least = _byte(code, max(1, sizes_K.min()))
    tail = _byte(code, np.clip(np.rint(_TAIL * (sizes_K.mean() - least)), 1, 255))
    sizes = np.arange(1, largest_level(bits) + 1)
    odds = np.where(sizes < least, 0.0, np.exp(-np.log1p(_TAIL / tail) * (sizes - least))) + 1e-3
    # A table begins at 0, which is no size.
    table = model.Categorical(np.append(1e-3, odds) / (odds.sum() + 1e-3), perfect=False)
    sizes_K, negative_K = code(sizes_K, table), code((values_K < 0).astype(np.int32), model.Uniform(2))
    mask_RC[found] = np.where(negative_K, -sizes_K, sizes_K)
    return mask_RC


def _stream(code: Code, coded: Mapping[str, Levels], sparse: bool) -> dict[str, Levels]:
    """Code levels; a reader gives zeros of the same names, shapes and numbers of steps."""
    steps = np.concatenate([np.zeros(0), *(of.steps.numpy() for of in coded.values())]).astype(np.int32)
    steps = _bell(code, steps, 0, 255, _byte(code, np.rint(steps.mean()) if steps.size else 0))
    parts = torch.from_numpy(steps.astype(np.uint8)).split([len(of.steps) for of in coded.values()])
    found = {}
    for (name, (levels, _, bits)), steps_R in zip(coded.items(), parts, strict=True):
        x, most = levels.numpy().astype(np.int32), largest_level(bits)
        if sparse and bits != VECTOR_BITS:
            # A vector is one row: its entries are as likely everywhere.
            x = _sparse(code, x.reshape(len(x) if x.ndim > 1 else 1, -1), bits)
        else:
            x = _bell(code, x.reshape(-1), -most, most)
        found[name] = Levels(torch.from_numpy(x.astype(np.int16)).view(levels.shape), steps_R, bits)
    return found


_CODE = "code"


def encode(
    state: Params, matrices: Mapping[str, Levels], about: Mapping[str, Any] | None = None, sparse: bool = False
) -> bytes:
    """Write a file: some tensors in their levels, other floats in 8 bits, integers unchanged."""
    plain = {name: x for name, x in state.items() if not x.is_floating_point()}
    coded = {k: matrices[k] if k in matrices else vector_levels(x) for k, x in state.items() if k not in plain}
    coder = _constriction().queue.RangeEncoder()

    def code(symbols: Ints, model: Any, *params: Any) -> Ints:
        coder.encode(symbols, model, *params)
        return symbols

    _stream(code, coded, sparse)
    words = torch.from_numpy(np.asarray(coder.get_compressed()).view(np.uint8).copy())
    return base.pack(plain | {_CODE: words}, torch.float32, about)


def decode(data: bytes, like: Params, rows: Mapping[str, int], bits: int, sparse: bool = False) -> Params:
    """Undo `encode`, into float32; `rows` gives the number of steps per tensor in levels of `bits`."""
    plain = {name: x for name, x in like.items() if not x.is_floating_point()}
    state = base.unpack(data, plain | {_CODE: torch.empty(0, dtype=torch.uint8)}, rest=_CODE)
    coder = _constriction().queue.RangeDecoder(state.pop(_CODE).numpy().view(np.uint32))

    def code(symbols: Ints, model: Any, *params: Any) -> Ints:
        return coder.decode(model, *(params or (len(symbols),)))

    blank = {
        k: Levels(torch.zeros(x.shape), torch.zeros(rows.get(k, 1)), bits if k in rows else VECTOR_BITS)
        for k, x in like.items()
        if k not in plain
    }
    found = _stream(code, blank, sparse)
    return {name: found[name].values() if name in found else state[name] for name in like}


class RoundedNet:
    """A new net that rounds its weights in training.

    Attributes:
        leaves: the net's parameters by name, to train in place.
        rows: number of steps per parameter to round.
        steps: their steps, uint8 [R] each; empty until rounding begins.
    """

    def __init__(self, net: nn.Module, bits: int, rows: Mapping[str, int]) -> None:
        self._net, self._bits, self.rows = net, bits, rows
        self.leaves = {info.name: info.tensor for info in parameter_infos(net)}
        self.steps: Params = {}
        self._call = base.generated_net(net, self._weights)

    def __call__(self, x: Tensor) -> Any:
        """Compute the output of the net with its present steps."""
        return self._call(x)

    def _weights(self) -> Params:
        near = {name: rounded(self._matrix(name), steps_R, self._bits) for name, steps_R in self.steps.items()}
        return self.leaves | {name: weight_RC.view_as(self.leaves[name]) for name, weight_RC in near.items()}

    def _matrix(self, name: str) -> Tensor:
        return self.leaves[name].reshape(self.rows[name], -1)

    def nearest_steps(self) -> Params:
        """Find the nearest steps of all parameters to round."""
        return {name: nearest_steps(self._matrix(name).detach(), self._bits) for name in self.rows}

    def levels(self, steps: Params) -> dict[str, Levels]:
        """Round with these steps."""
        return {name: to_levels(self.leaves[name], steps[name], self._bits) for name in self.rows}
