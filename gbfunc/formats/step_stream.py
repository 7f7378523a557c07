"""Compresses the integers of a genome (`steps`), and finds the quantization steps for a number of bits."""

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gbfunc.formats.layout import Allowed
from gbfunc.formats.statistics import codable, counter_entries, counters_of, encode_statistic, read_counters, squares_of
from gbfunc.formats.steps import LARGEST, LEAST, MOST, OCTAVE, Past, Quantised, Steps, joined, parts_of, quantise
from gbfunc.formats.symbols import NARROWEST, PIECE, WIDEST, Entry, Reader, entry, geometric, geometric_bits, join
from gbfunc.trees import DIRECT
from gbfunc.types import Params, TensorMap

# Rounding to multiples of a step raises the loss by `h step^2 / 24`; h is the loss's second derivative. One more bit
# halves the step, so the derivative of `h step^2 / 24` with respect to the bits is `-_BALANCE h step^2`.
_BALANCE = math.log(2) / 12
_STATISTIC = -32  # Largest index of the steps of running statistics: small, as training cannot correct rounding errors
_FROZEN_ERROR = 1 / 64  # Largest rounding error of a frozen parameter, relative to the parameter's largest number
_WIDTHS = np.arange(NARROWEST + 1, WIDEST)


def _stored(found: Quantised) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    full_mask = found.full_mask.numpy()
    shifts = np.broadcast_to(found.shifts.numpy(), full_mask.shape)
    return found.integers.numpy().astype(np.int64)[full_mask], shifts[full_mask]


def _width_and_bits(found: Quantised) -> tuple[int, float]:
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
        even = np.log2(2 * np.array(found.limits) + 1).sum()
        if even < bits:
            width, bits = WIDEST, even
    return int(width), float(bits)


@lru_cache(maxsize=1)
def _table() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    rows = [geometric_bits(int(width), LARGEST) for width in _WIDTHS]
    return np.stack([np.pad(row, (0, LARGEST + 1 - len(row))) for row in rows]), np.array([*map(len, rows)])


