"""Steps of quantisation, one for each tensor's part of each leaf: `number = integer * 2^(index / 8)`.

Where bits go: the loss grows by the sum of `h step^2 / 24` over all numbers, h being its curvature, for which the mean
square of the gradient stands (the diagonal of Fisher's information). It grows least, for as many bits, where
`sqrt(h) step` is the same everywhere (reverse water-filling: T. Cover, J. Thomas, Elements of Information Theory,
10.3.3). Within a leaf, too: a code weight of a periodic g-net moves weights by as much as its feature's amplitude and
the code say. Both are known where it is read, so its step is finer by powers of sqrt(2); what belongs to a feature of
amplitude 0 takes no bits.

Integers have two-sided geometric distributions (`symbols.geometric`), one width a part; one of them takes about
`log2(1 + e |q|)` bits on average, and the derivative of this is the gradient of the rate.

A file has, of all parts: the width of the differences of the steps' indices from their median, and both; as much of the
widths; then the integers of each part, those of amplitudes first.

Suffixes: T tiles, H features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gbfunc.plan.rounding import BITS, STORED_DTYPES, StoredDtype, rounded, stored_name
from gbfunc.plan.slots import DTYPES
from gbfunc.plan.symbols import NARROWEST, PIECE, WIDEST, Entry, Reader, geometric, geometric_bits, join
from gbfunc.trees import DIRECT, GNET
from gbfunc.types import Params, TensorMap

AUTO = "auto"
"""In place of a dtype: in codes whose steps training finds."""

_OCTAVE, _LEAST, _MOST = 8, -128, 127
"""Indices of an octave; the least and the most."""
LARGEST = 2047
"""Largest integer."""
_REACH = 400
_STEPS = torch.tensor([math.ldexp(2 ** (i % _OCTAVE / _OCTAVE), i // _OCTAVE) for i in range(-_REACH, _REACH + 1)])
_BALANCE = math.log(2) / 12
"""A bit more halves `step^2` of two numbers in the loss's sum."""
EXPECTED_BITS, EXPECTED_PART_BITS = 5.0, 11.0
"""Of a number and a part, for plans of a size: what MNIST's networks train best with."""


@dataclass(frozen=True)
class Steps:
    """How each part of the trained leaves is stored, and what a bit of it costs beside the loss.

    Attributes:
        indices: `(leaf, (index, ...))`: a step is `2^(index / 8)`; a part is what a tensor of the p-net has of a leaf.
        rate: weight of a bit in what is minimised: `loss + rate * bits`.
    """

    indices: tuple[tuple[str, tuple[int, ...]], ...]
    rate: float = 0.0


Stored = StoredDtype | Steps


def stored_as(stored: Stored, what: str = "dtype") -> str:
    """The name of a dtype that leaves may be stored in, `"auto"` for steps; `ValueError` for any other."""
    return AUTO if isinstance(stored, Steps) or stored == AUTO else stored_name(stored, what)


def bytes_each(stored: Stored) -> float:
    """Bytes of a number in a file, about where codes have steps; raises as `stored_as`."""
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
    gain: str | None = None
    """The leaf [T, H] that multiplies what this one [T, ..., H] makes."""
    finer: tuple[int, ...] = ()
    """Half octaves by which the steps of each code's weights are finer; () for none."""
    period: float | None = None

    def of(self, leaf: Tensor) -> Tensor:
        """This part of its leaf."""
        return leaf if self.last is None else leaf[self.first : self.last]

    @property
    def gain_key(self) -> tuple[str | None, int]:
        """Where its gain is."""
        return self.gain, self.first


class Quantised(NamedTuple):
    """A part in integers, their steps, in half octaves how much finer these are, and which integers are stored.

    The last three are of a shape that broadcasts; None is all.
    """

    part: Part
    integers: Tensor
    steps: Tensor
    shifts: Tensor
    alive: Tensor | None


