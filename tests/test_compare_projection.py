"""The random projection: orthonormal, what the dense matrix gives, of unit variance; other methods' own oracles."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import hadamard as scipy_hadamard
from torch import nn

import gbfunc as gb
from gbfunc.lab.compare.subspace import Projection, hadamard, low_rank, low_rank_net, subspace, subspace_net
from gbfunc.tasks.pnets import mlp, n_params


def matrix(projection: Projection) -> torch.Tensor:
    """The projection as a matrix [D, d], column by column."""
    return torch.stack([projection(e) for e in torch.eye(projection.d)], 1)


@pytest.mark.parametrize("n", [1, 2, 4, 32])
def test_hadamard_is_sylvesters(n: int) -> None:
    assert torch.equal(hadamard(n), torch.from_numpy(scipy_hadamard(n)).float())


@pytest.mark.parametrize("n", [0, 3, 12])
def test_hadamard_wants_a_power_of_two(n: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        hadamard(n)


@settings(deadline=None, max_examples=30)
@given(d=st.integers(1, 40), blocks=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_columns_are_orthonormal_in_whole_blocks(d: int, blocks: int, seed: int) -> None:
    n = 1 << (d - 1).bit_length()
    columns_Dd = matrix(Projection(d, blocks * n, seed)).double()
    assert torch.allclose(columns_Dd.T @ columns_Dd, torch.eye(d).double(), atol=1e-5)


@settings(deadline=None, max_examples=30)
@given(d=st.integers(1, 40), more=st.integers(0, 200), seed=st.integers(0, 2**31))
def test_it_is_a_hadamard_matrix_with_random_signs(d: int, more: int, seed: int) -> None:
    D = d + more
    found_Dd = matrix(Projection(d, D, seed)).double()
    assert torch.allclose(found_Dd.abs(), torch.full((D, d), D**-0.5).double(), atol=1e-6)
    n = 1 << (d - 1).bit_length()
    expected = torch.from_numpy(scipy_hadamard(n)).double()
    for first in range(0, D, n):
        block = found_Dd[first : first + n] * D**0.5
        # Every column of a block is that of the Hadamard matrix, with a sign.
        signs = block[0]
        assert torch.allclose(block, expected[: len(block), :d] * signs, atol=1e-5)


def test_projected_numbers_have_the_variance_of_the_given() -> None:
    generator = torch.Generator().manual_seed(0)
    z_d = torch.randn(500, generator=generator)
    theta_D = Projection(500, 100_000, seed=1)(z_d) * (100_000 / 500) ** 0.5
    # The mean of 10^5 entries, all but independent, is off by 3e-3; chi-square with 500 terms by 6 %.
    assert abs(float(theta_D.mean())) < 0.02 and float(theta_D.std()) == pytest.approx(float(z_d.std()), rel=0.02)
    blocks = theta_D[: 2 * 512].view(2, 512)
    assert abs(float(torch.corrcoef(blocks)[0, 1])) < 0.2


def test_the_seed_alone_decides() -> None:
    z_d = torch.randn(9)
    a, b, c = (Projection(9, 50, seed)(z_d) for seed in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_gradient_is_the_transpose() -> None:
    projection, g_D = Projection(11, 70, 0), torch.randn(70)
    z_d = torch.randn(11, requires_grad=True)
    (found_d,) = torch.autograd.grad(projection(z_d), z_d, g_D)
    assert torch.allclose(found_d, matrix(projection).T @ g_D, atol=1e-5)


@pytest.mark.parametrize(("d", "D"), [(0, 5), (6, 5)])
def test_sizes_are_checked(d: int, D: int) -> None:
    with pytest.raises(ValueError, match="1 <= d <= D"):
        Projection(d, D, 0)


@pytest.mark.parametrize(
    ("make", "form_of", "number"),
    [(subspace_net, subspace, 7), (low_rank_net, low_rank, 2)],
    ids=["subspace", "low rank"],
)
def test_forms_as_pnets_train_their_numbers_alone(
    make: Callable[..., nn.Module], form_of: Callable[..., Any], number: int
) -> None:
    x, net, pnet = torch.randn(5, 12), make(number, 3, (12, 9, 4)), mlp((12, 9, 4), 3)
    form = form_of({k: t.detach().clone() for k, t in pnet.named_parameters()}, number, 3)
    values = torch.linspace(-0.3, 0.3, n_params(net))
    nn.utils.vector_to_parameters(values, net.parameters())
    parts = values.split([leaf.numel() for leaf in form.leaves.values()])
    leaves = {k: part.view_as(leaf) for (k, leaf), part in zip(form.leaves.items(), parts, strict=True)}
    for name, weight in form.weights(leaves).items():
        pnet.get_parameter(name).data.copy_(weight)
    torch.testing.assert_close(net(x), pnet(x))
    torch.testing.assert_close(copy.deepcopy(net)(x), pnet(x))
    plan = gb.make_plan(net, exclude=[".*"])
    assert plan.genome_params == n_params(net)
    torch.testing.assert_close(gb.materialize(plan, gb.init_genome(plan, net), net)(x), pnet(x))
