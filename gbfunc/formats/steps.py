"""Quantization steps: a leaf is stored as integers, `number = integer * step`, with `step = 2^(index / 8)`.

A *part* of a leaf is the rows that belong to one tensor of the p-net. Each part has its own index. Rounding a number
raises the loss by about `h step^2 / 24`, where h is the second derivative of the loss, estimated by the mean square of
the gradient. For a given number of bits, the loss is least if `sqrt(h) step` is equal in all parts (reverse
water-filling: T. Cover, J. Thomas, Elements of Information Theory, 10.3.3).

In a periodic g-net, h of a code weight grows with the amplitude of its feature and with the entry of the code that the
weight multiplies. The step of the weight is therefore divided by `sqrt(2)^shift`, where `shift` grows with both. Code
weights of a feature with amplitude 0 have no effect, and take no bits.

The integers of a part are compressed as if drawn from a two-sided geometric distribution (`symbols.geometric`), whose
width is stored. Training can add the bits to the loss: n integers with mean size m count as `n log2(1 + e m)` bits.

A file has the indices of all parts, all widths, and then the integers: amplitudes first, and running statistics
(`statistics`) last. Indices and widths are stored as a median and differences from the median.

Suffixes: T tiles, H features.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from gbfunc.encoding import Binary, Encoding, PerAxis
from gbfunc.formats.rounding import BITS, STORED_DTYPES, StoredDtype, rounded, stored_name
from gbfunc.formats.statistics import decode_statistic, encode_statistic, statistics_of
from gbfunc.trees import BUFFERS, DIRECT, GNET
from gbfunc.types import DTYPES, Params, TensorMap

V = TypeVar("V")
Side = tuple[Encoding, int, int]  # Codes of the rows or columns of a matrix; number of codes; rows or columns of a tile
AUTO = "auto"  # Name of the dtype of files with quantization steps
OCTAVE, LEAST, MOST = 8, -128, 127  # A quantization step doubles every 8 indices; the smallest and the largest index
LARGEST = 2047  # Largest absolute value of a stored integer
_REACH = 400  # `_STEPS` has the quantization steps of the indices -400 .. 400
_AT_ONCE = 1 << 18  # Maximum number of entries of codes that are computed in one call, to limit memory
# Limits of the exponents in `Part.finer`, so that `_STEPS` has the steps of all code weights.
COARSEST, FINEST = -68, 44
# Dtype and device are explicit because files must not depend on the user's defaults.
_STEPS = torch.tensor(
    [math.ldexp(2 ** (i % OCTAVE / OCTAVE), i // OCTAVE) for i in range(-_REACH, _REACH + 1)],
    dtype=torch.float32,
    device="cpu",
)
# Bits that a plan for a file size assumes: for each number, and for the step and the width of each part of a leaf.
# Networks for MNIST were most accurate with these two values.
EXPECTED_BITS, EXPECTED_PART_BITS = 5.0, 11.0


@dataclass(frozen=True)
class Steps:
    """Quantization steps of a genome, and the weight of a bit in the training's objective.

    Attributes:
        indices: `(leaf, (index, ...))` per leaf, with one index per part (the rows of one tensor). The part's step is
            `2^(index / 8)`. If running statistics of norms have no indices, a file stores them in 16 bits.
        rate: weight of a bit in the objective `loss + rate * bits`.
    """

    indices: tuple[tuple[str, tuple[int, ...]], ...]
    rate: float = 0.0

    @property
    def statistics(self) -> bool:
        return any(name.startswith(BUFFERS) for name, _ in self.indices)

    def of_parts(self, parts: Sequence[Part]) -> list[int]:
        indices = {name: iter(of_leaf) for name, of_leaf in self.indices}
        return [next(indices[part.leaf]) for part in parts]

    @staticmethod
    def of(parts: Sequence[Part], indices: Sequence[int], rate: float = 0.0) -> Steps:
        return Steps(tuple((name, tuple(of_leaf)) for name, of_leaf in by_leaf(parts, indices).items()), rate)


Stored = StoredDtype | Steps


def stored_as(stored: Stored, what: str = "dtype") -> str:
    """Returns the name of a file's dtype, `"auto"` for `Steps`; raises ValueError for a dtype that no file has."""
    return AUTO if isinstance(stored, Steps) or stored == AUTO else stored_name(stored, what)


