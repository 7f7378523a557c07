"""A genome as one vector: what is searched by evolution strategies, and differentiated through learning."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

import gbfunc as gb
from tests.support.trees_equal import same_bits
from tests.support.zoo import ZOO, genome_of


@pytest.mark.parametrize("name", ZOO)
def test_there_and_back(name: str) -> None:
    _, plan, genome = genome_of(ZOO[name])
    vector, unflatten = gb.flatten(genome)
    assert vector.shape == (plan.genome_params,) and not vector.requires_grad
    assert same_bits(unflatten(vector), genome)
    gnets = {e: dict(reversed(leaves.items())) for e, leaves in reversed(genome.gnets.items())}
    assert torch.equal(gb.flatten(genome._replace(gnets=gnets))[0], vector)


def test_what_is_not_in_the_vector_stays() -> None:
    pnet = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    pnet.register_parameter("count", nn.Parameter(torch.tensor([3]), requires_grad=False))
    plan = gb.make_plan(pnet, gb.periodic(2), max_tile=4)
    genome = gb.init_genome(plan, pnet)
    vector, unflatten = gb.flatten(genome)
    made = unflatten(vector * 0)
    assert int(made.direct["count"]) == 3
    assert same_bits(made.buffers, genome.buffers)
    with pytest.raises(ValueError, match=r"expected a vector of \d+ numbers, got shape \(3,\)"):
        unflatten(vector[:3])


def test_gradients_through_learning_are_those_of_finite_differences() -> None:
    """Steps of gradient descent on the grown weights, differentiated with respect to the genome (Finn et al., 2017)."""
    generator = torch.Generator().manual_seed(0)
    pnet = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    plan = gb.make_plan(pnet, gb.periodic(2))
    vector, unflatten = gb.flatten(gb.init_genome(plan, pnet, 1))
    x, y = torch.randn(2, 6, 3, generator=generator, dtype=torch.float64), torch.tensor([[0, 1, 0, 1, 1, 0]] * 2)

    def loss(weights: dict[str, Tensor], i: int) -> Tensor:
        return nn.functional.cross_entropy(functional_call(pnet, weights, x[i]), y[i])

    def after_learning(v: Tensor) -> Tensor:
        weights = gb.generate(plan, unflatten(v))
        for _ in range(3):
            slopes = grad(loss)(weights, 0)
            weights = {k: w - 0.5 * slopes[k] for k, w in weights.items()}
        return loss(weights, 1)

    assert torch.autograd.gradcheck(after_learning, vector.requires_grad_())
