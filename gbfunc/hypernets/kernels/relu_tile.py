"""Matrices of ReLU g-nets, `W[i, j] = b + sum_h v[h] relu(A[i, h] + B[j, h])` with `A = X U + u` and `B = Y V`.

X and Y are codes of rows and columns. With `g` the cotangent of a tile, and the sums over active columns and rows
`SA[i, h] = sum_j g[i, j] [A[i, h] + B[j, h] > 0]` and `SB[j, h]`, the gradients are `dA = SA v`, `dB = SB v`,
`dv[h] = sum_i A SA + sum_j B SB` and `db = sum_ij g`: no pass keeps a hidden activation per weight.

The modules `native` (CPU), `triton` (GPU) and `eager` compute both passes. This module chooses a module and defines its
derivatives. Forward mode and second derivatives evaluate the definition in blocks of rows (`chunked`).

Suffixes: T tiles; U 1 or T; R, C rows and columns of a matrix; r, c of a tile; p, q widths of codes; H hidden units.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gbfunc.hypernets.base import project
from gbfunc.hypernets.kernels import eager, native
from gbfunc.hypernets.kernels.chunked import InputsOnly, Tensors, chunked_apply
from gbfunc.hypernets.kernels.waves import have_memory
from gbfunc.tiling import TileGrid, join_stack, split_stack, unbatched
from gbfunc.types import Kernel, Params

COMPILE_WORK = 2**20
"""Hidden activations T r c H from which `kernel="auto"` compiles: a training then repays seconds of compilation."""


@functools.cache
def _accelerator_form(device_type: str) -> ModuleType:
    """Return `triton` if it makes a tile of one weight on this device, otherwise `eager`."""
    try:
        from gbfunc.hypernets.kernels import triton

        one = torch.ones(1, 1, 1, dtype=torch.float32, device=device_type)
        weight = triton.tiles(one, one, one[0], one[0, 0], TileGrid(1, 1, 1, 1)).item()
        if weight != 3:
            raise RuntimeError(f"it makes a weight of {weight} where 3 is right")
        return triton
    except Exception as error:  # any error: no Triton, no driver, or no C compiler for Triton
        eager.warn_of_use(f"Triton does not work on {device_type!r} ({type(error).__name__}: {error})", "triton")
        return eager


class _How(NamedTuple):
    kernel: Kernel
    grid: TileGrid

    def form(self, tensors: Tensors, hidden: int) -> ModuleType:
        """Choose the module that computes on such tensors."""
        work = self.grid.n_tiles * self.grid.tile_rows * self.grid.tile_cols * hidden
        if self.kernel == "eager" or (self.kernel == "auto" and work < COMPILE_WORK) or not have_memory(tensors):
            return eager
        if tensors[0].device.type != "cpu":
            return _accelerator_form(tensors[0].device.type)
        return native if self.kernel == "compiled" or native.is_available() else eager


def _sides(X: Tensor, Y: Tensor, U: Tensor, V: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Compute A [T, r, H] and B [T, c, H]."""
    return project(X, U) + u.unsqueeze(-2), project(Y, V)


def _by_rows(grid: TileGrid, *inputs: Tensor) -> Tensor:
    """Compute the matrix by its definition in blocks of rows, differentiable to any order in any mode."""
    *sides, v, b = inputs

    def upper(pre: Tensor, params: Params) -> Tensor:
        return torch.relu(pre) @ params["v"] + params["b"]

    return join_stack(chunked_apply(upper, *_sides(*sides), {"v": v, "b": b}), grid)


def _stack_grid(tiles: int, grid: TileGrid) -> TileGrid:
    """Describe a stack of tiles [T, r, c] as the matrix [T r, c] that the stack is in memory."""
    return TileGrid(tiles * grid.tile_rows, grid.tile_cols, grid.tile_rows, grid.tile_cols)


def _folded(size: int, dims: tuple[int | None, ...], inputs: Tensors) -> Tensors:
    """Fold the dimension of a vmap into the tiles; codes that all tiles share stay shared."""
    wide = [*unbatched(size, dims, inputs)]
    tiles = wide[2].shape[1]
    codes = [
        x if dim is None and len(x) == 1 else many.expand(-1, tiles, -1, -1).flatten(0, 1)
        for x, dim, many in zip(inputs[:2], dims, wide, strict=False)
    ]
    return *codes, *(x.flatten(0, 1) for x in wide[2:])