@lru_cache(maxsize=16)
def parts_of(plan: Any) -> tuple[Part, ...]:
    """The parts of all trained leaves, those first on which the steps of others depend."""
    found = []
    for e in plan.ensembles:
        for name, leaf in e.leaves.items():
            spans = [(s.first, s.first + s.slot.grid.n_tiles) for s in e.spans]
            gain = None if leaf.gain is None else f"{GNET}{e.name}/{leaf.gain}"
            for first, last in spans if leaf.scope == "tile" else [(0, e.n_groups)]:
                shape = (last - first, *leaf.shape)
                found.append(Part(f"{GNET}{e.name}/{name}", first, last, shape, gain, _finer(e, leaf), leaf.period))
    floating = (t for t in plan.direct if DTYPES[t.dtype].is_floating_point)
    found += [Part(f"{DIRECT}{t.name}", 0, None, tuple(t.shape)) for t in floating]
    return tuple(sorted(found, key=lambda part: part.gain is not None))


def _finer(ensemble: Any, leaf: Any) -> tuple[int, ...]:
    """Half octaves, rounded, of the root mean square of each code that a leaf's rows multiply."""
    if leaf.codes is None:
        return ()
    squares = np.asarray(ensemble.codes[leaf.codes == "col"], np.float64) ** 2
    return tuple(round(math.log2(x)) if x > 0 else 0 for x in squares.mean(axis=(0, 1)).tolist())


def _shifts(part: Part, gains: Mapping[tuple[str | None, int], Tensor], device: Any) -> tuple[Tensor, Tensor | None]:
    """Half octaves by which steps are finer, and what is alive, by the integers of the gains."""
    ndim = len(part.shape)
    shifts = torch.zeros((1,) * ndim, dtype=torch.long, device=device)
    if part.finer:
        shifts = shifts + torch.tensor(part.finer, device=device)[:, None]
    if part.gain is None:
        return shifts, None
    gain_TH = gains[part.gain_key]
    shape = (part.shape[0], *(1,) * (ndim - 2), part.shape[-1])
    # Bits of the square: 2 log2 |gain|, rounded down, and 1.
    return shifts + torch.frexp(gain_TH * gain_TH).exponent.long().reshape(shape), (gain_TH != 0).reshape(shape)


@lru_cache(maxsize=8)
def _table(device: torch.device) -> Tensor:
    return _STEPS.to(device)


def _limit(part: Part, steps: Tensor) -> Tensor:
    """The largest integers of a part whose numbers have a period: no number is past half of it."""
    assert part.period is not None
    return (part.period / 2 / steps.double()).floor()


def _limits(found: Quantised, live: Tensor) -> list[int]:
    """The same of integers that are stored."""
    return _limit(found.part, found.steps).clamp(max=LARGEST).expand(found.part.shape)[live].long().tolist()


