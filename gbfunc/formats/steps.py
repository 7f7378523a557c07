"""Steps of quantisation: each part of a leaf is stored as `number = integer * 2^(index / 8)`.

A part is the stretch of a leaf that belongs to one tensor of the p-net. The loss grows by the sum of `h step^2 / 24`
over all numbers, where h is the curvature; the mean square of the gradient stands for h (the diagonal of Fisher's
information). For a given number of bits, the loss grows least where `sqrt(h) step` is the same everywhere (reverse
water-filling: T. Cover, J. Thomas, Elements of Information Theory, 10.3.3). This holds within a leaf too: a code weight
of a periodic g-net moves weights by its feature's amplitude times the code. A reader knows both, so the code weight's
step is finer by powers of sqrt(2); numbers of a feature with amplitude 0 take no bits.

Integers have two-sided geometric distributions (`symbols.geometric`), one width a part. An integer takes about
`log2(1 + e |q|)` bits on average, and the derivative of this is the gradient of the rate.

A file holds the steps' indices as their median and the width of the differences, then the differences; the widths of
all parts likewise; then the integers of each part, amplitudes first and running statistics last (`statistics`).

Suffixes: T tiles, H features.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from gbfunc.encoding import Binary, Encoding, PerAxis
from gbfunc.formats.rounding import BITS, STORED_DTYPES, StoredDtype, rounded, stored_name
from gbfunc.formats.statistics import coded, statistics_of, uncoded
from gbfunc.trees import BUFFERS, DIRECT, GNET
from gbfunc.types import DTYPES, Params, TensorMap

V = TypeVar("V")
Side = tuple[Encoding, int, int]
"""A code, the length of its axis, and the length of a tile."""

AUTO = "auto"  # The name of codes whose steps training finds, where a dtype is expected
OCTAVE, LEAST, MOST = 8, -128, 127  # Indices in an octave; the smallest index, and the largest
LARGEST = 2047  # Largest integer
_REACH = 400
_AT_ONCE = 1 << 18  # Numbers of codes
# Limits of the half octaves by which codes make steps finer: all indices, with the largest amplitude, stay in `_STEPS`.
COARSEST, FINEST = -68, 44
# Dtype and device are explicit: files do not depend on the user's defaults.
_STEPS = torch.tensor(
    [math.ldexp(2 ** (i % OCTAVE / OCTAVE), i // OCTAVE) for i in range(-_REACH, _REACH + 1)],
    dtype=torch.float32,
    device="cpu",
)
# Expected bits of a number, and of a part, when a plan is made for bytes: MNIST's networks train best with these.
EXPECTED_BITS, EXPECTED_PART_BITS = 5.0, 11.0


@dataclass(frozen=True)
class Steps:
    """The steps of all parts of a genome, and the price of a bit.

    Attributes:
        indices: `(leaf, (index, ...))`, an index for each part: a step is `2^(index / 8)`. Running statistics of norms
            either have steps, or are stored in 16 bits.
        rate: weight of a bit in the objective `loss + rate * bits`.
    """

    indices: tuple[tuple[str, tuple[int, ...]], ...]
    rate: float = 0.0

    @property
    def statistics(self) -> bool:
        """Whether running statistics have steps."""
        return any(name.startswith(BUFFERS) for name, _ in self.indices)

    def of_parts(self, parts: Sequence[Part]) -> list[int]:
        """The index of each part."""
        indices = {name: iter(of_leaf) for name, of_leaf in self.indices}
        return [next(indices[part.leaf]) for part in parts]

    @staticmethod
    def of(parts: Sequence[Part], indices: Sequence[int], rate: float = 0.0) -> Steps:
        """Undo `of_parts`."""
        return Steps(tuple((name, tuple(of_leaf)) for name, of_leaf in by_leaf(parts, indices).items()), rate)


Stored = StoredDtype | Steps


def stored_as(stored: Stored, what: str = "dtype") -> str:
    """The name of a dtype that leaves may be stored in, `"auto"` for steps; `ValueError` for any other."""
    return AUTO if isinstance(stored, Steps) or stored == AUTO else stored_name(stored, what)


def bytes_each(stored: Stored) -> float:
    """Bytes of a number in a file, on average for codes with steps; raises as `stored_as`."""
    name = stored_as(stored)
    if name == AUTO:
        return EXPECTED_BITS / 8
    return BITS[name] / 8 if name in BITS else STORED_DTYPES[name].itemsize


class Part(NamedTuple):
    """A stretch of a leaf with a step of its own: rows `first .. last - 1` of its first dimension, or all of it."""

    leaf: str
    first: int
    last: int | None
    shape: tuple[int, ...]
    gain: str | None = None  # The leaf [T, H] that multiplies the features made by this leaf [T, ..., H]
    finer: tuple[int, ...] = ()  # Half octaves by which the steps of each code's weights are finer
    period: float | None = None
    statistic: bool = False

    def of(self, leaf: Tensor) -> Tensor:
        """This part of its leaf."""
        return leaf if self.last is None else leaf[self.first : self.last]

    @property
    def gain_key(self) -> tuple[str | None, int]:
        """The leaf and first row of its gain."""
        return self.gain, self.first


def by_leaf(parts: Sequence[Part], values: Sequence[V]) -> dict[str, list[V]]:
    """Values of parts, grouped by leaf."""
    found: dict[str, list[V]] = {}
    for part, value in zip(parts, values, strict=True):
        found.setdefault(part.leaf, []).append(value)
    return found


def joined(parts: Sequence[Part], values: Sequence[Tensor]) -> Params:
    """Whole leaves from the values of their parts."""
    return {k: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for k, pieces in by_leaf(parts, values).items()}


class Quantised(NamedTuple):
    """A part in integers; the other tensors broadcast to the integers' shape."""

    part: Part
    integers: Tensor
    steps: Tensor
    shifts: Tensor  # Half octaves by which steps are finer
    alive: Tensor  # Whether integers are stored

    @property
    def live(self) -> Tensor:
        """`alive` in the part's shape."""
        return self.alive.expand(self.part.shape)


