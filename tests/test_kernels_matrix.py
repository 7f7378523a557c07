"""ReLU matrices from codes and leaves: the one pass equals its parts, in values, derivatives and transforms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import gbfunc as gb
from gbfunc.hypernets.kernels import native, relu_matrix
from gbfunc.hypernets.kernels.eager import reference_tiles
from gbfunc.tiling import TileGrid, join_tiles
from gbfunc.trees import tree_map
from tests.support.kernel_cases import NEEDS_COMPILER

pytestmark = [NEEDS_COMPILER]

GRIDS = [TileGrid(5, 7, 2, 3), TileGrid(4, 6, 2, 3), TileGrid(3, 3, 3, 3), TileGrid(7, 3, 2, 3)]
LARGE = [TileGrid(130, 90, 64, 40), TileGrid(70, 600, 70, 600), TileGrid(9, 5, 1, 1), TileGrid(33, 300, 33, 100)]


def inputs_of(
    grid: TileGrid,
    hidden: int = 3,
    shared: bool = True,
    widths: tuple[int, int] = (4, 2),
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """X, Y, U, V, u, v and b."""
    generator, tiles, (p, q) = torch.Generator().manual_seed(0), grid.n_tiles, widths
    n = 1 if shared else tiles
    shapes = ((n, grid.tile_rows, p), (n, grid.tile_cols, q), (tiles, p, hidden), (tiles, q, hidden), (tiles, hidden))
    drawn = [torch.randn(s, generator=generator, dtype=torch.float64) for s in (*shapes, (tiles, hidden), (tiles,))]
    return tuple(x.to(dtype or torch.float64) for x in drawn)


def definition(grid: TileGrid, X: Tensor, Y: Tensor, U: Tensor, V: Tensor, u: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return join_tiles(reference_tiles(X @ U + u.unsqueeze(-2), Y @ V, v, b), grid)


def with_gradients(fn: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_(i > 1) for i, x in enumerate(inputs)]
    matrix = fn(*leaves)
    weights = torch.linspace(-1, 1, matrix.numel(), dtype=matrix.dtype).reshape(matrix.shape).cos()
    return [matrix.detach(), *torch.autograd.grad((matrix * weights).sum(), [x for x in leaves if x.requires_grad])]


@pytest.mark.parametrize("shared", [True, False], ids=["codes shared", "codes of each tile"])
@pytest.mark.parametrize("hidden", [1, 16, 33])
@pytest.mark.parametrize("grid", [*GRIDS, *LARGE], ids=str)
def test_values_and_gradients_equal_the_definition(grid: TileGrid, hidden: int, shared: bool) -> None:
    inputs = inputs_of(grid, hidden, shared)
    expected = with_gradients(lambda *x: definition(grid, *x), inputs)
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-4)):
        found = with_gradients(
            lambda *x: relu_matrix(*x, grid=grid, kernel="compiled"), tuple(x.to(dtype) for x in inputs)
        )
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance * float(y.abs().max() + 1))


@pytest.mark.parametrize("widths", [(0, 2), (3, 0), (0, 0)], ids=str)
def test_codes_may_have_no_width(widths: tuple[int, int]) -> None:
    inputs, grid = inputs_of(GRIDS[0], widths=widths), GRIDS[0]
    expected = with_gradients(lambda *x: definition(grid, *x), inputs)
    found = with_gradients(lambda *x: relu_matrix(*x, grid=grid, kernel="compiled"), inputs)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_few_tiles_are_spread_over_threads(threads: int) -> None:
    grid, before = TileGrid(200, 30, 200, 30), torch.get_num_threads()
    inputs = inputs_of(grid, 5)
    expected = with_gradients(lambda *x: definition(grid, *x), inputs)
    torch.set_num_threads(threads)
    try:
        found = with_gradients(lambda *x: relu_matrix(*x, grid=grid, kernel="compiled"), inputs)
    finally:
        torch.set_num_threads(before)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("grid", GRIDS[:2], ids=str)
def test_derivatives_equal_finite_differences(grid: TileGrid) -> None:
    inputs = tuple(x.requires_grad_() for x in inputs_of(grid, 2))

    X, Y, *leaves = inputs

    def matrix(*leaves: Tensor) -> Tensor:
        return relu_matrix(X.detach(), Y.detach(), *leaves, grid=grid, kernel="compiled")

    assert torch.autograd.gradcheck(matrix, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(matrix, leaves, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("name", ["vmap", "grad", "vmap of grad", "grad of vmap", "jvp", "jvp of grad", "hessian"])
def test_transforms_agree_with_the_definition(name: str) -> None:
    grid = GRIDS[0]
    X, Y, U, V, u, v, b = inputs_of(grid, 2)
    many = torch.stack([U, U + 1, U - 2])

    def of(form: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda U: form(X, Y, U, V, u, v, b).square().sum()

    transforms: dict[str, Callable[[Callable[[Tensor], Tensor]], object]] = {
        "vmap": lambda f: torch.vmap(f)(many),
        "grad": lambda f: torch.func.grad(f)(U),
        "vmap of grad": lambda f: torch.vmap(torch.func.grad(f))(many),
        "grad of vmap": lambda f: torch.func.grad(lambda x: torch.vmap(f)(x).sum())(many),
        "jvp": lambda f: torch.func.jvp(f, (U,), (torch.ones_like(U),)),
        "jvp of grad": lambda f: torch.func.jvp(torch.func.grad(f), (U,), (torch.ones_like(U),)),
        "hessian": lambda f: torch.func.hessian(f)(U),
    }
    found = transforms[name](of(lambda *x: relu_matrix(*x, grid=grid, kernel="compiled")))
    expected = transforms[name](of(lambda *x: definition(grid, *x)))
    torch.testing.assert_close(found, expected)


def test_it_is_made_in_one_pass_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    plain = native.matrix

    def counted(sides: native.Sides, v: Tensor, b: Tensor, grid: TileGrid) -> Tensor:
        calls.append(sides.A is None)
        return plain(sides, v, b, grid)

    monkeypatch.setattr(native, "matrix", counted)
    grid = GRIDS[0]
    inputs = inputs_of(grid)
    relu_matrix(*inputs, grid=grid, kernel="compiled")
    # Half precisions are summed in float32, from sides that are rounded as ever.
    relu_matrix(*(x.bfloat16() for x in inputs), grid=grid, kernel="compiled")
    assert calls == [True, False]
    relu_matrix(*inputs, grid=grid)
    relu_matrix(*inputs, grid=grid, kernel="eager")
    assert calls == [True, False]


def test_matrices_of_many_genomes_are_those_of_each() -> None:
    net = torch.nn.Linear(60, 40, bias=False)
    plan = gb.make_plan(net, gb.gnet((5,)), max_tile=16)
    genomes = [gb.init_genome(plan, net, seed=seed) for seed in range(3)]
    many = torch.vmap(lambda genome: gb.generate(plan, genome, kernel="compiled"))(
        tree_map(lambda *x: torch.stack(x), *genomes)
    )
    for i, genome in enumerate(genomes):
        one = gb.generate(plan, genome, kernel="compiled")
        torch.testing.assert_close(many["weight"][i], one["weight"])
