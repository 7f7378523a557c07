"""One evaluation of many g-nets: what their tiles are made of, and these in one vmapped call.

    leaves + codes --vmap(apply)--> tiles [T, r, c], or factors [T, r, k] and [T, c, k] --join--> matrices [R, C]

Suffixes: T tiles, r rows and c columns of a tile, R and C of a matrix, p and q code widths, k rank, U 1 or T.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from gbfunc.hypernets import Hypernet
from gbfunc.hypernets.kernels.waves import period_of, waves
from gbfunc.hypernets.periodic import Waves
from gbfunc.tiling import TileGrid, join_all, join_tiles
from gbfunc.trees import have_memory
from gbfunc.types import Factors, Kernel, Params, TileDims


def is_exporting() -> bool:
    """Whether `torch.export` is tracing; older torch cannot tell, and keeps codes as tables."""
    return getattr(torch.compiler, "is_exporting", bool)()


class Evaluation(NamedTuple):
    """G-nets that are generated together.

    Codes are `row` [U, r, p] and `col` [U, c, q], U = 1 where all tiles share them; `scale` [T] is that of every tile's
    slot, None where there is none; `leaves` and `noise` are `{name: [T, ...]}`, {} for a type without leaves and None
    for the mean; `empty` are shapes of the leaves without entries, which no genome holds. With `groups` [T], leaves
    that tiles share are those of groups [G, ...]. `periods` are those of the codes of periodic g-nets; `made` are
    the factors, where they are there already.
    """

    hypernet: Hypernet
    dims: TileDims
    kernel: Kernel
    row: Tensor
    col: Tensor
    scale: Tensor | None
    empty: Mapping[str, tuple[int, ...]]
    groups: Tensor | None
    periods: tuple[int, int]
    leaves: Params
    noise: Params | None
    made: Factors | None = None

    @staticmethod
    def bare(
        hypernet: Hypernet,
        dims: TileDims,
        kernel: Kernel,
        row: Tensor,
        col: Tensor,
        scale: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> Evaluation:
        """An evaluation without leaves, to be `filled`."""
        empty = {k: leaf.shape for k, leaf in hypernet.leaves(dims).items() if 0 in leaf.shape}
        known = isinstance(hypernet, Waves) and have_memory((row, col)) and not torch.compiler.is_compiling()
        periods = (period_of(row), period_of(col)) if known else (0, 0)
        return Evaluation(hypernet, dims, kernel, row, col, scale, empty, groups, periods, {}, None)

    def tiles(self) -> Tensor | Factors:
        """Scaled tiles [T, r, c], or their factors [T, r, k] and [T, c, k]."""
        if self.made is not None:
            return self.made
        return periodic_factors([self])[0] if isinstance(self.hypernet, Waves) else self._evaluate()

    def _evaluate(self) -> Tensor | Factors:
        own = self._own()
        made = own._apply()
        return made if own.scale is None else dense_tiles(made) * own.scale[:, None, None]

    def _own(self) -> Evaluation:
        """With the leaves of every tile, scaled where the tile is linear in some: they are smaller than it."""
        specs = self.hypernet.leaves(self.dims)
        leaves, scale = self.leaves, self.scale
        if self.groups is not None:
            leaves = {k: v[self.groups] if specs[k].scope == "group" else v for k, v in leaves.items()}
        linear = [k for k in leaves if specs[k].role == "linear" and not self.hypernet.stochastic]
        if scale is not None and linear:
            leaves = {**leaves, **{k: leaves[k] * scale.reshape(-1, *(1,) * (leaves[k].ndim - 1)) for k in linear}}
            scale = None
        return self._with(leaves=leaves, scale=scale, groups=None)

    def _filled(self, *lead: int) -> Params:
        """The leaves with those that have no entries."""
        return {**self.leaves, **{k: self.row.new_zeros((*lead, *shape)) for k, shape in self.empty.items()}}

    def _apply(self) -> Tensor | Factors:
        def apply(leaves: Params, row: Tensor, col: Tensor, noise: Params | None) -> Tensor | Factors:
            return self.hypernet.apply(leaves, row, col, noise=noise, kernel=self.kernel)

        if not self.leaves:
            # Without leaves there is nothing to map over, and all tiles with the same codes are the same.
            tile = apply(self._filled(), self.row[0], self.col[0], None)
            return tile[None] if isinstance(tile, Tensor) else Factors(tile.left[None], tile.right[None])
        (row, row_dim), (col, col_dim) = ((x[0], None) if len(x) == 1 else (x, 0) for x in (self.row, self.col))
        many = apply if self.hypernet.batched else vmap(apply, (0, row_dim, col_dim, None if self.noise is None else 0))
        return many(self._filled(self.n_tiles), row, col, self.noise)

    def matrix(self, grid: TileGrid) -> Tensor:
        """The one matrix [R, C] that all tiles make."""
        if self.made is None and self.noise is None and not isinstance(self.hypernet, Waves):
            own = self._own()
            matrix = own.hypernet.matrix(own._filled(own.n_tiles), own.row, own.col, grid, own.kernel)
            if matrix is not None and own.scale is None:
                return matrix
        tiles = self.tiles()
        return joined(tiles if self.leaves else dense_tiles(tiles).expand(grid.n_tiles, -1, -1), grid)

    def matrices(self, grids: Sequence[TileGrid]) -> tuple[Tensor, ...]:
        """The matrices [R, C] that the tiles make, one grid after the other."""
        if len(grids) == 1 or not self.leaves:
            return tuple(self.matrix(grid) for grid in grids)
        return join_all(dense_tiles(self.tiles()), grids)

    def split(self, counts: Sequence[int]) -> list[Evaluation]:
        """So many tiles each, in order."""
        if len(counts) == 1:
            return [self]
        ends = [0]
        for count in counts:
            ends.append(ends[-1] + count)

        # One split node has one backward; slices would each fill a gradient of all tiles.
        def parts(x: Tensor) -> Sequence[Tensor]:
            return x.split(list(counts))

        shared = {k for k, leaf in self.hypernet.leaves(self.dims).items() if leaf.scope == "group"}
        shared = shared if self.groups is not None else set()
        leaves = {k: [v] * len(counts) if k in shared else parts(v) for k, v in self.leaves.items()}
        evaluations = [
            self.of(slice(ends[i], ends[i + 1]))._with(leaves={k: v[i] for k, v in leaves.items()})
            for i in range(len(counts))
        ]
        if self.made is None:
            return evaluations
        return [r._with(made=Factors(*x)) for r, *x in zip(evaluations, *map(parts, self.made), strict=True)]

    def _with(self, **changes: Any) -> Evaluation:
        # Not `_replace`, which Dynamo of torch 2.5 does not trace; nor does it trace unions of dicts.
        hypernet, dims, kernel, row, col, scale, empty, groups, periods, leaves, noise, made = self
        own = dict(
            hypernet=hypernet, dims=dims, kernel=kernel, row=row, col=col, scale=scale, leaves=leaves, noise=noise
        )
        return Evaluation(**{**own, "empty": empty, "groups": groups, "made": made, "periods": periods, **changes})

    @property
    def n_tiles(self) -> int:
        """Number of tiles; 0 for a type without leaves, whose tiles are all alike."""
        return len([*self.leaves.values(), ()][0] if self.groups is None else self.groups)

    def filled(self, leaves: Params, noise: Params | None) -> Evaluation:
        """The evaluation on other leaves and noise."""
        return Evaluation(*self[:-3], leaves, noise, self.made)

    def of(self, tiles: slice | Tensor) -> Evaluation:
        """The codes, scales and noise of some tiles, by span or number, with the leaves as they are."""
        row, col = (x if len(x) == 1 else x[tiles] for x in (self.row, self.col))
        noise = self.noise and {k: v[tiles] for k, v in self.noise.items()}
        scale, groups = (None if x is None else x[tiles] for x in (self.scale, self.groups))
        return self._with(row=row, col=col, scale=scale, noise=noise, groups=groups, made=None)


def with_factors(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """The evaluations, with the factors of periodic and bilinear g-nets `made`, by one operator for all of them."""
    periodic = [one.made is None and isinstance(one.hypernet, Waves) for one in evaluations]
    factors = iter(periodic_factors([one for one, yes in zip(evaluations, periodic, strict=True) if yes]))
    pairs = zip(evaluations, periodic, strict=True)
    return [Evaluation(*one[:-1], next(factors)) if yes else one for one, yes in pairs]


def periodic_factors(evaluations: Sequence[Evaluation]) -> list[Factors]:
    """Scaled factors [T, r, k] and [T, c, k] of each evaluation of periodic or bilinear g-nets, by one operator."""
    hypernets, leaves, sides = [], [], []
    for one in evaluations:
        assert isinstance(one.hypernet, Waves)
        hypernets.append(one.hypernet)
        leaves.append(one._filled(one.n_tiles))
        sides += one.hypernet.sides(leaves[-1], one.row, one.col, one.scale, one.groups, one.periods)
    made = waves(sides, kernel=evaluations[0].kernel) if evaluations else []
    pairs = zip(made[::2], made[1::2], strict=True)
    return [
        hypernet.factors(own, *pair, one.scale)
        for hypernet, own, pair, one in zip(hypernets, leaves, pairs, evaluations, strict=True)
    ]


def dense_tiles(tiles: Tensor | Factors) -> Tensor:
    """Tiles as they are, factors multiplied out: [T, r, c]."""
    return tiles if isinstance(tiles, Tensor) else tiles.left @ tiles.right.mT


def joined(tiles: Tensor | Factors, grid: TileGrid) -> Tensor:
    """The one matrix [R, C] of tiles, or of their factors."""
    if isinstance(tiles, Factors) and (grid.tile_rows, grid.tile_cols) == (grid.rows, grid.cols):
        # One matrix product is faster than a batch of one, and backward of a view than that of an index.
        return tiles.left.flatten(0, 1) @ tiles.right.flatten(0, 1).mT
    return join_tiles(dense_tiles(tiles), grid)
