"""P-nets that keep tensors from call to call: weights of then are refused in training, constants are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gbfunc as gb
from tests.test_odd_pnets import SGD, loss_of

MODES: dict[str, dict[str, Any]] = {
    "dense": {"lazy": False},
    "lazy": {"lazy": True},
    "layer": {"remat": "layer"},
    "microbatches": {"microbatches": 2},
    "compiled": {"compile": True},
}


class Keeping(nn.Module):
    """Has a forward of its own, and a place to keep something."""

    kept: Any

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], kept: Any = None) -> None:
        super().__init__()
        self.a, self.b, self.kept, self.own = nn.Linear(6, 5), nn.Linear(5, 3), kept, forward

    def forward(self, x: Tensor) -> Any:
        return self.own(self, x)


def weights(net: Any, x: Tensor) -> Tensor:
    net.kept = net.kept or [net.a.weight, net.b.weight]
    return x @ net.kept[0].T @ net.kept[1].T


def transpose(net: Any, x: Tensor) -> Tensor:
    net.kept = net.a.weight.t() if net.kept is None else net.kept
    return net.b(x @ net.kept)


def copied(net: Any, x: Tensor) -> Tensor:
    if "w" not in net.kept:
        net.kept["w"] = net.a.weight.detach().clone()
    return net.b(F.linear(x, net.kept["w"]))


def state(net: Any, x: Tensor) -> Tensor:
    h = net.a(x).tanh()
    h = h if net.kept is None else h + net.kept
    net.kept = h.mean(0).detach()
    return net.b(h)


def counted(net: Any, x: Tensor) -> Tensor:
    net.kept += 1
    return net.b(net.a(x)) * net.kept


LEAVING: dict[str, Callable[[], nn.Module]] = {
    "weights": lambda: Keeping(weights),
    "transpose": lambda: Keeping(transpose),
    "copy": lambda: Keeping(copied, {}),
    "state": lambda: Keeping(state),
    "counter": lambda: Keeping(counted, torch.zeros(())),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LEAVING)
def test_what_an_earlier_call_left_is_refused(name: str, mode: str) -> None:
    pnet = LEAVING[name]()
    step = gb.make_train_step(gb.make_plan(pnet, gb.periodic(2)), pnet, loss_of, SGD, **MODES[mode])
    start = step.init()
    with pytest.raises(ValueError, match="reads its 'kept', which an earlier call computed and left there"):
        step(step(start, torch.ones(2, 6))[0], torch.ones(2, 6))


@pytest.mark.parametrize("lazy", [False, True])
def test_in_a_module_it_is_refused_with_gradients(lazy: bool) -> None:
    pnet = Keeping(state)
    module = gb.GenomeModule(gb.make_plan(pnet, gb.periodic(2)), pnet, lazy=lazy)
    with torch.no_grad():
        first, second = module(torch.ones(2, 6)), module(torch.ones(2, 6))
    assert not torch.equal(first, second)
    module(torch.ones(2, 6))
    with pytest.raises(ValueError, match="reads its 'kept'"):
        module(torch.ones(2, 6))


def shown(net: Any, x: Tensor) -> Tensor:
    net.kept = net.a(x).softmax(-1)
    return net.b(net.kept.exp())


def constant(net: Any, x: Tensor) -> Tensor:
    if net.kept is None:
        mask = torch.ones(5, 5).tril_()
        net.kept = mask / mask.sum(1, keepdim=True), torch.zeros_like(x[:, :5]), x.new_ones(5)
    mean, zeros, ones = net.kept
    return net.b(F.linear(net.a(x) + zeros * ones, mean))


@pytest.mark.parametrize("forward", [shown, constant])
def test_what_is_overwritten_or_constant_may_be_kept(forward: Any) -> None:
    pnet = Keeping(forward)
    step = gb.make_train_step(gb.make_plan(pnet, gb.periodic(2)), pnet, loss_of, SGD)
    state = start = step.init()
    for _ in range(4):
        state, info = step(state, torch.ones(2, 6))
    again, _ = gb.make_train_step(step.plan, pnet, loss_of, SGD)(start, torch.ones(2, 6))
    torch.testing.assert_close(step(start, torch.ones(2, 6))[0].gnets, again.gnets)


class Memory(nn.Module):
    """A cell with a state that is reset by a method, as spiking networks have it."""

    state: Any

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.state = nn.Linear(6, 6), None

    def reset(self) -> None:
        self.state = None

    def forward(self, x: Tensor) -> Any:
        self.state = self.cell(x if self.state is None else x + self.state).tanh()
        return self.state


@pytest.mark.parametrize("resets", [True, False])
def test_a_state_may_last_for_a_step(resets: bool) -> None:
    def loss(net: Any, x: Tensor) -> Tensor:
        if resets:
            net.reset()
        return torch.stack([net(x) for _ in range(3)]).square().mean()

    pnet = Memory()
    step = gb.make_train_step(gb.make_plan(pnet, gb.periodic(2)), pnet, loss, SGD)
    start = step.init()
    once, _ = step(start, torch.ones(2, 6))
    if resets:
        torch.testing.assert_close(step(start, torch.ones(2, 6))[0].gnets, once.gnets)
        return
    with pytest.raises(ValueError, match="reads its 'state', which an earlier call computed"):
        step(start, torch.ones(2, 6))
