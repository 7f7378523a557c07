"""Stacked g-nets: drawing their leaves, and generating all their tiles in one vmapped call.

Suffixes: T tiles, G groups of tiles, U code blocks (1 or T), r rows and c columns of a tile, p and q code widths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from gbfunc.hypernets import Hypernet, Leaf
from gbfunc.tiling import TileGrid, join_tiles
from gbfunc.types import Factors, Kernel, Params, TileDims

_DRAWS = 8
_NEWTON_STEPS = 8
_FLAT = 1e-3
"""A slot that keeps less than this of its deviation when it is centred is taken to be nothing but its mean."""
_LARGE, _MANY = 1 << 20, 64
"""Weights of a slot, and columns of all its factors, from which on the factors tell its mean: the last bits differ."""
_SMALL = 0.1
"""A slot of factors of which less than this is left when it is centred is measured again, weight by weight."""
_CACHED = 1 << 18
"""Weights, or numbers of their factors, that are at hand at once when a slot is measured."""


def tile_leaves(leaves: Params, specs: dict[str, Leaf], groups_T: Tensor | None) -> Params:
    """Leaves of every tile, those of its group repeated: `{name: [T, ...]}`."""
    if groups_T is None:
        return leaves
    return {k: v[groups_T] if specs[k].scope == "group" else v for k, v in leaves.items()}


def apply_tiles(
    hypernet: Hypernet,
    dims: TileDims,
    leaves: Params,
    row_codes_Urp: Tensor,
    col_codes_Ucq: Tensor,
    *,
    noise: Params | None = None,
    kernel: Kernel = "auto",
) -> Tensor | Factors:
    """All tiles of an ensemble: [T, r, c], or their factors [T, r, k] and [T, c, k].

    Args:
        hypernet: the g-nets' type.
        dims: their tile.
        leaves: `{name: [T, ...]}`, a leaf for every tile.
        row_codes_Urp: row codes, U = 1 where all tiles share them.
        col_codes_Ucq: column codes.
        noise: `{name: [T, ...]}` for stochastic types, None for the mean.
        kernel: implementation, where the type has several.
    """
    empty = _empty(hypernet, dims)

    def one(
        own: Params, row_rp: Tensor, col_cq: Tensor, own_noise: Params | None, lead: tuple = ()
    ) -> Tensor | Factors:
        own = _with_empty(own, empty, row_rp, lead)
        return hypernet.apply(own, row_rp, col_cq, noise=own_noise, kernel=kernel)

    row_shared, col_shared = len(row_codes_Urp) == 1, len(col_codes_Ucq) == 1
    row = row_codes_Urp[0] if row_shared else row_codes_Urp
    col = col_codes_Ucq[0] if col_shared else col_codes_Ucq
    if not leaves:
        # Without leaves there is nothing to map over, and all tiles with the same codes are the same.
        tile = one({}, row_codes_Urp[0], col_codes_Ucq[0], None)
        return tile[None] if isinstance(tile, Tensor) else Factors(tile.left[None], tile.right[None])
    if hypernet.batched:
        return one(leaves, row, col, noise, (len(next(iter(leaves.values()))),))
    in_dims = (0, None if row_shared else 0, None if col_shared else 0, None if noise is None else 0)
    return vmap(one, in_dims)(leaves, row, col, noise)


def _empty(hypernet: Hypernet, dims: TileDims) -> dict[str, tuple[int, ...]]:
    """Shapes of the leaves that have no entries, which no genome holds."""
    return {k: leaf.shape for k, leaf in hypernet.leaves(dims).items() if 0 in leaf.shape}


def _with_empty(own: Params, empty: dict[str, tuple[int, ...]], like: Tensor, lead: tuple[int, ...]) -> Params:
    return own | {k: like.new_zeros((*lead, *shape)) for k, shape in empty.items()} if empty else own


def apply_matrix(
    hypernet: Hypernet,
    dims: TileDims,
    leaves: Params,
    row_codes_Urp: Tensor,
    col_codes_Ucq: Tensor,
    grid: TileGrid,
    *,
    noise: Params | None = None,
    kernel: Kernel = "auto",
) -> Tensor:
    """The matrix [R, C] that the tiles of one slot make; arguments are those of `apply_tiles`, and the slot's grid."""
    if leaves and noise is None:
        n_tiles = len(next(iter(leaves.values())))
        own = _with_empty(leaves, _empty(hypernet, dims), row_codes_Urp, (n_tiles,))
        matrix = hypernet.matrix(own, row_codes_Urp, col_codes_Ucq, grid, kernel)
        if matrix is not None:
            return matrix
    tiles = apply_tiles(hypernet, dims, leaves, row_codes_Urp, col_codes_Ucq, noise=noise, kernel=kernel)
    return join_tiles(dense_tiles(tiles), grid)


