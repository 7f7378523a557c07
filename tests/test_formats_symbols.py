"""Runs of symbols: what is packed is unpacked, in as few bits as is said, and what is no stream is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gbfunc.formats.symbols import PIECE, Reader, Run, most_runs_bytes, pack_runs


@st.composite
def runs(draw: st.DrawFn) -> Run:
    bits, n = draw(st.integers(1, 8)), draw(st.sampled_from([0, 1, 7, 300, PIECE + 5]))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    centres = random.integers(0, 2**bits, draw(st.sampled_from([1, n])) or 1)
    near = centres + random.normal(0, draw(st.sampled_from([0.0, 0.5, 9.0, 300.0])), max(n, len(centres)))
    return Run(near[:n].clip(0, 2**bits - 1).astype(np.uint8), bits, centres if len(centres) == 1 else centres[:n])


def counts(every: list[Run]) -> tuple[int, int]:
    return len(every), sum(len(run.symbols) for run in every)


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
    assert len(data) <= (bits + 4 * len(every)) / 8 + 5 * pieces


def test_streams_that_are_none() -> None:
    run = Run(np.arange(128), 7, np.array([64]))
    data, _ = pack_runs([run])
    for bad in (b"", b"\0", data[:-1], data + b"\0", data + b"\1", data * 9):
        reader = Reader(bad, 129)
        with pytest.raises(ValueError, match="do not end where they should"):
            reader.run(128, 7, run.centres)
            reader.close()
