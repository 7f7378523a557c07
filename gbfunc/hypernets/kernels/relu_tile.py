"""Tiles of ReLU g-nets, `W[i, j] = b + sum_h v[h] relu(A[i, h] + B[j, h])`, without a hidden activation per weight.

With `g` the cotangent of a tile, `SA[i, h] = sum_j g[i, j] [A[i, h] + B[j, h] > 0]` and `SB[j, h]` likewise over the
rows, the gradients are `dA = SA v`, `dB = SB v`, `dv[h] = sum_i A SA + sum_j B SB` and `db = sum_ij g`.

The modules `native` (CPU), `triton` (GPU) and `eager` compute both: `tiles(A, B, v, b, grid)` is the matrix that the
tiles of a grid make, and `gradients(g, A, B, v, grid)` are those of the inputs. Here one is chosen, and made
differentiable; further derivatives are those of the reference, row by row (`chunked`).

Suffixes: T tiles; R, C rows and columns of a matrix; r, c of a tile; H hidden units.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from gbfunc.hypernets.base import project
from gbfunc.hypernets.kernels import eager, native
from gbfunc.hypernets.kernels.chunked import InputsOnly, RowMap, Tensors, batch_tiles, filled_tangents
from gbfunc.hypernets.kernels.eager import compute_dtype, reference_tiles, traced_tiles
from gbfunc.tiling import TileGrid, join_stack, split_stack
from gbfunc.trees import have_memory
from gbfunc.types import Kernel

COMPILE_WORK = 2**20
"""Hidden activations T r c H from which `kernel="auto"` compiles: a training then repays the seconds that it takes."""


@functools.cache
def _accelerator_form(device_type: str) -> ModuleType:
    """The form for a device that is no CPU: Triton's where a tile of one weight shows that it works, else eager."""
    try:
        from gbfunc.hypernets.kernels import triton

        one = torch.ones(1, 1, 1, dtype=torch.float32, device=device_type)
        weight = triton.tiles(one, one, one[0], one[0, 0], TileGrid(1, 1, 1, 1)).item()
        if weight != 3:
            raise RuntimeError(f"it makes a weight of {weight} where 3 is right")
        return triton
    except Exception as error:  # no Triton, no driver or no C compiler for it: each shows in another way
        eager.warn_of_use(f"Triton does not work on {device_type!r} ({type(error).__name__}: {error})", "triton")
        return eager


def _form(kernel: Kernel, work: int, *tensors: Tensor) -> ModuleType:
    """The module that makes tiles of so many hidden activations from such tensors, or computes their gradients."""
    if kernel == "eager" or (kernel == "auto" and work < COMPILE_WORK) or not have_memory(tensors):
        return eager
    if tensors[0].device.type != "cpu":
        return _accelerator_form(tensors[0].device.type)
    return native if kernel == "compiled" or native.is_available() else eager


def _stack_grid(A: Tensor, B: Tensor) -> TileGrid:
    """A stack of tiles [T, r, c] as the matrix [T r, c] that it is in memory."""
    (tiles, rows, _), cols = A.shape, B.shape[1]
    return TileGrid(tiles * rows, cols, rows, cols)


def _row_map(A: Tensor, B: Tensor) -> RowMap:
    """The reference as a row map of rows (A,) and shared (B, v, b), for the derivatives that are not worth a kernel."""

    def fn(rows: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
        return (reference_tiles(*rows, *shared),), ()

    row_bytes = 4 * B.shape[1] * A.shape[-1] * compute_dtype(A.dtype).itemsize
    return RowMap(fn, (1, 3), (1, 0), row_bytes)


class _How(NamedTuple):
    kernel: Kernel
    grid: TileGrid


class _ReluGradients(InputsOnly):
    """Gradients of A, B, v and b from that of the matrix, themselves differentiable."""

    @staticmethod
    def forward(how: _How, g: Tensor, A: Tensor, B: Tensor, v: Tensor, b: Tensor) -> Tensors:
        return _form(how.kernel, A.numel() * B.shape[1], A, B, v, g).gradients(g, A, B, v, how.grid)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (g, A, *shared), (cA, *sums), grid = ctx.saved_tensors, cotangents, ctx.what.grid
        second = _row_map(A, shared[0]).vjp().vjp()
        dA, dg, *rest = second.apply((A, split_stack(g, grid), cA), (*shared, *sums))
        return None, join_stack(dg, grid), dA, *rest

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], how: _How, g: Tensor, *inputs: Tensor) -> tuple[Tensors, Any]:
        _, dim, *dims = in_dims
        g = split_stack(g if dim is None else g.movedim(dim, 0), how.grid)
        dims = (None if dim is None else 0, *dims)
        g, A, B, v, b = batch_tiles(info.batch_size, dims, (g, *inputs))
        outputs = _ReluGradients.apply(how._replace(grid=_stack_grid(A, B)), g.flatten(0, 1), A, B, v, b)
        return tuple(x.unflatten(0, (info.batch_size, -1)) for x in outputs), (0,) * len(outputs)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Tensors:
        g, A, *shared = ctx.saved_tensors
        tg, tA, *moved = filled_tangents(ctx.saved_tensors, tangents)
        g, tg = (split_stack(x, ctx.what.grid) for x in (g, tg))
        return _row_map(A, shared[0]).vjp().jvp().apply((A, g, tA, tg), (*shared, *moved))