def dense_tiles(tiles: Tensor | Factors) -> Tensor:
    """Tiles as they are, factors multiplied out: [T, r, c]."""
    if isinstance(tiles, Tensor):
        return tiles
    left, right = tiles
    # One matrix product is faster than a batch of one.
    return (left[0] @ right[0].mT)[None] if len(left) == len(right) == 1 else left @ right.mT


class _Slot(NamedTuple):
    """The tiles of one slot as functions of their leaves."""

    hypernet: Hypernet
    dims: TileDims
    grid: TileGrid
    row_codes: Tensor
    col_codes: Tensor

    def tiles(self, leaves: Params, span: slice = slice(None)) -> Tensor | Factors:
        """The tiles of a span, as `apply_tiles` has them, from their leaves."""
        row, col = (codes if len(codes) == 1 else codes[span] for codes in (self.row_codes, self.col_codes))
        return apply_tiles(self.hypernet, self.dims, leaves, row, col, kernel="eager")

    def matrix(self, leaves: Params) -> Tensor:
        """The whole matrix [R, C]."""
        return join_tiles(dense_tiles(self.tiles(leaves)), self.grid)

    def factors(self, leaves: Params, span: slice) -> Factors:
        """Factors of the tiles of a span from their leaves, with zeros beyond the edges of the matrix."""
        left, right = self.tiles(leaves, span)
        g, tile_T = self.grid, torch.arange(span.start, span.stop, device="cpu")
        if g.rows % g.tile_rows:
            left = left * _inside(g.rows - tile_T // g.n_cols * g.tile_rows, g.tile_rows)
        if g.cols % g.tile_cols:
            right = right * _inside(g.cols - tile_T % g.n_cols * g.tile_cols, g.tile_cols)
        return Factors(left, right)

    def spans(self) -> Iterator[slice]:
        """All tiles, as many at a time as a cache holds."""
        r, c, _, _ = self.dims
        step = max(1, _CACHED // max(r * c, (r + c) * self.hypernet.factor_width))
        for first in range(0, self.grid.n_tiles, step):
            yield slice(first, min(first + step, self.grid.n_tiles))


def _inside(lengths_T: Tensor, longest: int) -> Tensor:
    """Whether a row or column of a tile lies inside the matrix: [T, longest, 1]."""
    return (torch.arange(longest, device="cpu") < lengths_T[:, None])[..., None]


def init_leaves(
    hypernet: Hypernet,
    dims: TileDims,
    groups_T: Tensor,
    slots: Sequence[tuple[int, TileGrid]],
    row_codes_Urp: Tensor,
    col_codes_Ucq: Tensor,
    generator: torch.Generator,
    progress: Callable[[int], None] = lambda weights: None,
) -> Params:
    """Draw an ensemble's leaves, tile by tile from one CPU generator: the same wherever tiles are later.

    Every slot is then centred and scaled to zero mean and unit standard deviation by its linear leaves. The mean is
    linear in them, `mean = <m, v>`, so the smallest change that removes it is `v -= m * mean / |m|^2`. A slot with a
    single linear coefficient has its other leaves moved likewise.

    Args:
        hypernet: the g-nets' type.
        dims: their tile.
        groups_T: group of every tile.
        slots: `(first tile, grid)` of every slot.
        row_codes_Urp: row codes.
        col_codes_Ucq: column codes.
        generator: CPU generator; its state advances.
        progress: called with the number of weights of every slot that is done.
    """
    specs = hypernet.leaves(dims)
    drawn = hypernet.init(dims, len(groups_T), int(groups_T.max()) + 1, generator)
    leaves = {k: v.to(row_codes_Urp.dtype) for k, v in drawn.items() if 0 not in specs[k].shape}
    tile_scope = [k for k in leaves if specs[k].scope == "tile"]
    if not hypernet.standardised or not leaves:
        return leaves
    for first, grid in slots:
        span = slice(first, first + grid.n_tiles)
        own = {k: v[groups_T[span]] if specs[k].scope == "group" else v[span] for k, v in leaves.items()}
        row, col = (codes if len(codes) == 1 else codes[span] for codes in (row_codes_Urp, col_codes_Ucq))
        slot = _Slot(hypernet, dims, grid, row, col)
        for _ in range(_DRAWS if grid.numel > 1 else 0):
            if changed := _standardised(slot, own, tile_scope, [k for k in tile_scope if specs[k].role == "linear"]):
                own |= changed
                break
            # All its weights are equal, as with rectifiers that are off everywhere: such a slot would never train.
            fresh = hypernet.init(dims, grid.n_tiles, 1, generator)
            own |= {k: fresh[k].to(leaves[k].dtype) for k in tile_scope}
        for k in tile_scope:
            leaves[k][span] = own[k]
        progress(grid.numel)
    return leaves


def _standardised(slot: _Slot, own: Params, tile_scope: list[str], linear: list[str]) -> Params:
    """The leaves of one slot, changed so that its matrix has zero mean and unit deviation; {} if it has none."""
    columns = slot.grid.n_tiles * slot.hypernet.factor_width if slot.hypernet.factorised else 0
    if slot.grid.numel > _LARGE and columns >= _MANY:
        centred, size = _centred_factors(slot, own, linear)
        deviation = _size_of_product(slot, own | centred)
        if deviation > _SMALL * size:
            return {k: v / deviation for k, v in centred.items()}
    drawn = {k: own[k].detach().requires_grad_() for k in linear}
    with torch.enable_grad():
        weights = slot.matrix(own | drawn)
        mean = weights.mean()
    spread = _deviation(weights)
    if not spread > 0:
        return {}
    centred = _zeroed(mean, drawn)
    if (left := _deviation(slot.matrix(own | centred))) <= _FLAT * spread:
        # The linear leaves are nothing but the mean (one feature, one gene): move all of the tiles' leaves instead.
        centred = {k: own[k] for k in tile_scope}
        for _ in range(_NEWTON_STEPS):
            v = {k: leaf.detach().requires_grad_() for k, leaf in centred.items()}
            with torch.enable_grad():
                weights = slot.matrix(own | v)
                centred = _zeroed(weights.mean() / weights.std(correction=0), v)
        left = _deviation(slot.matrix(own | centred))
    if left <= _FLAT * spread:
        centred, left = {k: own[k] for k in linear}, spread
    return centred | {k: centred[k] / left for k in linear}


def _deviation(weights: Tensor) -> float:
    return float(weights.detach().std(correction=0))


def _zeroed(value: Tensor, leaves: Params) -> Params:
    """The leaves after the smallest change that makes a number zero, to first order."""
    slopes = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
    return _without(float(value.detach()), leaves, dict(zip(leaves, slopes, strict=True)))


def _without(value: float, leaves: Params, slopes: Params) -> Params:
    square = sum(float(m.square().sum()) for m in slopes.values())
    change = value / square if 0 < square < math.inf else 0.0
    return {k: leaf.detach() - change * slopes[k] for k, leaf in leaves.items()}


def _centred_factors(slot: _Slot, leaves: Params, linear: list[str]) -> tuple[Params, float]:
    """The linear leaves moved so that the mean is zero, and the size of the weights before, roughly.

    Factors are not multiplied out: the sum of all weights of a tile is that of the left rows times that of the right.
    """
    slopes: dict[str, list[Tensor]] = {k: [] for k in linear}
    mean = square = 0.0
    for span in slot.spans():
        own = {k: v[span].detach() for k, v in leaves.items()}
        own |= {k: own[k].requires_grad_() for k in linear}
        with torch.enable_grad():
            left, right = slot.factors(own, span)
            total = (left.sum(-2) * right.sum(-2)).sum()
            for k, slope in zip(linear, torch.autograd.grad(total, [own[k] for k in linear]), strict=True):
                slopes[k].append(slope / slot.grid.numel)
        mean += float(total.detach()) / slot.grid.numel
        # As if the columns of the factors were independent.
        norms = [torch.linalg.vector_norm(x.detach(), dim=(-2, -1)).double() for x in (left, right)]
        square += float((norms[0] * norms[1]).square().sum()) / left.shape[-1] / slot.grid.numel
    slope = {k: torch.cat(parts) for k, parts in slopes.items()}
    return _without(mean, {k: leaves[k] for k in linear}, slope), math.sqrt(square)


def _size_of_product(slot: _Slot, leaves: Params) -> float:
    """The root mean square of all weights, which is their deviation where the mean is zero."""
    total = 0.0
    for span in slot.spans():
        tiles = dense_tiles(slot.factors({k: v[span] for k, v in leaves.items()}, span))
        total += float(torch.linalg.vector_norm(tiles, dim=-1).double().square().sum())
    return math.sqrt(total / slot.grid.numel)
