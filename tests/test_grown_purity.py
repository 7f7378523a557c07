"""What a loss function may not do with `net`: change the p-net, or use it after the call."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gbfunc as gb
from tests.support.coder import Coder, made, numbers
from tests.support.zoo import SGD

# Torch's compiler still uses torch.jit.script when it is loaded.

HOOK: Any = lambda *args: None  # noqa: E731
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attribute": (lambda net: setattr(net, "last", 1), r"net.last = ... would change the p-net"),
    "attribute of a part": (lambda net: setattr(net.encoder[0], "last", 1), "would change the p-net"),
    "training": (lambda net: setattr(net, "training", False), r"net.train\(\) and net.eval\(\) set it"),
    "deletion": (lambda net: delattr(net, "config"), r"del net.config would change"),
    "parameter": (lambda net: setattr(net.layers[0], "weight", nn.Parameter(torch.ones(7, 7))), "would change"),
    "buffer": (lambda net: net.register_buffer("more", torch.ones(1)), r"net.register_buffer\(...\) would"),
    "registered": (lambda net: net.register_parameter("more", None), "register_parameter.* would change"),
    "module": (lambda net: net.add_module("more", nn.Tanh()), "add_module.* would change"),
    "submodule": (lambda net: net.layers.append(nn.Tanh()), "append.* would change"),
    "entry": (lambda net: net.heads.pop("a"), "pop.* would change"),
    "hook": (lambda net: net.encoder.register_forward_hook(HOOK), "register_forward_hook.* would change"),
    "to": (lambda net: net.to(torch.float32), r"net.to\(...\) would change"),
    "half": (lambda net: net.encoder.half(), r"net.half\(...\) would change"),
    "apply": (lambda net: net.apply(nn.init.ones_), r"net.apply\(...\) would change"),
    "requires_grad_": (lambda net: net.requires_grad_(False), "requires_grad_.* would change"),
    "zero_grad": (lambda net: net.zero_grad(), "zero_grad.* would change"),
    "load_state_dict": (lambda net: net.load_state_dict(net.state_dict()), "load_state_dict.* would change"),
    "compile": (lambda net: net.compile(), "compile.* would change"),
    "copy": (copy.deepcopy, "neither be copied nor saved"),
    "pickle": (pickle.dumps, "neither be copied nor saved"),
    "data": (lambda net: setattr(net.layers[0].weight, "data", torch.ones(7, 7).double()), "changes .* in place"),
    "data of a bias": (lambda net: net.layers[0].bias.data.add_(1), r"changes the parameter 'layers.0.bias' in place"),
    "data of a scale": (lambda net: net.scale.data.mul_(2), r"changes the parameter 'scale' in place"),
    "clamped data": (lambda net: [p.data.clamp_(-0.1, 0.1) for p in net.parameters()], "changes .* in place"),
    "without grad": (lambda net: torch.no_grad()(net.layers[1].weight.mul_)(2), "changes .* in place"),
    "state": (lambda net: net.state_dict()["scale"].add_(1), "changes .* in place"),
    "by number": (lambda net: torch.no_grad()(list(net.heads["a"].parameters())[0].zero_)(), "changes .* in place"),
    "swapped": (lambda net: net.encoder[0]._parameters.update(bias=numbers(7)), "'encoder.0.bias' was replaced"),
}


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_what_would_outlive_the_call_is_refused(name: str, lazy: bool) -> None:
    change, words = CHANGES[name]
    pnet, plan = made(Coder)
    bad = [True]

    def loss(net: Any, x: Tensor) -> Tensor:
        if bad:
            change(net)
        return net(x).square().mean()

    step = gb.make_train_step(plan, pnet, loss, SGD, lazy=lazy)
    with pytest.raises(RuntimeError, match=words) as caught:
        step(step.init(), numbers(8, 6))
    assert "\n" not in str(caught.value)
    bad.clear()
    state, fresh = step.init(), gb.make_train_step(plan, pnet, loss, SGD, lazy=lazy)
    torch.testing.assert_close(step(state, numbers(8, 6)), fresh(state, numbers(8, 6)), rtol=0, atol=0)


def test_a_method_that_changes_modules_is_refused_for_good() -> None:
    pnet, plan = made(Coder)
    step = gb.make_train_step(plan, pnet, lambda net, x: (net.widen(), net(x).mean())[1], SGD)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the p-net's method 'widen' changed its modules"):
            step(step.init(), numbers(8, 6))


LATER: dict[str, Callable[[Any], Callable[[Tensor], Any]]] = {
    "net": lambda net: net,
    "part": lambda net: net.encoder,
    "method": lambda net: net.code,
    "attribute": lambda net: lambda x: net.encoder[0].weight,
    "mode": lambda net: lambda x: net.eval(),
    "parameters": lambda net: lambda x: list(net.parameters()),
}


@pytest.mark.parametrize("name", LATER)
def test_a_net_is_refused_after_its_step_and_in_the_next_one(name: str) -> None:
    pnet, plan = made(Coder)
    kept: list[Callable[[Tensor], Any]] = []

    def loss(net: Any, x: Tensor) -> Tensor:
        if kept:
            kept[0](x)
        kept.append(LATER[name](net))
        return net(x).mean()

    step = gb.make_train_step(plan, pnet, loss, SGD)
    state, _ = step(step.init(), numbers(8, 6))
    with pytest.raises(RuntimeError, match="outside of the call of the loss function that it belongs to"):
        kept[0](numbers(8, 6))
    with pytest.raises(RuntimeError, match="outside of the call of the loss function that it belongs to"):
        step(state, numbers(8, 6))


def test_a_net_is_refused_in_a_call_inside_of_its_own() -> None:
    pnet, plan = made(Coder)
    module = gb.GenomeModule(plan, pnet)

    def outer(net: Any, x: Tensor) -> Tensor:
        own = net(x)
        torch.testing.assert_close(module.run(lambda inner: inner.eval().code(x)).shape, torch.Size((8, 7)))
        with pytest.raises(RuntimeError, match="outside of the call"):
            module.run(lambda inner: net(x))
        return own.mean() + net(x).mean()

    module.run(outer, numbers(8, 6)).backward()


@pytest.mark.parametrize("compile", [False, True])
def test_what_would_change_the_net_is_refused_in_compiled_steps_too(compile: bool) -> None:
    def loss(net: Any, x: Tensor) -> Tensor:
        net.seen = x
        return net(x).mean()

    pnet, plan = made(Coder)
    step = gb.make_train_step(plan, pnet, loss, SGD, compile=compile)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"net.seen = ... would change the p-net"):
            step(step.init(), numbers(8, 6))
