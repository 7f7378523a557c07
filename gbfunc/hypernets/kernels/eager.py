"""The tile of a ReLU g-net in eager PyTorch: blocks of rows that stay in cache, one hidden unit at a time.

Suffixes: T tiles; r, c rows and columns of a tile; H hidden units; b rows of a block. Memory is O(T r c).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gbfunc.hypernets.kernels.reference import compute_dtype, reference_sums, reference_tiles

# Elements of the one buffer that every pass rewrites. On a CPU core with 1 MiB of second-level cache a forward pass
# over 4.2 M weights took 117, 70, 50 and 41 ms with 2^15, 2^16, 2^18 and 2^20: dispatch costs more than cache saves.
_CPU_BLOCK = 2**20
# A launch must be repaid by a larger block; at 16 MiB the buffer is small beside the weights that need it.
_ACCELERATOR_BLOCK = 2**22


def block_size(device: torch.device) -> int:
    """Weights in one block that suit the device."""
    return _CPU_BLOCK if device.type == "cpu" else _ACCELERATOR_BLOCK


def _blocks(tiles: int, rows: int, cols: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Cover [tiles, rows] by blocks of about `size` weights: several whole tiles, or some rows of one."""
    rows_at_once = max(1, min(rows, size // cols))
    tiles_at_once = max(1, min(tiles, size // (rows * cols)))
    for first_tile in range(0, tiles, tiles_at_once):
        for first_row in range(0, rows, rows_at_once):
            yield (
                slice(first_tile, min(tiles, first_tile + tiles_at_once)),
                slice(first_row, min(rows, first_row + rows_at_once)),
            )


def _by_hidden(A_TbH: Tensor, B_TcH: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One hidden unit after the other: [T, b, H], [T, c, H] -> [H, T, b, 1], [H, T, 1, c] with whole rows of c."""
    B_HTc = B_TcH.permute(2, 0, 1).to(dtype).contiguous()
    return A_TbH.permute(2, 0, 1).unsqueeze(-1).to(dtype), B_HTc.unsqueeze(-2)


def eager_tiles(A: Tensor, B: Tensor, v: Tensor, b: Tensor, block: int) -> Tensor:
    """Generate tiles in blocks of about `block` weights: [T, r, H], [T, c, H], [T, H], [T] -> [T, r, c]."""
    (tiles, rows, hidden), cols = A.shape, B.shape[1]
    if tiles * rows * cols * hidden <= block:
        return reference_tiles(A, B, v, b)
    dtype = compute_dtype(A.dtype)
    W_Trc = A.new_empty(tiles, rows, cols)
    for t, i in _blocks(tiles, rows, cols, block):
        A_HTb1, B_HT1c = _by_hidden(A[t, i], B[t], dtype)
        v_HT11 = v[t].T[..., None, None].to(dtype)
        W_Tbc = torch.empty_like(W_Trc[t, i], dtype=dtype).copy_(b[t, None, None])
        hidden_Tbc = torch.empty_like(W_Tbc)
        for h in range(hidden):
            torch.add(A_HTb1[h], B_HT1c[h], out=hidden_Tbc).clamp_min_(0)
            W_Tbc.addcmul_(hidden_Tbc, v_HT11[h])
        W_Trc[t, i] = W_Tbc
    return W_Trc


def eager_sums(g: Tensor, A: Tensor, B: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Sum the cotangent over active columns and over active rows, as `reference_sums` does, block by block.

    Args:
        g: cotangent of the tiles [T, r, c].
        A: pre-activations of the rows [T, r, H].
        B: pre-activations of the columns [T, c, H].
        block: weights in one block, about.

    Returns:
        The sums [T, r, H] and [T, c, H], in the precision of the sums.
    """
    (tiles, rows, hidden), cols = A.shape, B.shape[1]
    if tiles * rows * cols * hidden <= block:
        return reference_sums(g, A, B), reference_sums(g.mT, B, A)
    dtype = compute_dtype(A.dtype)
    SA_TrH, SB_TcH = torch.empty_like(A, dtype=dtype), torch.zeros_like(B, dtype=dtype)
    for t, i in _blocks(tiles, rows, cols, block):
        A_HTb1, B_HT1c = _by_hidden(A[t, i], B[t], dtype)
        SA_HTb, SB_HTc = A_HTb1.new_empty(A_HTb1.shape[:-1]), B_HT1c.new_empty(hidden, len(B[t]), cols)
        g_Tbc = g[t, i].to(dtype)
        active_Tbc = torch.empty_like(g_Tbc, memory_format=torch.contiguous_format)
        for h in range(hidden):
            torch.add(A_HTb1[h], B_HT1c[h], out=active_Tbc)
            # One pass for `g * (x > 0)`; through a mask it would be two, the second over mixed types.
            torch.ops.aten.threshold_backward.grad_input(g_Tbc, active_Tbc, 0, grad_input=active_Tbc)
            torch.sum(active_Tbc, -1, out=SA_HTb[h])
            torch.sum(active_Tbc, -2, out=SB_HTc[h])
        SA_TrH[t, i] = SA_HTb.permute(1, 2, 0)
        SB_TcH[t] += SB_HTc.permute(1, 2, 0)
    return SA_TrH, SB_TcH
