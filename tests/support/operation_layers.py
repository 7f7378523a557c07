"""Operations of layers that are not quite stock, of several layers together, and of loss functions of a net."""

import copy
import types
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.support.operations import Forward, Operation, loss_of, quietly

INCLUDE = {"include": ["weight"]}


def call(net: Any, x: Tensor) -> Any:
    return net.a(x)


def layer(make: Callable[[], nn.Module], *shape: int, use: Forward = call, **options: Any) -> Operation:
    return Operation(use, lambda: {"a": make()}, shape or (6,), **options)


def pair(use: Forward, change: Callable[[Any], Any] | None = None, **options: Any) -> Operation:
    def make() -> Mapping[str, nn.Module]:
        layers = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)})
        if change is not None:
            change(layers)
        return dict(layers.items())

    return Operation(use, make, **options)


def chain(net: Any, x: Tensor) -> Tensor:
    return net.b(net.a(x).tanh())


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight * 2, self.bias)


class Masked(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight * self.get_buffer("mask"), self.bias)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6))
        self.more = nn.ParameterList([nn.Parameter(torch.randn(5, 5)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.weight)
        for weight in self.more:
            h = (h @ weight).tanh()
        return h


def masked() -> nn.Linear:
    made = Masked(6, 5)
    made.register_buffer("mask", torch.ones(5, 6).tril())
    return made


def patched() -> nn.Linear:
    made = nn.Linear(6, 5)
    made.forward = types.MethodType(lambda layer, x: F.linear(x, layer.weight) * 2, made)
    return made


def hooked(register: Callable[[nn.Linear], Any]) -> nn.Linear:
    register(made := nn.Linear(6, 5))
    return made


def after_dry_run() -> nn.Module:
    made = quietly(nn.LazyLinear, 5)
    made(torch.ones(1, 6))
    return made


def _conv1d() -> nn.Module:
    made = pytest.importorskip("transformers.pytorch_utils").Conv1D(5, 6)
    nn.init.normal_(made.weight)
    return made


def _adds_a_product(module: Any, args: Any, out: Any) -> Any:
    return out + args[0] @ module.weight.t()


NOT_QUITE_STOCK: Mapping[str, Operation] = {
    "subclass_forward": layer(lambda: Scaled(6, 5)),
    "subclass_mask": layer(masked),
    "patched_method": layer(patched),
    "bare_parameters": layer(Bare, options={"include": ["."]}),
    "lazy_linear": layer(after_dry_run),
    "conv1d_hugging_face": layer(_conv1d),
    "conv1d_reads_weight": layer(_conv1d, use=lambda net, x: net.a(x) + x @ net.a.weight),
    "hook_reads_weight": layer(lambda: hooked(lambda made: made.register_forward_hook(_adds_a_product))),
    "hook_with_kwargs": layer(
        lambda: hooked(lambda made: made.register_forward_hook(lambda m, a, k, out: out * 2, with_kwargs=True)),
        use=lambda net, x: net.a(input=x),
    ),
    "pre_hook": layer(lambda: hooked(lambda made: made.register_forward_pre_hook(lambda m, args: (args[0].sin(),)))),
    "weight_norm": layer(lambda: parametrizations.weight_norm(nn.Linear(6, 5))),
    "weight_norm_old": layer(lambda: nn.utils.weight_norm(nn.Linear(6, 5))),
    "spectral_norm": layer(lambda: parametrizations.spectral_norm(nn.Linear(6, 5))),
    "spectral_norm_conv": layer(lambda: parametrizations.spectral_norm(nn.Conv2d(2, 5, 3)), 2, 5, 5),
    "orthogonal": layer(lambda: parametrizations.orthogonal(nn.Linear(5, 5), use_trivialization=False), 5),
    "parametrized_cached": layer(
        lambda: parametrizations.weight_norm(nn.Linear(6, 5)), use=lambda net, x: _cached(net, x)
    ),
}


def _cached(net: Any, x: Tensor) -> Tensor:
    with parametrize.cached():
        return net.a(x) + net.a(-x).tanh() + x @ net.a.weight.t()


def _tie(layers: Any) -> None:
    layers["b"].weight = layers["a"].weight


def _visit(net: Any, x: Tensor) -> Tensor:
    sums: list[Tensor] = []
    net.apply(lambda module: sums.append(module.weight.square().sum()) if hasattr(module, "weight") else None)
    return chain(net, x) * torch.stack(sums).sum()


def _isinstance(net: Any, x: Tensor) -> Tensor:
    for module in net.children():
        x = module(x).tanh() if isinstance(module, nn.Linear) else x * 0
    return x


def _named_penalty(net: Any, x: Tensor) -> Any:
    return chain(net, x), sum(p.abs().sum() for name, p in net.named_parameters() if name.endswith("weight"))


def _by_state_dict(net: Any, x: Tensor) -> Tensor:
    state = net.state_dict()
    assert set(state) == {"a.weight", "a.bias", "b.weight", "b.bias"}
    return chain(net, x) + F.linear(x, state["a.weight"], state["a.bias"])


def _remembers(net: Any, x: Tensor) -> Tensor:
    out = chain(net, x) + getattr(net, "last", 0)
    net.last = out.detach().mean(0)
    return out


def _keeps_weight(net: Any, x: Tensor) -> Tensor:
    net.kept = net.a.weight
    return F.linear(chain(net, x), net.kept)


def _counts(net: Any, x: Tensor) -> Tensor:
    net.calls = getattr(net, "calls", 0) + 1
    return chain(net, x) * net.calls


def _recurrent(net: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = net.a(x).tanh()
    return net.b(x)


def _twice(net: Callable[..., Any], batch: Tensor) -> Tensor:
    return loss_of(net(batch)) + loss_of(net(-batch.sin()))


def _gradient_penalty(net: Callable[..., Any], batch: Tensor) -> Tensor:
    x = batch.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(net(x).sin().sum(), x, create_graph=True)
    return loss_of(net(x)) + gradient.square().sum()


SEVERAL: Mapping[str, Operation] = {
    "backward_hook": pair(chain, lambda layers: layers["b"].register_full_backward_hook(lambda m, g, _: (g[0] * 3,))),
    "tied_layers": pair(chain, _tie),
    "tied_and_read": pair(lambda net, x: chain(net, x) @ net.b.weight, _tie),
    "same_layer_twice": pair(lambda net, x: net.a(net.a(x).tanh())),
    "recurrent": pair(_recurrent),
    "other_layers_weight": pair(lambda net, x: F.linear(net.a(x), net.a.weight + net.b.weight, net.b.bias)),
    "named_parameters": pair(_named_penalty),
    "parameters_to_vector": pair(lambda net, x: (chain(net, x), nn.utils.parameters_to_vector(net.parameters()).sin())),
    "state_dict": pair(_by_state_dict),
    "apply": pair(_visit),
    "modules_isinstance": pair(_isinstance),
    "deepcopied_net": pair(lambda net, x: chain(net, x) + chain(copy.deepcopy(net), x), may_refuse=True),
    # A second microbatch reads what the first one left, which is refused.
    "state_between_calls": pair(_remembers, unseeded=_twice, may_refuse=True),
    "weight_kept_on_module": pair(_keeps_weight, unseeded=_twice),
    "calls_counted": pair(_counts),
    "net_called_twice": pair(chain, unseeded=_twice),
    "gradient_penalty": pair(chain, unseeded=_gradient_penalty),
    "net_under_vmap": pair(chain, unseeded=lambda net, batch: loss_of(torch.vmap(net)(batch))),
    "net_under_jvp": pair(chain, unseeded=lambda net, batch: loss_of(torch.func.jvp(net, (batch,), (batch.cos(),)))),
    "net_under_jacrev": pair(chain, unseeded=lambda net, batch: loss_of(torch.vmap(torch.func.jacrev(net))(batch))),
    "train_flag": pair(lambda net, x: chain(net, x) * (2 if net.a.training else 3)),
    "frozen_bias": pair(chain, lambda layers: layers["a"].bias.requires_grad_(False)),
    "frozen_weight": pair(chain, lambda layers: layers["a"].weight.requires_grad_(False)),
}

LAYERS: Mapping[str, Operation] = {**NOT_QUITE_STOCK, **SEVERAL}
