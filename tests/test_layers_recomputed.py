"""Weights that are made for each use and again in backward: when they are made, and what is kept."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gbfunc.layers.forms import Weight
from gbfunc.layers.recomputed import RecomputedWeight
from tests.support.forms import assert_close, on_form, vectors
from tests.support.live import LiveBytes


def doubled(made: Counter[str], inputs: tuple[str, ...] = ("half",)) -> RecomputedWeight:
    def maker(half: Tensor, *others: Tensor) -> Tensor:
        made["w"] += 1
        return 2 * half

    return RecomputedWeight("w", inputs, maker, False)


def given(form: RecomputedWeight, *tensors: Tensor) -> tuple[Any, ...]:
    leaves = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in tensors)
    return Weight(form, dict(zip(form.inputs, leaves, strict=True))), *leaves


# Each use that is not the stock linear one is run once more in backward, on the weight that is made there.
@pytest.mark.parametrize("use", ["linear", "conv", "embedding"])
def test_made_once_forward_and_once_backward(use: str) -> None:
    made: Counter[str] = Counter()
    weight, half = given(doubled(made), vectors(6, 2, 3) if use == "conv" else vectors(6, 4))
    uses: dict[str, Any] = {
        "linear": lambda: weight.linear(vectors(3, 4), None),
        "conv": lambda: weight.conv(torch.conv1d, vectors(3, 2, 7), None, stride=2),
        "embedding": lambda: weight.embedding(torch.tensor([1, 5, 1]), 5),
    }
    y = uses[use]()
    assert made["w"] == 1
    (gradient,) = torch.autograd.grad(y.sum(), half)
    assert made["w"] == 2
    weight.formed = 2 * half
    assert_close(uses[use](), y)
    assert_close(torch.autograd.grad(uses[use]().sum(), half)[0], gradient)
    assert made["w"] == 2


def test_outputs_may_be_changed_in_place() -> None:
    """As by `nn.ReLU(inplace=True)`: the product of a batch of many dimensions is a view."""
    weight, half = given(doubled(Counter()), vectors(6, 4))
    y = weight.linear(vectors(2, 3, 4), None).relu_()
    expected = torch.nn.functional.linear(vectors(2, 3, 4), 2 * half).relu()
    assert_close(y, expected)
    found, wanted = (torch.autograd.grad(x.sum(), half)[0] for x in (y, expected))
    assert_close(found, wanted)


def test_nothing_is_made_in_backward_that_nothing_asks_for() -> None:
    made: Counter[str] = Counter()
    weight = Weight(doubled(made), {"half": vectors(6, 4)})
    bias = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    y = weight.linear(vectors(3, 4), bias)
    assert_close(torch.autograd.grad(y.sum(), bias)[0], torch.full_like(bias, 3))
    with torch.no_grad():
        before = made["w"]
        assert not weight.linear(vectors(3, 4), bias).requires_grad
        assert made["w"] == before + 1


def test_inputs_without_gradients_stay_without() -> None:
    weight, half, _ = given(doubled(Counter(), ("half", "index")), vectors(6, 4), torch.arange(3))
    x = vectors(3, 4).requires_grad_()
    gradients = torch.autograd.grad(weight.linear(x, None).square().sum(), (half, x))
    assert_close(gradients, torch.autograd.grad((x @ (2 * half).T).square().sum(), (half, x)))


def test_a_weight_is_made_wide_in_a_backward_under_autocast() -> None:
    dtypes = list[torch.dtype]()

    def maker(half: Tensor) -> Tensor:
        dtypes.append((made := half @ torch.eye(4)).dtype)
        return made

    weight, *leaves = given(RecomputedWeight("w", ("half",), maker, False), torch.randn(6, 4))
    with torch.autocast("cpu", torch.bfloat16):
        torch.autograd.grad(weight.linear(torch.randn(3, 4), None).float().sum(), leaves)
    assert dtypes == [torch.float32] * 2


def peak_live_weights(kind: str, layers: int, width: int) -> int:
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    formed = on_form(kind, net, {f"{i}.weight": (1, 1) for i in range(layers)})
    x = torch.randn(4, width)
    formed(x)
    with LiveBytes(4 * width * width) as live:
        loss = formed(x).square().sum()
        torch.autograd.grad(loss, [leaf for name, leaf in formed.leaves.items() if "weight" in name])
    return live.peak_tensors


def test_one_layer_of_weights_is_alive_at_a_time() -> None:
    dense = peak_live_weights("dense", layers=24, width=48)
    assert dense >= 24 and peak_live_weights("factored", layers=24, width=48) == 0
    assert peak_live_weights("recomputed", layers=24, width=48) <= dense / 8
    assert peak_live_weights("recomputed", layers=24, width=48) == peak_live_weights("recomputed", layers=6, width=48)
