"""The first compiled step is compared with the code as it is, whose calls leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.train.gradients.proof import Rounding
from tests.support.zoo import SGD

pytestmark = pytest.mark.usefixtures("graphs_alone")
BATCH = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3 + 5


def square(net: Any, x: Tensor) -> Tensor:
    return net(x).square().mean()


def losses(make: Callable[[], nn.Module], loss_fn: Any, compile: bool, steps: int = 2) -> tuple[list[float], Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pnet = make().double()
    step = gb.make_train_step(gb.make_plan(pnet, gb.low_rank(1)), pnet, loss_fn, SGD, compile=compile)
    state, found = step.init(), []
    for _ in range(steps):
        state, info = step(state, BATCH)
        found += [float(info.loss), float(info.grad_norm)]
    return found, state.buffers


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_gradient_inside_of_a_random_loss_is_refused() -> None:
    def penalty(net: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = net(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + gradient.square().mean()

    with pytest.raises(ValueError, match="compiled by torch.compile, the gradient is .* pass compile=False"):
        losses(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(), nn.Linear(5, 1)), penalty, True)


def test_a_gradient_by_torch_func_in_a_random_loss_is_none_of_those() -> None:
    def penalty(net: Any, x: Tensor) -> Tensor:
        gradient = torch.func.grad(lambda x: net(x).sum())(x)
        return net(x).square().mean() + gradient.square().mean()

    found, _ = losses(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(), nn.Linear(5, 1)), penalty, True)
    assert len(found) == 4


def test_gradients_may_be_as_far_apart_as_the_coarsest_precision_of_a_forward_rounds() -> None:
    net = nn.Linear(6, 3)
    rounding = Rounding(gb.make_plan(net, gb.low_rank(2)))
    assert rounding.most == torch.finfo(torch.float32).eps ** 0.4
    with rounding, torch.autocast("cpu", torch.bfloat16):
        net(torch.ones(2, 6))
    assert rounding.most == torch.finfo(torch.bfloat16).eps ** 0.4
