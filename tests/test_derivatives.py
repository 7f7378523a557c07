"""Derivatives of generation and of a loss through it: finite differences, torch.func, forward mode, populations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import gbfunc as gb
from gbfunc.hypernets import Hypernet
from gbfunc.pnet import PureNet
from tests.support.strategies import ALL_EXAMPLES, named
from tests.support.zoo import loss_fn, noise_of, small

HYPERNETS = pytest.mark.parametrize("hypernet", ALL_EXAMPLES, ids=named)


def trained(genome: gb.Genome) -> tuple[Any, Any]:
    return genome.gnets, genome.direct


def objective(plan: gb.Plan, pnet: nn.Module, batch: Tensor, noise: Any = None) -> Callable[[Any], Tensor]:
    net = PureNet(pnet)
    buffers = {name: b.detach().clone() for name, b in pnet.named_buffers()}

    def loss(leaves: tuple[Any, Any]) -> Tensor:
        weights = gb.generate(plan, gb.Genome(*leaves, {}), noise=noise)
        return loss_fn(lambda x: net(weights, dict(buffers), x), batch)

    return loss


@HYPERNETS
def test_gradients_equal_finite_differences(hypernet: Hypernet) -> None:
    _, plan, genome = small(hypernet)
    leaves, spec = tree_flatten(trained(genome))
    # Away from the start: there biases of 0 put whole tiles on the kink of a ReLU.
    leaves = [(leaf + 0.1 * torch.cos(9 * leaf + 1)).requires_grad_() for leaf in leaves]
    noise = noise_of(plan)

    def weights(*values: Tensor) -> Tensor:
        gnets, direct = tree_unflatten(values, spec)
        made = gb.generate(plan, gb.Genome(gnets, direct, {}), noise=noise)
        return torch.cat([weight.flatten() for weight in made.values()])

    assert torch.autograd.gradcheck(weights, leaves, eps=1e-7, atol=1e-5, rtol=1e-5, fast_mode=True)


# torch's own forward derivatives are loaded by way of torch.jit.
@HYPERNETS
def test_forward_derivatives_equal_backward_ones(hypernet: Hypernet) -> None:
    pnet, plan, genome = small(hypernet)
    batch = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
    loss = objective(plan, pnet, batch, noise_of(plan))
    gradient = torch.func.grad(loss)(trained(genome))
    tangent = tree_map(lambda x: torch.cos(7 * x), trained(genome))
    slope = torch.func.jvp(loss, (trained(genome),), (tangent,))[1]
    expected = sum((g * t).sum() for g, t in zip(tree_leaves(gradient), tree_leaves(tangent), strict=True))
    torch.testing.assert_close(slope, expected, rtol=1e-10, atol=1e-12)


@HYPERNETS
def test_vmap_over_a_population_equals_a_loop(hypernet: Hypernet) -> None:
    pnet, plan, _ = small(hypernet)
    people = [trained(gb.init_genome(plan, pnet, seed)) for seed in range(3)]
    stacked = tree_map(lambda *x: torch.stack(x), *people)
    loss = objective(plan, pnet, torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3), noise_of(plan))

    weights = torch.vmap(lambda gnets, direct: gb.generate(plan, gb.Genome(gnets, direct, {})))(*stacked)
    alone = [gb.generate(plan, gb.Genome(gnets, direct, {})) for gnets, direct in people]
    expected = tree_map(lambda *x: torch.stack(x), *alone)
    torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)

    gradients, losses = torch.vmap(torch.func.grad_and_value(loss))(stacked)
    each = [torch.func.grad_and_value(loss)(leaves) for leaves in people]
    torch.testing.assert_close(losses, torch.stack([value for _, value in each]), rtol=1e-10, atol=1e-12)
    expected = tree_map(lambda *x: torch.stack(x), *[gradient for gradient, _ in each])
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-12)
