"""Tiles of ReLU g-nets, `W[i, j] = b + sum_h v[h] relu(A[i, h] + B[j, h])`, without a hidden activation per weight.

With `g` the cotangent of a tile, the derivatives are sums over the active hidden units:
`SA[i, h] = sum_j g[i, j] [A[i, h] + B[j, h] > 0]`, likewise `SB[j, h]` over the rows, and then `dA = SA v`,
`dB = SB v`, `dv[h] = sum_i A SA + sum_j B SB`, because `x [x > 0] = relu(x)`, and `db = sum_ij g`.

Suffixes: T tiles; r, c rows and columns of a tile; H hidden units.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from gbfunc.hypernets.kernels.chunked import (
    DEFAULT_MAX_BYTES,
    RowMap,
    Tensors,
    apply_row_map,
    batch_tiles,
    row_jvp,
    row_vjp,
)
from gbfunc.hypernets.kernels.compiled import CompiledForms, compiled_forms, working_forms
from gbfunc.hypernets.kernels.eager import block_size, eager_sums, eager_tiles
from gbfunc.hypernets.kernels.native import native_gradients, native_tiles, working_library
from gbfunc.hypernets.kernels.reference import compute_dtype, reference_tiles, traced_tiles
from gbfunc.tiling import TileGrid, copy_from_tiles, copy_to_tiles, join_stack, split_stack
from gbfunc.types import Kernel

COMPILE_WORK = 2**20
"""Hidden activations T r c H from which `kernel="auto"` compiles. Below, the eager form is a few broadcast passes; from
there on a training repays the compilation: some seconds, on a CPU once for all shapes and processes."""


_STRIP_BYTES = 2**22
"""Tiles of a matrix that are there at once on a CPU: few enough to stay in its cache, and in memory that is used again.
Elsewhere they are 16 times as many, to repay a launch."""


def _has_memory(x: Tensor) -> bool:
    """Whether a compiled program can read it: fake and meta tensors hold nothing, others bring their own operations."""
    if type(x) not in (Tensor, nn.Parameter) or x.is_meta:
        return False
    try:
        x.data_ptr()
    except RuntimeError:  # batched by `torch.autograd.grad(is_grads_batched=True)`
        return False
    return True


def _settled(kernel: Kernel, A: Tensor, B: Tensor, *others: Tensor) -> Literal["native", "compiled", "auto", "eager"]:
    """The implementation by the work of all tiles, of which each strip has a part: "auto" is left where it compiles."""
    work = A.numel() * B.shape[1]
    if not work or not all(map(_has_memory, (A, B, *others))):
        return "eager"
    if kernel not in ("auto", "compiled") or (kernel == "auto" and work < COMPILE_WORK):
        return "eager"
    if A.device.type == "cpu":
        return "native" if kernel == "compiled" or working_library() else "eager"
    return kernel


def _fused(kernel: str, A: Tensor, cols: int) -> CompiledForms | None:
    """The forms of `torch.compile` if they are asked for, or "auto" and work here."""
    key = (*A.shape[:2], cols, A.shape[2], A.dtype, A.device)
    if kernel == "compiled":
        return compiled_forms(*key)
    return working_forms(*key) if kernel == "auto" else None


def _stacked(A: Tensor, B: Tensor) -> TileGrid:
    """A stack of tiles [T, r, c] is the matrix [T r, c] of its tiles."""
    (tiles, rows, _), cols = A.shape, B.shape[1]
    return TileGrid(tiles * rows, cols, rows, cols)


def _strips(grid: TileGrid, like: Tensor) -> Iterator[tuple[slice, slice]]:
    """Cut a matrix into equal numbers of rows of tiles: tiles and rows of each, row [T] and matrix [R] slices."""
    row_bytes = grid.n_cols * grid.tile_rows * grid.tile_cols * like.itemsize
    most = _STRIP_BYTES if like.device.type == "cpu" else 16 * _STRIP_BYTES
    # Of one number, because every shape is compiled.
    fit = [n for n in range(1, grid.n_rows + 1) if grid.n_rows % n == 0 and n * row_bytes <= most]
    n = max(fit, default=1)
    for first in range(0, grid.n_rows, n):
        rows = slice(first * grid.tile_rows, min(grid.rows, (first + n) * grid.tile_rows))
        yield slice(first * grid.n_cols, (first + n) * grid.n_cols), rows


def _tiles(kernel: str, A: Tensor, B: Tensor, v: Tensor, b: Tensor) -> Tensor:
    fused = _fused(kernel, A, B.shape[1])
    return eager_tiles(A, B, v, b, block_size(A.device)) if fused is None else fused.tiles(A, B, v, b)


def _forward(kernel: Kernel, grid: TileGrid | None, A: Tensor, B: Tensor, v: Tensor, b: Tensor) -> Tensor:
    """Generate tiles or a matrix: [T, r, H], [T, c, H], [T, H], [T] -> [T, r, c] or [R, C]."""
    form = _settled(kernel, A, B, v, b)
    if form == "native":
        W = native_tiles(A, B, v, b, grid or _stacked(A, B))
        return W if grid is not None else W.view(*A.shape[:2], B.shape[1])
    if grid is None:
        return _tiles(form, A, B, v, b)
    W_RC = A.new_empty(grid.rows, grid.cols)
    for t, rows in _strips(grid, A):
        copy_from_tiles(W_RC[rows], _tiles(form, A[t], B[t], v[t], b[t]), grid)
    return W_RC


def _gradients(kernel: str, g: Tensor, A: Tensor, B: Tensor, v: Tensor) -> Tensors:
    """Gradients of A, B, v and b, as large as they are, from that of the tiles [T, r, c]."""
    fused = _fused(kernel, A, B.shape[1])
    SA, SB = eager_sums(g, A, B, block_size(A.device)) if fused is None else fused.sums(g, A, B)
    dv, v_T1H = (A * SA).sum(1) + (B * SB).sum(1), v.unsqueeze(1).to(SA.dtype)
    db = g.sum((-2, -1), dtype=SA.dtype)
    # In place: the sums are fresh, and as large as the inputs.
    return SA.mul_(v_T1H).to(v.dtype), SB.mul_(v_T1H).to(v.dtype), dv.to(v.dtype), db.to(v.dtype)


def _backward(kernel: Kernel, grid: TileGrid | None, g: Tensor, A: Tensor, B: Tensor, v: Tensor, b: Tensor) -> Tensors:
    """The same, also from the gradient of the matrix [R, C]."""
    form = _settled(kernel, A, B, v, g)
    if form == "native":
        return native_gradients(g, A, B, v, grid or _stacked(A, B))
    if grid is None:
        return _gradients(form, g, A, B, v)
    found = tuple(torch.empty_like(x) for x in (A, B, v, b))
    g_Trc = None
    for t, rows in _strips(grid, A):
        # One buffer for all: fresh memory costs more than what is written there.
        g_Trc = g.new_empty(len(A[t]), grid.tile_rows, grid.tile_cols) if g_Trc is None else g_Trc
        copy_to_tiles(g_Trc, g[rows], grid)
        for whole, part in zip(found, _gradients(form, g_Trc, A[t], B[t], v[t]), strict=True):
            whole[t] = part
    return found


def _row_map(A: Tensor, cols: int) -> RowMap:
    """The reference as a row map of rows (A,) and shared (B, v, b), for the derivatives that are not worth a kernel."""

    def fn(rows: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
        return (reference_tiles(*rows, *shared),), ()

    row_bytes = 4 * cols * A.shape[-1] * compute_dtype(A.dtype).itemsize
    return RowMap(fn, 1, 3, 1, 0, row_bytes, DEFAULT_MAX_BYTES)


class _ReluBackward(torch.autograd.Function):
    """Gradients of the tiles or of their matrix, themselves differentiable through the reference."""

    @staticmethod
    def forward(
        kernel: Kernel, grid: TileGrid | None, g: Tensor, A: Tensor, B: Tensor, v: Tensor, b: Tensor
    ) -> Tensors:
        return _backward(kernel, grid, g, A, B, v, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.grid = inputs[1]
        ctx.save_for_backward(*inputs[2:])
        ctx.save_for_forward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (g, A, *shared), (cA, *sums) = ctx.saved_tensors, cotangents
        second = row_vjp(row_vjp(_row_map(A, shared[0].shape[1])))
        dA, dg, *rest = apply_row_map(second, (A, split_stack(g, ctx.grid), cA), (*shared, *sums))
        return None, None, join_stack(dg, ctx.grid), dA, *rest

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], kernel: Kernel, grid: TileGrid | None, g: Tensor, *inputs: Tensor
    ) -> tuple[Tensors, Any]:
        g = split_stack(g if in_dims[2] is None else g.movedim(in_dims[2], 0), grid)
        dims = (None if in_dims[2] is None else 0, *in_dims[3:])
        outputs = _ReluBackward.apply(kernel, None, *batch_tiles(info.batch_size, dims, (g, *inputs)))
        return tuple(x.unflatten(0, (info.batch_size, -1)) for x in outputs), (0,) * len(outputs)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Tensor | None) -> Tensors:
        g, A, *shared = ctx.saved_tensors
        tg, tA, *moved = _filled(ctx.saved_tensors, tangents)
        g, tg = split_stack(g, ctx.grid), split_stack(tg, ctx.grid)
        return apply_row_map(row_jvp(row_vjp(_row_map(A, shared[0].shape[1]))), (A, g, tA, tg), (*shared, *moved))


class _ReluTiles(torch.autograd.Function):
    """Tiles of a stack of g-nets, or the matrix that they make; keeps only inputs, as thin as the tiles' edges."""

    @staticmethod
    def forward(kernel: Kernel, grid: TileGrid | None, A: Tensor, B: Tensor, v: Tensor, b: Tensor) -> Tensor:
        return _forward(kernel, grid, A, B, v, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.kernel, ctx.grid = inputs[:2]
        ctx.save_for_backward(*inputs[2:])
        ctx.save_for_forward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *_ReluBackward.apply(ctx.kernel, ctx.grid, g, *ctx.saved_tensors))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], kernel: Kernel, grid: TileGrid | None, *inputs: Tensor
    ) -> tuple[Tensor, int]:
        tiles = _ReluTiles.apply(kernel, None, *batch_tiles(info.batch_size, in_dims[2:], inputs))
        return join_stack(tiles.unflatten(0, (info.batch_size, -1)), grid), 0

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Tensor | None) -> Tensor:
        A, *shared = ctx.saved_tensors
        tA, *moved = _filled(ctx.saved_tensors, tangents)
        (tile_tangents,) = apply_row_map(row_jvp(_row_map(A, shared[0].shape[1])), (A, tA), (*shared, *moved))
        return join_stack(tile_tangents, ctx.grid)


