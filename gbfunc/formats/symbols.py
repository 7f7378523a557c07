"""Entropy coding of small integers: asymmetric numeral systems (J. Duda, 2013) with bell-shaped frequencies.

A run is a sequence of symbols 0 .. 2^b - 1. The most likely value of a symbol is its centre, which the reader knows. A
run begins with 4 bits for the `width` of the distribution around the centres. With width 0, values are equally likely.
Otherwise a value at a distance d from the centre has the frequency `1 + 2^12 * 2^(-q / 16)`, where q is
`64 d^2 >> (width - 1)`: a normal distribution in integer arithmetic, equal on every machine. Files store no tables.

The encoder turns symbols into one integer x, which starts at 1, from the last symbol to the first. Let f be the
frequency of a symbol, F the sum of all frequencies, and c the sum for smaller values. The encoder sets
`x = x // f * F + c + x % f`. The decoder reverses the operations from the first symbol on and ends at 1. Every 2,048
symbols have their own integer, little-endian, after two bytes with its length. The last integer needs no length.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Symbols = NDArray[np.integer[Any]]
Entry = tuple[int, int, int]

PIECE = 2048
MAX_SYMBOLS = 1 << 18  # Maximum number of symbols in all runs of a file; a symbol takes half a microsecond to read
_BLOCK = 24  # Symbols that are read together, because operations on the large integer x that encodes them are slow
_MOST_BYTES = 4  # Maximum number of bytes per symbol: no symbol is rarer than 1 in 2^29 (see `geometric`)
_ENDS = "expected codes that end with the data, got others: copy the file again"

# 2^12 * 2^(-i / 16) for i from 0 to 15, as integers: floating-point results could differ between machines
POWERS = (4096, 3922, 3756, 3597, 3444, 3298, 3158, 3025, 2896, 2774, 2656, 2543, 2435, 2332, 2233, 2139)


@lru_cache(maxsize=4096)
def _limits(bits: int, centre: int, width: int) -> list[int]:
    if not width:
        return list(range(2**bits + 1))
    limits = [0]
    for symbol in range(2**bits):
        q = 64 * (symbol - centre) ** 2 >> (width - 1)
        limits.append(limits[-1] + 1 + (POWERS[q % 16] >> q // 16))
    return limits


@lru_cache(maxsize=4096)
def _bits_of(bits: int, centre: int, width: int) -> NDArray[np.float64]:
    limits = np.array(_limits(bits, centre, width), np.float64)
    return np.log2(limits[-1]) - np.log2(np.diff(limits))


class Run(NamedTuple):
    """Symbols [n] of `bits` bits, with a centre (most likely value) per symbol [n], or one centre for all [1]."""

    symbols: Symbols
    bits: int
    centres: Symbols

    def cost(self) -> tuple[float, int]:
        """Finds the width with which the symbols take the fewest bits; returns these bits and the width."""
        centres, index = np.unique(self.centres, return_inverse=True)
        index = np.broadcast_to(index, self.symbols.shape)
        tables = (np.stack([_bits_of(self.bits, int(c), width) for c in centres]) for width in range(16))
        found = [float(table[index, self.symbols].sum()) for table in tables] if self.symbols.size else [0.0]
        return min(zip(found, range(16), strict=False))


def pack_runs(runs: list[Run]) -> tuple[bytes, list[float]]:
    entries: list[Entry] = []
    costs = []
    for run in runs:
        bits, width = run.cost()
        entries.append((width, 1, 16))
        centres = np.broadcast_to(run.centres, run.symbols.shape).tolist()
        for symbol, centre in zip(run.symbols.tolist(), centres, strict=True):
            entries.append(entry(symbol, _limits(run.bits, centre, width)))
        costs.append(bits)
    return join(entries), costs


def entry(symbol: int, limits: list[int]) -> Entry:
    return limits[symbol], limits[symbol + 1] - limits[symbol], limits[-1]


def join(entries: list[Entry]) -> bytes:
    """Encodes symbols. An entry is (sum of frequencies of smaller values, frequency of the symbol, sum of all)."""
    pieces = []
    for start in range(0, len(entries), PIECE):
        x = 1
        for less, frequency, total in reversed(entries[start : start + PIECE]):
            quotient, rest = divmod(x, frequency)
            x = quotient * total + less + rest
        pieces.append(x.to_bytes(-(-x.bit_length() // 8), "little"))
    return b"".join(len(piece).to_bytes(2, "little") + piece for piece in pieces[:-1]) + pieces[-1]


def most_runs_bytes(bits: float, symbols: int, runs: int) -> int:
    """Returns an upper bound for the bytes of `runs` runs, which together have `symbols` symbols and `bits` bits."""
    pieces = -(-(symbols + runs) // PIECE)
    # The rounding of each integer adds less than 3 bytes, because a sum of frequencies has fewer than 24 bits.
    return math.ceil((bits + 4 * runs) / 8) + 3 * pieces + 2 * max(0, pieces - 1)


class Reader:
    """Reads a stream of `symbols` symbols, one by one; raises ValueError for damaged streams."""

    def __init__(self, data: bytes, symbols: int) -> None:
        self._data, self._left = data, symbols
        self._x, self._in_piece = 1, 0

    def close(self) -> None:
        """Raises ValueError unless the stream is at its end."""
        if self._x != 1 or self._data:
            raise ValueError(_ENDS)

    def next(self, limits: Sequence[int]) -> int:
        return self.read([limits])[0]

    def read(self, tables: Sequence[Sequence[int]]) -> list[int]:
        """Reads one symbol per table. A table has the cumulative frequencies of all values that the symbol can have."""
        found: list[int] = []
        at = 0
        while at < len(tables):
            if not self._in_piece:
                self._open_piece()
            block = tables[at : at + min(_BLOCK, self._in_piece)]
            at, self._in_piece = at + len(block), self._in_piece - len(block)
            # A block's symbols depend only on x modulo the product of its sums of frequencies, a small integer.
            high, x = divmod(self._x, math.prod([limits[-1] for limits in block]))
            scale = 1
            for limits in block:
                quotient, rest = divmod(x, limits[-1])
                next_symbol = bisect_right(limits, rest)
                less = limits[next_symbol - 1]
                frequency = limits[next_symbol] - less
                x = quotient * frequency + rest - less
                scale *= frequency
                found.append(next_symbol - 1)
            self._x = high * scale + x
        return found

    def run(self, count: int, bits: int, centres: Symbols) -> Symbols:
        """Reads a run of `count` symbols; `centres` has one centre per symbol, or one for all symbols."""
        width = self.next(range(17))
        tables = {centre: _limits(bits, centre, width) for centre in np.unique(centres).tolist()}
        return np.array(self.read([tables[centre] for centre in np.broadcast_to(centres, (count,)).tolist()]), np.uint8)

    def _open_piece(self) -> None:
        start, end = 0, len(self._data)
        if self._left > PIECE:
            start, end = 2, 2 + int.from_bytes(self._data[:2], "little")
        piece, self._data = self._data[start:end], self._data[end:]
        self._in_piece = min(self._left, PIECE)
        self._left -= self._in_piece
        # The encoder writes no leading zeros, so the last (highest) byte of an integer is not 0.
        if self._x != 1 or not piece or not piece[-1] or len(piece) > _MOST_BYTES * self._in_piece:
            raise ValueError(_ENDS)
        self._x = int.from_bytes(piece, "little")


ROOTS = (16777216, 14107901, 11863283, 9975792)  # 2^24 * 2^(-i / 4)
NARROWEST, WIDEST = -9, 31  # At width -9 all integers are 0; at width 31 all integers are equally likely
HALVINGS = 22


@lru_cache(maxsize=4096)
def geometric(width: int, most: int) -> tuple[int, list[int]]:
    """Return D, the largest q in use, and cumulative sums of frequencies 2^-(|q| / 2^(width/4)) for -D .. D."""
    if width <= NARROWEST:
        return 0, [0, 1]
    if width >= WIDEST:
        return most, list(range(2 * most + 2))
    reach = min(most, math.ceil(HALVINGS * 2 ** (width / 4)))
    distance = np.abs(np.arange(-reach, reach + 1, dtype=np.int64))
    fine = distance * 16 * ROOTS[width % 4]
    # The frequency is proportional to (1/2)^(sixteenths / 16).
    sixteenths = fine >> (24 + width // 4)
    powers = np.array(POWERS, np.int64)[sixteenths % 16] << 8
    frequencies = 1 + (powers >> np.minimum(sixteenths // 16, 40))
    return reach, [0, *np.cumsum(frequencies).tolist()]


def geometric_bits(width: int, most: int) -> NDArray[np.float64]:
    reach, limits = geometric(width, most)
    frequencies = np.diff(np.array(limits, np.float64))[reach:]
    return np.log2(limits[-1]) - np.log2(frequencies)
