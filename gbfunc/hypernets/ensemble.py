"""Evaluates many g-nets together.

    leaves + codes --apply--> tiles [T, r, c], or factors [T, r, k] and [T, c, k] --join--> matrices [R, C]

Suffixes: T tiles, r rows and c columns of a tile, R and C of a matrix, p and q code widths, k rank, U 1 or T.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from gbfunc.hypernets import Hypernet
from gbfunc.hypernets.kernels.waves import Side, have_memory, period_of, waves
from gbfunc.hypernets.periodic import Waves
from gbfunc.tiling import TileGrid, join_all, join_tiles
from gbfunc.types import Factors, Kernel, Params, TileDims


def is_exporting() -> bool:
    """Return whether `torch.export` is tracing. False on older torch, where exported programs store all codes."""
    return getattr(torch.compiler, "is_exporting", bool)()


class Constants(NamedTuple):
    """The untrained inputs of several g-nets: the type, codes, scales, and groups (tiles that share parameters)."""

    hypernet: Hypernet
    dims: TileDims
    kernel: Kernel
    row: Tensor  # codes of the rows [U, r, p]; U is 1 if all tiles have the same codes
    col: Tensor  # codes of the columns [U, c, q]
    scale: Tensor | None = None  # scale of every tile [T]
    groups: Tensor | None = None  # index of every tile's group (tiles that share parameters), [T]; None without groups
    empty: Mapping[str, tuple[int, ...]] = {}  # shapes of leaves without numbers, which a genome omits
    periods: tuple[int, int] = (0, 0)  # periods of row and column codes (`period_of`) for sines; 0 if unknown

    @staticmethod
    def make(
        hypernet: Hypernet, dims: TileDims, kernel: Kernel, row: Tensor, col: Tensor, *others: Tensor | None
    ) -> Constants:
        """Create constants from codes of rows and columns. `others` are the values of `scale` and `groups`."""
        empty = {k: leaf.shape for k, leaf in hypernet.leaves(dims).items() if 0 in leaf.shape}
        known = isinstance(hypernet, Waves) and have_memory((row, col)) and not torch.compiler.is_compiling()
        periods = (period_of(row), period_of(col)) if known else (0, 0)
        return Constants(hypernet, dims, kernel, row, col, *others, empty=empty, periods=periods)

    def of(self, tiles: slice | Tensor) -> Constants:
        """Select the constants of some tiles, by slice or indices."""
        row, col = (x if len(x) == 1 else x[tiles] for x in (self.row, self.col))
        scale, groups = (None if x is None else x[tiles] for x in (self.scale, self.groups))
        # Do not use `_replace`, which `torch.compile` of torch 2.5 cannot trace.
        return Constants(self.hypernet, self.dims, self.kernel, row, col, scale, groups, self.empty, self.periods)


class Evaluation(NamedTuple):
    """The leaves and constants of g-nets of one ensemble, which are evaluated together."""

    constants: Constants
    leaves: Params  # {name: [T, ...]}, or [groups, ...] if tiles share the parameter; {} for a type without leaves
    noise: Params | None = None  # {name: [T, ...]}; None generates the mean
    factors: Factors | None = None  # factors of the tiles, if `with_factors` has computed them

    @property
    def n_tiles(self) -> int:
        """Number of tiles; 0 for a type without leaves, whose tiles are all equal."""
        groups = self.constants.groups
        return len([*self.leaves.values(), ()][0] if groups is None else groups)

    def all_leaves(self) -> Params:
        """Return all leaves, also leaves without numbers (code weights for codes of width 0), which a genome omits."""
        row = self.constants.row
        return self.leaves | {k: row.new_zeros((self.n_tiles, *x)) for k, x in self.constants.empty.items()}

    def tiles(self) -> Tensor | Factors:
        """Return tiles [T, r, c] times their scale, or factors. A type without leaves returns one tile instead of T."""
        if self.factors is not None:
            return self.factors
        if isinstance(self.constants.hypernet, Waves):
            return periodic_factors([self])[0]
        c, (leaves, scale) = self.constants, self._scaled()
        tiles = c.hypernet.tiles(leaves, c.row, c.col, self.noise, c.kernel)
        return tiles if scale is None else dense_tiles(tiles) * scale[:, None, None]

    def _scaled(self) -> tuple[Params, Tensor | None]:
        """Return leaves with the scale multiplied into linear leaves, and None; if impossible, leaves and scale."""
        hypernet, scale, groups = self.constants.hypernet, self.constants.scale, self.constants.groups
        specs, leaves = hypernet.leaves(self.constants.dims), self.all_leaves()
        if groups is not None:
            leaves = {k: v[groups] if specs[k].scope == "group" else v for k, v in leaves.items()}
        linear = [k for k in leaves if specs[k].role == "linear"]
        if scale is None or hypernet.stochastic or not linear:
            return leaves, scale
        return {**leaves, **{k: leaves[k] * scale.reshape(-1, *(1,) * (leaves[k].ndim - 1)) for k in linear}}, None

    def matrices(self, grids: Sequence[TileGrid]) -> tuple[Tensor, ...]:
        """Return one matrix [R, C] per grid: the first from the first tiles, the second from the next tiles, ..."""
        if len(grids) > 1 and self.leaves:
            return join_all(dense_tiles(self.tiles()), grids)
        return tuple(self.matrix(grid) for grid in grids)

    def matrix(self, grid: TileGrid) -> Tensor:
        """Return the matrix [R, C] that all tiles together make."""
        c = self.constants
        if self.factors is None and self.noise is None and not isinstance(c.hypernet, Waves):
            leaves, scale = self._scaled()
            matrix = c.hypernet.matrix(leaves, c.row, c.col, grid, c.kernel)
            if matrix is not None and scale is None:
                return matrix
        tiles = self.tiles()
        return joined(tiles if self.leaves else dense_tiles(tiles).expand(grid.n_tiles, -1, -1), grid)

    def split(self, counts: Sequence[int]) -> list[Evaluation]:
        """Divide the tiles: return one evaluation per count, which has this number of consecutive tiles."""
        if len(counts) == 1:
            return [self]
        constants, evaluations, first = self.constants, [], 0
        specs = {} if constants.groups is None else constants.hypernet.leaves(constants.dims)
        shared = [k for k, leaf in specs.items() if leaf.scope == "group"]
        # Use `Tensor.split`. In the backward of slices, each slice would allocate a gradient for all tiles.
        leaves = {k: [v] * len(counts) if k in shared else v.split(list(counts)) for k, v in self.leaves.items()}
        sides = [] if self.factors is None else [x.split(list(counts)) for x in self.factors]
        all_factors = [*map(Factors, *sides)] if sides else [None] * len(counts)
        for i, (count, factors) in enumerate(zip(counts, all_factors, strict=True)):
            span = slice(first, first + count)
            noise = self.noise and {k: v[span] for k, v in self.noise.items()}
            evaluations.append(Evaluation(constants.of(span), {k: v[i] for k, v in leaves.items()}, noise, factors))
            first += count
        return evaluations


def with_factors(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Compute the `factors` of all periodic and bilinear g-nets by one operator. Return evaluations with factors."""
    found = [*evaluations]
    which = [i for i, one in enumerate(found) if one.factors is None and isinstance(one.constants.hypernet, Waves)]
    for i, factors in zip(which, periodic_factors([found[i] for i in which]), strict=True):
        found[i] = Evaluation(*found[i][:-1], factors)
    return found