class _ReluTiles(InputsOnly):
    """The matrix that some tiles make, from inputs as thin as the tiles' edges."""

    @staticmethod
    def forward(how: _How, A: Tensor, B: Tensor, v: Tensor, b: Tensor) -> Tensor:
        return _form(how.kernel, A.numel() * B.shape[1], A, B, v, b).tiles(A, B, v, b, how.grid)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_ReluGradients.apply(ctx.what, g, *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], how: _How, *inputs: Tensor) -> tuple[Tensor, int]:
        A, *rest = batch_tiles(info.batch_size, in_dims[1:], inputs)
        stack = _ReluTiles.apply(how._replace(grid=_stack_grid(A, rest[0])), A, *rest)
        return join_stack(stack.unflatten(0, (info.batch_size, -1, A.shape[1])), how.grid), 0

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Tensor:
        A, *shared = ctx.saved_tensors
        tA, *moved = filled_tangents(ctx.saved_tensors, tangents)
        (tile_tangents,) = _row_map(A, shared[0]).jvp().apply((A, tA), (*shared, *moved))
        return join_stack(tile_tangents, ctx.what.grid)


def _check(A: Tensor, B: Tensor, v: Tensor, b: Tensor, grid: TileGrid | None) -> None:
    if not (A.dtype == B.dtype == v.dtype == b.dtype and A.is_floating_point()):
        got = f"{A.dtype}, {B.dtype}, {v.dtype} and {b.dtype}"
        raise TypeError(f"A, B, v and b must have one floating-point dtype, got {got}")
    lead, width = A.shape[:-2], A.shape[-1:]
    if A.ndim < 2 or B.shape != (*lead, *B.shape[-2:-1], *width) or v.shape != (*lead, *width) or b.shape != lead:
        raise ValueError(
            "expected A [..., r, H], B [..., c, H], v [..., H] and b [...] with equal leading dimensions, got "
            f"{list(A.shape)}, {list(B.shape)}, {list(v.shape)} and {list(b.shape)}"
        )
    if grid is not None and A.shape[:-1] != (grid.n_tiles, grid.tile_rows):
        raise ValueError(f"expected A [T, r, H] of the tiles of {grid}, got {list(A.shape)}")


def relu_tiles(
    A: Tensor, B: Tensor, v: Tensor, b: Tensor, *, kernel: Kernel = "auto", grid: TileGrid | None = None
) -> Tensor:
    """Generate the tiles [..., r, c] of ReLU g-nets: `W[i, j] = b + sum_h v[h] relu(A[i, h] + B[j, h])`.

    Every form sums half precisions in float32, returns the inputs' dtype, and is differentiable to any order, in
    reverse and forward mode, under `torch.func` and `torch.vmap`. Within `torch.compile`, "auto", "eager" and
    "compiled" are one expression that becomes part of its graph.

    Args:
        A: pre-activations of the rows, bias included [..., r, H].
        B: those of the columns [..., c, H].
        v: weights of the last layer [..., H].
        b: its bias [...].
        kernel: "eager" works in blocks of bounded memory; "compiled" is, on a CPU, a C++ loop that is compiled once and
            kept in `$XDG_CACHE_HOME/gbfunc` or `~/.cache/gbfunc`, and on a GPU a Triton kernel; "auto" is "compiled"
            from `COMPILE_WORK` hidden activations on, and "eager" below or, after a warning, where nothing compiles;
            "reference" is the plain expression, of O(T r c H) memory.
        grid: of the one matrix [R, C] that the tiles of A [T, r, H] make: it is returned, written without its tiles.

    Raises:
        RuntimeError: if "compiled" is asked for on a CPU, and there is no C++ compiler that works.
        TypeError: if the dtypes differ or are not floating point.
        ValueError: if the shapes do not fit or `kernel` is unknown.
    """
    if kernel not in get_args(Kernel):
        raise ValueError(f"kernel must be one of {get_args(Kernel)}, got {kernel!r}")
    _check(A, B, v, b, grid)
    if kernel == "reference" or torch.compiler.is_compiling() or not A.numel() * B.numel():
        tiles = (reference_tiles if kernel == "reference" else traced_tiles)(A, B, v, b)
        return tiles if grid is None else join_stack(tiles, grid)
    flat = (A.reshape(-1, *A.shape[-2:]), B.reshape(-1, *B.shape[-2:]), v.reshape(-1, v.shape[-1]), b.reshape(-1))
    matrix = _ReluTiles.apply(_How(kernel, grid or _stack_grid(*flat[:2])), *flat)
    return matrix.reshape(*A.shape[:-1], B.shape[-2]) if grid is None else matrix


