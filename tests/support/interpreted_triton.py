"""The Triton form on CPU tensors, a test file of its own: Triton must be imported with TRITON_INTERPRET=1.

`tests/test_kernels_triton.py` runs it in a process where that is so.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gbfunc.hypernets.kernels import relu, relu_matrix, relu_triton
from gbfunc.tiling import TileGrid
from tests.support.kernel_cases import (
    FIRST_ORDER,
    GRIDS,
    assert_alike,
    assert_trees_close,
    expected,
    found,
    inputs_of,
    transformed,
)

# Triton 3.1 came before numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-8}
LARGE = [TileGrid(70, 150, 40, 80), TileGrid(200, 3, 70, 3), TileGrid(4, 140, 3, 140)]


@pytest.fixture(autouse=True, scope="module")
def _triton_on_a_cpu() -> None:
    assert type(relu_triton.forward_kernel).__name__ == "InterpretedFunction", "set TRITON_INTERPRET=1"
    relu._tiles, relu._gradients = relu_triton.tiles, relu_triton.gradients


@pytest.mark.parametrize("dtype", TOLERANCES)
@settings(max_examples=5)
@given(st.sampled_from(GRIDS), st.integers(1, 5), st.integers(0, 99))
def test_values_and_gradients_equal_the_definition(dtype: torch.dtype, grid: TileGrid, hidden: int, seed: int) -> None:
    inputs = inputs_of(grid, hidden, dtype=dtype, seed=seed)
    assert_alike(found("eager", grid, inputs), expected(grid, inputs), TOLERANCES[dtype])


@pytest.mark.parametrize("grid", LARGE, ids=str)
def test_several_blocks_of_a_matrix(grid: TileGrid) -> None:
    inputs = inputs_of(grid, 19)
    assert_alike(found("eager", grid, inputs), expected(grid, inputs), 1e-12)


@pytest.mark.parametrize("name", [*FIRST_ORDER, "hessian"])
def test_transforms_agree_with_those_of_the_definition(name: str) -> None:
    assert_trees_close(transformed(name, GRIDS[0], "eager"), transformed(name, GRIDS[0], None))


def test_what_is_not_a_number_is_not_hidden() -> None:
    grid = TileGrid(5, 9, 5, 9)
    inputs = [x.detach() for x in inputs_of(grid, shared=False)]
    inputs[0][0, 2, 0] = torch.nan
    matrix = relu_matrix(*inputs, grid=grid, kernel="eager")
    assert matrix[2].isnan().all() and matrix.isnan().sum() == 9
