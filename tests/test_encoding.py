"""Codes: distinct, +-1, as narrow as can be, the same for the same place however the axis is cut."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gbfunc as gb
from gbfunc.encoding import ENCODINGS, Encoding, bit_width, encoding_from_json
from gbfunc.formats import file_bytes
from tests.support import oracles
from tests.support.strategies import encodings
from tests.support.trees_equal import same_bits


@st.composite
def coded_axes(draw: st.DrawFn) -> tuple[Encoding, int]:
    n = draw(st.integers(1, 70))
    return draw(encodings(n)), n


@given(coded_axes())
def test_codes_are_distinct_and_as_wide_as_announced(case: tuple[Encoding, int]) -> None:
    encoding, n = case
    codes = encoding.codes(n)
    assert codes.shape == (n, encoding.width(n))
    assert codes.dtype == np.float64
    assert np.isfinite(codes).all()
    assert len(np.unique(codes, axis=0)) == n or (n == 1 and codes.shape == (1, 0))


@given(coded_axes())
def test_codes_equal_a_loop_over_positions(case: tuple[Encoding, int]) -> None:
    encoding, n = case
    expected = np.array([oracles.code(encoding.to_json(), n, i) for i in range(n)]).reshape(n, -1)
    np.testing.assert_allclose(encoding.codes(n), expected, rtol=0, atol=1e-12)


@given(coded_axes(), st.integers(1, 70))
def test_codes_of_tiles_equal_a_loop_over_tiles(case: tuple[Encoding, int], longest: int) -> None:
    encoding, n = case
    unit = encoding.to_json().get("n_positions", 1)
    tile = unit * min(longest, n // unit)
    found = encoding.tile_codes(n, tile)
    assert encoding.tile_width(n, tile) == found.shape[-1]
    assert len(found) == (1 if encoding.local else -(-n // tile))
    for block in range(-(-n // tile)):
        own = found[0 if len(found) == 1 else block]
        for i in range(min(tile, n - block * tile)):
            np.testing.assert_allclose(own[i], oracles.tile_code(encoding, n, tile, block, i), rtol=0, atol=1e-12)


@given(coded_axes())
def test_json_round_trip(case: tuple[Encoding, int]) -> None:
    encoding, _ = case
    again = encoding_from_json(json.loads(json.dumps(encoding.to_json())))
    assert again == encoding
    assert hash(again) == hash(encoding)


@pytest.mark.parametrize("make", [gb.binary, gb.gray])
@given(n=st.integers(1, 3000))
def test_bits_are_plus_minus_one_and_fewest(make: Any, n: int) -> None:
    codes = make().codes(n)
    assert codes.shape[1] == (math.ceil(math.log2(n)) if n > 1 else 0) == bit_width(n)
    assert set(np.unique(codes)) <= {-1.0, 1.0}


@given(st.integers(2, 500))
def test_gray_neighbours_differ_in_one_bit(n: int) -> None:
    codes = gb.gray().codes(n)
    assert (np.sum(codes[1:] != codes[:-1], axis=1) == 1).all()


def test_grid_coordinates_span_the_bandwidth_row_major() -> None:
    codes = gb.grid(28, 28, bandwidth=6.0).codes(784)
    assert codes.shape == (784, 2)
    np.testing.assert_allclose(codes[[0, 27, 756, 783]], [[-6, -6], [-6, 6], [6, -6], [6, 6]])
    assert (np.diff(codes.reshape(28, 28, 2)[0, :, 1]) > 0).all()
    assert np.abs(gb.grid(3, 5).codes(15)).max() == 6.0 and gb.grid(28, 28, code="gray").width(784) == 10


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gb.grid(), "1 to 16 axis lengths"),
        (lambda: gb.grid(0), "axis lengths >= 1"),
        (lambda: gb.grid(3, -1), "axis lengths >= 1"),
        (lambda: gb.grid(2.0), "axis lengths >= 1"),  # pyright: ignore[reportArgumentType]
        (lambda: gb.grid(3, code="hex"), "'coordinate', 'gray' or 'binary'"),  # pyright: ignore[reportArgumentType]
        (lambda: gb.grid(3, bandwidth=0.0), "positive"),
        (lambda: gb.grid(3, bandwidth=math.nan), "positive"),
        (lambda: gb.grid(28, 28).check(700), r"grid\(28x28\) codes 784 positions, but the axis has 700"),
        (lambda: gb.per_axis(gb.binary(), gb.grid(3, 3), 8), "9 positions, but the axis has 8"),
        (lambda: gb.per_axis(gb.binary(), gb.binary(), 0), "n_positions"),
        (lambda: gb.per_axis(gb.binary(), gb.grid(3, 3), 9).check(20), "a multiple of 9 kernel positions, got 20"),
    ],
)
def test_errors_say_what_was_expected(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


TABLE = {"type": "table", "shape": [2, 2], "dtype": "int8", "data": "AQIDBA=="}
AXES = {"type": "per_axis", "channels": {}, "positions": {}, "n_positions": 1}
GRID = {"type": "grid", "dims": [3], "code": "gray", "bandwidth": 1.0}
NONE = [{}, {"type": "hex"}, {"type": []}, {"type": "grid"}, GRID | {"dims": 3}, GRID | {"bandwidth": math.inf}, AXES]
NONE += [[], None, "binary", TABLE | {"shape": [2]}, TABLE | {"shape": [2, 3]}, TABLE | {"shape": [2, -2]}]
NONE += [TABLE | {"shape": [1 << 40, 1 << 40]}, TABLE | {"dtype": "object"}, TABLE | {"data": "AAAA"}]
NONE += [TABLE | {"data": "????????"}, TABLE | {"data": 3}]
NONE += [TABLE | {"dtype": "float16", "shape": [2, 1], "data": "AH4AfA=="}]


@pytest.mark.parametrize("data", NONE, ids=str)
def test_json_of_anything_else_is_refused(data: Any) -> None:
    with pytest.raises(ValueError):
        encoding_from_json(data)


def test_every_encoding_has_a_reader() -> None:
    made = [gb.binary(), gb.gray(), gb.one_hot(), gb.grid(3), gb.per_axis(gb.binary(), gb.grid(3), 3), gb.table([[1]])]
    assert {e.type for e in made} == set(ENCODINGS)


@pytest.mark.parametrize(
    ("codes", "dtype"),
    [
        ([[1, -1], [0, 127]], "int8"),
        ([[0.5, -1.0], [2048.0, 1.0]], "float16"),
        (torch.tensor([[1.0], [0.1]]), "float32"),
        (torch.tensor([[1.0], [0.1]]).bfloat16(), "float16"),
        (np.array([[0.1]]), "float64"),
        (np.array([[True], [False]]), "int8"),
    ],
)
def test_a_table_is_kept_exactly_and_narrow(codes: Any, dtype: str) -> None:
    made = gb.table(codes)
    expected = torch.as_tensor(codes).double().numpy()
    np.testing.assert_array_equal(made.codes(len(expected)), expected)
    assert made.to_json()["dtype"] == dtype and repr(made) == f"table({len(expected)}x{expected.shape[1]}, {dtype})"
    assert made == encoding_from_json(json.loads(json.dumps(made.to_json())))


@pytest.mark.parametrize(
    "codes",
    [[1.0, 2.0], np.zeros((0, 2)), np.zeros((2, 0)), [[1j]], [["a"]], [[math.nan]], [[math.inf]], [[2e9]]],
    ids=str,
)
def test_what_is_no_table(codes: Any) -> None:
    with pytest.raises(ValueError, match=r"codes must be|a table of codes must be \[n, k\] of real numbers"):
        gb.table(codes)


KINDS, PLACES = 5, 40


def kinds_of_units(n: int) -> np.ndarray[Any, Any]:
    kinds = np.random.default_rng(0).normal(size=(KINDS, 3)).astype(np.float16)[np.arange(n) % KINDS]
    return np.concatenate([kinds, gb.binary().codes(n)], 1)


def planned(**options: Any) -> tuple[nn.Module, gb.Plan]:
    net = nn.Sequential(nn.Linear(12, PLACES), nn.Tanh(), nn.Linear(PLACES, 3))
    own = kinds_of_units(PLACES)
    encodings = {"0.weight": (own, gb.grid(3, 4)), "2.weight": (None, torch.from_numpy(own))}
    return net, gb.make_plan(net, encodings=encodings, **options)


@pytest.mark.parametrize("dtype", [None, "float16", "int6"])
def test_files_hold_the_codes_once(dtype: str | None, tmp_path: Path) -> None:
    net, plan = planned(hypernet=gb.periodic(6))
    bare = gb.make_plan(net, gb.periodic(6), encodings={"0.weight": (None, gb.grid(3, 4))})
    genome = gb.init_genome(plan, net)
    size = gb.save(tmp_path / "g", plan, genome, dtype)
    read, again = gb.load(tmp_path / "g")
    assert read == plan and hash(read) == hash(plan)
    again_size = gb.save(tmp_path / "again", read, again, dtype)
    assert again_size == size and (tmp_path / "g").read_bytes() == (tmp_path / "again").read_bytes()
    parts = file_bytes(plan, dtype, genome)
    assert sum(parts.values()) == size
    held, raw = parts["(plan)"] - file_bytes(bare, dtype)["(plan)"], 2 * kinds_of_units(PLACES).size
    assert 2 * KINDS * 3 < held < 2 * raw
    x = torch.randn(4, 12)
    outputs = [{"y": gb.materialize(p, again, net)(x).detach()} for p in (plan, read)]
    assert same_bits(*outputs)
