"""Cost models: what weights take as factors and multiplied out, what generates them, and what ranks send.

Operations are multiplications and additions, of forward and backward together: backward takes twice what forward does.
A matrix has R rows, C columns and nr x nc tiles with factors of rank k, and is applied to B rows of a batch.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType

FLOPS_PER_ELEMENT = 40
"""Operations in the time that writing or reading an element takes: 10 per byte, 4 bytes."""

_CHANNELS, _SLOWER = 16, 1.25  # Channels that convolutions compute at once; their time for a FLOP of thin factors

OPERATIONS_PER_BYTE: Mapping[str, float] = MappingProxyType({"cpu": 40.0, "cuda": 400.0})
"""Operations in the time of a byte on the wire: 50 Gflop/s (some cores) at 10 Gbit/s, 20 Tflop/s (GPU) at 50 GB/s."""


def product_flops(rows: int, cols: int, k: int) -> float:
    """To multiply factors to a matrix: 6 R C k."""
    return 6.0 * rows * cols * k


def generation_flops(rows: int, cols: int, params: int, k: int = 0) -> float:
    """To generate a tile by a g-net: per row and column, and a product of factors; without factors, per weight."""
    return 6.0 * (rows + cols if k else rows * cols) * params + product_flops(rows, cols, k)


def dense_flops(rows: int, cols: int, k: int, batch: int) -> float:
    """To form a weight of factors and apply it: 6 R C (B + k), and 6 times the time of moving it."""
    return 6 * rows * cols * (batch + k + FLOPS_PER_ELEMENT)


def thin_flops(
    rows: int, cols: int, k: int, tiles: tuple[int, int], batch: int, parts: tuple[int, int] = (1, 1)
) -> float:
    """To apply factors: 6 B k (nr C + nc R), and 15 times the time of moving the thin product [B, nr nc k].

    `parts` is into how many its rows and columns are split over ranks, each of which applies one.

    >>> thin_flops(4096, 4096, 64, (1, 1), 256) < dense_flops(4096, 4096, 64, 256)
    True
    """
    nr, nc = tiles
    products = 6 * batch * k * (nr * cols / parts[1] + nc * rows / parts[0])
    return products + 15 * FLOPS_PER_ELEMENT * batch * nr * nc * k


def missing_ranks(tile_rows: int, k: int) -> int:
    """What rank k lacks so that the filters of a column of tiles, tile_rows k, are a multiple of `_CHANNELS`."""
    return -k % (_CHANNELS // math.gcd(tile_rows, _CHANNELS))


def thin_rows(
    rows: int, cols: int, k: int, tiles: tuple[int, int], frozen_base: bool = False, conv: bool = False
) -> float:
    """Rows of a batch (positions, for a convolution) below which factors cost less applied than multiplied out.

    Both costs grow linearly with the rows. Beside a `frozen_base`, factors spare one GEMM of the weight's size, that of
    its gradient, and not three. For a `conv`, factors cost a quarter more, and channels are computed 16 at once
    (measured: 3 x 3 kernels, 16 to 192 channels, in float32 and bfloat16).

    >>> thin_rows(4096, 4096, 64, (1, 1)), round(thin_rows(128, 128, 64, (1, 1)))
    (inf, 266)
    """
    thin, slower = thin_flops(rows, cols, k, tiles, 1), 1.0
    if conv:
        thin, slower = thin_flops(rows, cols, k + missing_ranks(tiles[0], k), tiles, 1), _SLOWER
    fixed = dense_flops(rows, cols, k, 0)
    saved = (2 if frozen_base else 6) * rows * cols
    return fixed / (thin * slower - saved) if thin * slower > saved else math.inf


def all_reduce_bytes(n_bytes: float, ranks: int) -> float:
    """Bytes that a rank sends in an all-reduce along a ring."""
    return 2 * n_bytes * (ranks - 1) / ranks