def bytes_each(stored: Stored) -> float:
    """Returns the bytes per number in a file (an estimate for `"auto"`); raises ValueError for an unknown dtype."""
    name = stored_as(stored)
    if name == AUTO:
        return EXPECTED_BITS / 8
    return BITS[name] / 8 if name in BITS else STORED_DTYPES[name].itemsize


class Part(NamedTuple):
    """Rows `first .. last - 1` of a leaf, which have one quantization step; `last` is None for the whole leaf."""

    leaf: str
    first: int
    last: int | None
    shape: tuple[int, ...]
    gain: str | None = None  # Name of the leaf of amplitudes [T, H] that multiply the features of this leaf [T, ..., H]
    # One exponent n per entry of a code: the steps of the entry's code weights are divided by sqrt(2)^n, about its RMS.
    finer: tuple[int, ...] = ()
    period: float | None = None
    statistic: bool = False

    def of(self, leaf: Tensor) -> Tensor:
        return leaf if self.last is None else leaf[self.first : self.last]

    def in_period(self, x: Tensor) -> Tensor:
        return x if self.period is None else x - self.period * (x / self.period).round()

    def limit(self, steps: Tensor) -> Tensor:
        """Computes the largest integer per quantization step. A phase, which is periodic, is at most half a period."""
        if self.period is None:
            return torch.tensor(float(LARGEST), device=steps.device)
        return (self.period / 2 / steps.double()).floor().clamp(max=LARGEST)

    @property
    def gain_key(self) -> tuple[str | None, int]:
        return self.gain, self.first


def by_leaf(parts: Sequence[Part], values: Sequence[V]) -> dict[str, list[V]]:
    found: dict[str, list[V]] = {}
    for part, value in zip(parts, values, strict=True):
        found.setdefault(part.leaf, []).append(value)
    return found


def joined(parts: Sequence[Part], values: Sequence[Tensor]) -> Params:
    return {k: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for k, pieces in by_leaf(parts, values).items()}


class Quantised(NamedTuple):
    """The numbers of a `Part` as `integers * steps`; `steps`, `shifts` and `mask` broadcast to `integers`."""

    part: Part
    integers: Tensor
    steps: Tensor  # The step of the part, divided by sqrt(2)^shifts
    shifts: Tensor  # Exponents of sqrt(2), 0 except for code weights and phases
    mask: Tensor  # True if a file has the integer; False for weights and phases of a feature with amplitude 0

    @property
    def full_mask(self) -> Tensor:
        return self.mask.expand(self.part.shape)

    @property
    def limits(self) -> list[int]:
        return self.part.limit(self.steps).expand(self.part.shape)[self.full_mask].long().tolist()


@lru_cache(maxsize=16)
def parts_of(plan: Any, statistics: bool = True) -> tuple[Part, ...]:
    """Lists the parts of leaves and statistics in the order of a file. Each part depends only on earlier parts."""
    found, means = [], cache(_mean_squares)
    for e in plan.ensembles:
        for name, leaf in e.leaves.items():
            spans = [(s.first, s.first + s.slot.grid.n_tiles) for s in e.spans]
            gain = None if leaf.gain is None else f"{GNET}{e.name}/{leaf.gain}"
            finer = _finer(e, leaf, means)
            for first, last in spans if leaf.scope == "tile" else [(0, e.n_groups)]:
                shape = (last - first, *leaf.shape)
                found.append(Part(f"{GNET}{e.name}/{name}", first, last, shape, gain, finer, leaf.period))
    floating = (t for t in plan.direct if DTYPES[t.dtype].is_floating_point)
    found += [Part(f"{DIRECT}{t.name}", 0, None, tuple(t.shape)) for t in floating]
    found.sort(key=lambda part: part.gain is not None)
    shapes = {f"{BUFFERS}{b.name}": tuple(b.shape) for b in plan.buffers}
    found += [Part(name, 0, None, shapes[name], statistic=True) for name in statistics_of(plan) if statistics]
    return tuple(found)


