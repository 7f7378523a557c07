"""Row blocks of any g-net: the whole tile as an oracle, derivatives of every order and mode, transforms, memory."""

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

# Forward mode and Inductor import parts of torch that torch itself deprecates.


def upper(pre: Tensor, params: dict[str, Tensor]) -> Tensor:
    x = torch.tanh(torch.relu(pre) @ params["weight"].mT + params["bias"])
    return x @ params["head"] + params["offset"]


def deep_case(rows: int, cols: int, hidden: int, seed: int = 0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    params = {"weight": normal(4, hidden), "bias": normal(4), "head": normal(4), "offset": normal()}
    return normal(rows, hidden), normal(cols, hidden), params


def whole(A: Tensor, B: Tensor, params: dict[str, Tensor]) -> Tensor:
    return upper(A.unsqueeze(-2) + B, params)


def chunked(max_bytes: int) -> Callable[..., Tensor]:
    return lambda A, B, params: chunked_apply(upper, A, B, params, max_bytes=max_bytes)


@given(st.integers(1, 7), st.integers(1, 5), st.integers(1, 4), st.integers(1, 5000), st.integers(0, 2**32))
def test_chunks_of_any_size_give_the_same_values_and_gradients(
    rows: int, cols: int, hidden: int, max_bytes: int, seed: int
) -> None:
    case = deep_case(rows, cols, hidden, seed)
    assert_trees_close(chunked(max_bytes)(*case), whole(*case))
    derivative = [grad(lambda *x, f=f: f(*x).square().sum(), (0, 1, 2))(*case) for f in (chunked(max_bytes), whole)]
    assert_trees_close(*derivative)


def population(f: Callable[..., Any]) -> Callable[..., Any]:
    """A vmap over three g-nets that share the columns."""

    def run(A: Tensor, B: Tensor, params: dict[str, Tensor]) -> Any:
        scales = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
        return torch.vmap(lambda s: f(A * s, B, {k: p + s for k, p in params.items()}))(scales)

    return run


DEEP_TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "vmap": population,
    "vmap of grad": lambda f: population(grad(lambda *x: f(*x).square().sum(), (0, 1, 2))),
    "grad of vmap": lambda f: grad(lambda *x: population(f)(*x).square().sum(), (0, 1, 2)),
    "forward mode": lambda f: jacfwd(f, (0, 1, 2)),
    "hessian": lambda f: hessian(lambda *x: f(*x).square().sum(), (0, 1, 2)),
    "reverse over reverse": lambda f: jacrev(jacrev(lambda *x: f(*x).square().sum(), (0, 2)), (0, 2)),
}


@pytest.mark.parametrize("name", DEEP_TRANSFORMS)
def test_chunks_under_transforms(name: str) -> None:
    transform, case = DEEP_TRANSFORMS[name], deep_case(5, 3, 2)
    assert_trees_close(transform(chunked(400))(*case), transform(whole)(*case))


@pytest.mark.parametrize("name", ["vmap", "vmap of grad", pytest.param("grad of vmap", marks=needs_whole_graphs)])
def test_compiled_programs_may_contain_chunks(name: str) -> None:
    transform, case = DEEP_TRANSFORMS[name], deep_case(5, 3, 2)
    program = torch.compile(transform(chunked(400)), fullgraph=True, backend="aot_eager")
    assert_trees_close(program(*case), transform(whole)(*case))


def test_chunks_ignore_autocast() -> None:
    A, B, params = deep_case(5, 3, 2)
    A, B = leaves = (A.float().requires_grad_(), B.float().requires_grad_())
    rest = {name: p.float() for name, p in params.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tile = chunked(400)(A, B, rest)
    assert tile.dtype == torch.float32
    expected = whole(A, B, rest)
    torch.testing.assert_close(tile, expected)
    torch.testing.assert_close(
        torch.autograd.grad(tile.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("n_gnets", [1, 4])
def test_memory_of_chunks_is_bounded(n_gnets: int) -> None:
    A, B, params = deep_case(60, 60, 8)
    stacked = (A.expand(n_gnets, -1, -1), B, {k: p.expand(n_gnets, *p.shape) for k, p in params.items()})
    max_bytes = 2**17
    weights = n_gnets * 60 * 60 * 8

    def run(f: Callable[..., Tensor]) -> Any:
        leaves = tuple(x.detach().clone().requires_grad_() for x in tree_leaves(stacked))
        tiles = torch.vmap(f, (0, None, 0))(leaves[0], leaves[1], dict(zip(params, leaves[2:], strict=True)))
        return torch.autograd.grad(tiles, leaves, torch.ones_like(tiles))

    assert peak_of(lambda: run(chunked(max_bytes))) <= 3 * weights + 2 * max_bytes
    assert peak_of(lambda: run(whole)) > 20 * weights


def test_chunked_apply_says_what_it_expects() -> None:
    A, B, params = deep_case(3, 4, 2)
    with pytest.raises(ValueError, match=r"got \[3, 1\] and \[4, 2\]"):
        chunked_apply(upper, A[:, 1:], B, params)
    with pytest.raises(ValueError, match="max_bytes must be positive, got 0"):
        chunked_apply(upper, A, B, params, max_bytes=0)
    with pytest.raises(ValueError, match=r"fn must return weights \[3, 4\], got \[3, 4, 2\]"):
        chunked_apply(lambda pre, _: pre, A, B, params)
