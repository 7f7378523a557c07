"""The Triton form of periodic sides on CPU tensors, a test file of its own: TRITON_INTERPRET=1 must be set at import.

`tests/test_kernels_triton.py` runs it in a process with this setting.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gbfunc.hypernets.kernels import waves as module
from gbfunc.hypernets.kernels import waves_triton
from gbfunc.hypernets.kernels.waves import Side, waves
from gbfunc.types import Kernel
from tests.support.kernel_cases import assert_trees_close
from tests.test_kernels_waves import CASES, FORMS, LEAVES, TRANSFORMS, Case, _with, leaves_of

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}


@pytest.fixture(autouse=True, scope="module")
def _triton_on_a_cpu() -> None:
    assert type(waves_triton.forward_kernel).__name__ == "InterpretedFunction", "set TRITON_INTERPRET=1"
    module._native = waves_triton.backend


def made(sides: list[Side], kernel: Kernel) -> list[Tensor]:
    """Outputs and gradients of all leaves."""
    outputs, leaves = waves(sides, kernel=kernel), [x for side in sides for x in leaves_of(side)]
    draw = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in outputs]
    total = sum((x * g).sum() for x, g in zip(outputs, cotangents, strict=True)) + 0 * sum(x.sum() for x in leaves)
    assert isinstance(total, Tensor)
    return [*(x.detach() for x in outputs), *torch.autograd.grad(total, leaves)]


def exact(side: Side) -> Side:
    """The same numbers in float64."""
    wide = {k: getattr(side, k) for k in ("codes", "scale", *LEAVES)}
    wide = {k: None if x is None else x.detach().double() for k, x in wide.items()}
    return side._replace(**{k: x if x is None or k not in LEAVES else x.requires_grad_() for k, x in wide.items()})


def assert_exact(sides: list[Side]) -> None:
    tolerance = TOLERANCES[sides[0].weight.dtype]
    for x, y in zip(made(sides, "compiled"), made([*map(exact, sides)], "reference"), strict=True):
        assert x.shape == y.shape
        if y.numel():
            assert float((x.double() - y).abs().max()) <= tolerance * max(float(y.abs().max()), 1e-30)


# In float32 a gradient of one entry that is a sum of terms of opposite signs can be off by more than 1e-6 of itself.
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)])
@settings(max_examples=50)
@given(st.lists(st.tuples(CASES, st.integers(0, 99)), min_size=2, max_size=2))
def test_values_and_gradients_equal_the_parts(dtype: torch.dtype, cases: list[tuple[Case, int]]) -> None:
    assert_exact([case.side(dtype, seed) for case, seed in cases])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_several_blocks_of_rows_features_and_codes(dtype: torch.dtype) -> None:
    small = Case(2, 300, 3, 20, groups=1), Case(40, 3, 1, 2, groups=3, own_codes=True), Case(1, 70, 18, 33)
    # Angles as large as those of binary codes.
    sides = [case.side(dtype) for case in small]
    assert_exact([side._replace(codes=side.codes.sign()) for side in sides])


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_agree_with_those_of_the_parts(name: str) -> None:
    side = Case(there=("phase", "sine", "scale"), groups=2).side()
    leaves = tuple(x.detach() for x in leaves_of(side))
    found, expected = (
        TRANSFORMS[name](lambda *x, k=kernel: waves([_with(side, x)], kernel=k)[0].square().sum().sin())(*leaves)
        for kernel in ("compiled", "reference")
    )
    assert_trees_close(found, expected)


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_second_derivatives_and_batched_gradients(case: Case) -> None:
    side = case.side()
    leaves, found = leaves_of(side), list[list[Tensor]]()
    for kernel in ("compiled", "reference"):
        (out,) = waves([side], kernel=kernel)
        many = torch.randn(2, *out.shape, generator=torch.Generator().manual_seed(0), dtype=out.dtype)
        batched = torch.autograd.grad(out, leaves, many, is_grads_batched=True, retain_graph=True)
        first = torch.autograd.grad(out, leaves, out.detach(), create_graph=True)
        found.append([*batched, *torch.autograd.grad([x.square().sum() for x in first], leaves)])
    assert_trees_close(*found)


def test_equal_calls_give_equal_bits_and_a_changed_leaf_is_an_error() -> None:
    side = Case(4, 300, groups=2).side(torch.float32)
    for x, y in zip(made([side], "compiled"), made([side], "compiled"), strict=True):
        assert torch.equal(x, y)
    (out,) = waves([side], kernel="compiled")
    with torch.no_grad():
        side.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
