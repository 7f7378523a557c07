"""Row blocks of any g-net: whole tiles as an oracle, derivatives of every order and mode, transforms, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev
from torch.utils._pytree import tree_leaves

from gbfunc.hypernets.kernels import chunked_apply
from tests.support.kernel_cases import assert_trees_close, peak_of
from tests.support.versions import needs_whole_graphs

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


DEEP_TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "vmap": population,
    "vmap of grad": lambda f: population(grad(squares(f), (0, 1, 2))),
    "grad of vmap": lambda f: grad(squares(population(f)), (0, 1, 2)),
    "forward mode": lambda f: jacfwd(f, (0, 1, 2)),
    "hessian": lambda f: hessian(squares(f), (0, 1, 2)),
    "reverse over reverse": lambda f: jacrev(jacrev(squares(f), (0, 2)), (0, 2)),
}


@pytest.mark.parametrize("name", DEEP_TRANSFORMS)
def test_chunks_under_transforms(name: str) -> None:
    transform, case = DEEP_TRANSFORMS[name], deep_case(2, 5, 3, 2)
    assert_trees_close(transform(chunked(400))(*case), transform(whole)(*case))


@pytest.mark.parametrize("name", ["vmap of grad", pytest.param("grad of vmap", marks=needs_whole_graphs)])
def test_compiled_programs_may_contain_chunks(name: str) -> None:
    transform, case = DEEP_TRANSFORMS[name], deep_case(2, 5, 3, 2)
    program = torch.compile(transform(chunked(400)), fullgraph=True, backend="aot_eager")
    assert_trees_close(program(*case), transform(whole)(*case))


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