def _filled(primals: Tensors, tangents: tuple[Tensor | None, ...]) -> Tensors:
    return tuple(torch.zeros_like(x) if t is None else t for x, t in zip(primals, tangents, strict=True))


def relu_tiles(
    A: Tensor, B: Tensor, v: Tensor, b: Tensor, *, kernel: Kernel = "auto", grid: TileGrid | None = None
) -> Tensor:
    """Generate the tiles of ReLU g-nets: `W[i, j] = b + sum_h v[h] relu(A[i, h] + B[j, h])`.

    Every form sums half precisions in float32, returns the inputs' dtype, and is differentiable to any order, in
    reverse and forward mode, under `torch.func`, `torch.vmap` and `torch.compile`. Derivatives beyond the first
    gradient run through the reference, in blocks. Inside a function that is being compiled, "auto", "eager" and
    "compiled" are one expression that becomes part of its graph.

    Args:
        A: pre-activations of the rows, bias included [..., r, H].
        B: pre-activations of the columns [..., c, H].
        v: weights of the last layer [..., H].
        b: its bias [...].
        kernel: "eager" works in blocks of bounded memory; "compiled" is, on a CPU, a C++ loop that is compiled once and
            kept, in `$XDG_CACHE_HOME/gbfunc` or `~/.cache/gbfunc`, and elsewhere a fused kernel that `torch.compile`
            makes for each shape, in seconds at the first call; "auto" is "compiled" from `COMPILE_WORK` hidden
            activations on, and "eager" below and, after one warning, where nothing can be compiled; "reference" is the
            plain expression, of O(T r c H) memory.
        grid: of the one matrix that the tiles of A [T, r, H] make; it is then written at once, and its tiles are never
            all in memory.

    Returns:
        The tiles [..., r, c], or the matrix [R, C].

    Raises:
        RuntimeError: if "compiled" is asked for, and there is no C++ compiler that works.
        TypeError: if the dtypes differ or are not floating point.
        ValueError: if the shapes do not fit or `kernel` is unknown.
    """
    if kernel not in get_args(Kernel):
        raise ValueError(f"kernel must be one of {list(get_args(Kernel))}, got {kernel!r}")
    if not (A.dtype == B.dtype == v.dtype == b.dtype and A.is_floating_point()):
        dtypes = f"{A.dtype}, {B.dtype}, {v.dtype} and {b.dtype}"
        raise TypeError(f"A, B, v and b must have one floating-point dtype, got {dtypes}")
    if (
        A.ndim < 2
        or B.shape != (*A.shape[:-2], *B.shape[-2:-1], A.shape[-1])
        or v.shape != (*A.shape[:-2], A.shape[-1])
        or b.shape != A.shape[:-2]
    ):
        shapes = f"{list(A.shape)}, {list(B.shape)}, {list(v.shape)} and {list(b.shape)}"
        raise ValueError(
            f"expected A [..., r, H], B [..., c, H], v [..., H] and b [...] with equal leading dimensions, got {shapes}"
        )
    if grid is not None and A.shape[:-1] != (grid.n_tiles, grid.tile_rows):
        raise ValueError(f"expected A [T, r, H] of the tiles of {grid}, got {list(A.shape)}")
    if kernel == "reference" or torch.compiler.is_compiling():
        plain = reference_tiles if kernel == "reference" else traced_tiles
        return join_stack(plain(A, B, v, b), grid)
    stack = A.shape[:-2]
    flat = (A.reshape(-1, *A.shape[-2:]), B.reshape(-1, *B.shape[-2:]), v.reshape(-1, v.shape[-1]), b.reshape(-1))
    if grid is not None:
        return _ReluTiles.apply(kernel, grid, *flat)
    return _ReluTiles.apply(kernel, None, *flat).reshape(*stack, A.shape[-2], B.shape[-2])