def _quantise(part: Part, leaf: Tensor, index: int, gains: dict[tuple[str | None, int], Tensor]) -> Quantised:
    """A part with a step; its integers are put among the gains."""
    x = part.of(leaf.detach()).float()
    shifts, alive = _shifts(part, gains, x.device)
    steps = _table(x.device)[index - _OCTAVE // 2 * shifts + _REACH]
    limit = torch.tensor(float(LARGEST), device=x.device)
    if part.period is not None:
        x = x - part.period * (x / part.period).round()
        limit = torch.minimum(limit, _limit(part, steps).float())
    integers = (x / steps).round().clamp(-limit, limit)
    gains[part.leaf, part.first] = integers
    return Quantised(part, integers, steps, shifts, alive)


def quantise(plan: Any, leaves: TensorMap, steps: Steps) -> Iterator[Quantised]:
    """Every part in integers, on the leaves' device."""
    indices = {name: iter(of_parts) for name, of_parts in steps.indices}
    gains: dict[tuple[str | None, int], Tensor] = {}
    for part in parts_of(plan):
        yield _quantise(part, leaves[part.leaf], next(indices[part.leaf]), gains)


def check_steps(plan: Any, steps: Steps) -> None:
    """Raise `ValueError` for steps of another plan."""
    counts: dict[str, int] = {}
    for part in parts_of(plan):
        counts[part.leaf] = counts.get(part.leaf, 0) + 1
    if {name: len(indices) for name, indices in steps.indices} != counts:
        raise ValueError("the steps are those of another plan: expected what gb.allocate_steps gives for this one")
    if any(not _LEAST <= i <= _MOST for _, indices in steps.indices for i in indices):
        raise ValueError(f"indices of steps must be {_LEAST} to {_MOST}")


def as_stored(plan: Any, leaves: TensorMap, stored: Stored) -> tuple[Params, Params]:
    """Leaves and buffers as they come back from a file; gradients go straight through the rounding.

    What belongs to features of amplitude 0 stays as it is, for which a file has zeros: the weights are the same.

    Returns:
        The leaves, and the gradient of `rate * bits` with respect to them; {} where there is none.
    """
    if not isinstance(stored, Steps):
        return rounded(leaves, stored), {}
    made, values = dict(leaves), dict[str, list[Tensor]]()
    found = list(quantise(plan, leaves, stored))
    for part, integers, steps, _, alive in found:
        value = integers * steps
        value = value if alive is None else torch.where(alive, value, part.of(leaves[part.leaf].detach()))
        values.setdefault(part.leaf, []).append(value)
    for name, pieces in values.items():
        x, value = leaves[name], pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        # Straight through (Bengio et al., 2013): the value, with the gradient of the leaf.
        made[name] = value.reshape(x.shape).to(x.dtype) + (x - x.detach())
    return made, _rate_gradient(leaves, found, stored.rate) if stored.rate else {}


def _rate_gradient(leaves: TensorMap, found: list[Quantised], rate: float) -> Params:
    """The gradient of `rate * bits`, where n numbers of a part take `n log2(1 + e mean|x| / step)` bits.

    Of amplitudes also that of the bits which their features take: one fewer for each number where they are half.
    """
    gradients: dict[str, list[Tensor]] = {}
    owned: dict[tuple[str | None, int], Tensor | float] = {}
    for part, _, steps, _, alive in found:
        x = part.of(leaves[part.leaf].detach()).float()
        live = torch.ones_like(x) if alive is None else alive.float().expand(x.shape)
        slopes = torch.zeros_like(x)
        if part.period is None and x.numel():
            share = live / live.sum().clamp(min=1)
            per = math.e / steps
            slopes = ((per / (1 + per * (x.abs() * share).sum())) * share).sum() * live * x.sign()
        gradients.setdefault(part.leaf, []).append(slopes)
        if alive is not None:
            numbers_TH = live.reshape(x.shape[0], -1, x.shape[-1]).sum(1)
            owned[part.gain_key] = owned.get(part.gain_key, 0.0) + numbers_TH
    for part, _, steps, _, _ in found:
        if (part.leaf, part.first) in owned:
            x = part.of(leaves[part.leaf].detach()).float()
            at = [p.part.first for p in found if p.part.leaf == part.leaf].index(part.first)
            slopes = owned[part.leaf, part.first] * x.sign() / (x.abs() + steps)
            gradients[part.leaf][at] = gradients[part.leaf][at] + slopes
    joined = {k: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for k, pieces in gradients.items()}
    return {k: (x * (rate / math.log(2))).reshape(leaves[k].shape).to(leaves[k].dtype) for k, x in joined.items()}


class _Costs(NamedTuple):
    """The width of a part's integers [n], those that are stored, and how much finer their steps are."""

    width: int
    bits: float
    integers: NDArray[np.int64]
    shifts: NDArray[np.int64]
    alive: NDArray[np.bool_]


def _costs(found: Quantised) -> _Costs:
    """With the width that takes the fewest bits."""
    shape = found.part.shape
    alive = np.ones(shape, bool) if found.alive is None else np.broadcast_to(found.alive.numpy(), shape).copy()
    integers = found.integers.numpy().astype(np.int64)[alive]
    shifts = np.broadcast_to(found.shifts.numpy(), shape)[alive]
    if not integers.any():
        return _Costs(NARROWEST, 0.0, integers, shifts, alive)
    groups = [(int(s), np.bincount(np.abs(integers[shifts == s]))) for s in np.unique(shifts)]
    widths = {w: sum(_bits(counts, _width_at(w, s)) for s, counts in groups) for w in range(NARROWEST + 1, WIDEST)}
    if found.part.period is not None:
        widths[WIDEST] = float(np.log2(2 * np.array(_limits(found, torch.from_numpy(alive))) + 1).sum())
    width = min(widths, key=widths.__getitem__)
    return _Costs(width, widths[width], integers, shifts, alive)


def _bits(counts: NDArray[np.int64], width: int) -> float:
    """What so many integers of each absolute value take."""
    table = geometric_bits(width, LARGEST)
    return float(counts @ table[: len(counts)]) if len(counts) <= len(table) else math.inf


def _width_at(width: int, shift: int) -> int:
    """The width of integers whose steps are finer."""
    return max(NARROWEST + 1, min(WIDEST - 1, width + 2 * shift))


def code_bits(plan: Any, leaves: TensorMap, steps: Steps) -> float:
    """Bits of all integers of leaves on the CPU."""
    return sum(_costs(found).bits for found in quantise(plan, leaves, steps))


def pack_steps(plan: Any, leaves: TensorMap, steps: Steps) -> tuple[bytes, float, dict[str, NDArray[np.float64]]]:
    """The stream of all parts, with the bits of steps and widths, and of each number of a leaf."""
    found = list(quantise(plan, leaves, steps))
    costs = [_costs(one) for one in found]
    indices = {name: iter(of_parts) for name, of_parts in steps.indices}
    entries = _header([next(indices[one.part.leaf]) for one in found], _LEAST, _MOST)
    entries += _header([cost.width for cost in costs], NARROWEST, WIDEST)
    head = _bits_of(entries).sum()
    numbers: dict[str, list[NDArray[np.float64]]] = {}
    for one, cost in zip(found, costs, strict=True):
        own = _entries(one, cost)
        bits = np.zeros(one.part.shape)
        if own:
            bits[cost.alive] = _bits_of(own)
        numbers.setdefault(one.part.leaf, []).append(bits.reshape(-1))
        entries += own
    pieces = -(-len(entries) // PIECE)
    if pieces > 0xFFFF:
        raise ValueError(f"{len(entries):,} numbers are too many for codes with steps of their own")
    return pieces.to_bytes(2, "little") + join(entries), head, {k: np.concatenate(v) for k, v in numbers.items()}


def _bits_of(entries: list[Entry]) -> NDArray[np.float64]:
    of = np.array(entries, np.float64).reshape(-1, 3)
    return np.log2(of[:, 2]) - np.log2(of[:, 1])


def _entry(integer: int, width: int, most: int) -> Entry:
    reach, limits = geometric(width, most)
    return limits[integer + reach], limits[integer + reach + 1] - limits[integer + reach], limits[-1]


def _header(numbers: list[int], least: int, most: int) -> list[Entry]:
    """Numbers of `least .. most`: their median, the width of the differences from it, and these."""
    median = sorted(numbers)[len(numbers) // 2] if numbers else 0
    counts = np.bincount([abs(n - median) for n in numbers], minlength=1)
    widths = {w: _bits(counts, w) for w in range(NARROWEST + 1, WIDEST)}
    width = min(widths, key=widths.__getitem__)
    span, spans = most - least + 1, WIDEST - NARROWEST + 1
    head = [(median - least, 1, span), (width - NARROWEST, 1, spans)]
    return head + [_entry(n - median, width, LARGEST) for n in numbers]


def _entries(found: Quantised, cost: _Costs) -> list[Entry]:
    if cost.width == NARROWEST:
        return []
    integers = cost.integers.tolist()
    if cost.width == WIDEST:
        limits = _limits(found, torch.from_numpy(cost.alive))
        return [_entry(q, WIDEST, most) for q, most in zip(integers, limits, strict=True)]
    shifts = cost.shifts.tolist()
    return [_entry(q, _width_at(cost.width, s), LARGEST) for q, s in zip(integers, shifts, strict=True)]


def unpack_steps(plan: Any, data: bytes) -> tuple[Params, Steps]:
    """The leaves in float32 that `pack_steps` packed, and their steps; `ValueError` for any other data."""
    parts = parts_of(plan)
    reader = Reader(data[2:], PIECE * int.from_bytes(data[:2], "little"))
    indices = _read_header(reader, len(parts), _LEAST, _MOST)
    widths = _read_header(reader, len(parts), NARROWEST, WIDEST)
    gains: dict[tuple[str | None, int], Tensor] = {}
    values: dict[str, list[Tensor]] = {}
    for part, index, width in zip(parts, indices, widths, strict=True):
        shifts, alive = _shifts(part, gains, "cpu")
        steps = _STEPS[index - _OCTAVE // 2 * shifts + _REACH]
        integers = torch.zeros(part.shape)
        found = Quantised(part, integers, steps, shifts, alive)
        live = torch.ones(part.shape, dtype=torch.bool) if alive is None else alive.expand(part.shape)
        if width != NARROWEST:
            integers[live] = torch.tensor(_read(reader, found, width, live), dtype=torch.float32)
        gains[part.leaf, part.first] = integers
        values.setdefault(part.leaf, []).append(integers * steps)
    reader.close()
    held: dict[str, list[int]] = {}
    for part, index in zip(parts, indices, strict=True):
        held.setdefault(part.leaf, []).append(index)
    leaves = {name: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for name, pieces in values.items()}
    return leaves, Steps(tuple((name, tuple(of_parts)) for name, of_parts in held.items()))


def _read(reader: Reader, found: Quantised, width: int, live: Tensor) -> list[int]:
    if width == WIDEST:
        if found.part.period is None:
            raise ValueError("its codes are of a width that only numbers with a period have")
        tables = (geometric(WIDEST, most) for most in _limits(found, live))
    else:
        shifts = found.shifts.expand(live.shape)[live].tolist()
        tables = (geometric(_width_at(width, s), LARGEST) for s in shifts)
    return [reader.next(limits) - reach for reach, limits in tables]


def _read_header(reader: Reader, count: int, least: int, most: int) -> list[int]:
    median = reader.next(list(range(most - least + 2))) + least
    width = reader.next(list(range(WIDEST - NARROWEST + 2))) + NARROWEST
    reach, limits = geometric(width, LARGEST)
    numbers = [reader.next(limits) - reach + median for _ in range(count)]
    if any(not least <= n <= most for n in numbers):
        raise ValueError(f"its steps or widths are not within {least} .. {most}")
    return numbers


def allocate(plan: Any, leaves: TensorMap, squares: TensorMap, bits: float, examples: int = 0) -> Steps:
    """Steps with which all integers take at most so many bits, or the largest ones.

    Args:
        plan: the plan.
        leaves: trained leaves on the CPU.
        squares: mean squares of their gradients; leaves without any get the smallest steps.
        bits: of all integers.
        examples: of a batch, whose gradients these are; with them, a bit's weight is that at which a bit more, spent on
            smaller steps, lowers the loss as much.
    """
    low, high = -40.0, 24.0
    for _ in range(20):
        middle = (low + high) / 2
        if code_bits(plan, leaves, _steps_at(plan, leaves, squares, middle)) > bits:
            low = middle
        else:
            high = middle
    # The noise h step^2 / 24 of each number, with h the examples times the mean square of their mean gradient.
    rate = _BALANCE * examples * 4.0**high
    return Steps(_steps_at(plan, leaves, squares, high).indices, rate)


def _steps_at(plan: Any, leaves: TensorMap, squares: TensorMap, log_noise: float) -> Steps:
    """Steps of which each, times the root mean square of the gradient, is about 2^log_noise."""
    indices: dict[str, list[int]] = {}
    gains: dict[tuple[str | None, int], Tensor] = {}
    for part in parts_of(plan):
        leaf = leaves[part.leaf]
        most = float(part.of(leaf).abs().max()) if leaf.numel() else 0.0
        least = _LEAST if most == 0 or part.gain else math.ceil(_OCTAVE * math.log2(most / LARGEST))
        index = least
        if part.leaf in squares:
            shifts, alive = _shifts(part, gains, "cpu")
            # What the mean square would be, were all steps equal.
            even = part.of(squares[part.leaf]).double() * torch.exp2(-shifts.double())
            even = even if alive is None else even[alive.expand(even.shape)]
            mean = float(even.mean()) if even.numel() else 0.0
            index = _MOST if mean <= 0 else round(_OCTAVE * (log_noise - math.log2(mean) / 2))
        index = max(_LEAST, least, min(_MOST, index))
        indices.setdefault(part.leaf, []).append(index)
        _quantise(part, leaf, index, gains)
    return Steps(tuple((name, tuple(of_parts)) for name, of_parts in indices.items()))
