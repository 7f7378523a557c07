"""ReLU tile kernels: the definition as an oracle, derivatives of every order and mode, transforms, memory."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gbfunc.hypernets.kernels import eager, native, relu_tile, relu_tiles
from gbfunc.tiling import TileGrid, join_tiles
from gbfunc.types import Kernel
from tests.support.kernel_cases import (
    FAST,
    FIRST_ORDER,
    NEEDS_COMPILER,
    TRANSFORMS,
    Shape,
    assert_trees_close,
    check,
    draw,
    peak_of,
    relu_objective,
    with_gradients,
)

# Forward mode and Inductor import parts of torch that torch itself deprecates.

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 7), st.integers(1, 7), st.integers(1, 5))
SEEDS = st.integers(0, 2**32)


# --- every form agrees with the definition -------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["reference", *FAST])
@given(SHAPES, SEEDS)
def test_values_and_gradients_equal_the_oracle(kernel: Kernel, shape: Shape, seed: int) -> None:
    case = draw(shape, seed, torch.float32)
    check(with_gradients(case, kernel), case, 1e-5)


@pytest.mark.parametrize("kernel", ["reference", *FAST])
@given(SHAPES, SEEDS, st.sampled_from([torch.bfloat16, torch.float16]))
def test_half_precisions_round_once(kernel: Kernel, shape: Shape, seed: int, dtype: torch.dtype) -> None:
    case = draw(shape, seed, dtype)
    found = with_gradients(case, kernel)
    if kernel == "reference":  # autograd also rounds the gradient of each cast
        check(found, case, 2 * torch.finfo(dtype).eps)
    else:
        check(found, case, torch.finfo(dtype).eps)


@given(SHAPES, SEEDS, st.integers(1, 30))
def test_blocks_of_any_size_give_the_same_tiles_and_gradients(shape: Shape, seed: int, block: int) -> None:
    case = draw(shape, seed, torch.float32)
    with patch.object(eager, "block_size", lambda _: block):
        check(with_gradients(case, "eager"), case, 1e-5)


@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("shape", [(40, 30, 35, 30), (1, 1100, 1000, 2)], ids=["tiles", "rows"])
def test_large_cases_take_several_blocks(shape: Shape, kernel: Kernel) -> None:
    case = draw(shape)
    for found, expected in zip(with_gradients(case, kernel), with_gradients(case, "reference"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernel", FAST)
def test_non_contiguous_inputs(kernel: Kernel) -> None:
    g, A, B, v, b = draw((3, 4, 5, 6))
    strided = (g.mT.contiguous().mT, A.mT.contiguous().mT, B.flip(0).flip(0), v.T.contiguous().T, b.flip(0).flip(0))
    for found, expected in zip(with_gradients(strided, kernel), with_gradients((g, A, B, v, b), kernel), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kernel", ["reference", *FAST])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_defaults_of_the_process_change_nothing(kernel: Kernel, dtype: torch.dtype) -> None:
    for shape in ((2, 3, 4, 5), (11, 60, 70, 30)):
        case = draw(shape, dtype=dtype)
        expected, before = with_gradients(case, kernel), torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"):
                found = with_gradients(case, kernel)
        finally:
            torch.set_default_dtype(before)
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)


# --- derivatives of every order and mode, and transforms -----------------------------------------------------------


# torch 2.5 uses there what it deprecates itself.
@pytest.mark.filterwarnings("ignore:.*torch._vmap_internals:FutureWarning")
@pytest.mark.parametrize("kernel", FAST)
def test_derivatives_equal_finite_differences(kernel: Kernel) -> None:
    leaves = tuple(x.requires_grad_() for x in draw((2, 3, 4, 3))[1:])

    def tiles(*x: Tensor) -> Tensor:
        return relu_tiles(*x, kernel=kernel)

    assert torch.autograd.gradcheck(tiles, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(tiles, leaves, check_fwd_over_rev=True)


@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_agree_with_those_of_the_reference(name: str, kernel: Kernel) -> None:
    transform, leaves = TRANSFORMS[name], draw((2, 3, 4, 3))[1:]
    assert_trees_close(transform(relu_objective(kernel))(*leaves), transform(relu_objective("reference"))(*leaves))


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_compiled_programs_may_contain_the_kernel(name: str) -> None:
    transform, leaves = TRANSFORMS[name], draw((2, 3, 4, 3))[1:]
    program = torch.compile(transform(relu_objective("auto")), fullgraph=True, backend="aot_eager")
    assert_trees_close(program(*leaves), transform(relu_objective("reference"))(*leaves))


# --- a matrix written without its tiles ------------------------------------------------------------------------------

GRIDS = [TileGrid(5, 7, 2, 3), TileGrid(4, 6, 2, 3), TileGrid(3, 3, 3, 3), TileGrid(7, 3, 2, 3)]


def _of_grid(grid: TileGrid, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    return draw((grid.n_tiles, grid.tile_rows, grid.tile_cols, 3), dtype=dtype)[1:]


@pytest.mark.parametrize(
    ("kernel", "block"),
    [("eager", 1), ("eager", 20), ("eager", 2**20), pytest.param("compiled", 0, marks=NEEDS_COMPILER)],
    ids=["eager rows", "eager rows of tiles", "eager whole", "compiled"],
)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_matrix_and_its_derivatives_equal_the_joined_tiles(
    grid: TileGrid, block: int, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager, "block_size", lambda _: block)
    leaves = tuple(x.requires_grad_() for x in _of_grid(grid))

    def matrix(*x: Tensor) -> Tensor:
        return relu_tiles(*x, kernel=kernel, grid=grid)

    expected = join_tiles(relu_tiles(*leaves, kernel="reference"), grid)
    torch.testing.assert_close(matrix(*leaves), expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(matrix, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(matrix, leaves, check_fwd_over_rev=True, fast_mode=True)


def test_a_matrix_is_compiled_where_the_whole_of_it_repays_that(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(native, "is_available", lambda: asked.append(1))
    grid = GRIDS[0]
    leaves = [x.requires_grad_() for x in _of_grid(grid)]
    work = leaves[0].numel() * grid.tile_cols
    for least, expected in ((work, [1, 1]), (work + 1, [])):
        monkeypatch.setattr(relu_tile, "COMPILE_WORK", least)
        torch.autograd.grad(relu_tiles(*leaves, grid=grid).sum(), leaves)
        assert asked == expected
        asked.clear()


@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("name", ["vmap", "vmap of grad", "grad of vmap", "jvp of vmap of grad"])
def test_matrices_under_transforms(name: str, kernel: Kernel) -> None:
    grid = GRIDS[0]
    leaves = tuple(torch.stack([x, x + 1]) for x in _of_grid(grid))

    def objective(form: Kernel) -> Callable[..., Tensor]:
        return lambda *x: relu_tiles(*x, kernel=form, grid=grid).square().sum()

    found, expected = (TRANSFORMS[name](objective(form))(*leaves) for form in (kernel, "reference"))
    assert_trees_close(found, expected)


@pytest.mark.parametrize("kernel", FAST)
def test_a_matrix_takes_the_memory_of_its_weights(kernel: Kernel) -> None:
    grid = TileGrid(2000, 2000, 100, 100)
    leaves = [x.requires_grad_() for x in draw((grid.n_tiles, 100, 100, 4), dtype=torch.float32)[1:]]
    g = torch.ones(2000, 2000)
    peak = peak_of(lambda: torch.autograd.grad(relu_tiles(*leaves, kernel=kernel, grid=grid), leaves, g))
    assert peak <= 3 * g.nbytes


# --- memory, and what is refused -----------------------------------------------------------------------------------


def test_memory_of_the_relu_tile_is_that_of_its_weights() -> None:
    case = draw((110, 100, 100, 8), dtype=torch.float32)
    buffers, weights = 2 * eager.block_size(case[0].device) * 4, case[0].nbytes
    assert peak_of(lambda: with_gradients(case, "eager")) <= 2 * weights + buffers
    assert peak_of(lambda: with_gradients(case, "reference")) > 15 * weights


def test_relu_tiles_say_what_they_expect() -> None:
    _, A, B, v, b = draw((2, 3, 4, 5))
    with pytest.raises(ValueError, match="kernel must be one of .* got 'fast'"):
        relu_tiles(A, B, v, b, kernel="fast")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"got \[2, 3, 5\], \[2, 4, 4\], \[2, 5\] and \[2\]"):
        relu_tiles(A, B[..., 1:], v, b)
    with pytest.raises(ValueError, match="equal leading dimensions"):
        relu_tiles(A, B[:1], v, b)
    with pytest.raises(ValueError, match="v \\[..., H\\]"):
        relu_tiles(A, B, v[:, 1:], b)
    with pytest.raises(TypeError, match="torch.float64, torch.float32, torch.float64 and torch.float64"):
        relu_tiles(A, B.float(), v, b)
    with pytest.raises(TypeError, match="floating-point"):
        relu_tiles(A.long(), B.long(), v.long(), b.long())
    with pytest.raises(ValueError, match="of the tiles of TileGrid"):
        relu_tiles(A, B, v, b, grid=TileGrid(9, 4, 3, 4))