def periodic_factors(evaluations: Sequence[Evaluation]) -> list[Factors]:
    """Compute the factors [T, r, k] and [T, c, k] (with scales) of periodic or bilinear g-nets with one operator."""
    leaves = [one.all_leaves() for one in evaluations]
    sides: list[Side] = []
    for (c, *_), own in zip(evaluations, leaves, strict=True):
        # `all_leaves` adds empty code weights (for codes of width 0) for every tile, even if tiles share code weights.
        of_row, of_col = (c.groups if codes.shape[-1] else None for codes in (c.row, c.col))
        phase, sine, cosine = own.get("phase"), own.get("amplitude", own.get("sine")), own.get("cosine")
        scale, first = None if sine is None else c.scale, cast(Waves, c.hypernet).cosine_first
        sides.append(Side(c.row, own["row_weight"], phase, sine, cosine, scale, of_row, False, c.periods[0]))
        sides.append(Side(c.col, own["col_weight"], None, None, None, None, of_col, first, c.periods[1]))
    thin = waves(sides, kernel=evaluations[0].constants.kernel) if evaluations else []
    factors: list[Factors] = []
    for (c, *_), own, left, right in zip(evaluations, leaves, thin[::2], thin[1::2], strict=True):
        mix = own.get("mix")  # The matrix M of bilinear g-nets
        if mix is not None:
            left = left @ (mix if c.scale is None else mix * c.scale[:, None, None])
        factors.append(Factors(left, right))
    return factors


def dense_tiles(tiles: Tensor | Factors) -> Tensor:
    """Return tiles [T, r, c], multiplying factors if necessary."""
    return tiles if isinstance(tiles, Tensor) else tiles.left @ tiles.right.mT


def joined(tiles: Tensor | Factors, grid: TileGrid) -> Tensor:
    """Join tiles or their factors into a single matrix [R, C]."""
    if isinstance(tiles, Factors) and (grid.tile_rows, grid.tile_cols) == (grid.rows, grid.cols):
        # For a single tile, a plain product is faster than a batched product, and `flatten` is faster than `[0]`.
        return tiles.left.flatten(0, 1) @ tiles.right.flatten(0, 1).mT
    return join_tiles(dense_tiles(tiles), grid)