def _finer(ensemble: Any, leaf: Any, mean_squares: Callable[..., Any]) -> tuple[int, ...]:
    if leaf.codes is None:
        return ()
    sides = Counter[Side]()
    for span in ensemble.spans:
        sides[_side(span.slot, leaf.codes == "row")] += span.slot.grid.n_tiles
    means = np.average([mean_squares(*side) for side in sides], axis=0, weights=[*sides.values()])
    return tuple(min(FINEST, max(COARSEST, round(math.log2(x)))) if x > 0 else 0 for x in means.tolist())


def _side(slot: Any, rows: bool) -> Side:
    grid = slot.grid
    code, n, tile = (slot.row_code, grid.rows, grid.tile_rows) if rows else (slot.col_code, grid.cols, grid.tile_cols)
    return code, tile if code.local else n, tile


def numbers_of_codes(plan: Any) -> int:
    sides = {_side(span.slot, rows) for e in plan.ensembles for span in e.spans for rows in (True, False)}
    return sum(_mean_squares(*side, count=True) for side in sides)


def _mean_squares(code: Encoding, n: int, tile: int, count: bool = False) -> Any:
    if isinstance(code, Binary):
        return 0 if count else np.ones(code.width(n))
    if isinstance(code, PerAxis) and code.local:
        m = code.n_positions
        channels, positions = (code.channels, n // m, n // m), (code.positions, m, m)
        both = [_mean_squares(*side, count=count) for side in (channels, positions)]
        return sum(both) if count else np.concatenate(both)
    length = -(-n // tile) * tile
    if count:
        return length * code.width(n)
    total, at_once = np.zeros(code.width(n)), max(1, _AT_ONCE // max(1, code.width(n)))
    for first in range(0, length, at_once):
        i = torch.arange(first, min(length, first + at_once), device="cpu").clip(max=n - 1)
        total += code.at(i, n).double().square().sum(0).numpy()
    return total / length


@lru_cache(maxsize=8)
def _table(device: torch.device) -> Tensor:
    return _STEPS.to(device)


class Past(NamedTuple):
    """Values of earlier parts that later parts need: integers of amplitudes, and encoded variances (`statistics`)."""

    gains: dict[tuple[str | None, int], Tensor]
    variances: dict[str, Tensor]

    def shifts(self, part: Part, device: Any) -> tuple[Tensor, Tensor]:
        """Computes `shifts` and `mask` of a part (`Quantised`) from the integers of the amplitudes (`Part.gain`)."""
        ndim = len(part.shape)
        shifts = torch.zeros((1,) * ndim, dtype=torch.long, device=device)
        if part.finer:
            shifts = shifts + torch.tensor(part.finer, device=device)[:, None]
        if part.gain is None:
            return shifts, torch.ones((1,) * ndim, dtype=torch.bool, device=device)
        gain_TH = self.gains[part.gain_key]
        shape = (part.shape[0], *(1,) * (ndim - 2), part.shape[-1])
        # `frexp` returns the exponent of the square: 2 log2 |gain|, rounded down, plus 1.
        return shifts + torch.frexp(gain_TH * gain_TH).exponent.long().reshape(shape), (gain_TH != 0).reshape(shape)

    def zeros(self, part: Part, index: int, device: Any) -> Quantised:
        """Returns `Quantised` with integers 0, which the caller replaces. Steps: `2^(index / 8) / sqrt(2)^shifts`."""
        shifts, mask = self.shifts(part, device)
        steps = _table(shifts.device)[index - OCTAVE // 2 * shifts + _REACH]
        integers = torch.zeros(part.shape, dtype=torch.float32, device=device)
        return Quantised(part, integers, steps, shifts, mask)

    def quantise(self, part: Part, leaf: Tensor, index: int) -> tuple[Quantised, Tensor]:
        x = part.of(leaf.detach()).float()
        x = part.in_period(encode_statistic(part.leaf, x, self.variances) if part.statistic else x)
        found = self.zeros(part, index, x.device)
        limit = part.limit(found.steps).to(x.dtype)
        integers = (x / found.steps).round().clamp(-limit, limit)
        return found._replace(integers=integers), self.add(part, integers, found.steps)

    def add(self, part: Part, integers: Tensor, steps: Tensor) -> Tensor:
        """Records a part's integers. Returns their numbers: `integers * steps` (quantization steps), or statistics."""
        self.gains[part.leaf, part.first] = integers
        if not part.statistic:
            return integers * steps
        numbers = integers.double() * steps.double()
        self.variances[part.leaf] = numbers
        return decode_statistic(part.leaf, numbers, self.variances)


def quantise(plan: Any, leaves: TensorMap, steps: Steps) -> Iterator[tuple[Quantised, Tensor]]:
    """Quantises every part on the device of the leaves; skips running statistics that `leaves` does not have."""
    parts = [part for part in parts_of(plan, steps.statistics) if part.leaf in leaves or not part.statistic]
    past = Past({}, {})
    for part, index in zip(parts, steps.of_parts(parts), strict=True):
        yield past.quantise(part, leaves[part.leaf], index)


def check_steps(plan: Any, steps: Steps) -> None:
    counts = Counter(part.leaf for part in parts_of(plan, steps.statistics))
    if {name: len(indices) for name, indices in steps.indices} != counts:
        raise ValueError("expected steps of gb.allocate_steps for this plan, got those of another: allocate again")
    if any(not LEAST <= i <= MOST for _, indices in steps.indices for i in indices):
        raise ValueError(f"indices of steps must be {LEAST} to {MOST}")


def as_stored(plan: Any, leaves: TensorMap, stored: Stored) -> tuple[Params, Params]:
    """Rounds leaves and buffers as a file does; backward ignores the rounding.

    The second result is the gradient of `rate * bits` with respect to the leaves, {} if the rate is 0. Code weights of
    a feature with amplitude 0 are not rounded. A file stores them as 0, which does not change the p-net's weights.
    """
    if not isinstance(stored, Steps):
        return rounded(leaves, stored), {}
    found = [*quantise(plan, leaves, stored)]
    parts, values = [one.part for one, _ in found], []
    for (part, _, _, _, mask), value in found:
        values.append(value if part.gain is None else torch.where(mask, value, part.of(leaves[part.leaf].detach())))
    results = dict(leaves)
    for name, value in joined(parts, values).items():
        x = leaves[name]
        # Straight-through estimator (Bengio et al., 2013): the rounded value, with the gradient of the leaf.
        results[name] = value.reshape(x.shape).to(x.dtype) + (x - x.detach())
    trained = [one for one, _ in found if not one.part.statistic]
    return results, _rate_gradient(leaves, trained, stored.rate) if stored.rate else {}


def _rate_gradient(leaves: TensorMap, found: list[Quantised], rate: float) -> Params:
    # The n numbers x of a `Part` count as `n log2(1 + e mean|x| / step)` bits. An amplitude multiplies the rounding
    # errors of its feature's code weights: half the amplitude allows twice the steps, and saves a bit per code weight.
    gradients: list[Tensor] = []
    owned: dict[tuple[str | None, int], Tensor | float] = {}
    numbers = [one.part.of(leaves[one.part.leaf].detach()).float() for one in found]
    for one, x in zip(found, numbers, strict=True):
        full_mask, slopes = one.full_mask.float(), torch.zeros_like(x)
        if one.part.period is None and x.numel():
            share = full_mask / full_mask.sum().clamp(min=1)
            per = math.e / one.steps
            slopes = ((per / (1 + per * (x.abs() * share).sum())) * share).sum() * full_mask * x.sign()
        gradients.append(slopes)
        if one.part.gain is not None:
            numbers_TH = full_mask.reshape(x.shape[0], -1, x.shape[-1]).sum(1)
            owned[one.part.gain_key] = owned.get(one.part.gain_key, 0.0) + numbers_TH
    for i, (one, x) in enumerate(zip(found, numbers, strict=True)):
        if (of_features := owned.get((one.part.leaf, one.part.first))) is not None:
            gradients[i] = gradients[i] + of_features * x.sign() / (x.abs() + one.steps)
    of_leaves = joined([one.part for one in found], gradients)
    return {k: (x * (rate / math.log(2))).reshape(leaves[k].shape).to(leaves[k].dtype) for k, x in of_leaves.items()}
