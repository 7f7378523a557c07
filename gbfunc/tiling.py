"""Cutting a matrix into equal tiles and putting it together again.

Suffixes: R, C rows and columns of the matrix; T tiles, row-major; r, c rows and columns of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gbfunc.types import MatrixDims


def _cut(length: int, longest: int) -> int:
    """Length of the pieces of the most even cut of `length` into pieces of at most `longest`."""
    return -(-length // -(-length // longest))


@dataclass(frozen=True)
class TileGrid:
    """A matrix of `rows` x `cols` covered by equal tiles of `tile_rows` x `tile_cols`, the last ones cropped.

    Raises:
        ValueError: if a length is below 1, a tile exceeds the matrix, or a row or column of tiles would lie outside.
    """

    rows: int
    cols: int
    tile_rows: int
    tile_cols: int

    def __post_init__(self) -> None:
        for axis, length, tile in (("rows", self.rows, self.tile_rows), ("cols", self.cols, self.tile_cols)):
            if not (isinstance(length, int) and isinstance(tile, int)):
                raise ValueError(f"lengths must be ints, got {axis} {length!r} in tiles of {tile!r}")
            if not 1 <= tile <= length:
                raise ValueError(f"a tile of {tile} {axis} does not fit a matrix of {length} {axis}")

    @property
    def n_rows(self) -> int:
        """Tiles along the rows."""
        return -(-self.rows // self.tile_rows)

    @property
    def n_cols(self) -> int:
        """Tiles along the columns."""
        return -(-self.cols // self.tile_cols)

    @property
    def n_tiles(self) -> int:
        """All tiles."""
        return self.n_rows * self.n_cols

    @property
    def numel(self) -> int:
        """Weights of the matrix."""
        return self.rows * self.cols


MaxTile = int | tuple[int, int] | None


def check_max_tile(max_tile: MaxTile) -> tuple[int, int] | None:
    """The largest tile as (rows, columns), or None for one tile a matrix.

    Raises:
        ValueError: unless `max_tile` is None, an int >= 1 or a pair of them.
    """
    if max_tile is None:
        return None
    pair = (max_tile, max_tile) if isinstance(max_tile, int) else max_tile
    good = isinstance(pair, tuple) and len(pair) == 2
    if not good or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in pair):
        raise ValueError(f"max_tile must be None, an int >= 1 or (rows, cols), got {max_tile!r}")
    return pair


def tile_grid(matrix: MatrixDims | tuple[int, int], max_tile: MaxTile = None) -> TileGrid:
    """The most even cut of a matrix into tiles of at most `max_tile`.

    256 rows at most 100 long give 3 tiles of 86 rows, not of 100, so that almost nothing that is generated is cropped.

    Args:
        matrix: rows and columns; where the columns span a kernel, tiles cut channels and never kernels.
        max_tile: None (one tile), a length for both sides, or (rows, columns); columns count channels.
    """
    dims = MatrixDims(*matrix)
    pair = check_max_tile(max_tile)
    if pair is None:
        return TileGrid(dims.rows, dims.cols, dims.rows, dims.cols)
    unit = 1
    for k in dims.kernel:
        unit *= k
    return TileGrid(dims.rows, dims.cols, _cut(dims.rows, pair[0]), unit * _cut(dims.cols // unit, pair[1]))


def split_tiles(matrix_RC: Tensor, grid: TileGrid) -> Tensor:
    """Cut a matrix into tiles, zero beyond its edge: [R, C] -> [T, r, c].

    Raises:
        ValueError: if the matrix has another shape than the grid.
    """
    if tuple(matrix_RC.shape) != (grid.rows, grid.cols):
        raise ValueError(f"expected a matrix of {(grid.rows, grid.cols)}, got {tuple(matrix_RC.shape)}")
    r, c = grid.tile_rows, grid.tile_cols
    below, right = grid.n_rows * r - grid.rows, grid.n_cols * c - grid.cols
    padded = torch.nn.functional.pad(matrix_RC, (0, right, 0, below))
    return padded.reshape(grid.n_rows, r, grid.n_cols, c).transpose(1, 2).reshape(grid.n_tiles, r, c)


def join_tiles(tiles_Trc: Tensor, grid: TileGrid) -> Tensor:
    """Rebuild a matrix from its tiles: [T, r, c] -> [R, C].

    Raises:
        ValueError: if the tiles are not those of the grid.
    """
    r, c = grid.tile_rows, grid.tile_cols
    if tuple(tiles_Trc.shape) != (grid.n_tiles, r, c):
        raise ValueError(f"expected tiles of {(grid.n_tiles, r, c)}, got {tuple(tiles_Trc.shape)}")
    if grid.n_tiles == 1:
        return tiles_Trc[0]
    blocks = tiles_Trc.reshape(grid.n_rows, grid.n_cols, r, c).transpose(1, 2)
    return blocks.reshape(grid.n_rows * r, grid.n_cols * c)[: grid.rows, : grid.cols]
