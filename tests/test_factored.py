"""Factored weights, and weights made again in backward: every operation gives what the dense weight gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn

from gbfunc.factored import FactoredWeight, factored_weight, remat_weight, stack_rows
from tests.support.lazy_weights import KINDS, as_kind, assert_close, make_factors, vectors


def assert_same(run: Callable[[Tensor], Tensor], weights: tuple[Tensor, Tensor], leaves: list[Tensor]) -> None:
    """Equal values and gradients of `run` with two forms of a weight."""
    expected, actual = run(weights[0]), run(weights[1])
    assert_close(actual, expected)
    seed = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype).reshape(expected.shape)
    wanted = torch.autograd.grad(expected, leaves, seed)
    for gradient, target in zip(torch.autograd.grad(actual, leaves, seed), wanted, strict=True):
        assert_close(gradient, target)


@st.composite
def grids(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """(rows, cols, tile rows, tile columns, rank), with a last tile that may be cropped."""

    def axis() -> tuple[int, int]:
        length = draw(st.integers(1, 11))
        tile = draw(st.integers(1, length))
        return length, -(-length // tile)

    (rows, nr), (cols, nc) = axis(), axis()
    return rows, cols, nr, nc, draw(st.integers(1, 3))


def balanced(rows: int, cols: int, nr: int, nc: int) -> tuple[int, int]:
    """Tile counts after balancing: 5 rows in 4 tiles of 2 need only 3."""
    return -(-rows // -(-rows // nr)), -(-cols // -(-cols // nc))


# Laws: every way to apply a matrix, any grid.

MATRIX_FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w, b: F.linear(x, w),
    "linear_bias": lambda x, w, b: F.linear(x, w, b),
    "batched": lambda x, w, b: F.linear(x.expand(2, *x.shape), w, b),
    "vector": lambda x, w, b: F.linear(x[0], w, b),
    "empty": lambda x, w, b: F.linear(x[:0], w, b).sum(0) + x.sum(),
    "matmul_t": lambda x, w, b: torch.matmul(x, w.t()),
    "at_T": lambda x, w, b: x @ w.T,
    "at_mT": lambda x, w, b: x @ w.mT,
    "mm_transpose": lambda x, w, b: torch.mm(x, w.transpose(0, -1)),
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
    "addmm_scaled": lambda x, w, b: torch.addmm(b, x, w.t(), beta=0.5, alpha=2.0),
    "weight_first": lambda x, w, b: w @ x.t(),
    "weight_first_batched": lambda x, w, b: w @ x.t().expand(2, *x.t().shape),
    "weight_vector": lambda x, w, b: torch.mv(w, x[0]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", MATRIX_FORMS)
@settings(deadline=None, max_examples=8)
@given(grid=grids(), transposed=st.booleans())
def test_matrix_forms(kind: str, form: str, grid: tuple[int, int, int, int, int], transposed: bool) -> None:
    rows, cols, nr, nc, k = grid
    nr, nc = balanced(rows, cols, nr, nc)
    left, right = make_factors(rows, cols, nr, nc, k, seed=0)
    shape = (cols, rows) if transposed else (rows, cols)
    report: Counter[tuple[str, str]] = Counter()
    options = {"rows": rows, "cols": cols, "transposed": transposed}
    dense = as_kind("dense", left, right, shape, **options)
    lazy = as_kind(kind, left, right, shape, **options, report=report)
    x = torch.randn(3, shape[1], dtype=torch.float64, requires_grad=True)
    b = torch.randn(shape[0], dtype=torch.float64)
    assert_same(lambda w: MATRIX_FORMS[form](x, w, b), (dense, lazy), [x, left, right])
    assert not report


@settings(deadline=None, max_examples=30)
@given(grid=grids(), transposed=st.booleans())
def test_dense_is_the_loop_over_weights(grid: tuple[int, int, int, int, int], transposed: bool) -> None:
    rows, cols, nr, nc, k = grid
    nr, nc = balanced(rows, cols, nr, nc)
    left, right = make_factors(rows, cols, nr, nc, k, seed=1)
    shape = (cols, rows) if transposed else (rows, cols)
    weight = factored_weight(left, right, shape, rows=rows, cols=cols, transposed=transposed).dense()
    r, c = left.shape[2], right.shape[2]
    for i in range(rows):
        for j in range(cols):
            expected = left[i // r, j // c, i % r] @ right[i // r, j // c, j % c]
            actual = weight[j, i] if transposed else weight[i, j]
            assert_close(actual, expected)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=20)
@given(
    dims=st.integers(1, 3),
    tiles=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    padding=st.sampled_from([0, 1, "same", "valid"]),
    bias=st.booleans(),
    batched=st.booleans(),
)
def test_convolutions(
    kind: str,
    dims: int,
    tiles: tuple[int, int],
    stride: int,
    dilation: int,
    padding: int | str,
    bias: bool,
    batched: bool,
) -> None:
    out, channels, kernel = 5, 4, (2, 3, 1)[:dims]
    stride = 1 if padding == "same" else stride
    nr, nc = balanced(out, channels, *tiles)
    cols = channels * torch.Size(kernel).numel()
    left, _ = make_factors(out, cols, nr, nc, 2, seed=2)
    per_tile = -(-channels // nc) * (cols // channels)
    right = torch.randn(nr, nc, per_tile, 2, dtype=torch.float64, requires_grad=True)
    shape = (out, channels, *kernel)
    report: Counter[tuple[str, str]] = Counter()
    dense = as_kind("dense", left, right, shape, rows=out, cols=cols)
    lazy = as_kind(kind, left, right, shape, rows=out, cols=cols, report=report)
    x = torch.randn(*((2,) if batched else ()), channels, *(7, 6, 5)[:dims], dtype=torch.float64)
    x.requires_grad_()
    b = torch.randn(out, dtype=torch.float64) if bias else None
    conv = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    # An odd number of padded positions on one side: torch pads "same" by a copy, and warns.
    if padding == "same" and any(dilation * (n - 1) % 2 for n in kernel):
        padding = "valid"
    options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
    assert_same(lambda w: conv(x, w, b, **options), (dense, lazy), [x, left, right])
    assert not report


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding_idx", [None, 2, -1])
@settings(deadline=None, max_examples=20)
@given(grid=grids(), index=st.lists(st.integers(0, 10), min_size=0, max_size=4))
def test_embedding(kind: str, padding_idx: int | None, grid: tuple[int, int, int, int, int], index: list[int]) -> None:
    _, cols, _, nc, k = grid
    rows = 11
    nr, nc = balanced(rows, cols, 1 + cols % 3, nc)
    left, right = make_factors(rows, cols, nr, nc, k, seed=3)
    dense = as_kind("dense", left, right, (rows, cols), rows=rows, cols=cols)
    lazy = as_kind(kind, left, right, (rows, cols), rows=rows, cols=cols)
    where = torch.tensor([index, index[::-1]], dtype=torch.int64)
    assert_same(lambda w: F.embedding(where, w, padding_idx), (dense, lazy), [left, right])


# Contracts of the placeholder.


@pytest.mark.parametrize("kind", KINDS)
def test_metadata_needs_no_dense_weight(kind: str) -> None:
    left, right = make_factors(6, 12, 2, 2, 2, seed=9)
    report: Counter[tuple[str, str]] = Counter()
    lazy = as_kind(kind, left, right, (6, 3, 2, 2), rows=6, cols=12, name="w", report=report)
    dense = as_kind("dense", left, right, (6, 3, 2, 2), rows=6, cols=12)
    for ask in (
        lambda w: w.shape,
        lambda w: (w.size(), w.size(1), w.dim(), w.ndim, len(w)),
        lambda w: (w.numel(), w.nelement(), torch.numel(w), w.element_size()),
        lambda w: (w.dtype, w.device, w.layout, w.is_floating_point(), w.is_cuda),
        lambda w: (w.stride(), w.stride(0), w.is_contiguous(), w.storage_offset()),
        lambda w: (w.requires_grad, w.is_leaf),
    ):
        assert ask(lazy) == ask(dense)
    assert isinstance(lazy, Tensor) and hash(lazy) == hash(lazy) and "w" in repr(lazy)
    assert not report
    assert not as_kind(kind, left.detach(), right.detach(), (6, 12), rows=6, cols=12).requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_other_operations_see_the_dense_weight(kind: str) -> None:
    left, right = make_factors(6, 4, 2, 2, 2, seed=10)
    report: Counter[tuple[str, str]] = Counter()
    lazy = as_kind(kind, left, right, (6, 4), rows=6, cols=4, name="w", report=report)
    dense = as_kind("dense", left, right, (6, 4), rows=6, cols=4)
    assert_close(torch.cat([lazy, lazy]), torch.cat([dense, dense]))
    assert_close(lazy[1:3] * 2, dense[1:3] * 2)
    assert_close(torch.einsum("oi,bi->bo", lazy, dense), dense @ dense.T)
    assert_close(lazy @ lazy.t(), dense @ dense.t())
    assert report == {("w", "cat"): 2, ("w", "__getitem__"): 1, ("w", "einsum"): 1, ("w", "linear"): 1}


@pytest.mark.parametrize("kind", KINDS)
def test_changing_a_generated_weight_is_refused(kind: str) -> None:
    left, right = make_factors(6, 4, 1, 1, 2, seed=11)
    weight = as_kind(kind, left, right, (6, 4), rows=6, cols=4, name="layer.weight")
    for change in (
        lambda: weight.mul_(2),
        lambda: weight.__setitem__(0, 1.0),
        lambda: nn.init.normal_(weight),
        lambda: setattr(weight, "data", left),
    ):
        with pytest.raises(TypeError, match="in place.*layer.weight"):
            change()


def test_errors_name_what_came() -> None:
    left, right = torch.randn(2, 2, 3, 2), torch.randn(2, 2, 2, 2)
    good: dict[str, Any] = {"rows": 5, "cols": 4}
    with pytest.raises(ValueError, match=r"expected factors .* got \(2, 2, 3, 2\) and \(2, 2, 2, 1\)"):
        factored_weight(left, right[..., :1], (5, 4), **good)
    with pytest.raises(ValueError, match="2 x 2 tiles of 3 x 2 just cover, got 3 x 4"):
        factored_weight(left, right, (3, 4), rows=3, cols=4)
    with pytest.raises(ValueError, match="20 elements"):
        factored_weight(left, right, (5, 5), **good)
    with pytest.raises(ValueError, match=r"two-dimensional.*\(4, 5\)"):
        factored_weight(left, right, (4, 5), **good)
    with pytest.raises(ValueError, match="transposed shape"):
        factored_weight(left, right, (5, 2, 2), **good, transposed=True)
    with pytest.raises(ValueError, match=r"4 features .* got shape \(3, 2\)"):
        F.linear(torch.randn(3, 2), factored_weight(left, right, (5, 4), **good))
    with pytest.raises(ValueError, match="at least one input"):
        remat_weight(lambda: left, (), (2, 2), torch.float32, left.device)


def test_stack_rows() -> None:
    parts = [factored_weight(*make_factors(4, 6, 2, 1, 2, seed), (4, 6), rows=4, cols=6) for seed in range(3)]
    stacked = stack_rows(parts)
    assert isinstance(stacked, FactoredWeight) and stacked.shape == (12, 6)
    assert_close(stacked.dense(), torch.cat([part.dense() for part in parts]))
    x = vectors(3, 6)
    assert_close(F.linear(x, stacked), x @ stacked.dense().T)
    cropped = factored_weight(*make_factors(3, 6, 2, 1, 2, 0), (3, 6), rows=3, cols=6)
    with pytest.raises(ValueError, match="whole tiles"):
        stack_rows([cropped, parts[0]])
