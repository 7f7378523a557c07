"""Forms of layers under function transforms, autocast and the compiler."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.forms import KINDS, Formed, Reader, assert_close, on_form, vectors

EACH_KIND = pytest.mark.parametrize("kind", KINDS)
Leaves = Mapping[str, Tensor]


# module, its weights' cuts, input
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, tuple[int, int]], Tensor]] = {
    "linear": (lambda: nn.Linear(4, 6), {"weight": (2, 2)}, vectors(3, 4)),
    "conv": (lambda: nn.Conv1d(2, 6, 2), {"weight": (2, 2)}, vectors(2, 2, 5)),
    "embedding": (lambda: nn.Embedding(6, 4, padding_idx=1), {"weight": (2, 2)}, torch.tensor([1, 5, 1])),
    "read": (Reader, {"fc.weight": (2, 2)}, vectors(3, 4)),
}


def transforms(loss: Callable[[Leaves], Tensor], leaves: Leaves) -> dict[str, Callable[[], Any]]:
    grad = torch.func.grad(loss)
    population = {name: torch.stack([leaf, 2 * leaf, -leaf]) for name, leaf in leaves.items()}
    tangents = {name: leaf.cos() for name, leaf in leaves.items()}
    squares = lambda p: torch.stack([g.square().sum() for g in grad(p).values()]).sum()  # noqa: E731
    return {
        "grad": lambda: grad(leaves),
        "vjp": lambda: torch.func.vjp(loss, leaves)[1](torch.ones((), dtype=torch.float64)),
        "jvp": lambda: torch.func.jvp(loss, (leaves,), (tangents,)),
        "vmap": lambda: torch.func.vmap(loss)(population),
        "vmap_grad": lambda: torch.func.vmap(grad)(population),
        "grad_grad": lambda: torch.func.grad(squares)(leaves),
    }


# Torch's own forward-mode formulas of `linear` still use torch.jit.script.
@EACH_KIND
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "vmap", "vmap_grad", "grad_grad"])
def test_function_transforms(kind: str, name: str, transform: str) -> None:
    build, cuts, x = CASES[name]
    module = build().double()
    if isinstance(module, nn.Embedding) and transform == "jvp":
        module.padding_idx = None  # torch's forward mode ignores it, a property of the gradient alone

    def answer(kind: str) -> Any:
        formed = on_form(kind, module, cuts)
        leaves = {k: vectors(*v.shape) for k, v in formed.leaves.items()}
        return transforms(lambda p: formed(x, leaves=p).sin().sum(), leaves)[transform]()

    assert_close(answer(kind), answer("dense"), 1e-10)


# Dynamo instantiates the Function class while it traces a recompute.
@pytest.mark.process
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="Dynamo of torch 2.5 does not trace a net in a closure")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")
@EACH_KIND
@pytest.mark.parametrize("name", CASES)
def test_compiles_whole(kind: str, name: str) -> None:
    build, cuts, x = CASES[name]
    module = build().double()
    expected, formed = on_form("dense", module, cuts), on_form(kind, module, cuts)

    def run(leaves: dict[str, Tensor], x: Tensor) -> Tensor:
        return formed(x, leaves=leaves)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for batch in (x, torch.cat([x, x, x])):
        out, target = compiled(formed.leaves, batch), expected(batch)
        assert_close(out, target, 1e-10)
        wanted = torch.autograd.grad(target.sin().sum(), list(expected.leaves.values()))
        assert_close(torch.autograd.grad(out.sin().sum(), list(formed.leaves.values())), wanted, 1e-10)


@EACH_KIND
@pytest.mark.parametrize("cut", [(1, 1), (2, 2), (6, 2)])
@pytest.mark.parametrize("name", CASES)
def test_autocast(kind: str, name: str, cut: tuple[int, int]) -> None:
    build, cuts, x = CASES[name]
    module = build()
    x = x.float() if x.is_floating_point() else x

    def answer(kind: str) -> tuple[Tensor, ...]:
        formed: Formed = on_form(kind, module, dict.fromkeys(cuts, cut))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = formed(x)
        return y, *torch.autograd.grad(y.float().sum(), list(formed.leaves.values()))

    # Thin products round elsewhere; a weight made again rounds where the dense one does, and rows are never rounded.
    tolerance = 3e-2 if kind == "factored" and name != "embedding" else 1e-6
    for actual, expected in zip(answer(kind), answer("dense"), strict=True):
        assert actual.dtype == expected.dtype
        scale = expected.abs().max().clamp(min=1)  # bfloat16 sums round in proportion to their largest terms.
        assert_close(actual / scale, expected / scale, tolerance)