class _ReluMatrix(InputsOnly):
    """`relu_matrix` in one pass on a CPU; its further derivatives are those of its parts."""

    @staticmethod
    def forward(grid: TileGrid, *inputs: Tensor) -> Tensor:
        *sides, v, b = inputs
        return native.matrix(native.Sides(None, None, *sides), v, b, grid)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        *sides, v, _ = ctx.saved_tensors
        if torch.is_grad_enabled() or not have_memory((g,)):
            return None, *_pull(ctx)[1](g)
        d = native.matrix_gradients(g, native.Sides(None, None, *sides), v, ctx.what)
        return None, None, None, *(d[name] for name in ("U", "V", "u", "v", "b"))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], grid: TileGrid, *inputs: Tensor) -> tuple[Tensor, int]:
        return torch.vmap(functools.partial(_in_parts, "auto", grid), in_dims[1:])(*inputs), 0

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Tensor:
        # The gradient is linear in the cotangent, as in `RowMap.jvp`.
        W_RC, pull = _pull(ctx)
        return torch.func.vjp(pull, torch.zeros_like(W_RC))[1](filled_tangents(ctx.saved_tensors, tangents))[0]


def _pull(ctx: Any) -> tuple[Tensor, Callable[[Tensor], Tensors]]:
    """The matrix in parts, and its gradient of all inputs."""
    made: Any = torch.func.vjp(functools.partial(_in_parts, "auto", ctx.what), *ctx.saved_tensors)
    return made


def _in_parts(
    kernel: Kernel, grid: TileGrid, X: Tensor, Y: Tensor, U: Tensor, V: Tensor, u: Tensor, v: Tensor, b: Tensor
) -> Tensor:
    """`relu_matrix` by what comes before the ReLU."""
    return relu_tiles(project(X, U) + u.unsqueeze(-2), project(Y, V), v, b, kernel=kernel, grid=grid)


def relu_matrix(
    X: Tensor,
    Y: Tensor,
    U: Tensor,
    V: Tensor,
    u: Tensor,
    v: Tensor,
    b: Tensor,
    *,
    grid: TileGrid,
    kernel: Kernel = "auto",
) -> Tensor:
    """Generate the matrix [R, C] of ReLU g-nets from codes: `relu_tiles` of A = X U + u and B = Y V.

    The compiled form for a CPU makes A and B tile by tile and keeps neither, which spares half of its traffic.

    Args:
        X: codes of the rows [1 or T, r, p].
        Y: codes of the columns [1 or T, c, q].
        U: weights of the rows' codes [T, p, H].
        V: weights of the columns' codes [T, q, H].
        u: biases of the hidden units [T, H].
        v: weights of the last layer [T, H].
        b: its bias [T].
        grid: of the matrix.
        kernel: as in `relu_tiles`.

    Raises:
        RuntimeError: as `relu_tiles`.
    """
    inputs = (X, Y, U, V, u, v, b)
    plain = {x.dtype for x in inputs} in ({torch.float32}, {torch.float64}) and not torch.compiler.is_compiling()
    work = grid.n_tiles * grid.tile_rows * grid.tile_cols * v.shape[-1]
    if plain and work and kernel != "reference" and _form(kernel, work, *inputs) is native:
        return _ReluMatrix.apply(grid, *inputs)
    return _in_parts(kernel, grid, *inputs)
