"""What a forward may do with a layer's weight: a table of small p-nets, one for each operation.

`READS` holds reads of `net.a.weight`, `net.a` being a `Linear(6, 5)` and `net.b` a `Linear(5, 6)`; what stands in
`operation_layers.py` and `operation_stock.py` brings other layers. Most write their result as a function of the input
too, so that a wrong read changes loss and gradients.
"""

import copy
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import gbfunc as gb
from tests.support.strategies import Net
from tests.support.zoo import DEVICE

ROWS = 4
Forward = Callable[[Any, Tensor], Any]


def loss_of(out: Any) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for tensor in out if isinstance(out, tuple) else (out,):
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        wide = real.double() if real.dtype.itemsize < 4 else real
        target = torch.arange(wide.numel(), dtype=wide.dtype, device=wide.device).sin().reshape(wide.shape)
        total = total + F.mse_loss(wide, target)
    return total


def loss_fn(net: Callable[..., Any], batch: Tensor) -> Tensor:
    return loss_of(net(batch))


def quietly(make: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*args, **options)


class Operation(NamedTuple):
    forward: Forward
    layers: Callable[[], Mapping[str, nn.Module]] = lambda: {"a": nn.Linear(6, 5), "b": nn.Linear(5, 6)}
    shape: tuple[int, ...] = (6,)  # of one input
    tokens: int = 0  # vocabulary size where inputs are token numbers
    options: Mapping[str, Any] = MappingProxyType({})  # of `make_plan`
    dtype: torch.dtype = torch.float64  # of p-net and input
    unseeded: Callable[..., Any] = loss_fn
    tolerance: float = 1e-9
    may_refuse: bool = False  # an error is as good as the answer; a wrong answer never is
    train: bool = True
    random: bool = False  # the forward draws random numbers
    slow: bool = False

    def pnet(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            net = Net(self.forward, **quietly(self.layers))
        cast = {torch.float64: "double", torch.float32: "float", torch.bfloat16: "bfloat16", torch.float16: "half"}
        return getattr(net, cast[self.dtype])().train(self.train).to(DEVICE)

    def plan(self, pnet: nn.Module, name: str = "", **changes: Any) -> gb.Plan:
        hypernet = gb.low_rank(2) if crc32(name.encode()) % 2 else gb.periodic(2)
        return gb.make_plan(pnet, **{"hypernet": hypernet, "max_tile": 4, **self.options, **changes})

    def loss(self, net: Callable[..., Any], batch: Tensor) -> Tensor:
        if self.random:
            (torch.cuda if DEVICE.type == "cuda" else torch.default_generator).manual_seed(7)
        return self.unseeded(net, batch)

    def batch(self) -> Tensor:
        draw = torch.Generator().manual_seed(1)
        if self.tokens:
            return torch.randint(0, self.tokens, (ROWS, *self.shape), generator=draw).to(DEVICE)
        return torch.randn((ROWS, *self.shape), generator=draw, dtype=torch.float64).to(DEVICE, self.dtype)


class OldFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


class NewFunction(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return (x * weight).sum(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0][..., None] * weight, grads[0][..., None] * x


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return (weight * 4).round() / 4

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor | None:
        return grads[0] if ctx.needs_input_grad[0] else None


class TwoWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.scale, ctx.has_bias = scale, bias is not None
        signs = weight.sign()
        ctx.mark_non_differentiable(signs)
        return F.linear(x, weight, bias) * scale, signs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        out = grads[0] * ctx.scale
        return out @ weight, out.t() @ x, out.sum(0) if ctx.has_bias else None, None


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight.t()).tanh() * 2.0


scripted = quietly(torch.jit.script, _product)
compiled = torch.compile(_product, backend="aot_eager", dynamic=False)


def _fast_weights(net: Any, x: Tensor) -> Tensor:
    """One step of gradient descent on the weight, inside the forward (MAML)."""
    weight = net.a.weight
    weight = weight if weight.requires_grad else weight.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(F.linear(x, weight).square().sum(), weight, create_graph=True)
    return F.linear(x, net.a.weight - 0.1 * gradient)


def _energy(x: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda weight: F.linear(x, weight).sin().sum()


def _nested(net: Any, x: Tensor) -> Tensor:
    nested = quietly(torch.nested.as_nested_tensor, [net.a.weight, net.b.weight.t()], layout=torch.strided)
    first, last = nested.unbind()
    return x @ (first * last).t()


def _offloaded(net: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return net.b(net.a(x).tanh() @ torch.eye(5, dtype=x.dtype)) + x @ net.a.weight.t() @ net.b.weight.t()


C_ENTRY: Mapping[str, Forward] = {
    "function_old_style_beside_layer": lambda net, x: OldFunction.apply(x, net.a.weight) + net.a(x).tanh(),
    "function_setup_context": lambda net, x: NewFunction.apply(x[:, None], net.a.weight),
    "function_straight_through": lambda net, x: F.linear(x, StraightThrough.apply(net.a.weight), net.a.bias),
    "function_several_inputs": lambda net, x: TwoWeights.apply(x, net.a.weight, net.a.bias, 2.0)[0],
    "script_function": lambda net, x: scripted(x, net.a.weight),
    "compiled_function": lambda net, x: compiled(x, net.a.weight),
    "vmap_rows": lambda net, x: torch.vmap(lambda row: (x * row).sum(1))(net.a.weight),
    "vmap_stack": lambda net, x: torch.vmap(lambda w: x @ w.t())(torch.stack([net.a.weight, net.b.weight.t()])),
    "vmap_layer": lambda net, x: torch.vmap(net.a)(x),
    "func_grad": lambda net, x: torch.func.grad(_energy(x))(net.a.weight),
    "func_hessian_whole": lambda net, x: torch.func.hessian(_energy(x))(net.a.weight),
    "func_jacfwd": lambda net, x: torch.func.jacfwd(lambda w: (x @ w.t()).tanh())(net.a.weight),
    "func_jvp": lambda net, x: torch.func.jvp(_energy(x), (net.a.weight,), (torch.ones(5, 6, dtype=x.dtype),)),
    "func_vjp": lambda net, x: torch.func.vjp(_energy(x), net.a.weight)[1](x.sum())[0],
    "func_grad_of_input": lambda net, x: torch.func.grad(lambda y: net.a(y).sin().sum())(x),
    "func_call_of_layer": lambda net, x: functional_call(net.a, {"weight": net.a.weight * 2, "bias": net.a.bias}, (x,)),
    "fast_weights": _fast_weights,
    "nested_strided": _nested,
    "saved_tensors_hooks": _offloaded,
    "checkpoint_inside": lambda net, x: checkpoint(net.a, x, use_reentrant=False),
    "autocast_inside": lambda net, x: _autocast(net, x),
}


def _autocast(net: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net.b(net.a(x).tanh()) + x @ net.a.weight.t() @ net.b.weight.t()


def _in_place(change: Callable[[Tensor], Any]) -> Forward:
    def use(net: Any, x: Tensor) -> Tensor:
        weight = net.a.weight.clone()
        change(weight)
        return F.linear(x, weight, net.a.bias) + net.a(x)

    return use


def _read(function: Callable[[Tensor], Tensor]) -> Forward:
    return lambda net, x: (function(net.a.weight) * x.square().mean(), net.a(x))


def _clipped(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.a.weight.clamp_(-0.1, 0.1)
    return net.a(x)


def _without_grad(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        norm = net.a.weight.norm()
    return net.a(x) / norm


def _hooked(net: Any, x: Tensor, *, read_later: bool = False) -> Tensor:
    weight = net.a.weight
    # Twice is as good as once: a leaf keeps its hooks from one microbatch to the next.
    weight.register_hook(lambda g: g.clamp(-0.003, 0.003))
    return net.a(x) if read_later else F.linear(x, weight)


TENSOR_READS: Mapping[str, Forward] = {
    "linear": lambda net, x: F.linear(x, net.a.weight, net.a.bias),
    "matmul_t": lambda net, x: x @ net.a.weight.t(),
    "einsum": lambda net, x: torch.einsum("oi,bi->bo", net.a.weight, x),
    "einsum_two_weights": lambda net, x: torch.einsum("oi,po,bi->bp", net.a.weight, net.b.weight, x),
    "slice_rows": lambda net, x: F.linear(x, net.a.weight[1:3], net.a.bias[1:3]),
    "iterate_rows": lambda net, x: torch.stack([x @ row for row in net.a.weight], 1),
    "cat": lambda net, x: x @ torch.cat([net.a.weight, net.b.weight.t()]).t(),
    "arithmetic": lambda net, x: F.linear(x, 2 * net.a.weight - net.b.weight.t() / 3 + 1),
    "norms": _read(lambda w: torch.stack([w.norm(), torch.linalg.matrix_norm(w, "nuc"), torch.linalg.norm(w, 2)])),
    "complex_view": _read(lambda w: torch.view_as_complex(w.reshape(5, 3, 2)).prod(1)),
    "embedding_of_weight": lambda net, x: F.embedding(x.argmax(1) % 5, net.a.weight) * x,
    "dropconnect": lambda net, x: F.linear(x, F.dropout(net.a.weight, 0.5)) + net.a(x),
    "in_place_mul": _in_place(lambda w: w.mul_(2)),
    "in_place_assign_row": _in_place(lambda w: w.__setitem__(0, 0.5)),
    "in_place_on_row_of_clone": _in_place(lambda w: w[1].tanh_()),
    "in_place_without_grad": _clipped,
    "no_grad_read": _without_grad,
    "detach": lambda net, x: net.a(x) + x @ net.a.weight.detach().t(),
    "data": lambda net, x: net.a(x) + x @ net.a.weight.data.t(),
    "to_numpy": lambda net, x: net.a(x) * float(net.a.weight.detach().numpy()[0, 1]),
    "to_dtype": lambda net, x: F.linear(x, net.a.weight.to(torch.complex128).real.contiguous()),
    "deepcopy_weight": lambda net, x: net.a(x) + x @ copy.deepcopy(net.a.weight).t(),
    "deepcopy_layer": lambda net, x: net.a(x) + copy.deepcopy(net.a)(x),
    "tensor_hook": _hooked,
    "tensor_hook_then_layer": lambda net, x: _hooked(net, x, read_later=True),
    "retain_grad": lambda net, x: (net.a.weight.retain_grad(), net.a(x))[1],
    "shape": lambda net, x: net.a(x) * net.a.weight.shape[0] + net.a.weight.size(1) - net.a.weight.dim(),
    "requires_grad": lambda net, x: net.a(x) * (2.0 if net.a.weight.requires_grad else 3.0),
    "zeros_like": lambda net, x: net.a(x) + F.linear(x, torch.ones_like(net.a.weight) + net.a.weight.new_zeros(5, 6)),
    "penalty": lambda net, x: (net.a(x), net.a.weight.square().sum() + net.b.weight.abs().sum()),
    "returned_weight": lambda net, x: (net.b(net.a(x)), net.a.weight),
}

MARKS: Mapping[str, Mapping[str, Any]] = {
    "autocast_inside": {"dtype": torch.float32, "tolerance": 0.05},
    "compiled_function": {"slow": True},
    "dropconnect": {"random": True},
    "in_place_without_grad": {"may_refuse": True},
    "deepcopy_weight": {"may_refuse": True},
    "deepcopy_layer": {"may_refuse": True},
    "retain_grad": {"may_refuse": True},
}
"""How the training of some is judged (see `Operation`)."""

READS: Mapping[str, Operation] = {
    name: Operation(use, **MARKS.get(name, {})) for name, use in {**C_ENTRY, **TENSOR_READS}.items()
}
