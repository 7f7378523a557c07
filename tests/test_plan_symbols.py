"""Runs of symbols: what is packed is unpacked, in as few bits as is said, and what is no stream is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gbfunc.formats.symbols import PIECE, Reader, Run, _limits, most_runs_bytes, pack_runs


@st.composite
def runs(draw: st.DrawFn) -> Run:
    bits, n = draw(st.integers(1, 8)), draw(st.sampled_from([0, 1, 7, 300, PIECE + 5]))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    centres = random.integers(0, 2**bits, draw(st.sampled_from([1, n])) or 1)
    near = centres + random.normal(0, draw(st.sampled_from([0.0, 0.5, 9.0, 300.0])), max(n, len(centres)))
    return Run(near[:n].clip(0, 2**bits - 1).astype(np.uint8), bits, centres if len(centres) == 1 else centres[:n])


def counts(every: list[Run]) -> tuple[int, int]:
    return len(every), sum(len(run.symbols) for run in every)


def free_bits(every: list[Run]) -> float:
    """Of the symbols with which an integer need not grow, as it is less than their frequency."""
    entries, free = [], 0.0
    for run in every:
        spread = run.costs()[0]
        entries.append((spread, 1, 16))
        centres = np.broadcast_to(run.centres, run.symbols.shape).tolist()
        for symbol, centre in zip(run.symbols.tolist(), centres, strict=True):
            limits = _limits(run.bits, centre, spread)
            entries.append((limits[symbol], limits[symbol + 1] - limits[symbol], limits[-1]))
    for start in range(0, len(entries), PIECE):
        x = 1
        for less, frequency, total in reversed(entries[start : start + PIECE]):
            free += math.log2(total / frequency) if x < frequency else 0.0
            x = x // frequency * total + less + x % frequency
    return free


@given(st.lists(runs(), min_size=1, max_size=4))
def test_what_is_packed_is_unpacked(every: list[Run]) -> None:
    data, costs = pack_runs(every)
    reader = Reader(data, sum(counts(every)))
    for run in every:
        np.testing.assert_array_equal(reader.run(len(run.symbols), run.bits, run.centres), run.symbols)
    reader.close()
    bits, plain = sum(float(cost.sum()) for cost in costs), sum(len(run.symbols) * run.bits for run in every)
    pieces = math.ceil(sum(counts(every)) / PIECE)
    assert bits <= plain + 1e-6 and len(data) <= most_runs_bytes(plain, *counts(every)[::-1])
    # The integers' beginnings, and the bytes before the pieces.
    whole = (bits + 4 * len(every)) / 8
    assert whole - free_bits(every) / 8 - 1 <= len(data) <= whole + 5 * pieces


def test_frequencies_are_a_normal_distribution() -> None:
    """The costs of symbols far from the tails, against the density that the module's first lines say."""
    symbols = np.arange(40, 90)
    for spread in range(9, 13):
        deviation = math.sqrt(2 ** (spread - 1) / (8 * math.log(2)))
        drawn = np.random.default_rng(0).normal(64, deviation, 4000).round().clip(0, 127).astype(int)
        found, costs = Run(drawn, 7, np.array([64])).costs()
        assert found == spread
        expected = (symbols - 64) ** 2 / (2 * deviation**2 * math.log(2)) + math.log2(
            deviation * math.sqrt(2 * math.pi)
        )
        by_symbol = dict(zip(drawn.tolist(), costs.tolist(), strict=True))
        near = [s for s in symbols.tolist() if s in by_symbol and abs(s - 64) < 2 * deviation]
        np.testing.assert_allclose([by_symbol[s] for s in near], expected[np.array(near) - 40], atol=0.1)


def test_streams_that_are_none() -> None:
    run = Run(np.arange(128), 7, np.array([64]))
    data, _ = pack_runs([run])
    for bad in (b"", b"\0", data[:-1], data + b"\0", data + b"\1", data * 9):
        reader = Reader(bad, 129)
        with pytest.raises(ValueError, match="do not end where they should"):
            reader.run(128, 7, run.centres)
            reader.close()
