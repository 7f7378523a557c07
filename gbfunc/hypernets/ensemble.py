"""Stacked g-nets: drawing their leaves, and generating all their tiles in one vmapped call.

Suffixes: T tiles, G groups of tiles, U code blocks (1 or T), r rows and c columns of a tile, p and q code widths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

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


def init_leaves(
    hypernet: Hypernet,
    dims: TileDims,
    groups: Sequence[int],
    slots: Sequence[tuple[int, TileGrid]],
    row_codes_Urp: Tensor,
    col_codes_Ucq: Tensor,
    generator: torch.Generator,
) -> Params:
    """Draw an ensemble's leaves, tile by tile from one CPU generator: the same wherever tiles are later.

    Every slot is then centred and scaled to zero mean and unit standard deviation by its linear leaves. The mean is
    linear in them, `mean = <m, v>`, so the smallest change that removes it is `v -= m * mean / |m|^2`. A slot with a
    single linear coefficient has its other leaves moved likewise.

    Args:
        hypernet: the g-nets' type.
        dims: their tile.
        groups: group of every tile.
        slots: `(first tile, grid)` of every slot.
        row_codes_Urp: row codes.
        col_codes_Ucq: column codes.
        generator: CPU generator; its state advances.
    """
    specs = hypernet.leaves(dims)
    n_groups = max(groups) + 1
    drawn = hypernet.init(dims, len(groups), n_groups, generator)
    leaves = {k: v.to(row_codes_Urp.dtype) for k, v in drawn.items() if 0 not in specs[k].shape}
    tile_scope = [k for k in leaves if specs[k].scope == "tile"]
    if not hypernet.standardised or not leaves:
        return leaves
    index_T = torch.tensor(groups)
    for first, grid in slots:
        span = slice(first, first + grid.n_tiles)
        own = {k: v[index_T[span]] if specs[k].scope == "group" else v[span] for k, v in leaves.items()}
        row = row_codes_Urp if len(row_codes_Urp) == 1 else row_codes_Urp[span]
        col = col_codes_Ucq if len(col_codes_Ucq) == 1 else col_codes_Ucq[span]
        matrix = partial(_matrix, hypernet, dims, row, col, grid)
        for _ in range(_DRAWS):
            changed = _standardise(matrix, own, tile_scope, [k for k in tile_scope if specs[k].role == "linear"])
            if changed or grid.numel == 1:
                break
            # All its weights are equal, as with rectifiers that are off everywhere: such a slot would never train.
            fresh = hypernet.init(dims, grid.n_tiles, 1, generator)
            own |= {k: fresh[k].to(leaves[k].dtype) for k in tile_scope}
        for k in tile_scope:
            leaves[k][span] = (own | changed)[k]
    return leaves


def _matrix(hypernet: Hypernet, dims: TileDims, row: Tensor, col: Tensor, grid: TileGrid, own: Params) -> Tensor:
    """The matrix of one slot from its tiles' leaves: [R, C]."""
    return join_tiles(dense_tiles(apply_tiles(hypernet, dims, own, row, col, kernel="eager")), grid)


def _standardise(matrix: Callable[[Params], Tensor], own: Params, tile_scope: list[str], linear: list[str]) -> Params:
    """The leaves of one slot, changed so that its matrix has zero mean and unit deviation; {} if it has none."""

    def mean(values: Params) -> Tensor:
        return matrix(own | values).mean()

    def relative_mean(values: Params) -> Tensor:
        weights = matrix(own | values)
        return weights.mean() / weights.std(correction=0)

    def deviation(values: Params) -> float:
        return float(matrix(own | values).detach().std(correction=0))

    drawn = {k: own[k] for k in linear}
    spread = deviation(drawn)
    if not spread > 0:
        return {}
    centred = _newton(mean, drawn, 1)
    if (left := deviation(centred)) <= _FLAT * spread:
        # The linear leaves are nothing but the mean (one feature, one gene): move all of the tiles' leaves instead.
        centred = _newton(relative_mean, {k: own[k] for k in tile_scope}, _NEWTON_STEPS)
        left = deviation(centred)
    if left > _FLAT * spread:
        drawn, spread = centred, left
    return drawn | {k: drawn[k] / spread for k in linear}


def _newton(objective: Callable[[Params], Tensor], leaves: Params, steps: int) -> Params:
    """The smallest change of the leaves that makes a number zero, step by step; one is exact where it is linear."""
    for _ in range(steps):
        v = {k: leaf.detach().requires_grad_() for k, leaf in leaves.items()}
        with torch.enable_grad():
            value = objective(v)
            gradients = torch.autograd.grad(value, list(v.values()), materialize_grads=True)
        square = sum(float(m.square().sum()) for m in gradients)
        if not 0 < square < math.inf:
            return leaves
        step = float(value.detach()) / square
        leaves = {k: leaf.detach() - step * m for (k, leaf), m in zip(leaves.items(), gradients, strict=True)}
    return leaves
