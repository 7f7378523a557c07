"""Lazy weights under function transforms, autocast and the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from tests.support.lazy_weights import KINDS, as_kind, assert_close, make_factors, vectors

OPERATIONS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "linear": ((6, 4), lambda w: F.linear(vectors(3, 4).to(w.dtype), w)),
    "conv": ((6, 2, 2), lambda w: F.conv1d(vectors(2, 2, 5).to(w.dtype), w)),
    "embedding": ((6, 4), lambda w: F.embedding(torch.tensor([1, 5, 1]), w, 1)),
    "fallback": ((6, 4), lambda w: w.sin().sum(0)),
}
Leaves = dict[str, Tensor]


def transforms(loss: Callable[[Leaves], Tensor], leaves: Leaves) -> dict[str, Callable[[], Any]]:
    """Each function transform of a loss of (left, right)."""
    grad = torch.func.grad(loss)
    population = {name: torch.stack([leaf, 2 * leaf, -leaf]) for name, leaf in leaves.items()}
    tangents = {name: leaf.cos() for name, leaf in leaves.items()}
    return {
        "grad": lambda: grad(leaves),
        "vjp": lambda: torch.func.vjp(loss, leaves)[1](torch.ones((), dtype=torch.float64)),
        "jvp": lambda: torch.func.jvp(loss, (leaves,), (tangents,)),
        "vmap": lambda: torch.func.vmap(loss)(population),
        "vmap_grad": lambda: torch.func.vmap(grad)(population),
        "grad_grad": lambda: torch.func.grad(lambda p: torch.stack([g.square().sum() for g in grad(p).values()]).sum())(
            leaves
        ),
    }


# torch's own forward-mode formulas of `linear` still use torch.jit.script.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "vmap", "vmap_grad", "grad_grad"])
def test_function_transforms(kind: str, operation: str, transform: str) -> None:
    shape, run = OPERATIONS[operation]
    if (operation, transform) == ("embedding", "jvp"):
        # torch's forward mode ignores padding_idx, a property of the gradient alone.
        run = lambda w: F.embedding(torch.tensor([1, 5, 1]), w)  # noqa: E731
    tiles = 1 if operation == "conv" else 2
    left, right = make_factors(6, 4, tiles, tiles, 2, seed=5)
    leaves = {"left": left.detach(), "right": right.detach()}

    def loss_with(form: str) -> Callable[[Leaves], Tensor]:
        def loss(p: Leaves) -> Tensor:
            return run(as_kind(form, p["left"], p["right"], shape, rows=6, cols=4)).sin().sum()

        return loss

    expected = transforms(loss_with("dense"), leaves)[transform]()
    actual = transforms(loss_with(kind), leaves)[transform]()
    assert_close(actual, expected, 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_double_backward(kind: str) -> None:
    left, right = make_factors(6, 4, 2, 1, 2, seed=6)
    results = {}
    for form in ("dense", kind):
        y = F.linear(vectors(3, 4), as_kind(form, left, right, (6, 4), rows=6, cols=4)).sin().sum()
        first = torch.autograd.grad(y, (left, right), create_graph=True)
        results[form] = torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), (left, right))
    assert_close(results[kind], results["dense"])


# Dynamo instantiates the Function class while it traces a recompute.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["mlp", "cross", "fallback"])
def test_compiles_whole(kind: str, case: str) -> None:
    """Generation, metadata, application and fallback in one graph; the placeholder is never read."""
    attention = nn.MultiheadAttention(8, 2).double().eval()
    x = vectors(5, 2, 8)

    def run(form: str, left: Tensor, right: Tensor) -> Tensor:
        if case == "cross":
            weight = as_kind(form, left, right, (24, 8), rows=24, cols=8)
            rest = {k: v for k, v in attention.named_parameters() if k != "in_proj_weight"}
            return functional_call(attention, rest | {"in_proj_weight": weight}, (x, x, x), strict=True)[0]
        weight = as_kind(form, left, right, (24, 8), rows=24, cols=8)
        if case == "fallback":
            return (weight * 2).sum(1) + F.linear(x, weight).flatten(0, 1).sum(0)
        assert weight.shape == (24, 8) and weight.dtype == torch.float64
        return F.linear(x, weight).tanh() @ weight

    left, right = make_factors(24, 8, 3, 1, 2, seed=8)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    expected, actual = run("dense", left, right), compiled(kind, left, right)
    assert_close(actual, expected, 1e-10)
    wanted = torch.autograd.grad(expected.sum(), (left, right))
    assert_close(torch.autograd.grad(actual.sum(), (left, right)), wanted, 1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", ["linear", "conv"])
def test_autocast(kind: str, operation: str) -> None:
    """Products run in bfloat16, the weight itself is generated in its own precision."""
    shape, run = OPERATIONS[operation]
    tiles = 1 if operation == "conv" else 2
    left, right = make_factors(6, 4, tiles, tiles, 3, seed=4, dtype=torch.float32)
    outputs = {}
    for form in ("dense", kind):
        weight = as_kind(form, left, right, shape, rows=6, cols=4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = run(weight)
            assert y.dtype == torch.bfloat16
            assert (weight * 1).dtype == torch.float32
        outputs[form] = (y.float(), *torch.autograd.grad(y.float().sum(), (left, right)))
    for actual, expected in zip(outputs[kind], outputs["dense"], strict=True):
        assert actual.dtype == torch.float32
        # Thin products round elsewhere; a weight made again rounds where the dense one does.
        assert_close(actual, expected, 3e-2 if kind == "factored" else 1e-6)
