"""The Triton form on CPU tensors, a test file of its own: Triton must be imported with TRITON_INTERPRET=1.

`tests/test_kernels_triton.py` runs it in a process where that is so.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gbfunc.hypernets.kernels import relu_tile, relu_tiles, triton
from gbfunc.tiling import TileGrid
from tests.support.kernel_cases import (
    FIRST_ORDER,
    TRANSFORMS,
    Shape,
    assert_trees_close,
    check,
    draw,
    relu_objective,
    with_gradients,
)

pytestmark = [
    # Forward mode imports parts of torch that torch itself deprecates.
    # Triton 3.1 came before numpy 2.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 7), st.integers(1, 7), st.integers(1, 5))
TOLERANCES = {torch.float64: 1e-14, torch.float32: 1e-5} | {
    dtype: torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16)
}
GRIDS = [TileGrid(5, 7, 2, 3), TileGrid(70, 150, 40, 80), TileGrid(200, 3, 70, 3), TileGrid(4, 140, 3, 140)]


@pytest.fixture(autouse=True, scope="module")
def _triton_on_a_cpu() -> None:
    assert type(triton.forward_kernel).__name__ == "InterpretedFunction", "set TRITON_INTERPRET=1"
    relu_tile.native = triton  # what `kernel="compiled"` means on a CPU


@pytest.mark.parametrize("dtype", TOLERANCES)
@settings(max_examples=5)
@given(SHAPES, st.integers(0, 2**32))
def test_values_and_gradients_equal_the_oracle(dtype: torch.dtype, shape: Shape, seed: int) -> None:
    case = draw(shape, seed, dtype)
    check(with_gradients(case, "compiled"), case, TOLERANCES[dtype])


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_several_blocks_of_a_matrix(grid: TileGrid) -> None:
    _, *leaves = draw((grid.n_tiles, grid.tile_rows, grid.tile_cols, 19))
    leaves = [x.requires_grad_() for x in leaves]
    g = torch.randn(grid.cols, grid.rows, dtype=torch.float64).T
    found, expected = (
        [W, *torch.autograd.grad(W, leaves, g)]
        for W in (relu_tiles(*leaves, kernel=kernel, grid=grid) for kernel in ("compiled", "reference"))
    )
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [*FIRST_ORDER, "jvp of grad", "hessian"])
def test_transforms_agree_with_those_of_the_reference(name: str) -> None:
    transform, leaves = TRANSFORMS[name], draw((2, 3, 4, 3))[1:]
    found, expected = (transform(relu_objective(kernel))(*leaves) for kernel in ("compiled", "reference"))
    assert_trees_close(found, expected)


def test_what_is_not_a_number_is_not_hidden() -> None:
    _, A, B, v, b = draw((2, 5, 9, 3), dtype=torch.float32)
    A[1, 2, 0] = torch.nan
    tiles = relu_tiles(A, B, v, b, kernel="compiled")
    assert tiles[1, 2].isnan().all()
    assert tiles.isnan().sum() == 9


def test_defaults_of_the_process_change_nothing() -> None:
    case = draw((2, 3, 4, 5), dtype=torch.float32)
    expected = with_gradients(case, "compiled")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = with_gradients(case, "compiled")
    finally:
        torch.set_default_dtype(torch.float32)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
