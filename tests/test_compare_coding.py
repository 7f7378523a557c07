"""Pruned and quantised nets: what is coded comes back, in as few bytes as it should; quantisation against torch's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gbfunc.lab.compare.dense import dequantise, pack_levels, quantise, unpack_levels
from gbfunc.lab.compare.pruned import decode_sparse, encode_sparse, most_entries

MATRICES = st.tuples(st.integers(1, 9), st.integers(1, 9), st.floats(0, 1), st.integers(0, 2**31))


def sparse(rows: int, cols: int, density: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, cols, generator=generator)
    return values * (torch.rand(rows, cols, generator=generator) < density)


@settings(deadline=None, max_examples=40)
@given(first=MATRICES, second=MATRICES, bits=st.integers(2, 8))
def test_sparse_matrices_come_back(first: tuple, second: tuple, bits: int) -> None:
    state = {"0.weight": sparse(*first), "0.bias": torch.arange(3.0), "2.weight": sparse(*second)}
    back = decode_sparse(encode_sparse(state, bits), state, bits)
    assert back.keys() == state.keys() and torch.equal(back["0.bias"], state["0.bias"])
    for name in ("0.weight", "2.weight"):
        found, given_ = back[name], state[name]
        assert torch.equal(found != 0, given_ != 0) and torch.equal(found.sign(), given_.sign())
        sizes = given_.abs()[given_ != 0]
        if len(sizes):
            # Half a step, and the rounding of the ends to float16.
            step = float(sizes.max() - sizes.min()) / (2 ** (bits - 1) - 1)
            assert float((found - given_).abs().max()) <= step / 2 + 2e-3 * float(sizes.max())


def test_the_code_is_about_as_short_as_its_entropy() -> None:
    n, density, bits = 300 * 400, 0.05, 5
    weight = sparse(300, 400, density, 0)
    positions = n * -(density * math.log2(density) + (1 - density) * math.log2(1 - density))
    plain = (positions + bits * int(weight.count_nonzero())) / 8
    assert len(encode_sparse({"0.weight": weight}, bits)) < plain + 400
    # Columns that are never used cost next to nothing.
    weight[:, 200:] = 0
    assert len(encode_sparse({"0.weight": weight}, bits)) < 0.55 * plain + 400


def test_most_entries_fill_the_budget() -> None:
    state = {"0.weight": sparse(40, 60, 1.0, 0), "0.bias": torch.zeros(40)}
    n = most_entries(state, 1_500)
    assert 100 < n < 2_400 and most_entries(state, 1e6) == 2_400 and most_entries(state, 10) == 0


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_is_what_torch_fakes(bits: int) -> None:
    weight = torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    q = quantise(weight, bits)
    most = 2**bits - 1
    expected = torch.fake_quantize_per_channel_affine(weight, q.scale_R.float(), q.zero_R.int(), 0, 0, most)
    assert torch.allclose(dequantise(q), expected, atol=1e-6)
    # No worse than the whole range of each row, which is torch's usual choice.
    scale_R = (weight.amax(1) - weight.amin(1)) / most
    whole = torch.fake_quantize_per_channel_affine(
        weight, scale_R, (-weight.amin(1) / scale_R).round().int(), 0, 0, most
    )
    assert float((dequantise(q) - weight).square().sum()) <= 1.01 * float((whole - weight).square().sum())


@settings(deadline=None, max_examples=40)
@given(matrix=MATRICES, bits=st.sampled_from([4, 8]), offset=st.floats(-3, 3))
def test_quantisation_is_off_by_half_a_step_where_it_does_not_clip(matrix: tuple, bits: int, offset: float) -> None:
    weight = sparse(*matrix) + offset
    q = quantise(weight, bits)
    inside = (q.levels_RC > 0) & (q.levels_RC < 2**bits - 1)
    error = (dequantise(q) - weight).abs()
    assert bool((error <= 0.501 * q.scale_R.float()[:, None])[inside].all())
    assert torch.equal(unpack_levels(pack_levels(q.levels_RC, bits), (len(weight), weight.shape[1]), bits), q.levels_RC)
    assert pack_levels(q.levels_RC, bits).numel() == -(-weight.numel() * bits // 8)


def test_zeros_stay_zeros() -> None:
    assert torch.equal(dequantise(quantise(torch.zeros(3, 4), 8)), torch.zeros(3, 4))