class _Matrix(InputsOnly):
    @staticmethod
    def forward(how: _How, *inputs: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        *sides, v, b = inputs
        form = how.form(inputs, v.shape[1])
        return native.matrix(inputs, how.grid) if form is native else form.tiles(*_sides(*sides), v, b, how.grid)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, None, *_Gradients.apply(ctx.what, g, *ctx.saved_tensors)  # pyright: ignore[reportGeneralTypeIssues]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], how: _How, *inputs: Tensor) -> tuple[Tensor, int]:
        folded, grid = _folded(info.batch_size, in_dims[1:], inputs), how.grid
        stack: Any = _Matrix.apply(how._replace(grid=_stack_grid(len(folded[2]), grid)), *folded)
        return join_stack(stack.unflatten(0, (info.batch_size, -1, grid.tile_rows)), grid), 0


class _Gradients(InputsOnly):
    @staticmethod
    def forward(how: _How, g: Tensor, *inputs: Tensor) -> Tensors:  # pyright: ignore[reportIncompatibleMethodOverride]
        X, Y, U, V, u, v, _ = inputs
        form = how.form((*inputs, g), v.shape[1])
        if form is native:
            return native.gradients(g, inputs, how.grid)
        dA, dB, dv, db = form.gradients(g, *_sides(X, Y, U, V, u), v, how.grid)
        return X.mT @ dA, Y.mT @ dB, dA.sum(1), dv, db

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        g, X, Y, *leaves = ctx.saved_tensors

        def gradients(g: Tensor, *leaves: Tensor) -> Tensors:
            pull: Any = torch.func.vjp(functools.partial(_by_rows, ctx.what.grid, X, Y), *leaves)[1]
            return pull(g)

        pull: Any = torch.func.vjp(gradients, g, *leaves)[1]
        dg, *d_leaves = pull(cotangents)
        return None, dg, None, None, *d_leaves

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], how: _How, g: Tensor, *inputs: Tensor) -> tuple[Tensors, Any]:
        size, (_, dim, *dims) = info.batch_size, in_dims
        folded = _folded(size, tuple(dims), inputs)
        (many,) = unbatched(size, (dim,), (g,))
        stack = split_stack(many, how.grid).flatten(0, 2)
        found: Any = _Gradients.apply(how._replace(grid=_stack_grid(len(folded[2]), how.grid)), stack, *folded)
        return tuple(x.unflatten(0, (size, -1)) for x in found), (0,) * len(found)


def relu_matrix(*inputs: Tensor, grid: TileGrid | None = None, kernel: Kernel = "auto") -> Tensor:
    """Generate the matrix [R, C] of ReLU g-nets, or their tiles [T, r, c] without a grid.

    Every kernel computes half precisions in float32, returns the dtype of the inputs, and is differentiable to any
    order in the leaves (not in the codes), in reverse and forward mode, under `torch.func` and `torch.vmap`. Within
    `torch.compile`, "auto", "eager" and "compiled" are one expression that becomes part of the graph.

    Args:
        X, Y: codes of the rows [U, r, p] and of the columns [U, c, q].
        U, V: weights of these codes [T, p, H] and [T, q, H].
        u: biases of the hidden units [T, H].
        v, b: weights of the last layer [T, H], and its bias [T].
        grid: the tiles of the matrix.
        kernel: "eager" works in blocks of bounded memory; "compiled" is, on a CPU, a C++ loop that is compiled once and
            kept in `$XDG_CACHE_HOME/gbfunc` or `~/.cache/gbfunc`, and on a GPU a Triton kernel; "auto" is "compiled"
            from `COMPILE_WORK` hidden activations on, and otherwise, or after a warning if nothing compiles, "eager";
            "reference" is the plain expression, of O(T r c H) memory.

    Raises:
        RuntimeError: if "compiled" is asked for on a CPU, and no C++ compiler works.
    """
    (tiles, hidden), rows, cols, dtype = v.shape, X.shape[-2], Y.shape[-2], v.dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    inputs = tuple(x.to(wide) for x in inputs)
    if kernel == "reference" or torch.compiler.is_compiling() or not tiles * hidden:
        form = eager.reference_tiles if kernel == "reference" else eager.traced_tiles
        made = form(*_sides(*inputs[:5]), *inputs[5:]).to(dtype)
        return made if grid is None else join_stack(made, grid)
    whole = grid or TileGrid(tiles * rows, cols, rows, cols)
    made: Any = (
        _by_rows(whole, *inputs) if forward_ad._current_level >= 0 else _Matrix.apply(_How(kernel, whole), *inputs)
    )
    return (made.unflatten(0, (tiles, rows)) if grid is None else made).to(dtype)
