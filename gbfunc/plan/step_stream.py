"""The integers of all parts of a genome as a stream of symbols (`steps` says what they are, and in which order)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gbfunc.plan.statistics import counter_entries, counters_of, read_counters
from gbfunc.plan.steps import (
    LARGEST,
    LEAST,
    MOST,
    Quantised,
    Seen,
    Steps,
    limits_of,
    parts_in,
    quantise,
    shifts_of,
    sizes_of,
)
from gbfunc.plan.symbols import NARROWEST, PIECE, WIDEST, Entry, Reader, geometric, geometric_bits, join
from gbfunc.types import Params, TensorMap


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
    bits_W = np.zeros(len(_WIDTHS))
    for shift in np.unique(shifts):
        own_W = _bits(np.bincount(np.abs(integers[shifts == shift])))
        bits_W += own_W[_width_at(_WIDTHS, shift) - _WIDTHS[0]]
    best = int(np.argmin(bits_W))
    width, bits = _WIDTHS[best], bits_W[best]
    if found.part.period is not None:
        even = np.log2(2 * np.array(limits_of(found, torch.from_numpy(alive))) + 1).sum()
        if even < bits:
            width, bits = WIDEST, even
    return _Costs(int(width), float(bits), integers, shifts, alive)


_WIDTHS = np.arange(NARROWEST + 1, WIDEST)


@lru_cache(maxsize=1)
def _table() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Bits of the integers 0 .. `LARGEST` at each of the widths [W, n], 0 past its reach, and how many it has [W]."""
    rows = [geometric_bits(int(width), LARGEST) for width in _WIDTHS]
    return np.stack([np.pad(row, (0, LARGEST + 1 - len(row))) for row in rows]), np.array([*map(len, rows)])


def _bits(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """What so many integers of each absolute value take at each of the widths [W]."""
    bits_Wn, reach_W = _table()
    return np.where(len(counts) <= reach_W, bits_Wn[:, : len(counts)] @ counts, np.inf)


def _width_at(width: NDArray[np.int64] | int, shift: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """The widths of integers whose steps are finer."""
    return np.clip(width + 2 * shift, NARROWEST + 1, WIDEST - 1)


def code_bits(plan: Any, leaves: TensorMap, steps: Steps) -> float:
    """Bits of all integers of leaves on the CPU."""
    return sum(part_bits(found) for found, _ in quantise(plan, leaves, steps))


def part_bits(found: Quantised) -> float:
    """Bits of the integers of a part on the CPU."""
    return _costs(found).bits


def pack_steps(plan: Any, leaves: TensorMap, steps: Steps) -> tuple[bytes, float, dict[str, NDArray[np.float64]]]:
    """The stream of all parts, with the bits of steps and widths, and of each number of a leaf."""
    found = [one for one, _ in quantise(plan, leaves, steps)]
    costs = [_costs(one) for one in found]
    indices = {name: iter(of_parts) for name, of_parts in steps.indices}
    entries = _header([next(indices[one.part.leaf]) for one in found], LEAST, MOST)
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
    counters = counters_of(plan) if steps.statistics else []
    for name, own in zip(counters, counter_entries(leaves[k] for k in counters), strict=True):
        numbers[name] = [_bits_of(own).sum(keepdims=True)]
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
    width = int(_WIDTHS[np.argmin(_bits(counts))])
    span, spans = most - least + 1, WIDEST - NARROWEST + 1
    head = [(median - least, 1, span), (width - NARROWEST, 1, spans)]
    return head + [_entry(n - median, width, LARGEST) for n in numbers]


def _entries(found: Quantised, cost: _Costs) -> list[Entry]:
    if cost.width == NARROWEST:
        return []
    integers = cost.integers.tolist()
    if cost.width == WIDEST:
        limits = limits_of(found, torch.from_numpy(cost.alive))
        return [_entry(q, WIDEST, most) for q, most in zip(integers, limits, strict=True)]
    widths = _width_at(cost.width, cost.shifts).tolist()
    return [_entry(q, width, LARGEST) for q, width in zip(integers, widths, strict=True)]


def unpack_steps(plan: Any, data: bytes, statistics: bool) -> tuple[Params, Steps]:
    """The leaves in float32 that `pack_steps` packed, and their steps; `ValueError` for any other data."""
    parts = parts_in(plan, statistics)
    reader = Reader(data[2:], PIECE * int.from_bytes(data[:2], "little"))
    indices = _read_header(reader, len(parts), LEAST, MOST)
    widths = _read_header(reader, len(parts), NARROWEST, WIDEST)
    seen = Seen({}, {})
    values: dict[str, list[Tensor]] = {}
    for part, index, width in zip(parts, indices, widths, strict=True):
        shifts, alive = shifts_of(part, seen.gains, "cpu")
        steps = sizes_of(index, shifts)
        integers = torch.zeros(part.shape)
        found = Quantised(part, integers, steps, shifts, alive)
        live = torch.ones(part.shape, dtype=torch.bool) if alive is None else alive.expand(part.shape)
        if width != NARROWEST:
            integers[live] = torch.tensor(_read(reader, found, width, live), dtype=torch.float32)
        values.setdefault(part.leaf, []).append(seen.add(part, integers, steps))
    counters = read_counters(reader, counters_of(plan) if statistics else [])
    reader.close()
    held: dict[str, list[int]] = {}
    for part, index in zip(parts, indices, strict=True):
        held.setdefault(part.leaf, []).append(index)
    leaves = {name: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for name, pieces in values.items()}
    return leaves | counters, Steps(tuple((name, tuple(of_parts)) for name, of_parts in held.items()))


def _read(reader: Reader, found: Quantised, width: int, live: Tensor) -> list[int]:
    if width == WIDEST:
        if found.part.period is None:
            raise ValueError("its codes are of a width that only numbers with a period have")
        tables = (geometric(WIDEST, most) for most in limits_of(found, live))
    else:
        shifts = found.shifts.expand(live.shape)[live].numpy()
        tables = (geometric(w, LARGEST) for w in _width_at(width, shifts).tolist())
    return [reader.next(limits) - reach for reach, limits in tables]


def _read_header(reader: Reader, count: int, least: int, most: int) -> list[int]:
    median = reader.next(list(range(most - least + 2))) + least
    width = reader.next(list(range(WIDEST - NARROWEST + 2))) + NARROWEST
    reach, limits = geometric(width, LARGEST)
    numbers = [reader.next(limits) - reach + median for _ in range(count)]
    if any(not least <= n <= most for n in numbers):
        raise ValueError(f"its steps or widths are not within {least} .. {most}")
    return numbers
