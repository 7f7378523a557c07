"""Cuts matrices into equal tiles, and joins tiles to matrices.

Suffixes: R, C rows and columns of the matrix; T tiles, row-major; r, c rows and columns of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gbfunc.types import MatrixDims


@dataclass(frozen=True)
class TileGrid:
    """A matrix covered by equal tiles, cropped at the matrix's end. ValueError if a tile is larger than the matrix."""

    rows: int
    cols: int
    tile_rows: int
    tile_cols: int

    def __post_init__(self) -> None:
        for axis, length, tile in (("rows", self.rows, self.tile_rows), ("cols", self.cols, self.tile_cols)):
            if type(length) is not int or type(tile) is not int or not 1 <= tile <= length:
                raise ValueError(f"a tile must have 1 to {length!r} {axis}, an int, got {tile!r}")

    @property
    def n_rows(self) -> int:
        return -(-self.rows // self.tile_rows)

    @property
    def n_cols(self) -> int:
        return -(-self.cols // self.tile_cols)

    @property
    def n_tiles(self) -> int:
        return self.n_rows * self.n_cols

    @property
    def numel(self) -> int:
        return self.rows * self.cols


class Piece(NamedTuple):
    """A block of a matrix: the rows of one or more ranges (a, b), concatenated, and the columns of one range (c, d)."""

    rows: tuple[tuple[int, int], ...]
    cols: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(b - a for a, b in self.rows), self.cols[1] - self.cols[0]

    def of(self, matrix_RC: Tensor) -> Tensor:
        rows = [matrix_RC[a:b] for a, b in self.rows]
        return (rows[0] if len(rows) == 1 else torch.cat(rows))[:, slice(*self.cols)]


class Cut(NamedTuple):
    """The tiles to generate for a matrix, or for a block of a matrix."""

    grid: TileGrid  # The grid of the generated tiles alone
    tiles: tuple[int, ...] | None = None  # Indices of the tiles in the full matrix's grid. None means all tiles
    piece: Piece | None = None  # The block to return, in coordinates of `grid`. None means the entire `grid`

    def crop(self, matrix_RC: Tensor) -> Tensor:
        return matrix_RC if self.piece is None else self.piece.of(matrix_RC)


def cut_piece(grid: TileGrid, piece: Piece) -> Cut:
    """Return the tiles that overlap a block, at least one. Raise ValueError if the block exceeds the matrix.

    >>> cut_piece(TileGrid(10, 6, 4, 3), Piece(((5, 9),), (0, 2))).tiles
    (2, 4)
    """
    ranges = [*((r, grid.rows) for r in piece.rows), (piece.cols, grid.cols)]
    if not all(0 <= a <= b <= n for (a, b), n in ranges) or not piece.rows:
        raise ValueError(f"expected a block inside a matrix of {grid.rows} x {grid.cols}, got {piece}")
    r, c = grid.tile_rows, grid.tile_cols

    def overlapping(a: int, b: int, tile: int, most: int) -> range:
        first = min(a // tile, most - 1)
        return range(first, max(-(-b // tile), first + 1))

    spans = [overlapping(a, b, r, grid.n_rows) for a, b in piece.rows]
    rows, cols = sorted({i for span in spans for i in span}), overlapping(*piece.cols, c, grid.n_cols)
    tiles = tuple(i * grid.n_cols + j for i in rows for j in cols)
    shifts = [(rows.index(span[0]) - span[0]) * r for span in spans]
    moved = tuple((a + shift, b + shift) for (a, b), shift in zip(piece.rows, shifts, strict=True))
    inside = Piece(moved, (piece.cols[0] - cols[0] * c, piece.cols[1] - cols[0] * c))
    return Cut(TileGrid(len(rows) * r, len(cols) * c, r, c), tiles, inside)


MaxTile = int | tuple[int, int] | None


def check_max_tile(max_tile: MaxTile) -> tuple[int, int] | None:
    """Return the largest tile as (rows, columns), or None for one tile per matrix. Raise ValueError for wrong types."""
    if max_tile is None:
        return None
    pair = (max_tile, max_tile) if isinstance(max_tile, int) else max_tile
    if not isinstance(pair, tuple) or len(pair) != 2 or any(type(n) is not int or n < 1 for n in pair):
        raise ValueError(f"max_tile must be None, an int >= 1 or (rows, cols), got {max_tile!r}")
    return pair


def tile_grid(matrix: MatrixDims | tuple[int, int], max_tile: MaxTile = None) -> TileGrid:
    """Cut a matrix into equal tiles of at most `max_tile`: `max_tile=100` cuts 256 rows into 3 tiles of 86 rows.

    `max_tile` is None (one tile), a maximum for both rows and columns, or (rows, columns). For a convolution, tiles are
    cut between input channels, and `max_tile` counts channels instead of columns.
    """
    dims = matrix if isinstance(matrix, MatrixDims) else MatrixDims(matrix[0], matrix[1])
    pair = check_max_tile(max_tile)
    if pair is None:
        return TileGrid(dims.rows, dims.cols, dims.rows, dims.cols)

    def even(length: int, longest: int) -> int:
        return -(-length // -(-length // longest))

    unit = math.prod(dims.kernel)
    return TileGrid(dims.rows, dims.cols, even(dims.rows, pair[0]), unit * even(dims.cols // unit, pair[1]))


def split_tiles(matrix_RC: Tensor, grid: TileGrid) -> Tensor:
    """Cut a matrix into tiles, padded with zeros: [R, C] -> [T, r, c]."""
    if tuple(matrix_RC.shape) != (grid.rows, grid.cols):
        raise ValueError(f"expected a matrix of {(grid.rows, grid.cols)}, got {tuple(matrix_RC.shape)}")
    return split_stack(matrix_RC, grid)


def join_tiles(tiles_Trc: Tensor, grid: TileGrid) -> Tensor:
    """Rebuild a matrix from its tiles: [T, r, c] -> [R, C]."""
    return join_all(tiles_Trc, (grid,))[0]


def join_all(tiles_Trc: Tensor, grids: Sequence[TileGrid]) -> tuple[Tensor, ...]:
    """Rebuild several matrices from their concatenated tiles: [T, r, c] -> [R, C], ..."""
    r, c = grids[0].tile_rows, grids[0].tile_cols
    counts = [grid.n_tiles for grid in grids]
    if tuple(tiles_Trc.shape) != (sum(counts), r, c) or any((g.tile_rows, g.tile_cols) != (r, c) for g in grids):
        raise ValueError(f"expected the tiles of {list(grids)}, got {tuple(tiles_Trc.shape)}")
    if 1 < len(counts) == sum(counts):
        return tiles_Trc.unbind()
    if len(grids) == 1:
        return (join_stack(tiles_Trc, grids[0]),)
    if torch.compiler.is_compiling():
        return tuple(map(join_stack, tiles_Trc.split(counts), grids))
    # Return copies, because views from `split` could not be changed in place.
    return _Retile.apply(True, tuple(grids), tiles_Trc)  # pyright: ignore[reportReturnType]


def _is_stack(grid: TileGrid) -> bool:
    return grid.n_cols == 1 and grid.rows % grid.tile_rows == 0


def join_stack(tiles: Tensor, grid: TileGrid) -> Tensor:
    """Rebuild matrices from their tiles: [..., T, r, c] -> [..., R, C]."""
    if _is_stack(grid):
        return tiles.reshape(*tiles.shape[:-3], grid.rows, grid.cols)
    r, c = grid.tile_rows, grid.tile_cols
    # `torch.compile` does not support a Function with a jvp: compiled code uses the expression below.
    if (grid.rows % r or grid.cols % c) and not torch.compiler.is_compiling():
        return _Retile.apply(True, (grid,), tiles)[0]  # pyright: ignore[reportOptionalSubscript]
    blocks = tiles.unflatten(-3, (grid.n_rows, grid.n_cols)).transpose(-3, -2)
    return blocks.reshape(*tiles.shape[:-3], grid.n_rows * r, grid.n_cols * c)[..., : grid.rows, : grid.cols]


def split_stack(matrices: Tensor, grid: TileGrid) -> Tensor:
    """Cut matrices into tiles, padded with zeros (the transpose of `join_stack`): [..., R, C] -> [..., T, r, c]."""
    if _is_stack(grid):
        return matrices.reshape(*matrices.shape[:-2], -1, grid.tile_rows, grid.cols)
    return _Retile.apply(False, (grid,), matrices)[0]  # pyright: ignore[reportOptionalSubscript]


def copy_tiles(matrix: Tensor, tiles: Tensor, grid: TileGrid, joins: bool) -> None:
    """If `joins`, copy tiles [..., T, r, c] into a matrix [..., R, C]; else, copy the matrix into zero-padded tiles."""
    r, c = grid.tile_rows, grid.tile_cols
    blocks = tiles.unflatten(-3, (-1, grid.n_cols))
    top, left = blocks.shape[-4] - 1, grid.n_cols - 1
    last_height, last_width = matrix.shape[-2] - top * r, grid.cols - left * c
    if not joins:
        blocks[..., -1, :, last_height:, :] = 0
        blocks[..., -1, :, last_width:] = 0
    for i, height in (slice(0, top), r), (slice(top, None), last_height):
        for j, width in (slice(0, left), c), (slice(left, None), last_width):
            inner = blocks[..., i, j, :height, :width].transpose(-3, -2)
            part = matrix[..., i.start * r : i.start * r + inner.shape[-4] * height, :]
            part = part[..., j.start * c : j.start * c + inner.shape[-2] * width]
            if inner.numel():
                outer = part.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))
                outer.copy_(inner) if joins else inner.copy_(outer)


def unbatched(size: int, in_dims: Sequence[int | None], tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Move the vmap dimension of each tensor to the front. Tensors without this dimension are expanded to `size`."""
    return (x.expand(size, *x.shape) if d is None else x.movedim(d, 0) for x, d in zip(tensors, in_dims, strict=True))


class _Retile(torch.autograd.Function):
    """Joins tiles into matrices, or cuts matrices into tiles, with one copy in forward and one in backward."""

    @staticmethod
    def forward(joins: bool, grids: tuple[TileGrid, ...], *inputs: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        first, counts, lead = inputs[0], [grid.n_tiles for grid in grids], inputs[0].shape[: -3 if joins else -2]
        tiles = first if joins else first.new_empty((*lead, sum(counts), grids[0].tile_rows, grids[0].tile_cols))
        matrices = tuple(first.new_empty((*lead, g.rows, g.cols)) for g in grids) if joins else inputs
        for matrix, part, grid in zip(matrices, tiles.split(counts, dim=-3), grids, strict=True):
            copy_tiles(matrix, part, grid, joins)
        return matrices if joins else (tiles,)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.joins, ctx.grids = inputs[:2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_Retile.apply(not ctx.joins, ctx.grids, *gradients)  # pyright: ignore[reportGeneralTypeIssues]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], joins: bool, grids: tuple[TileGrid, ...], *inputs: Tensor) -> Any:
        moved = unbatched(info.batch_size, in_dims[2:], inputs)
        return _Retile.apply(joins, grids, *moved), (0,) * (len(grids) if joins else 1)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        return _Retile.apply(ctx.joins, ctx.grids, *tangents)  # pyright: ignore[reportReturnType]
