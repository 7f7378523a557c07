"""A module, and generation, inside of transforms of `torch.func` over what is no part of the genome: the inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import gbfunc as gb
from tests.support.forms import assert_close, vectors

TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "vmap": lambda f, x: torch.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    "vmap_grad": lambda f, x: torch.vmap(torch.func.grad(lambda x: f(x).square().sum()))(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x[0]),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x[0]),
}
X = vectors(5, 6)


def made(hypernet: Any = None) -> tuple[nn.Module, gb.Plan]:
    torch.manual_seed(0)
    pnet = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    return pnet, gb.make_plan(pnet, hypernet or gb.periodic(2), max_tile=5)


@pytest.mark.parametrize("lazy", [True, False, "auto"])
@pytest.mark.parametrize("hypernet", [gb.periodic(2), gb.bilinear(2), gb.gnet((3,))], ids=lambda h: h.type)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_the_inputs_are_those_of_the_dense_net(transform: str, hypernet: Any, lazy: Any) -> None:
    pnet, plan = made(hypernet)
    module, take = gb.GenomeModule(plan, pnet, lazy=lazy), TRANSFORMS[transform]
    leaves: dict[str, Tensor] = dict(module.named_parameters())
    gnets = {e: {k: leaves[f"gnets:{e}:{k}"] for k in own} for e, own in module.to_genome().gnets.items()}
    direct = {k: x for k, x in leaves.items() if not k.startswith("gnets:")}
    weights = gb.generate(plan, gb.Genome(gnets, direct, {}))
    expected, found = take(lambda x: functional_call(pnet, weights, x), X), take(module, X)
    assert_close(found, expected)
    # The transform is over: its result has a gradient of the genome.
    grads = (torch.autograd.grad(y.square().sum(), [*leaves.values()], allow_unused=True) for y in (found, expected))
    for gradient, target in zip(*grads, strict=True):
        assert (gradient is None) == (target is None)
        assert gradient is None or torch.allclose(gradient, target, 1e-10, 1e-10)


@pytest.mark.parametrize("kernel", ["auto", "compiled", "eager"])
def test_weights_are_generated_inside_of_a_transform(kernel: Any) -> None:
    pnet, plan = made()
    genome = gb.init_genome(plan, pnet)
    weights = gb.generate(plan, genome)["0.weight"]
    found = torch.vmap(lambda x: gb.generate(plan, genome, kernel=kernel)["0.weight"] @ x)(X)
    assert_close(found, X @ weights.T)


def test_the_first_call_may_be_inside_of_functionalize() -> None:
    pnet, plan = made()
    module = gb.GenomeModule(plan, pnet)
    assert_close(torch.func.functionalize(module)(X), module(X))