def _bits(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    bits_Wn, reach_W = _table()
    return np.where(len(counts) <= reach_W, bits_Wn[:, : len(counts)] @ counts, np.inf)


def _width_at(width: NDArray[np.int64] | int, shift: NDArray[np.int64] | int) -> NDArray[np.int64]:
    return np.clip(width + 2 * shift, NARROWEST + 1, WIDEST - 1)


def code_bits(plan: Any, leaves: TensorMap, steps: Steps) -> float:
    return sum(_width_and_bits(found)[1] for found, _ in quantise(plan, leaves, steps))


def allocate(plan: Any, leaves: TensorMap, squares: TensorMap, bits: float, examples: int = 0) -> Steps:
    """Returns the finest quantization steps with which the integers take at most `bits`, otherwise the largest steps.

    `squares` are mean squares of gradients of the mean loss of `examples` rows. `Steps.rate` of the result estimates
    the decrease of the loss per additional bit; with `examples=0`, `rate` is 0. A frozen leaf has no squares, and gets
    the smallest steps that can store the leaf. Raises ValueError if no step can store a frozen parameter.
    """
    # Bounds of log2(step * sqrt(square)). Normal training needs less, but `squares` grow if the loss suddenly rises.
    low, high = -40.0, 88.0
    for _ in range(21):
        middle = (low + high) / 2
        if _steps_at(plan, leaves, squares, middle)[1] > bits:
            low = middle
        else:
            high = middle
    # The second derivative is estimated by `examples` times the mean square of the mean gradient. `min` bounds the
    # rate: after suddenly large gradients, a large rate would cause large gradients again.
    rate = _BALANCE * examples * 4.0 ** min(high, 0.0)
    return Steps(_steps_at(plan, leaves, squares, high)[0].indices, rate)


def _steps_at(plan: Any, leaves: TensorMap, squares: TensorMap, log_noise: float) -> tuple[Steps, float]:
    parts = parts_of(plan, codable(plan, leaves))
    past, indices, bits = Past({}, {}), [], 0.0
    for part in parts:
        leaf = leaves[part.leaf]
        numbers = encode_statistic(part.leaf, leaf, past.variances) if part.statistic else part.of(leaf)
        shifts, mask = past.shifts(part, "cpu")
        # `least` is the index of the smallest quantization step with which no integer of the part exceeds `LARGEST`.
        logs = OCTAVE * (part.in_period(numbers.double()).abs() / LARGEST).log2() + OCTAVE // 2 * shifts
        stored = logs[mask.expand(part.shape)]
        most = float(stored.max()) if stored.numel() else -math.inf
        least = min(MOST, max(LEAST, math.ceil(most))) if math.isfinite(most) else LEAST
        index, coarsest = (_STATISTIC, _STATISTIC) if part.statistic else (least, MOST)
        found = squares_of(part.leaf, leaves, squares) if part.statistic else squares.get(part.leaf)
        if found is not None:
            # Rescale squared gradients to the part's quantization step: a number's step is divided by sqrt(2)^shift.
            even = (part.of(found).double() * torch.exp2(-shifts.double()))[mask.expand(part.shape)]
            mean = float(even.mean()) if even.numel() else 0.0
            index = coarsest if mean <= 0 else round(OCTAVE * (log_noise - math.log2(mean) / 2))
        indices.append(max(LEAST, least, min(coarsest, index)))
        one, represented = past.quantise(part, leaf, indices[-1])
        bits += _width_and_bits(one)[1]
        if found is None and part.leaf.startswith(DIRECT) and numbers.numel():
            largest = float(numbers.abs().max())
            if float((represented - numbers).abs().max()) > _FROZEN_ERROR * largest:
                cure = "register it as a buffer, which is stored as it is"
                raise ValueError(f"{part.leaf!r} is not trained and holds {largest:g}, too extreme for codes: {cure}")
    return Steps.of(parts, indices), bits


def pack_steps(plan: Any, leaves: TensorMap, steps: Steps) -> tuple[bytes, dict[str, float]]:
    """Returns the stream, and how many bits each leaf takes in the stream. The stream's header is not counted."""
    found = [one for one, _ in quantise(plan, leaves, steps)]
    parts, widths = [one.part for one in found], []
    bits = {part.leaf: 0.0 for part in parts}
    for one in found:
        width, of_part = _width_and_bits(one)
        widths.append(width)
        bits[one.part.leaf] += of_part
    entries = _header(steps.of_parts(parts), LEAST, MOST) + _header(widths, NARROWEST, WIDEST)
    for one, width in zip(found, widths, strict=True):
        if width != NARROWEST:
            reaches, limits = _tables(one, width)
            entries += map(entry, (_stored(one)[0] + reaches).tolist(), limits)
    counters = counters_of(plan) if steps.statistics else []
    for name, own in zip(counters, counter_entries(leaves[k] for k in counters), strict=True):
        bits[name] = sum(math.log2(total / frequency) for _, frequency, total in own)
        entries += own
    pieces = -(-len(entries) // PIECE)
    if pieces > 0xFFFF:
        raise ValueError(f"{len(entries):,} numbers are too many for codes with quantization steps")
    return pieces.to_bytes(2, "little") + join(entries), bits


def _tables(found: Quantised, width: int) -> tuple[NDArray[np.int64], list[list[int]]]:
    evenly = width == WIDEST
    own = np.array(found.limits, np.int64) if evenly else _width_at(width, _stored(found)[1])
    keys, index = np.unique(own, return_inverse=True)
    tables = [geometric(WIDEST, key) if evenly else geometric(key, LARGEST) for key in keys.tolist()]
    reaches = np.array([reach for reach, _ in tables], np.int64)
    return reaches[index], [tables[i][1] for i in index.tolist()]


def _header(numbers: list[int], least: int, most: int) -> list[Entry]:
    median = sorted(numbers)[len(numbers) // 2] if numbers else 0
    counts = np.bincount([abs(n - median) for n in numbers], minlength=1)
    width = int(_WIDTHS[np.argmin(_bits(counts))])
    span, spans = most - least + 1, WIDEST - NARROWEST + 1
    head = [(median - least, 1, span), (width - NARROWEST, 1, spans)]
    reach, limits = geometric(width, LARGEST)
    return head + [entry(n - median + reach, limits) for n in numbers]


def unpack_steps(plan: Any, data: bytes, statistics: bool, allowed: Allowed) -> tuple[Params, Steps]:
    """Reads the data of `pack_steps`: returns float32 leaves and quantization steps; ValueError for damaged data."""
    symbols = PIECE * int.from_bytes(data[:2], "little")
    allowed.check("symbols", symbols - PIECE)
    parts, reader = parts_of(plan, statistics), Reader(data[2:], symbols)
    indices = _read_header(reader, len(parts), LEAST, MOST)
    widths = _read_header(reader, len(parts), NARROWEST, WIDEST)
    past, values = Past({}, {}), []
    for part, index, width in zip(parts, indices, widths, strict=True):
        found = past.zeros(part, index, "cpu")
        if width == WIDEST and part.period is None:
            raise ValueError("its codes have a width that is reserved for numbers with a period")
        if width != NARROWEST:
            reaches, limits = _tables(found, width)
            read = np.array(reader.read(limits), np.int64) - reaches
            found.integers[found.full_mask] = torch.from_numpy(read).float()
        values.append(past.add(part, found.integers, found.steps))
    counters = read_counters(reader, counters_of(plan) if statistics else [])
    reader.close()
    return joined(parts, values) | counters, Steps.of(parts, indices)


def _read_header(reader: Reader, count: int, least: int, most: int) -> list[int]:
    median = reader.next(range(most - least + 2)) + least
    width = reader.next(range(WIDEST - NARROWEST + 2)) + NARROWEST
    reach, limits = geometric(width, LARGEST)
    numbers = [symbol - reach + median for symbol in reader.read([limits] * count)]
    if any(not least <= n <= most for n in numbers):
        raise ValueError(f"its steps or widths are not within {least} .. {most}")
    return numbers
