"""When a factored weight is cheaper than the dense one."""

from __future__ import annotations

# An element written or read costs about as much as this many floating-point operations: a processor with
# 10 FLOP per byte of memory bandwidth, 4 bytes an element.
_FLOPS_PER_ELEMENT = 40
# Times that a training step writes or reads each element of the weight and its gradient (form, apply, apply
# in backward, gradient out, gradient into both factors), and of the thin product and its gradient, which the
# two batched products of a grid hold in two orders.
_WEIGHT_PASSES = 6
_THIN_PASSES = 15


def lazy_pays(rows: int, cols: int, k: int, tiles: tuple[int, int], batch_rows: int) -> bool:
    """Whether applying the factors costs less than forming the weight, forward and backward.

    With R rows, C columns, nr x nc tiles of rank k and B batch rows (positions, for a convolution), in FLOPs,
    with e = 40 FLOPs per element moved:

        dense    = 6 R C (B + k) + 6 e R C                  three GEMMs each for layer and generation
        factored = 6 B k (nr C + nc R) + 15 e B nr nc k     three pairs of thin GEMMs

    Inputs, outputs and factors are read and written alike by both and are left out. For large B the factored
    FLOPs equal the dense ones at k = min(r, c) / 2 with square tiles r = R / nr, c = C / nc.

    Args:
        rows: Rows of the matrix.
        cols: Columns of the matrix.
        k: Rank of a tile's factors (2H for a periodic g-net with H features).
        tiles: Tile rows and tile columns of the grid.
        batch_rows: Rows of the input that the weight is applied to in one step.
    """
    tile_rows, tile_cols = tiles
    dense = 6 * rows * cols * (batch_rows + k) + _WEIGHT_PASSES * _FLOPS_PER_ELEMENT * rows * cols
    thin = batch_rows * tile_rows * tile_cols * k
    factored = 6 * batch_rows * k * (tile_rows * cols + tile_cols * rows) + _THIN_PASSES * _FLOPS_PER_ELEMENT * thin
    return factored < dense
