"""The random projection: the dense matrix, of unit variance."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import hadamard as scipy_hadamard

from gbfunc.lab.compare.subspace import Projection


def matrix(projection: Projection) -> torch.Tensor:
    """The projection as a matrix [D, d], column by column."""
    return torch.stack([projection(e) for e in torch.eye(projection.d)], 1)


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
    # The seed alone decides.
    assert torch.equal(found_Dd, matrix(Projection(d, D, seed)).double())


def test_projected_numbers_have_the_variance_of_the_given() -> None:
    generator = torch.Generator().manual_seed(0)
    z_d = torch.randn(500, generator=generator)
    theta_D = Projection(500, 100_000, seed=1)(z_d) * (100_000 / 500) ** 0.5
    # The mean of 10^5 entries, all but independent, is off by 3e-3; chi-square with 500 terms by 6 %.
    assert abs(float(theta_D.mean())) < 0.02 and float(theta_D.std()) == pytest.approx(float(z_d.std()), rel=0.02)
    blocks = theta_D[: 2 * 512].view(2, 512)
    assert abs(float(torch.corrcoef(blocks)[0, 1])) < 0.2
    assert not torch.equal(Projection(500, 600, 0)(z_d), Projection(500, 600, 1)(z_d))


@pytest.mark.parametrize(("d", "D"), [(0, 5), (6, 5)])
def test_sizes_are_checked(d: int, D: int) -> None:
    with pytest.raises(ValueError, match="1 <= d <= D"):
        Projection(d, D, 0)
