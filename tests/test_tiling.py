"""Tiles: an exact, even cover that puts together again what it cut."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gbfunc.tiling import TileGrid, check_max_tile, join_all, join_tiles, split_tiles, tile_grid
from gbfunc.types import MatrixDims
from tests.support.strategies import matrices, max_tiles


@st.composite
def grids(draw: st.DrawFn) -> TileGrid:
    rows, cols = draw(matrices())
    return TileGrid(rows, cols, draw(st.integers(1, rows)), draw(st.integers(1, cols)))


def numbered(grid: TileGrid) -> torch.Tensor:
    return torch.arange(1, grid.numel + 1, dtype=torch.float64).reshape(grid.rows, grid.cols)


@given(grids())
def test_tiles_cover_every_entry_exactly_once(grid: TileGrid) -> None:
    tiles = split_tiles(numbered(grid), grid)
    assert torch.equal(join_tiles(tiles, grid), numbered(grid))
    assert tiles.shape == (grid.n_tiles, grid.tile_rows, grid.tile_cols)
    inside = tiles[tiles != 0]
    assert sorted(inside.tolist()) == list(range(1, grid.numel + 1))
    # Row-major.
    for t in range(grid.n_tiles):
        y, x = t // grid.n_cols * grid.tile_rows, t % grid.n_cols * grid.tile_cols
        own = numbered(grid)[y : y + grid.tile_rows, x : x + grid.tile_cols]
        assert torch.equal(tiles[t, : own.shape[0], : own.shape[1]], own)


@st.composite
def stacks(draw: st.DrawFn, most: int = 3) -> list[TileGrid]:
    r, c = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    side = st.integers(0, 6)
    sizes = draw(st.lists(st.tuples(side, side), min_size=1, max_size=most))
    return [TileGrid(r + n, c + m, r, c) for n, m in sizes]


def stacked(grids: list[TileGrid]) -> torch.Tensor:
    return torch.cat([split_tiles(numbered(grid), grid) for grid in grids])


@given(stacks())
def test_join_all_undoes_split_of_each(grids: list[TileGrid]) -> None:
    for matrix, grid in zip(join_all(stacked(grids), grids), grids, strict=True):
        assert torch.equal(matrix, numbered(grid))


# torch's own forward-mode formulas still use torch.jit.script.
@settings(max_examples=10)
@given(stacks(2))
def test_join_has_derivatives_of_every_kind(grids: list[TileGrid]) -> None:
    tiles = torch.randn(stacked(grids).shape, dtype=torch.float64, requires_grad=True)

    def squares(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(m.square() for m in join_all(x, grids))

    assert torch.autograd.gradcheck(squares, tiles, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(squares, tiles, check_fwd_over_rev=True, fast_mode=True)
    forward, reverse = (jacobian(squares)(tiles.detach()) for jacobian in (torch.func.jacfwd, torch.func.jacrev))
    torch.testing.assert_close(forward, reverse)


@given(matrices(400), max_tiles(120))
def test_cuts_are_fewest_and_even(matrix: tuple[int, int], max_tile: Any) -> None:
    grid = tile_grid(matrix, max_tile)
    limits = matrix if max_tile is None else (max_tile, max_tile) if isinstance(max_tile, int) else max_tile
    for length, tile, n, limit in zip(
        matrix, (grid.tile_rows, grid.tile_cols), (grid.n_rows, grid.n_cols), limits, strict=True
    ):
        assert tile <= limit
        assert (n - 1) * tile < length <= n * tile
        assert n <= math.ceil(length / limit)
        assert n * tile - length < math.ceil(length / limit)


@given(st.integers(1, 60), st.integers(1, 60), st.lists(st.integers(1, 5), min_size=1, max_size=3), max_tiles(30))
def test_convolutions_are_cut_between_channels(rows: int, channels: int, kernel: list[int], max_tile: Any) -> None:
    unit = math.prod(kernel)
    grid = tile_grid(MatrixDims(rows, channels * unit, tuple(kernel)), max_tile)
    assert grid.tile_cols % unit == 0
    plain = tile_grid((rows, channels), max_tile)
    assert grid.tile_cols == unit * plain.tile_cols
    assert grid.n_tiles == plain.n_tiles


@pytest.mark.parametrize("max_tile", [0, -1, True, 2.0, (3,), (3, 0), (3, 4, 5), [3, 4], (3, None), "8", (True, 3)])
def test_max_tile_errors(max_tile: Any) -> None:
    with pytest.raises(ValueError, match="max_tile must be None, an int >= 1 or"):
        check_max_tile(max_tile)


def test_wrong_shapes_are_refused() -> None:
    wrong: Any = (0, 1, 1, 1), (4, 4, 5, 1), (4, 4, 1, 0), (4, 4, -1, 2), (4, 4, 2.0, 2)
    for sizes in wrong:
        with pytest.raises(ValueError, match="must have 1 to"):
            TileGrid(*sizes)
    grid = TileGrid(5, 4, 3, 2)
    with pytest.raises(ValueError, match=r"expected a matrix of \(5, 4\), got \(4, 5\)"):
        split_tiles(torch.zeros(4, 5), grid)
    with pytest.raises(ValueError, match=r"expected the tiles of .*tile_cols=2.*, got \(3, 3, 2\)"):
        join_tiles(torch.zeros(3, 3, 2), grid)
    with pytest.raises(ValueError, match=r"expected the tiles of .*, got \(8, 3, 2\)"):
        join_all(torch.zeros(8, 3, 2), [grid, TileGrid(4, 4, 2, 2)])
