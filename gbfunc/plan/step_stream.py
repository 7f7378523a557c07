"""The integers of all parts of a genome as a stream of symbols (`steps` says what they are, and in which order)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gbfunc.plan.statistics import counter_entries, counters_of, read_counters
from gbfunc.plan.steps import (
    LARGEST,
    LEAST,
    MOST,
    Quantised,
    Seen,
    Steps,
    by_leaf,
    joined,
    limits_of,
    parts_of,
    quantise,
    shifts_of,
    sizes_of,
)
from gbfunc.plan.symbols import NARROWEST, PIECE, WIDEST, Entry, Reader, geometric, geometric_bits, join
from gbfunc.types import Params, TensorMap


def _stored(found: Quantised) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The integers [n] of a part that are stored, and how much finer their steps are [n]."""
    live = found.live.numpy()
    shifts = np.broadcast_to(found.shifts.numpy(), live.shape)
    return found.integers.numpy().astype(np.int64)[live], shifts[live]


def _width_and_bits(found: Quantised) -> tuple[int, float]:
    """The width with which a part's integers take the fewest bits, and these."""
    integers, shifts = _stored(found)
    if not integers.any():
        return NARROWEST, 0.0
    bits_W = np.zeros(len(_WIDTHS))
    for shift in np.unique(shifts):
        own_W = _bits(np.bincount(np.abs(integers[shifts == shift])))
        bits_W += own_W[_width_at(_WIDTHS, shift) - _WIDTHS[0]]
    best = int(np.argmin(bits_W))
    width, bits = _WIDTHS[best], bits_W[best]
    if found.part.period is not None:
        even = np.log2(2 * np.array(limits_of(found)) + 1).sum()
        if even < bits:
            width, bits = WIDEST, even
    return int(width), float(bits)


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
    return _width_and_bits(found)[1]


def pack_steps(plan: Any, leaves: TensorMap, steps: Steps) -> tuple[bytes, float, dict[str, NDArray[np.float64]]]:
    """The stream of all parts, with the bits of steps and widths, and of each number of a leaf."""
    found = [one for one, _ in quantise(plan, leaves, steps)]
    parts, widths = [one.part for one in found], [_width_and_bits(one)[0] for one in found]
    entries = _header(steps.of_parts(parts), LEAST, MOST) + _header(widths, NARROWEST, WIDEST)
    head, bits = _bits_of(entries).sum(), []
    for one, width in zip(found, widths, strict=True):
        own = [] if width == NARROWEST else list(map(_entry, _stored(one)[0].tolist(), _tables(one, width)))
        of_part = np.zeros(one.part.shape)
        if own:
            of_part[one.live.numpy()] = _bits_of(own)
        bits.append(of_part.reshape(-1))
        entries += own
    numbers = {name: np.concatenate(of_parts) for name, of_parts in by_leaf(parts, bits).items()}
    counters = counters_of(plan) if steps.statistics else []
    for name, own in zip(counters, counter_entries(leaves[k] for k in counters), strict=True):
        numbers[name] = _bits_of(own).sum(keepdims=True)
        entries += own
    pieces = -(-len(entries) // PIECE)
    if pieces > 0xFFFF:
        raise ValueError(f"{len(entries):,} numbers are too many for codes with steps of their own")
    return pieces.to_bytes(2, "little") + join(entries), head, numbers


def _bits_of(entries: list[Entry]) -> NDArray[np.float64]:
    of = np.array(entries, np.float64).reshape(-1, 3)
    return np.log2(of[:, 2]) - np.log2(of[:, 1])


def _entry(integer: int, table: tuple[int, list[int]]) -> Entry:
    reach, limits = table
    return limits[integer + reach], limits[integer + reach + 1] - limits[integer + reach], limits[-1]


def _tables(found: Quantised, width: int) -> Iterator[tuple[int, list[int]]]:
    """What `geometric` gives for each integer of a part that is stored."""
    if width == WIDEST:
        return (geometric(WIDEST, most) for most in limits_of(found))
    return (geometric(w, LARGEST) for w in _width_at(width, _stored(found)[1]).tolist())


def _header(numbers: list[int], least: int, most: int) -> list[Entry]:
    """Numbers of `least .. most`: their median, the width of the differences from it, and these."""
    median = sorted(numbers)[len(numbers) // 2] if numbers else 0
    counts = np.bincount([abs(n - median) for n in numbers], minlength=1)
    width = int(_WIDTHS[np.argmin(_bits(counts))])
    span, spans = most - least + 1, WIDEST - NARROWEST + 1
    head = [(median - least, 1, span), (width - NARROWEST, 1, spans)]
    return head + [_entry(n - median, geometric(width, LARGEST)) for n in numbers]


def unpack_steps(plan: Any, data: bytes, statistics: bool) -> tuple[Params, Steps]:
    """The leaves in float32 that `pack_steps` packed, and their steps; `ValueError` for any other data."""
    parts = parts_of(plan, statistics)
    reader = Reader(data[2:], PIECE * int.from_bytes(data[:2], "little"))
    indices = _read_header(reader, len(parts), LEAST, MOST)
    widths = _read_header(reader, len(parts), NARROWEST, WIDEST)
    seen, values = Seen({}, {}), []
    for part, index, width in zip(parts, indices, widths, strict=True):
        shifts, alive = shifts_of(part, seen.gains, "cpu")
        found = Quantised(part, torch.zeros(part.shape), sizes_of(index, shifts), shifts, alive)
        if width == WIDEST and part.period is None:
            raise ValueError("its codes are of a width that only numbers with a period have")
        if width != NARROWEST:
            read = [reader.next(limits) - reach for reach, limits in _tables(found, width)]
            found.integers[found.live] = torch.tensor(read, dtype=torch.float32)
        values.append(seen.add(part, found.integers, found.steps))
    counters = read_counters(reader, counters_of(plan) if statistics else [])
    reader.close()
    return joined(parts, values) | counters, Steps.of(parts, indices)


def _read_header(reader: Reader, count: int, least: int, most: int) -> list[int]:
    median = reader.next(list(range(most - least + 2))) + least
    width = reader.next(list(range(WIDEST - NARROWEST + 2))) + NARROWEST
    reach, limits = geometric(width, LARGEST)
    numbers = [reader.next(limits) - reach + median for _ in range(count)]
    if any(not least <= n <= most for n in numbers):
        raise ValueError(f"its steps or widths are not within {least} .. {most}")
    return numbers
