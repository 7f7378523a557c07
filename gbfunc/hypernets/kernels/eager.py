"""The ReLU tile in PyTorch: its definition, and eager code where there is no C++ compiler and no Triton.

`W[i, j] = b + sum_h v[h] relu(A[i, h] + B[j, h])`, where `A` and `B` are row and column terms of the pre-activation.
Small inputs use one broadcast expression with O(T r c H) memory; large inputs use blocks that fit in cache.

Suffixes: R, C rows and columns of a matrix; T tiles; r, c of a tile, b rows of it in a block; H hidden units.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from gbfunc.hypernets.kernels.chunked import pieces
from gbfunc.tiling import TileGrid, join_stack, split_stack


def warn_of_use(reason: str, cure: str) -> None:
    """Warn that the eager kernel replaces a compiled kernel."""
    words = f"{reason}; large ReLU ensembles use the slower eager kernel; install {cure}, or ask for kernel='eager'"
    warnings.warn(f"{words} to silence this", RuntimeWarning, stacklevel=3)


def reference_tiles(A: Tensor, B: Tensor, v: Tensor, b: Tensor) -> Tensor:
    """Generate tiles by their definition: [..., r, H], [..., c, H], [..., H], [...] -> [..., r, c]."""
    hidden_rcH = torch.relu(A.unsqueeze(-2) + B.unsqueeze(-3))
    return (hidden_rcH * v.unsqueeze(-2).unsqueeze(-2)).sum(-1) + b[..., None, None]


def traced_tiles(A: Tensor, B: Tensor, v: Tensor, b: Tensor) -> Tensor:
    """Generate tiles for compilers, `W[i, j] = b + sum_h [A + B > 0] (v[h] A[i, h] + v[h] B[j, h])`.

    The automatic derivative is the two sums of the hand-derived backward pass: half the time of the plain expression.
    """
    active_rcH = A.unsqueeze(-2) + B.unsqueeze(-3) > 0
    terms_rcH = (A * v.unsqueeze(-2)).unsqueeze(-2) + (B * v.unsqueeze(-2)).unsqueeze(-3)
    return torch.where(active_rcH, terms_rcH, 0).sum(-1) + b[..., None, None]


def block_size(device: torch.device) -> int:
    """Return the number of weights per block, large enough to amortize dispatch or kernel launch."""
    return 2**20 if device.type == "cpu" else 2**22


def _is_small(A: Tensor, B: Tensor) -> bool:
    return A.numel() * B.shape[1] <= block_size(A.device)


def _blocks(A: Tensor, B: Tensor) -> Iterator[tuple[slice, slice]]:
    (tiles, rows, _), cols, size = A.shape, B.shape[1], block_size(A.device)
    for t in pieces(tiles, max(1, size // (rows * cols))):
        for i in pieces(rows, max(1, size // cols)):
            yield t, i


def _by_hidden(A_TbH: Tensor, B_TcH: Tensor) -> tuple[Tensor, Tensor]:
    """Move hidden units to the front: [T, b, H], [T, c, H] -> [H, T, b, 1], [H, T, 1, c] with whole rows of c."""
    return A_TbH.permute(2, 0, 1).unsqueeze(-1), B_TcH.permute(2, 0, 1).contiguous().unsqueeze(-2)


def tiles(A: Tensor, B: Tensor, v: Tensor, b: Tensor, grid: TileGrid) -> Tensor:
    """Generate the matrix of some tiles: [T, r, H], [T, c, H], [T, H], [T] -> [R, C]."""
    if _is_small(A, B):
        return join_stack(reference_tiles(A, B, v, b), grid)
    W_Trc = A.new_empty(*A.shape[:2], B.shape[1])
    for t, i in _blocks(A, B):
        W_Tbc, v_HT11, (A_HTb1, B_HT1c) = W_Trc[t, i], v[t].T[..., None, None], _by_hidden(A[t, i], B[t])
        W_Tbc.copy_(b[t, None, None])
        hidden_Tbc = torch.empty_like(W_Tbc)
        for h in range(A.shape[2]):
            torch.add(A_HTb1[h], B_HT1c[h], out=hidden_Tbc).clamp_min_(0)
            W_Tbc.addcmul_(hidden_Tbc, v_HT11[h])
    return join_stack(W_Trc, grid)


def _active_sums(g: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """Sum over active columns, `SA[i, h] = sum_j g[i, j] [A[i, h] + B[j, h] > 0]`: [T, r, c] ... -> [T, r, H]."""
    return torch.where(A.unsqueeze(-2) + B.unsqueeze(-3) > 0, g.unsqueeze(-1), 0).sum(-2)


def _block_sums(g_Tbc: Tensor, A_TbH: Tensor, B_TcH: Tensor) -> tuple[Tensor, Tensor]:
    A_HTb1, B_HT1c = _by_hidden(A_TbH, B_TcH)
    SA_HTb, SB_HTc = torch.empty_like(A_HTb1[..., 0]), torch.empty_like(B_HT1c[..., 0, :])
    active_Tbc = torch.empty_like(g_Tbc)
    for h in range(len(A_HTb1)):
        torch.add(A_HTb1[h], B_HT1c[h], out=active_Tbc)
        # One pass for `g * (x > 0)`; a mask would take two.
        torch.ops.aten.threshold_backward.grad_input(g_Tbc, active_Tbc, 0, grad_input=active_Tbc)
        torch.sum(active_Tbc, -1, out=SA_HTb[h])
        torch.sum(active_Tbc, -2, out=SB_HTc[h])
    return SA_HTb.permute(1, 2, 0), SB_HTc.permute(1, 2, 0)


def gradients(g: Tensor, A: Tensor, B: Tensor, v: Tensor, grid: TileGrid) -> tuple[Tensor, ...]:
    """Compute the gradients of A, B, v and b, with their shapes, from the gradient of the matrix [R, C]."""
    g_Trc = split_stack(g, grid)
    if _is_small(A, B):
        SA_TrH, SB_TcH = _active_sums(g_Trc, A, B), _active_sums(g_Trc.mT, B, A)
    else:
        SA_TrH, SB_TcH = torch.zeros_like(A), torch.zeros_like(B)
        for t, i in _blocks(A, B):
            SA_TrH[t, i], part_TcH = _block_sums(g_Trc[t, i], A[t, i], B[t])
            SB_TcH[t] += part_TcH
    dv_TH, v_T1H = (A * SA_TrH).sum(1) + (B * SB_TcH).sum(1), v.unsqueeze(1)
    # In place, as the sums are as large as the inputs.
    return SA_TrH.mul_(v_T1H), SB_TcH.mul_(v_T1H), dv_TH, g_Trc.sum((1, 2))
