"""Stacked g-nets: drawing their leaves, and generating all their tiles in one vmapped call.

Suffixes: T tiles, G groups of tiles, U code blocks (1 or T), r rows and c columns of a tile, p and q code widths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import vmap

from gbfunc.hypernets import Hypernet, Leaf
from gbfunc.tiling import TileGrid, join_tiles
from gbfunc.types import Factors, Kernel, Params, TileDims


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
    empty = {k: leaf.shape for k, leaf in hypernet.leaves(dims).items() if 0 in leaf.shape}

    def one(own: Params, row_rp: Tensor, col_cq: Tensor, own_noise: Params | None, lead: tuple = ()) -> Tensor | Factors:
        if empty:
            own = own | {k: row_rp.new_zeros((*lead, *shape)) for k, shape in empty.items()}
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


def dense_tiles(tiles: Tensor | Factors) -> Tensor:
    """Tiles as they are, factors multiplied out: [T, r, c]."""
    return tiles if isinstance(tiles, Tensor) else tiles.left @ tiles.right.mT


def init_leaves(
    hypernet: Hypernet,
    dims: TileDims,
    groups: Sequence[int],
    slots: Sequence[tuple[int, TileGrid]],
    row_codes_Urp: Tensor,
    col_codes_Ucq: Tensor,
    generator: torch.Generator,
) -> Params:
    """Draw an ensemble's leaves, tile by tile from one CPU generator: the same however tiles are later spread over ranks.

    Every slot is then centred and scaled to zero mean and unit standard deviation by its linear leaves. The mean is
    linear in them, `mean = <m, v>`, so the smallest change that removes it is `v -= m * mean / |m|^2`.

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
    linear = [k for k in leaves if specs[k].role == "linear"]
    if not hypernet.standardised or not linear:
        return leaves
    index_T = torch.tensor(groups)
    for first, grid in slots:
        span = slice(first, first + grid.n_tiles)
        own = {k: v[index_T[span]] if specs[k].scope == "group" else v[span] for k, v in leaves.items()}
        row = row_codes_Urp if len(row_codes_Urp) == 1 else row_codes_Urp[span]
        col = col_codes_Ucq if len(col_codes_Ucq) == 1 else col_codes_Ucq[span]
        for k, v in _standardise(hypernet, dims, own, linear, row, col, grid).items():
            leaves[k][span] = v
    return leaves


def _standardise(
    hypernet: Hypernet, dims: TileDims, own: Params, linear: list[str], row: Tensor, col: Tensor, grid: TileGrid
) -> Params:
    """The linear leaves of one slot, changed so that its matrix has zero mean and unit standard deviation."""

    def matrix(values: Params) -> Tensor:
        tiles = dense_tiles(apply_tiles(hypernet, dims, own | values, row, col, kernel="eager"))
        return join_tiles(tiles, grid)

    v = {k: own[k].detach().requires_grad_() for k in linear}
    with torch.enable_grad():
        mean = matrix(v).mean()
        gradients = torch.autograd.grad(mean, list(v.values()))
    with torch.no_grad():
        spread = matrix(v).std(correction=0)
        square = sum(float(m.square().sum()) for m in gradients)
        if square > 1e-12 * float(spread) ** 2:
            centred = {k: v[k] - m * (mean / square) for k, m in zip(linear, gradients, strict=True)}
            left = matrix(centred).std(correction=0)
            # A slot that is nothing but its mean (one weight, one constant feature) keeps it.
            if float(left) > 1e-3 * float(spread):
                v, spread = centred, left
        scale = 1 / float(spread) if float(spread) > 0 else 1.0
        return {k: (leaf * scale).detach() for k, leaf in v.items()}