@lru_cache(maxsize=16)
def parts_of(plan: Any, statistics: bool = True) -> tuple[Part, ...]:
    """The parts of all trained leaves and of statistics; parts that others depend on come first."""
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
    """The numbers of codes that `parts_of` computes."""
    sides = {_side(span.slot, rows) for e in plan.ensembles for span in e.spans for rows in (True, False)}
    return sum(_mean_squares(*side, count=True) for side in sides)


def _mean_squares(code: Encoding, n: int, tile: int, count: bool = False) -> Any:
    """Mean squares of the codes of all tiles of an axis of `n` [k]; or how many numbers of codes these take."""
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


def shifts_of(part: Part, gains: Mapping[tuple[str | None, int], Tensor], device: Any) -> tuple[Tensor, Tensor]:
    """`shifts` and `alive` of a part (`Quantised`), by the integers of the gains."""
    ndim = len(part.shape)
    shifts = torch.zeros((1,) * ndim, dtype=torch.long, device=device)
    if part.finer:
        shifts = shifts + torch.tensor(part.finer, device=device)[:, None]
    if part.gain is None:
        return shifts, torch.ones((1,) * ndim, dtype=torch.bool, device=device)
    gain_TH = gains[part.gain_key]
    shape = (part.shape[0], *(1,) * (ndim - 2), part.shape[-1])
    # The exponent of the square: 2 log2 |gain|, rounded down, plus 1.
    return shifts + torch.frexp(gain_TH * gain_TH).exponent.long().reshape(shape), (gain_TH != 0).reshape(shape)


@lru_cache(maxsize=8)
def _table(device: torch.device) -> Tensor:
    return _STEPS.to(device)


