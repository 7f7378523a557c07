"""ReLU matrices: every form equals the definition, in derivatives of every order and mode, transforms and memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, hessian
from torch.utils._pytree import tree_leaves

from gbfunc.hypernets.kernels import relu
from gbfunc.hypernets.kernels.operation import chunked_apply
from gbfunc.hypernets.kernels.relu import relu_matrix
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

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@st.composite
def grids(draw: st.DrawFn) -> TileGrid:
    (rows, cols) = (draw(st.integers(1, 9)) for _ in range(2))
    return TileGrid(rows, cols, draw(st.integers(1, rows)), draw(st.integers(1, cols)))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kernel", FAST)
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


@NEEDS_COMPILER
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    "grid", [TileGrid(70, 9, 70, 9), TileGrid(45, 600, 40, 300), TileGrid(130, 30, 13, 7)], ids=str
)
def test_any_number_of_threads_and_parts(grid: TileGrid, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relu, "_THREAD_WORK", 1)
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


@pytest.mark.parametrize("kernel", FAST)
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


Case = tuple[Tensor, Tensor, dict[str, Tensor]]


def upper(pre: Tensor, params: dict[str, Tensor]) -> Tensor:
    x = torch.tanh(torch.relu(pre) @ params["weight"].mT + params["bias"])
    return x @ params["head"] + params["offset"]


def deep_case(tiles: int, rows: int, cols: int, hidden: int, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(tiles, *size, generator=generator, dtype=torch.float64)

    params = {"weight": normal(4, hidden), "bias": normal(4), "head": normal(4), "offset": normal()}
    return normal(rows, hidden), normal(cols, hidden), params


def whole(A: Tensor, B: Tensor, params: dict[str, Tensor]) -> Tensor:
    return torch.vmap(upper)(A[:, :, None] + B[:, None], params)


def chunked(max_bytes: int) -> Callable[..., Tensor]:
    return lambda A, B, params: chunked_apply(upper, A, B, params, max_bytes=max_bytes)


def squares(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *x: f(*x).square().sum()


CASES = st.builds(
    deep_case, st.integers(1, 3), st.integers(1, 7), st.integers(1, 5), st.integers(1, 4), st.integers(0, 99)
)


@given(CASES, st.integers(1, 5000))
def test_chunks_of_any_size_give_the_same_values_and_gradients(case: Case, max_bytes: int) -> None:
    assert_trees_close(chunked(max_bytes)(*case), whole(*case))
    assert_trees_close(*(grad(squares(f), (0, 1, 2))(*case) for f in (chunked(max_bytes), whole)))


def population(f: Callable[..., Any]) -> Callable[..., Any]:
    def run(A: Tensor, B: Tensor, params: dict[str, Tensor]) -> Any:
        scales = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
        return torch.vmap(lambda s: f(A * s, B, {k: p + s for k, p in params.items()}))(scales)

    return run


def test_chunks_under_transforms_and_in_compiled_programs() -> None:
    case = deep_case(2, 5, 3, 2)
    of_chunks, of_whole = (population(grad(squares(f), (0, 1, 2))) for f in (chunked(400), whole))
    for program in (of_chunks, torch.compile(of_chunks, fullgraph=True, backend="aot_eager")):
        assert_trees_close(program(*case), of_whole(*case))
    assert_trees_close(*(hessian(squares(f), (0, 1, 2))(*case) for f in (chunked(400), whole)))


def test_chunks_ignore_autocast() -> None:
    A, B, params = deep_case(1, 5, 3, 2)
    A, B = leaves = (A.float().requires_grad_(), B.float().requires_grad_())
    rest = {name: p.float() for name, p in params.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tiles = chunked(400)(A, B, rest)
    expected = whole(A, B, rest)
    torch.testing.assert_close(tiles, expected)
    found, gradients = (torch.autograd.grad(x.sum(), leaves) for x in (tiles, expected))
    torch.testing.assert_close(found, gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_gnets", [1, 4])
def test_memory_of_chunks_is_bounded(n_gnets: int) -> None:
    A, B, params = deep_case(n_gnets, 60, 60, 8)
    max_bytes, weights = 2**17, n_gnets * 60 * 60 * 8

    def run(f: Callable[..., Tensor]) -> Any:
        leaves = tuple(x.clone().requires_grad_() for x in tree_leaves((A, B, params)))
        tiles = f(leaves[0], leaves[1], dict(zip(params, leaves[2:], strict=True)))
        return torch.autograd.grad(tiles, leaves, torch.ones_like(tiles))

    assert peak_of(lambda: run(chunked(max_bytes))) <= 3 * weights + 2 * max_bytes
    assert peak_of(lambda: run(whole)) > 20 * weights
