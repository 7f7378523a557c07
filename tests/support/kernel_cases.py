"""Inputs, the definition, transforms and measures that the tests of the kernels share."""

import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.utils._pytree import tree_leaves

from gbfunc.hypernets.kernels import native, relu, waves
from gbfunc.hypernets.kernels.relu import relu_matrix
from gbfunc.tiling import TileGrid, join_tiles
from gbfunc.types import Kernel
from tests.support.live import LiveBytes

NEEDS_COMPILER = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler on the path"
)
FAST = ["eager", pytest.param("compiled", marks=NEEDS_COMPILER)]
"""The forms that are used, each to be held against the definition."""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels of a GPU replace the kernels of a CPU (`tests/test_kernels_triton.py`)."""
if INTERPRETED:
    from gbfunc.hypernets.kernels import relu_triton, waves_triton

    assert type(relu_triton.forward_kernel).__name__ == "InterpretedFunction"
    relu._in_cpp = lambda grid: relu._in_python(grid, relu_triton.tiles, relu_triton.gradients)
    waves._native = waves_triton.backend
    settings.register_profile("interpreted", settings.get_profile("gbfunc"), max_examples=5)
    settings.load_profile("interpreted")

GRIDS = [TileGrid(5, 7, 2, 3), TileGrid(4, 6, 2, 3), TileGrid(3, 3, 3, 3), TileGrid(7, 3, 2, 3)]
LARGE = [TileGrid(130, 90, 64, 40), TileGrid(70, 600, 70, 600), TileGrid(9, 5, 1, 1), TileGrid(33, 300, 33, 100)]

Inputs = tuple[Tensor, ...]


def inputs_of(
    grid: TileGrid,
    hidden: int = 3,
    *,
    shared: bool = True,
    widths: tuple[int, int] = (4, 2),
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Inputs:
    generator, tiles, (p, q) = torch.Generator().manual_seed(seed), grid.n_tiles, widths
    n = 1 if shared else tiles
    shapes = ((n, grid.tile_rows, p), (n, grid.tile_cols, q), (tiles, p, hidden), (tiles, q, hidden), (tiles, hidden))
    drawn = (torch.randn(s, generator=generator, dtype=torch.float64) for s in (*shapes, (tiles, hidden), (tiles,)))
    return tuple(x.to(dtype).requires_grad_(i > 1) for i, x in enumerate(drawn))


def definition(grid: TileGrid, X: Tensor, Y: Tensor, U: Tensor, V: Tensor, u: Tensor, v: Tensor, b: Tensor) -> Tensor:
    pre = (X @ U + u[..., None, :])[..., :, None, :] + (Y @ V)[..., None, :, :]
    return join_tiles((pre.relu() * v[..., None, None, :]).sum(-1) + b[..., None, None], grid)


def with_gradients(fn: Callable[..., Tensor], inputs: Inputs) -> list[Tensor]:
    matrix = fn(*inputs)
    g = ((torch.arange(matrix.numel()) % 9 - 4) / 4).reshape(matrix.shape).to(matrix)  # exact in half precisions
    leaves = [x for x in inputs if x.requires_grad]
    return [matrix.detach(), *torch.autograd.grad(matrix, leaves, g, materialize_grads=True)]


def found(kernel: Kernel, grid: TileGrid, inputs: Inputs) -> list[Tensor]:
    return with_gradients(lambda *x: relu_matrix(*x, grid=grid, kernel=kernel), inputs)


def expected(grid: TileGrid, inputs: Inputs) -> list[Tensor]:
    exact = tuple(x.detach().double().requires_grad_(x.requires_grad) for x in inputs)
    return with_gradients(lambda *x: definition(grid, *x), exact)


def assert_alike(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for x, y in zip(found, expected, strict=True):
        size = 1 + (float(y.detach().abs().max()) if y.numel() else 0.0)
        torch.testing.assert_close(x.double(), y.double(), rtol=tolerance, atol=tolerance * size)


def compile_kernels(init_method: str) -> bool:
    return native.has_kernels("cpu", "auto")


ALL = (0, 1, 2, 3, 4)


def many(x: Inputs) -> Inputs:
    return tuple(torch.stack([y, y + 1]) for y in x)


def _nested(f: Callable[..., Tensor]) -> Callable[..., Any]:
    inner = vmap(grad(f, ALL), in_dims=(0, None, 1, None, 0))
    outer = vmap(inner, in_dims=(None, 0, None, 2, 0))
    return lambda U, V, u, v, b: outer(
        *many((U, V)), torch.stack([u, u - 1], 1), torch.stack([v, v + 1], 2), many(many((b,)))[0]
    )


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "vmap": lambda f: lambda *x: vmap(f)(*many(x)),
    "grad": lambda f: grad(f, ALL),
    "vmap of grad": lambda f: lambda *x: vmap(grad(f, ALL))(*many(x)),
    "grad of vmap": lambda f: grad(lambda *x: vmap(f)(*many(x)).sum(), ALL),
    "nested vmap of grad": _nested,
    "jvp of vmap of grad": lambda f: lambda *x: jvp(vmap(grad(f, ALL)), many(x), tuple(y + 1 for y in many(x))),
    "hessian": lambda f: hessian(f, ALL),
    "reverse over reverse": lambda f: jacrev(jacrev(f, (0, 2)), (0, 2)),
    "third order": lambda f: lambda *x: jvp(hessian(f, 2), x, tuple(y - 1 for y in x)),
}
FIRST_ORDER = ("vmap", "grad", "vmap of grad", "grad of vmap")


def transformed(name: str, grid: TileGrid, kernel: Kernel | None, compiler: Callable[..., Any] = lambda f: f) -> Any:
    X, Y, *leaves = (x.detach() for x in inputs_of(grid, 2))

    def objective(*leaves: Tensor) -> Tensor:
        inputs = (X, Y, *leaves)
        matrix = definition(grid, *inputs) if kernel is None else relu_matrix(*inputs, grid=grid, kernel=kernel)
        return matrix.square().sum()

    return compiler(TRANSFORMS[name](objective))(*leaves)


def assert_trees_close(found: Any, expected: Any) -> None:
    for x, y in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def peak_of(run: Callable[[], Any]) -> int:
    with LiveBytes(1) as counter:
        run()
    return counter.peak
