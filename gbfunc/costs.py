"""Cost models: operations to generate weights and to apply dense weights or factors, and bytes sent between ranks.

Operations are the multiplications and additions of forward and backward. Backward has twice as many as forward.
A matrix has R rows, C columns, and nr x nc tiles with factors of rank k. The matrix is applied to B rows of a batch.
To read or to write one number takes as long as 40 operations.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType

FLOPS_PER_ELEMENT = 40
"""Number of operations that take as long as to read or write one element of 4 bytes: 10 per byte."""

_CHANNELS = 16  # Number of channels that a convolution computes at once
_SLOWER = 1.25  # Time of an operation in a convolution with factors, relative to a dense convolution

OPERATIONS_PER_BYTE: Mapping[str, float] = MappingProxyType({"cpu": 40.0, "cuda": 400.0})
"""Operations that run while a byte is sent. CPU: 50 Gflop/s at 10 Gbit/s; GPU: 20 Tflop/s at 50 GB/s."""


def product_flops(rows: int, cols: int, k: int) -> float:
    """Count the operations to multiply two factors of rank k to a matrix of R rows and C columns: 6 R C k."""
    return 6.0 * rows * cols * k


def generation_flops(rows: int, cols: int, params: int, k: int = 0) -> float:
    """Count operations of a g-net of P parameters (`params`): 6 R C P, or 6 (R + C) P + 6 R C k for factors (k > 0)."""
    return 6.0 * (rows + cols if k else rows * cols) * params + product_flops(rows, cols, k)


def dense_flops(rows: int, cols: int, k: int, batch: int) -> float:
    """Count operations to form a weight from factors, apply it to B rows, and read or write the weight 6 times."""
    return 6 * rows * cols * (batch + k + FLOPS_PER_ELEMENT)


def thin_flops(
    rows: int, cols: int, k: int, tiles: tuple[int, int], batch: int, parts: tuple[int, int] = (1, 1)
) -> float:
    """Count operations to apply factors, 6 B k (nr C + nc R), and to read or write intermediates [B, nr nc k] 15 times.

    `parts` are the numbers of ranks over which the matrix's rows and columns are split. The result is for one rank.

    >>> thin_flops(4096, 4096, 64, (1, 1), 256) < dense_flops(4096, 4096, 64, 256)
    True
    """
    nr, nc = tiles
    products = 6 * batch * k * (nr * cols / parts[1] + nc * rows / parts[0])
    return products + 15 * FLOPS_PER_ELEMENT * batch * nr * nc * k


def missing_ranks(nr: int, k: int) -> int:
    """Return what to add to the rank k, so that `nr * k`, a convolution's filters per group, is a multiple of 16."""
    return -k % (_CHANNELS // math.gcd(nr, _CHANNELS))


def thin_rows(
    rows: int, cols: int, k: int, tiles: tuple[int, int], frozen_base: bool = False, conv: bool = False
) -> float:
    """Return the number of batch rows (positions of a convolution) below which factors cost less than dense weights.

    Forming a dense weight has a fixed cost. Then each row costs three GEMMs of the weight's size: one in forward, two
    in backward. Factors of rank `k` cost thin products per row and, with a `frozen_base`, two of the three GEMMs.
    Returns inf if factors always cost less. For a `conv`, an operation takes a quarter more time with factors, and
    filters are padded to a multiple of 16 (measured: 3 x 3 kernels, 16 to 192 channels, in float32 and bfloat16).

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
    """Count the bytes that a rank sends in an all-reduce of `n_bytes` along a ring."""
    return 2 * n_bytes * (ranks - 1) / ranks