def sizes_of(index: int, shifts: Tensor) -> Tensor:
    """Steps by their index, finer by `shifts` half octaves."""
    return _table(shifts.device)[index - OCTAVE // 2 * shifts + _REACH]


def _limit(part: Part, steps: Tensor) -> Tensor:
    """The largest integers of a part with a period: numbers are at most half of the period."""
    assert part.period is not None
    return (part.period / 2 / steps.double()).floor()


def in_period(part: Part, x: Tensor) -> Tensor:
    """Numbers of a part, moved by multiples of their period, if any, towards 0."""
    return x if part.period is None else x - part.period * (x / part.period).round()


def limits_of(found: Quantised) -> list[int]:
    """The largest integer for each stored integer of a part with a period."""
    return _limit(found.part, found.steps).clamp(max=LARGEST).expand(found.part.shape)[found.live].long().tolist()


class Seen(NamedTuple):
    """The state between parts: integers of earlier parts, by leaf and first row, and numbers of variances."""

    gains: dict[tuple[str | None, int], Tensor]
    variances: dict[str, Tensor]

    def add(self, part: Part, integers: Tensor, steps: Tensor) -> Tensor:
        """Record a part, and return the numbers that its integers stand for."""
        self.gains[part.leaf, part.first] = integers
        if not part.statistic:
            return integers * steps
        numbers = integers.double() * steps.double()
        self.variances[part.leaf] = numbers
        return uncoded(part.leaf, numbers, self.variances)


def quantise_part(part: Part, leaf: Tensor, index: int, seen: Seen) -> tuple[Quantised, Tensor]:
    """Quantise a part: its integers, and the numbers that these stand for."""
    x = part.of(leaf.detach()).float()
    x = coded(part.leaf, x, seen.variances) if part.statistic else x
    shifts, alive = shifts_of(part, seen.gains, x.device)
    steps = sizes_of(index, shifts)
    limit = torch.tensor(float(LARGEST), dtype=x.dtype, device=x.device)
    if part.period is not None:
        x = in_period(part, x)
        limit = torch.minimum(limit, _limit(part, steps).float())
    integers = (x / steps).round().clamp(-limit, limit)
    return Quantised(part, integers, steps, shifts, alive), seen.add(part, integers, steps)


def quantise(plan: Any, leaves: TensorMap, steps: Steps) -> Iterator[tuple[Quantised, Tensor]]:
    """Quantise every part on the leaves' device; statistics that are not among the leaves are left out."""
    parts = [part for part in parts_of(plan, steps.statistics) if part.leaf in leaves or not part.statistic]
    seen = Seen({}, {})
    for part, index in zip(parts, steps.of_parts(parts), strict=True):
        yield quantise_part(part, leaves[part.leaf], index, seen)


def check_steps(plan: Any, steps: Steps) -> None:
    """Raise `ValueError` if steps do not belong to a plan."""
    counts = Counter(part.leaf for part in parts_of(plan, steps.statistics))
    if {name: len(indices) for name, indices in steps.indices} != counts:
        raise ValueError("the steps are those of another plan: expected what gb.allocate_steps gives for this one")
    if any(not LEAST <= i <= MOST for _, indices in steps.indices for i in indices):
        raise ValueError(f"indices of steps must be {LEAST} to {MOST}")


def as_stored(plan: Any, leaves: TensorMap, stored: Stored) -> tuple[Params, Params]:
    """Rounds leaves and buffers as a file does; gradients go straight through the rounding.

    Numbers of features with amplitude 0, which are 0 in a file, keep their values: the weights are equal. The second
    result is the gradient of `rate * bits` with respect to the leaves, {} without a rate.
    """
    if not isinstance(stored, Steps):
        return rounded(leaves, stored), {}
    found = [*quantise(plan, leaves, stored)]
    parts, values = [one.part for one, _ in found], []
    for (part, _, _, _, alive), value in found:
        values.append(value if part.gain is None else torch.where(alive, value, part.of(leaves[part.leaf].detach())))
    made = dict(leaves)
    for name, value in joined(parts, values).items():
        x = leaves[name]
        # Straight through (Bengio et al., 2013): the value, with the gradient of the leaf.
        made[name] = value.reshape(x.shape).to(x.dtype) + (x - x.detach())
    trained = [one for one, _ in found if not one.part.statistic]
    return made, _rate_gradient(leaves, trained, stored.rate) if stored.rate else {}


def _rate_gradient(leaves: TensorMap, found: list[Quantised], rate: float) -> Params:
    # n numbers of a part take `n log2(1 + e mean|x| / step)` bits; halving an amplitude saves a bit of each number.
    gradients: list[Tensor] = []
    owned: dict[tuple[str | None, int], Tensor | float] = {}
    numbers = [one.part.of(leaves[one.part.leaf].detach()).float() for one in found]
    for one, x in zip(found, numbers, strict=True):
        live, slopes = one.live.float(), torch.zeros_like(x)
        if one.part.period is None and x.numel():
            share = live / live.sum().clamp(min=1)
            per = math.e / one.steps
            slopes = ((per / (1 + per * (x.abs() * share).sum())) * share).sum() * live * x.sign()
        gradients.append(slopes)
        if one.part.gain is not None:
            numbers_TH = live.reshape(x.shape[0], -1, x.shape[-1]).sum(1)
            owned[one.part.gain_key] = owned.get(one.part.gain_key, 0.0) + numbers_TH
    for i, (one, x) in enumerate(zip(found, numbers, strict=True)):
        if (of_features := owned.get((one.part.leaf, one.part.first))) is not None:
            gradients[i] = gradients[i] + of_features * x.sign() / (x.abs() + one.steps)
    whole = joined([one.part for one in found], gradients)
    return {k: (x * (rate / math.log(2))).reshape(leaves[k].shape).to(leaves[k].dtype) for k, x in whole.items()}
