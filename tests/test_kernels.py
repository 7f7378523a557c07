"""ReLU matrices: every form equals the definition, in derivatives of every order and mode, transforms and memory."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gbfunc.hypernets.kernels import eager, native, relu_matrix
from gbfunc.tiling import TileGrid
from gbfunc.types import Kernel
from tests.support.kernel_cases import (
    FAST,
    FIRST_ORDER,
    GRIDS,
    LARGE,
    NEEDS_COMPILER,
    TRANSFORMS,
    assert_alike,
    assert_trees_close,
    expected,
    found,
    inputs_of,
    peak_of,
    transformed,
)
from tests.support.trees_equal import same_bits, torch_defaults

FORMS = ["reference", *FAST]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@st.composite
def grids(draw: st.DrawFn) -> TileGrid:
    (rows, cols) = (draw(st.integers(1, 9)) for _ in range(2))
    return TileGrid(rows, cols, draw(st.integers(1, rows)), draw(st.integers(1, cols)))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kernel", FORMS)
@given(grids(), st.integers(1, 20), st.booleans(), st.tuples(st.integers(0, 3), st.integers(0, 3)), st.integers(0, 99))
def test_values_and_gradients_equal_the_definition(
    kernel: Kernel, dtype: torch.dtype, grid: TileGrid, hidden: int, shared: bool, widths: tuple[int, int], seed: int
) -> None:
    inputs = inputs_of(grid, hidden, shared=shared, widths=widths, dtype=dtype, seed=seed)
    made = found(kernel, grid, inputs)
    assert all(x.dtype == dtype for x in made)
    assert_alike(made, expected(grid, inputs), TOLERANCES[dtype])


@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("grid", [*LARGE, TileGrid(1100, 1000, 1100, 1000)], ids=str)
def test_large_matrices(kernel: Kernel, grid: TileGrid) -> None:
    inputs = inputs_of(grid, 33 if grid.numel < 2**20 else 2)
    assert_alike(found(kernel, grid, inputs), expected(grid, inputs), 1e-11)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("block", [1, 20, 2**20], ids=["rows", "rows of tiles", "whole"])
def test_blocks_of_any_size_give_the_same_matrix_and_gradients(grid: TileGrid, block: int) -> None:
    inputs = inputs_of(grid)
    with patch.object(eager, "block_size", lambda _: block):
        assert_alike(found("eager", grid, inputs), expected(grid, inputs), 1e-12)


@NEEDS_COMPILER
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    "grid", [TileGrid(70, 9, 70, 9), TileGrid(45, 600, 40, 300), TileGrid(130, 30, 13, 7)], ids=str
)
def test_any_number_of_threads_and_parts(grid: TileGrid, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_THREAD_WORK", 1)
    inputs, before = inputs_of(grid, 11), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        made = found("compiled", grid, inputs)
    finally:
        torch.set_num_threads(before)
    assert_alike(made, expected(grid, inputs), 1e-12)


@pytest.mark.parametrize("kernel", FAST)
def test_inputs_of_any_strides(kernel: Kernel) -> None:
    grid = GRIDS[0]
    inputs = inputs_of(grid, shared=False)
    strided = tuple(torch.stack([x.detach()] * 2, -1)[..., 0].requires_grad_(x.requires_grad) for x in inputs)
    assert not any(x.is_contiguous() for x in strided)
    assert_alike(found(kernel, grid, strided), found(kernel, grid, inputs), 1e-12)


@pytest.mark.parametrize("kernel", FORMS)
@pytest.mark.parametrize("grid", [GRIDS[0], TileGrid(200, 300, 60, 70)], ids=str)
def test_defaults_of_the_process_change_nothing(kernel: Kernel, grid: TileGrid) -> None:
    inputs = inputs_of(grid, 20, dtype=torch.float32)

    def made() -> list[Tensor]:
        matrix = relu_matrix(*inputs, grid=grid, kernel=kernel)
        return [matrix, *torch.autograd.grad(matrix.sum(), inputs[2:])]

    before = made()
    with torch_defaults("meta", torch.float64):
        after = made()
    assert same_bits(after, before)


@pytest.mark.parametrize("kernel", FORMS)
def test_what_is_not_a_number_is_not_hidden(kernel: Kernel) -> None:
    inputs = [x.detach() for x in inputs_of(TileGrid(5, 9, 5, 9), shared=False)]
    inputs[0][0, 2, 0] = torch.nan
    matrix = relu_matrix(*inputs, grid=TileGrid(5, 9, 5, 9), kernel=kernel)
    assert matrix[2].isnan().all() and matrix.isnan().sum() == 9


@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("grid", GRIDS[:2], ids=str)
def test_derivatives_equal_finite_differences(grid: TileGrid, kernel: Kernel) -> None:
    X, Y, *leaves = inputs_of(grid, 2)

    def matrix(*leaves: Tensor) -> Tensor:
        return relu_matrix(X, Y, *leaves, grid=grid, kernel=kernel)

    assert torch.autograd.gradcheck(matrix, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(matrix, leaves, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_agree_with_those_of_the_definition(name: str, kernel: Kernel) -> None:
    assert_trees_close(transformed(name, GRIDS[0], kernel), transformed(name, GRIDS[0], None))


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_compiled_programs_may_contain_the_kernel(name: str) -> None:
    compiler = partial(torch.compile, fullgraph=True, backend="aot_eager")
    assert_trees_close(transformed(name, GRIDS[0], "auto", compiler), transformed(name, GRIDS[0], None))


@pytest.mark.parametrize("kernel", FAST)
def test_a_matrix_takes_the_memory_of_its_weights(kernel: Kernel) -> None:
    grid = TileGrid(2000, 2000, 100, 100)
    inputs = inputs_of(grid, 4, dtype=torch.float32)
    g = torch.ones(2000, 2000)
    peak = peak_of(lambda: torch.autograd.grad(relu_matrix(*inputs, grid=grid, kernel=kernel), inputs[2:], g))
    assert peak <= 3.5 * g.nbytes  # the matrix, tiles of one direction, the cotangent, and blocks
