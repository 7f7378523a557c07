"""Matrices of ReLU g-nets, `W[i, j] = b + sum_h v[h] relu(A[i, h] + B[j, h])` with `A = X U + u` and `B = Y V`.

X and Y are codes of rows and columns, U and V code weights, u and b biases. Let `g` be the gradient of a tile, and
`active[i, j, h]` be 1 if `A[i, h] + B[j, h] > 0`, otherwise 0. With `SA[i, h] = sum_j g[i, j] active[i, j, h]` and
`SB[j, h] = sum_i g[i, j] active[i, j, h]`, the gradients are `dA = SA v`, `dB = SB v`,
`dv[h] = sum_i A[i, h] SA[i, h] + sum_j B[j, h] SB[j, h]` and `db = sum_ij g[i, j]`. No pass stores the activations
[T, r, c, H]. Forward and backward are in C++ (`relu.cpp`), in Triton (`relu_triton.py`), and here in PyTorch. Forward
mode and second derivatives use the first formula above.

Suffixes: T tiles; U 1 or T; R, C rows and columns of a matrix; r, c of a tile; p, q widths of codes; H hidden units.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gbfunc.hypernets.base import project
from gbfunc.hypernets.kernels import native
from gbfunc.hypernets.kernels.operation import Operation
from gbfunc.hypernets.kernels.waves import Tensors
from gbfunc.tiling import TileGrid, join_stack, split_stack
from gbfunc.types import Kernel

_THREAD_WORK = 2**16  # Use one more thread for every 2^16 hidden activations, which take about 10 us


def _sides(X: Tensor, Y: Tensor, U: Tensor, V: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    return project(X, U) + u.unsqueeze(-2), project(Y, V)


def _definition(grid: TileGrid, *inputs: Tensor) -> Tensors:
    # In compiled graphs, `b + sum_h active (v[h] A[i, h] + v[h] B[j, h])` is twice as fast as a formula with `relu`.
    *sides, v, b = inputs
    A, B = _sides(*sides)
    idle_TrcH = A.unsqueeze(-2) + B.unsqueeze(-3) <= 0
    terms_TrcH = (A * v.unsqueeze(-2)).unsqueeze(-2) + (B * v.unsqueeze(-2)).unsqueeze(-3)
    return (join_stack(torch.where(idle_TrcH, 0, terms_TrcH).sum(-1) + b[:, None, None], grid),)


def _by_hidden(A_TrH: Tensor, B_TcH: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    # Yield A [T, r, 1] and B [T, 1, c] of each hidden unit. The c entries of B are contiguous, so that sums are fast.
    return zip(A_TrH.permute(2, 0, 1)[..., None], B_TcH.permute(2, 0, 1).contiguous()[..., None, :], strict=True)


def _blocks(*tensors: Tensor) -> Iterator[Tensors]:
    # Yield blocks of tiles with about 2^18 weights (entries of the first tensor), which fit into the processor's cache.
    n = max(1, 2**18 // tensors[0][0].numel())
    return zip(*(x.split(n) for x in tensors), strict=True)


def _tiles(A: Tensor, B: Tensor, v: Tensor, b: Tensor, grid: TileGrid) -> Tensor:
    tiles_Trc = b[:, None, None].repeat(1, *A.shape[1:2], B.shape[1])
    for W_Trc, A_TrH, B_TcH, v_TH in _blocks(tiles_Trc, A, B, v):
        hidden_Trc = torch.empty_like(W_Trc)
        for h, sides in enumerate(_by_hidden(A_TrH, B_TcH)):
            W_Trc.addcmul_(torch.add(*sides, out=hidden_Trc).clamp_min_(0), v_TH[:, h, None, None])
    return join_stack(tiles_Trc, grid)


def _gradients(g: Tensor, A: Tensor, B: Tensor, v: Tensor, grid: TileGrid) -> Tensors:
    blocks = list[Tensors]()
    for g_Trc, A_TrH, B_TcH in _blocks(split_stack(g, grid), A, B):
        active_Trc, sums = torch.empty_like(g_Trc), list[Tensors]()
        for sides in _by_hidden(A_TrH, B_TcH):
            torch.add(*sides, out=active_Trc)
            # Compute `g * (x > 0)` in one pass over memory; with a mask, torch would need two passes.
            torch.ops.aten.threshold_backward.grad_input(g_Trc, active_Trc, 0, grad_input=active_Trc)
            sums.append((active_Trc.sum(2), active_Trc.sum(1)))
        blocks.append((*(torch.stack(x, -1) for x in zip(*sums, strict=True)), g_Trc.sum((1, 2))))
    SA_TrH, SB_TcH, db_T = map(torch.cat, zip(*blocks, strict=True))
    dv_TH, v_T1H = (A * SA_TrH).sum(1) + (B * SB_TcH).sum(1), v.unsqueeze(1)
    return SA_TrH * v_T1H, SB_TcH * v_T1H, dv_TH, db_T


def _in_cpp(grid: TileGrid) -> tuple[Callable[..., Tensors], Callable[..., Tensors]]:
    # Cut tiles into blocks of rows, about four per thread, so that a fast thread can do more blocks.
    row_blocks = max(1, min(-(-4 * torch.get_num_threads() // grid.n_tiles), grid.tile_rows // 16))

    def packed(X: Tensor, Y: Tensor, *leaves: Tensor) -> array[int]:
        # The array has the fields of the struct `Sides` in `relu.cpp`.
        steps = [0 if len(x) == 1 else x[0].numel() for x in (X, Y)]
        return array("q", [*map(Tensor.data_ptr, (X, Y, *leaves)), X.shape[2], Y.shape[2], *steps])

    def call(direction: str, v: Tensor, *arguments: Tensor | array[int]) -> None:
        sizes = array("q", (grid.rows, grid.cols, grid.tile_rows, grid.tile_cols, v.shape[1], row_blocks))
        places = [x.data_ptr() if isinstance(x, Tensor) else x.buffer_info()[0] for x in (*arguments, sizes)]
        threads = min(torch.get_num_threads(), 1 + grid.numel * v.shape[1] // _THREAD_WORK)
        native.function(f"relu_{direction}", v.dtype)(*map(ctypes.c_void_p, places), threads)

    def run(*inputs: Tensor) -> Tensors:
        *sides, v, b = (x.contiguous() for x in inputs)
        W_RC = v.new_empty(grid.rows, grid.cols)
        call("forward", v, packed(*sides), v, b, W_RC)
        return (W_RC,)

    def pull(*tensors: Tensor) -> Tensors:
        g, *sides, v, b = (x.contiguous() for x in tensors)
        # Every block of rows has its own sums, because different threads compute the blocks of a tile.
        sums = [x.new_zeros(row_blocks, *x.shape) for x in (*sides[2:], v, b)]
        call("backward", v, g, packed(*sides), v, array("q", map(Tensor.data_ptr, sums)))
        return tuple(x.sum(0) if row_blocks > 1 else x[0] for x in sums)

    return run, pull


def _in_python(grid: TileGrid, tiles: Any, gradients: Any) -> tuple[Callable[..., Tensors], Callable[..., Tensors]]:
    def run(*inputs: Tensor) -> Tensors:
        *sides, v, b = inputs
        return (tiles(*_sides(*sides), v, b, grid),)

    def pull(g: Tensor, *inputs: Tensor) -> Tensors:
        *sides, v, _ = inputs
        dA, dB, dv, db = gradients(g, *_sides(*sides), v, grid)
        return sides[0].mT @ dA, sides[1].mT @ dB, dA.sum(1), dv, db

    return run, pull


def relu_matrix(X: Tensor, Y: Tensor, *leaves: Tensor, grid: TileGrid | None = None, kernel: Kernel = "auto") -> Tensor:
    """Generate a matrix [R, C] whose tiles come from ReLU g-nets. Without a `grid`, return the tiles [T, r, c].

    `leaves` are U [T, p, H], V [T, q, H], u [T, H], v [T, H] and b [T]. The codes X [T or 1, r, p] and Y [T or 1, c, q]
    get no gradient. For half-precision inputs, the result is float32. Raises RuntimeError for `kernel="compiled"` on a
    CPU without a working C++ compiler.
    """
    (tiles, hidden), rows, cols, dtype = leaves[3].shape, X.shape[-2], Y.shape[-2], leaves[3].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    inputs = [x.to(wide) for x in (X, Y, *leaves)]
    full_grid = grid or TileGrid(tiles * rows, cols, rows, cols)
    if torch.compiler.is_compiling() or not tiles * hidden:
        (matrix,) = _definition(full_grid, *inputs)
    else:
        if not native.has_kernels(X.device.type, kernel):
            passes = _in_python(full_grid, _tiles, _gradients)
        elif X.device.type == "cpu":
            passes = _in_cpp(full_grid)
        else:
            from gbfunc.hypernets.kernels import relu_triton

            passes = _in_python(full_grid, relu_triton.tiles, relu_triton.gradients)
        (matrix,) = Operation(functools.partial(_definition, full_grid), *passes, constants=2).apply(*inputs)
    return (matrix.unflatten(0, (tiles, rows)) if grid is None else matrix).to(dtype)
