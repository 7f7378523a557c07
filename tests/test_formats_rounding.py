"""Codes of 2 to 8 bits: the numbers that they stand for are near, stay what they are, and the loss sees the same."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gbfunc as gb
from gbfunc.formats.rounding import BITS, BLOCK, block_size, decode, encode, rounded
from gbfunc.train.step import TrainStep
from gbfunc.trees import flat_genome
from tests.support.trees_equal import same_bits
from tests.support.zoo import ZOO, Animal, dtype_of, loss_fn

SHAPES = [(1, 2, 80), (5, 3, 4), (7, 9, 9), (3, 1), (2, 0), (1, 4, 25), (200,)]


def drawn(shape: tuple[int, ...], seed: int, scale: float, shift: float) -> Tensor:
    return scale * (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + shift)


leaves = st.builds(
    drawn, st.sampled_from(SHAPES), st.integers(0, 99), st.sampled_from([1e-30, 1e-3, 1.0, 1e9]), st.floats(-4, 4)
)


@pytest.mark.parametrize("bits", BITS.values())
@given(x=leaves)
def test_codes_stand_for_near_numbers(x: Tensor, bits: int) -> None:
    coded = encode(x, bits)
    y, size = decode(coded, x).double().flatten(), max(1, block_size(tuple(x.shape)))
    once = rounded({"gnets/x": x}, f"int{bits}")
    assert same_bits(rounded(once, f"int{bits}"), once) and bool((y[x.flatten() == 0] == 0).all())
    for i, block in enumerate(x.double().flatten().split(size) if x.numel() else ()):
        low, high = min(0.0, float(block.min())), max(0.0, float(block.max()))
        scale, zero = float(coded.scales[i].double()), int(coded.zeros[i])
        assert (high - low) / (2**bits - 1) * (1 - 2**-7) <= scale <= (high - low) / (2**bits - 1) * (1 + 1e-6)
        for j, number in enumerate(block.tolist()):
            code = int(coded.codes[i, j])
            assert 0 <= code < 2**bits and float(y[i * size + j]) == pytest.approx(scale * (code - zero), rel=1e-6)
            # Half a step, and what the rounding of the scale towards zero cuts off at the ends.
            assert abs(number - float(y[i * size + j])) <= scale * (0.51 + 2**-7 * 2**bits)


def test_blocks_are_the_fewest_last_dimensions_of_many_numbers() -> None:
    assert [block_size(s) for s in SHAPES] == [80, 60, 81, 3, 0, 100, 200] and BLOCK == 64


def test_what_is_in_codes_and_what_is_not() -> None:
    x = torch.linspace(-1, 1, 300).reshape(3, 100)
    flat = {"gnets/e/a": x, "direct/m": x, "direct/v": x[0], "buffers/b": x, "direct/n": torch.arange(3)}
    near = rounded(flat, "int4")
    assert same_bits(near["direct/v"], x[0].half().float())
    assert same_bits(near["buffers/b"], x) and same_bits(near["direct/n"], flat["direct/n"])
    for name in ("gnets/e/a", "direct/m"):
        assert len(near[name].unique()) <= 3 * 16 and not torch.equal(near[name], x)


def step_of(animal: Animal, **options: Any) -> tuple[TrainStep, Tensor]:
    pnet = animal.pnet()
    sgd = gb.torch_optimizer(torch.optim.SGD, lr=0.1)
    return gb.make_train_step(animal.plan(pnet), pnet, loss_fn, sgd, **options), animal.batch(dtype_of(pnet))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *[(n, {}) for n in ("mlp", "conv_bn", "tied", "weight_norm", "stochastic", "float64", "bfloat16", "frozen")],
        *[("conv_bn", o) for o in ({"microbatches": 2}, {"remat": "generate"}, {"remat": "layer"}, {"donate": True})],
        ("mlp", {"clip_norm": 0.01}),
    ],
    ids=str,
)
def test_a_step_with_rounding_is_one_at_the_rounded_genome(name: str, options: Any) -> None:
    plain, batch = step_of(ZOO[name], **options)
    rounding, _ = step_of(ZOO[name], **options, rounding="int4")
    state = plain.init(seed=3)
    near = rounded(flat_genome(state), "int4")
    at = state._replace(
        gnets={e: {k: near[f"gnets/{e}/{k}"] for k in leaves} for e, leaves in state.gnets.items()},
        direct={k: near[f"direct/{k}"] for k in state.direct},
    )
    expected, info = plain(at, batch)
    got, told = rounding(state, batch)
    assert same_bits(told.loss, info.loss) and same_bits(got.buffers, expected.buffers)
    before, after = flat_genome(state), flat_genome(got)
    moved = flat_genome(expected)
    for k, x in before.items():
        torch.testing.assert_close(after[k] - x, moved[k] - near[k], rtol=1e-2, atol=1e-2 if x.itemsize < 4 else 1e-6)


@pytest.mark.parametrize("dtype", ["float16", "int8", "int3"])
def test_what_is_trained_is_what_is_saved(dtype: str, tmp_path: Any) -> None:
    pnet = ZOO["mlp"].pnet()
    step, batch = step_of(ZOO["mlp"], rounding=dtype)
    state, _ = step(step.init(), batch)
    _, info = step(state, batch)
    gb.save(tmp_path / "g", step.plan, state, dtype)
    net = gb.materialize(*gb.load(tmp_path / "g"), pnet)
    torch.testing.assert_close(loss_fn(net, batch).detach(), info.loss)
