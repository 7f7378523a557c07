"""ReLU tiles (formula in `relu`) on a GPU, in Triton (Tillet et al., 2019). Kernels use tiles in place in a matrix.

In forward, a program computes a block of a tile, one hidden unit after another. In backward, a program takes a block
of rows and some hidden units. It computes the gradient of A, and partial sums of the gradients of v and b. A second
launch, with rows and columns exchanged, computes the gradient of B and the other sums for v. No two programs write to
the same address, so results are reproducible. Sums are in float64 for float64 inputs, otherwise in float32.

Suffixes: R, C rows and columns of a matrix; T tiles; r, c rows and columns of a tile; P blocks of r or c; H units.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gbfunc.tiling import TileGrid

# A program of the forward kernel computes `_ROWS` x `_COLS` weights. A program of the backward kernel takes `_COLS`
# rows (or columns) and `_HIDDEN` hidden units. The sums of both use at most 16 registers per thread.
_ROWS, _COLS, _HIDDEN = 32, 64, 16


# Do not use `from __future__ import annotations`: the interpreter of Triton 3.1 cannot read annotations as strings.


@triton.jit
def forward_kernel(
    A, B, v, b, W, R, C, r, c, H, ROWS: tl.constexpr, COLS: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    """Compute `W[i, j] = b + sum_h v[h] relu(A[i, h] + B[j, h])` for ROWS x COLS weights, in dtype S."""
    blocks, across = tl.cdiv(r, ROWS), tl.cdiv(C, c)
    tile, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    i, j = block * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLS + tl.arange(0, COLS)
    top, left = tile // across * r, tile % across * c
    inside_i, inside_j = (i < r) & (top + i < R), (j < c) & (left + j < C)
    A_i, B_j = A + (tile * r + i) * H, B + (tile * c + j) * H
    sums = tl.zeros([ROWS, COLS], S) + tl.load(b + tile).to(S)
    for h in range(H):
        row = tl.load(A_i + h, mask=inside_i, other=0).to(S)
        column = tl.load(B_j + h, mask=inside_j, other=0).to(S)
        x = row[:, None] + column[None, :]
        # Do not use `tl.maximum`, which hides NaN.
        sums += tl.where(x < 0, 0.0, x) * tl.load(v + tile * H + h).to(S)
    to = W + (top + i)[:, None] * C + (left + j)[None, :]
    tl.store(to, sums.to(W.dtype.element_ty), mask=inside_i[:, None] & inside_j[None, :])


@triton.jit
def backward_kernel(
    g, A, B, v, dA, dv, db, R, C, r, c, H,
    BY_ROWS: tl.constexpr, ROWS: tl.constexpr, HIDDEN: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Compute `dA[i, h] = v[h] sum_j g[i, j]` over j with `A[i, h] + B[j, h] > 0`, and partial sums of dv and db.

    If BY_ROWS is False, compute dB: the caller passes B as `A` and A as `B`, and i is a column of the tile.
    """
    across = tl.cdiv(C, c)
    blocks = tl.cdiv(r if BY_ROWS else c, ROWS)
    tile, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    top, left = tile // across * r, tile % across * c
    rows, cols = tl.minimum(R - top, r), tl.minimum(C - left, c)
    if BY_ROWS:
        n, m, end_i, end_j, stride_i, stride_j = r, c, rows, cols, C, 1
    else:
        n, m, end_i, end_j, stride_i, stride_j = c, r, cols, rows, 1, C
    i, h = block * ROWS + tl.arange(0, ROWS), tl.program_id(1) * HIDDEN + tl.arange(0, HIDDEN)
    at_ih = (tile * n + i)[:, None] * H + h[None, :]
    inside_ih = (i < n)[:, None] & (h < H)[None, :]
    A_ih = tl.load(A + at_ih, mask=inside_ih, other=0).to(S)
    sums, total = tl.zeros([ROWS, HIDDEN], S), tl.zeros([ROWS], S)
    g_i, B_h = g + top * C + left + i.to(tl.int64) * stride_i, B + tile * m * H + h
    for _ in range(end_j):
        B_jh = tl.load(B_h, mask=h < H, other=0).to(S)
        g_ij = tl.load(g_i, mask=i < end_i, other=0).to(S)
        sums += tl.where(A_ih + B_jh[None, :] > 0, g_ij[:, None], 0.0)
        total += g_ij
        g_i, B_h = g_i + stride_j, B_h + H
    v_h = tl.load(v + tile * H + h, mask=h < H, other=0).to(S)
    tl.store(dA + at_ih, (sums * v_h[None, :]).to(dA.dtype.element_ty), mask=inside_ih)
    at_block = tile * blocks + block
    tl.store(dv + at_block * H + h, tl.sum(A_ih * sums, axis=0), mask=h < H)
    if tl.program_id(1) == 0:
        tl.store(db + at_block, tl.sum(total, axis=0))


def _launch(kernel: Any, programs: tuple[int, int], tensors: Sequence[Tensor], grid: TileGrid, *blocks: int) -> None:
    hidden, is_double = tensors[1].shape[-1], tensors[1].dtype == torch.float64
    sizes = (grid.rows, grid.cols, grid.tile_rows, grid.tile_cols, hidden)
    with torch.cuda.device_of(tensors[1]):
        kernel[programs](*tensors, *sizes, *blocks, tl.float64 if is_double else tl.float32)


def tiles(A: Tensor, B: Tensor, v: Tensor, b: Tensor, grid: TileGrid) -> Tensor:
    """Generate a matrix [R, C] from A [T, r, H], B [T, c, H], v [T, H] and b [T]."""
    W_RC = A.new_empty(grid.rows, grid.cols)
    tensors = [x.detach().contiguous() for x in (A, B, v, b, W_RC)]
    programs = (grid.n_tiles * -(-grid.tile_rows // _ROWS), -(-grid.tile_cols // _COLS))
    _launch(forward_kernel, programs, tensors, grid, _ROWS, _COLS)
    return W_RC


def gradients(g: Tensor, A: Tensor, B: Tensor, v: Tensor, grid: TileGrid) -> tuple[Tensor, ...]:
    """Compute the gradients of A, B, v and b from the gradient g of the matrix [R, C]."""
    g, A, B, v = (x.detach().contiguous() for x in (g, A, B, v))
    hidden, results = A.shape[2], []
    for by_rows, x, y in ((True, A, B), (False, B, A)):
        blocks, dx = -(-x.shape[1] // _COLS), torch.empty_like(x)
        dv_TPH = x.new_empty(grid.n_tiles, blocks, hidden)
        db_TP = torch.empty_like(dv_TPH[..., 0])
        programs = (grid.n_tiles * blocks, -(-hidden // _HIDDEN))
        _launch(backward_kernel, programs, (g, x, y, v, dx, dv_TPH, db_TP), grid, by_rows, _COLS, _HIDDEN)
        results.append((dx, dv_TPH.sum(1), db_TP.sum(1)))
    (dA, dv_rows, db), (dB, dv_cols, _) = results
    return dA, dB, dv_rows + dv_cols, db
