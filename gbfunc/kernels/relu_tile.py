"""Tiles of ReLU g-nets, `W[i, j] = b + sum_h v[h] relu(A[i, h] + B[j, h])`, without a hidden activation per weight.

With `g` the cotangent of a tile, the derivatives are sums over the active hidden units:
`SA[i, h] = sum_j g[i, j] [A[i, h] + B[j, h] > 0]`, likewise `SB[j, h]` over the rows, and then `dA = SA v`,
`dB = SB v`, `dv[h] = sum_i A SA + sum_j B SB`, because `x [x > 0] = relu(x)`, and `db = sum_ij g`.

Suffixes: T tiles; r, c rows and columns of a tile; H hidden units.
"""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor, nn

from gbfunc.kernels.chunked import DEFAULT_MAX_BYTES, RowMap, Tensors, apply_row_map, batch_tiles, row_jvp, row_vjp
from gbfunc.kernels.compiled import CompiledForms, compiled_forms, working_forms
from gbfunc.kernels.eager import block_size, eager_sums, eager_tiles
from gbfunc.kernels.reference import compute_dtype, reference_tiles, traced_tiles
from gbfunc.types import Kernel

COMPILE_WORK = 2**24
"""Hidden activations T r c H from which `kernel="auto"` compiles: a step then gains about 10 ms, which repays the 10 to
20 s of a first compilation within some thousand steps."""


def _fused(kernel: Kernel, A: Tensor, cols: int) -> CompiledForms | None:
    """The compiled forms if they are asked for, or repay themselves and work here."""
    # A compiled program reads memory, which fake and meta tensors lack; other subclasses bring operations of their own.
    if type(A) not in (Tensor, nn.Parameter) or A.is_meta:
        return None
    key = (*A.shape[:2], cols, A.shape[2], A.dtype, A.device)
    if kernel == "compiled":
        return compiled_forms(*key)
    if kernel == "auto" and A.numel() * cols >= COMPILE_WORK:
        return working_forms(*key)
    return None


def _forward(kernel: Kernel, A: Tensor, B: Tensor, v: Tensor, b: Tensor) -> Tensor:
    """Generate tiles: [T, r, H], [T, c, H], [T, H], [T] -> [T, r, c]."""
    fused = _fused(kernel, A, B.shape[1])
    return eager_tiles(A, B, v, b, block_size(A.device)) if fused is None else fused.tiles(A, B, v, b)


def _backward(kernel: Kernel, g: Tensor, A: Tensor, B: Tensor, v: Tensor) -> Tensors:
    """Gradients of A, B, v and b: [T, r, c], [T, r, H], [T, c, H], [T, H] -> [T, r, H], [T, c, H], [T, H], [T]."""
    fused = _fused(kernel, A, B.shape[1])
    SA, SB = eager_sums(g, A, B, block_size(A.device)) if fused is None else fused.sums(g, A, B)
    dv = (A * SA).sum(1) + (B * SB).sum(1)
    v_T1H = v.unsqueeze(1).to(SA.dtype)
    # In place: the sums are fresh, and as large as the inputs.
    db = g.sum((-2, -1), dtype=SA.dtype)
    return SA.mul_(v_T1H).to(v.dtype), SB.mul_(v_T1H).to(v.dtype), dv.to(v.dtype), db.to(v.dtype)


def _row_map(A: Tensor, cols: int) -> RowMap:
    """The reference as a row map of rows (A,) and shared (B, v, b), for the derivatives that are not worth a kernel."""

    def fn(rows: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
        return (reference_tiles(*rows, *shared),), ()

    row_bytes = 4 * cols * A.shape[-1] * compute_dtype(A.dtype).itemsize
    return RowMap(fn, 1, 3, 1, 0, row_bytes, DEFAULT_MAX_BYTES)


class _ReluBackward(torch.autograd.Function):
    """Gradients of the tiles, themselves differentiable through the reference."""

    @staticmethod
    def forward(kernel: Kernel, g: Tensor, A: Tensor, B: Tensor, v: Tensor, b: Tensor) -> Tensors:
        return _backward(kernel, g, A, B, v)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (g, A, *shared), (cA, *sums) = ctx.saved_tensors, cotangents
        second = row_vjp(row_vjp(_row_map(A, shared[0].shape[1])))
        dA, dg, *rest = apply_row_map(second, (A, g, cA), (*shared, *sums))
        return None, dg, dA, *rest

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], kernel: Kernel, *inputs: Tensor) -> tuple[Tensors, Any]:
        outputs = _ReluBackward.apply(kernel, *batch_tiles(info.batch_size, in_dims[1:], inputs))
        return tuple(x.unflatten(0, (info.batch_size, -1)) for x in outputs), (0,) * len(outputs)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Tensors:
        g, A, *shared = ctx.saved_tensors
        tg, tA, *moved = _filled(ctx.saved_tensors, tangents)
        return apply_row_map(row_jvp(row_vjp(_row_map(A, shared[0].shape[1]))), (A, g, tA, tg), (*shared, *moved))


class _ReluTiles(torch.autograd.Function):
    """Tiles of a stack of g-nets; keeps only its inputs, which are as thin as the tiles' edges."""

    @staticmethod
    def forward(kernel: Kernel, A: Tensor, B: Tensor, v: Tensor, b: Tensor) -> Tensor:
        return _forward(kernel, A, B, v, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.kernel = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *_ReluBackward.apply(ctx.kernel, g, *ctx.saved_tensors))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], kernel: Kernel, *inputs: Tensor) -> tuple[Tensor, int]:
        tiles = _ReluTiles.apply(kernel, *batch_tiles(info.batch_size, in_dims[1:], inputs))
        return tiles.unflatten(0, (info.batch_size, -1)), 0

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Tensor:
        A, *shared = ctx.saved_tensors
        tA, *moved = _filled(ctx.saved_tensors, tangents)
        return apply_row_map(row_jvp(_row_map(A, shared[0].shape[1])), (A, tA), (*shared, *moved))[0]


def _filled(primals: Tensors, tangents: tuple[Tensor | None, ...]) -> Tensors:
    return tuple(torch.zeros_like(x) if t is None else t for x, t in zip(primals, tangents, strict=True))


def relu_tiles(A: Tensor, B: Tensor, v: Tensor, b: Tensor, *, kernel: Kernel = "auto") -> Tensor:
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
        kernel: "eager" works in blocks of bounded memory; "compiled" makes a fused kernel for each shape, which takes
            seconds at the first call; "auto" is "compiled" from `COMPILE_WORK` hidden activations on, and "eager" below
            and, after one warning, where `torch.compile` does not work; "reference" is the plain expression, of
            O(T r c H) memory.

    Returns:
        The tiles [..., r, c].

    Raises:
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
    if kernel == "reference":
        return reference_tiles(A, B, v, b)
    if torch.compiler.is_compiling():
        return traced_tiles(A, B, v, b)
    stack = A.shape[:-2]
    flat = (A.reshape(-1, *A.shape[-2:]), B.reshape(-1, *B.shape[-2:]), v.reshape(-1, v.shape[-1]), b.reshape(-1))
    return _ReluTiles.apply(kernel, *flat).reshape(*stack, A.shape[-2], B.shape[-2])
