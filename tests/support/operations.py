"""What a forward may do with a layer's weight: a table of small p-nets, one for each operation.

`READS` holds reads of `net.a.weight`, `net.a` being a `Linear(6, 5)` and `net.b` a `Linear(5, 6)`; what stands in
`operation_layers.py` and `operation_stock.py` brings other layers. Most write their result as a function of the input
too, so that a wrong read changes loss and gradients.
"""

from __future__ import annotations

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
from tests.support.zoo import DEVICE

ROWS = 4
Forward = Callable[[Any, Tensor], Any]


def loss_of(out: Any) -> Tensor:
    """Sum over the outputs of the mean squared distance from a sine of their index."""
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
    """Call what torch warns of: deprecated (scripts, old normalisations) or a prototype (nested tensors)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*args, **options)


class Net(nn.Module):
    """Layers by name, and a forward that is a plain function of (net, input)."""

    def __init__(self, layers: Mapping[str, nn.Module], use: Forward) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.use = use

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.use(self, *args, **kwargs)


class Operation(NamedTuple):
    """A p-net in which something is done to a weight, and how its training is judged.

    Attributes:
        forward: `(net, input) -> output`.
        layers: makes the layers, from the random state of the moment.
        shape: shape of one input.
        tokens: vocabulary size where inputs are token numbers, 0 where they are real.
        options: what `make_plan` gets beside the p-net.
        dtype: of p-net and input.
        unseeded: the loss function.
        random: whether the forward draws random numbers.
        tolerance: largest difference from the oracle.
        refused: the error that torch or gbfunc raises in place of an answer, in every mode.
        may_refuse: whether an error is as good as the answer; a wrong answer never is.
        train: the training mode.
        slow: whether it takes seconds.
    """

    forward: Forward
    layers: Callable[[], Mapping[str, nn.Module]] = lambda: {"a": nn.Linear(6, 5), "b": nn.Linear(5, 6)}
    shape: tuple[int, ...] = (6,)
    tokens: int = 0
    options: Mapping[str, Any] = MappingProxyType({})
    dtype: torch.dtype = torch.float64
    unseeded: Callable[..., Any] = loss_fn
    tolerance: float = 1e-9
    refused: type[Exception] | tuple[type[Exception], ...] = ()
    may_refuse: bool = False
    train: bool = True
    random: bool = False
    slow: bool = False

    def pnet(self) -> nn.Module:
        """The p-net; every call gives the same values."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            net = Net(quietly(self.layers), self.forward)
        cast = {torch.float64: "double", torch.float32: "float", torch.bfloat16: "bfloat16", torch.float16: "half"}
        return getattr(net, cast[self.dtype])().train(self.train).to(DEVICE)

    def plan(self, pnet: nn.Module, name: str = "", **changes: Any) -> gb.Plan:
        """A plan of several tiles for most weights; half the names get one g-net type, half the other."""
        hypernet = gb.low_rank(2) if crc32(name.encode()) % 2 else gb.periodic(2)
        return gb.make_plan(pnet, **{"hypernet": hypernet, "max_tile": 4, **self.options, **changes})

    def loss(self, net: Callable[..., Any], batch: Tensor) -> Tensor:
        """The loss function; a forward that draws does so from the same start in every mode, and in the oracle."""
        if self.random:
            (torch.cuda if DEVICE.type == "cuda" else torch.default_generator).manual_seed(7)
        return self.unseeded(net, batch)

    def batch(self) -> Tensor:
        """Inputs: [ROWS, *shape]."""
        draw = torch.Generator().manual_seed(1)
        if self.tokens:
            return torch.randint(0, self.tokens, (ROWS, *self.shape), generator=draw).to(DEVICE)
        return torch.randn((ROWS, *self.shape), generator=draw, dtype=torch.float64).to(DEVICE, self.dtype)


# --- what C++ entry points are given ---------------------------------------------------------------------------------


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
    """Rounds; its backward asks which inputs need a gradient, and is not differentiable itself."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return (weight * 4).round() / 4

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor | None:
        return grads[0] if ctx.needs_input_grad[0] else None


class TwoWeights(torch.autograd.Function):
    """Takes a weight, a bias that may be None, and a number."""

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


def _rowwise(x: Tensor, weight: Tensor) -> Tensor:
    rows = []
    for i in range(weight.size(0)):
        rows.append((x * weight[i]).sum(1))
    return torch.stack(rows, 1)


scripted = quietly(torch.jit.script, _product)
scripted_loop = quietly(torch.jit.script, _rowwise)
traced = quietly(torch.jit.trace, _product, (torch.ones(2, 6).double(), torch.ones(5, 6).double()))
compiled = torch.compile(_product, backend="aot_eager", dynamic=False)


def _per_row(net: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: (x * row).sum(1))(net.a.weight)


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


def _jagged(net: Any, x: Tensor) -> Tensor:
    nested = quietly(torch.nested.as_nested_tensor, [net.a.weight, net.b.weight.t()], layout=torch.jagged)
    first, last = (nested * 2).unbind()
    return x @ (first * last).t()


def _offloaded(net: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return net.b(net.a(x).tanh() @ torch.eye(5, dtype=x.dtype)) + x @ net.a.weight.t() @ net.b.weight.t()


C_ENTRY: Mapping[str, Forward] = {
    "function_old_style": lambda net, x: OldFunction.apply(x, net.a.weight),
    "function_old_style_beside_layer": lambda net, x: OldFunction.apply(x, net.a.weight) + net.a(x).tanh(),
    "function_setup_context": lambda net, x: NewFunction.apply(x[:, None], net.a.weight),
    "function_vmap": lambda net, x: torch.vmap(lambda row: NewFunction.apply(x, row.expand_as(x)))(net.a.weight),
    "function_straight_through": lambda net, x: F.linear(x, StraightThrough.apply(net.a.weight), net.a.bias),
    "function_several_inputs": lambda net, x: TwoWeights.apply(x, net.a.weight, net.a.bias, 2.0)[0],
    "function_without_bias": lambda net, x: TwoWeights.apply(x, net.a.weight, None, 0.5)[0],
    "function_of_a_view": lambda net, x: OldFunction.apply(x[:, :3], net.a.weight[:, ::2]),
    "function_of_two_layers": lambda net, x: OldFunction.apply(OldFunction.apply(x, net.a.weight), net.b.weight),
    "script_function": lambda net, x: scripted(x, net.a.weight),
    "script_function_loop": lambda net, x: scripted_loop(x, net.a.weight),
    "script_function_two": lambda net, x: scripted(scripted(x, net.a.weight), net.b.weight),
    "trace_function": lambda net, x: traced(x, net.a.weight),
    "compiled_function": lambda net, x: compiled(x, net.a.weight),
    "vmap_rows": _per_row,
    "vmap_columns": lambda net, x: torch.vmap(lambda w, c: w.sum() * c, in_dims=(1, 1))(net.a.weight, x),
    "vmap_stack": lambda net, x: torch.vmap(lambda w: x @ w.t())(torch.stack([net.a.weight, net.b.weight.t()])),
    "vmap_closure": lambda net, x: torch.vmap(lambda row: net.a.weight @ row)(x),
    "vmap_layer": lambda net, x: torch.vmap(net.a)(x),
    "func_grad": lambda net, x: torch.func.grad(_energy(x))(net.a.weight),
    "func_grad_and_value": lambda net, x: torch.func.grad_and_value(_energy(x))(net.a.weight)[0],
    "func_hessian": lambda net, x: torch.func.hessian(_energy(x[:, :2]))(net.a.weight[:2, :2]),
    "func_hessian_whole": lambda net, x: torch.func.hessian(_energy(x))(net.a.weight),
    "func_jacrev": lambda net, x: torch.func.jacrev(lambda w: (x @ w.t()).tanh())(net.a.weight),
    "func_jacfwd": lambda net, x: torch.func.jacfwd(lambda w: (x @ w.t()).tanh())(net.a.weight),
    "func_jvp": lambda net, x: torch.func.jvp(_energy(x), (net.a.weight,), (torch.ones(5, 6, dtype=x.dtype),)),
    "func_jvp_tangent": lambda net, x: torch.func.jvp(lambda y: y.sin() @ net.a.bias, (net.a(x),), (net.a(x) ** 2,)),
    "func_vjp": lambda net, x: torch.func.vjp(_energy(x), net.a.weight)[1](x.sum())[0],
    "func_grad_of_input": lambda net, x: torch.func.grad(lambda y: net.a(y).sin().sum())(x),
    "func_jacobian_of_layer": lambda net, x: torch.func.jacrev(lambda y: net.b(net.a(y).tanh()))(x[0]) * x.sum(),
    "func_call_of_layer": lambda net, x: functional_call(net.a, {"weight": net.a.weight * 2, "bias": net.a.bias}, (x,)),
    "fast_weights": _fast_weights,
    "nested_strided": _nested,
    "nested_jagged": _jagged,
    "saved_tensors_hooks": _offloaded,
    "checkpoint_inside": lambda net, x: checkpoint(net.a, x, use_reentrant=False),
    "autocast_inside": lambda net, x: _autocast(net, x),
}


def _autocast(net: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net.b(net.a(x).tanh()) + x @ net.a.weight.t() @ net.b.weight.t()


# --- reads by torch's operations -------------------------------------------------------------------------------------


def _in_place(change: Callable[[Tensor], Any]) -> Forward:
    """A change of a clone of the weight."""

    def use(net: Any, x: Tensor) -> Tensor:
        weight = net.a.weight.clone()
        change(weight)
        return F.linear(x, weight, net.a.bias) + net.a(x)

    return use


def _read(function: Callable[[Tensor], Tensor]) -> Forward:
    """A function of the weight, weighted by the input, beside the layer itself."""
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
    "matmul_T": lambda net, x: x @ net.a.weight.T,
    "matmul_mT": lambda net, x: torch.matmul(x, net.a.weight.mT),
    "matmul_left": lambda net, x: net.a.weight @ x.t(),
    "mv": lambda net, x: net.a.weight.mv(x[0]) * x.sum(),
    "mm_transposed_other": lambda net, x: net.a(x).mm(net.a.weight),
    "addmm": lambda net, x: torch.addmm(net.a.bias, x, net.a.weight.t(), beta=2, alpha=3),
    "bmm": lambda net, x: torch.bmm(x[:, None], net.a.weight.t().expand(len(x), 6, 5)),
    "multi_dot": lambda net, x: torch.linalg.multi_dot([x, net.a.weight.t(), net.b.weight.t()]),
    "einsum": lambda net, x: torch.einsum("oi,bi->bo", net.a.weight, x),
    "einsum_two_weights": lambda net, x: torch.einsum("oi,po,bi->bp", net.a.weight, net.b.weight, x),
    "tensordot": lambda net, x: torch.tensordot(x, net.a.weight.t(), dims=1),
    "kron": _read(lambda w: torch.kron(w, w[:2])),
    "transpose_permute": _read(lambda w: w.transpose(0, 1).permute(1, 0) * w),
    "reshape": lambda net, x: x @ net.a.weight.reshape(6, 5),
    "view_flatten": _read(lambda w: w.view(-1) * w.flatten().flip(0)),
    "expand_repeat": _read(lambda w: w.expand(3, 5, 6) * w.repeat(3, 1, 1)),
    "slice_rows": lambda net, x: F.linear(x, net.a.weight[1:3], net.a.bias[1:3]),
    "slice_columns": lambda net, x: F.linear(x[:, ::2], net.a.weight[:, ::2]),
    "index_row": lambda net, x: (x * net.a.weight[0]).sum(1),
    "index_list": lambda net, x: x @ net.a.weight[[0, 0, 3]].t(),
    "index_pairs": _read(lambda w: w[torch.arange(5), torch.arange(5)]),
    "boolean_mask": _read(lambda w: w[w.detach() > 0].sum()),
    "index_select": _read(lambda w: w.index_select(1, torch.tensor([5, 0, 0]))),
    "gather": _read(lambda w: w.gather(1, w.detach().argsort(1)[:, :3])),
    "narrow_select": _read(lambda w: w.narrow(0, 1, 2) * w.select(0, 4)),
    "diagonal_tril": _read(lambda w: w.diagonal() * w.tril().sum(1)),
    "masked_fill": lambda net, x: F.linear(x, net.a.weight.masked_fill(torch.eye(5, 6, dtype=torch.bool), 0.5)),
    "where": lambda net, x: F.linear(x, torch.where(net.a.weight > 0, net.a.weight, 0.1 * net.a.weight)),
    "iterate_rows": lambda net, x: torch.stack([x @ row for row in net.a.weight], 1),
    "unbind": lambda net, x: sum(x @ row for row in net.a.weight.unbind()),
    "chunk": lambda net, x: torch.cat([x @ part.t() for part in net.a.weight.chunk(3)], 1),
    "split": lambda net, x: tuple(x @ part.t() for part in net.a.weight.split([2, 3])),
    "cat": lambda net, x: x @ torch.cat([net.a.weight, net.b.weight.t()]).t(),
    "stack": lambda net, x: torch.stack([net.a.weight, net.b.weight.t()]) @ x[0] * x.sum(),
    "roll_flip": _read(lambda w: w.roll(1, 0) * w.flip(1)),
    "pad_unfold": _read(lambda w: F.pad(w, (1, 1)).unfold(1, 3, 2)),
    "outer": _read(lambda w: torch.outer(w[0], w[1])),
    "arithmetic": lambda net, x: F.linear(x, 2 * net.a.weight - net.b.weight.t() / 3 + 1),
    "unary": _read(lambda w: w.exp() + w.abs() + w.pow(3) - w.neg().sigmoid()),
    "softmax": lambda net, x: F.linear(x, net.a.weight.softmax(1)),
    "normalize": lambda net, x: F.linear(F.normalize(x), F.normalize(net.a.weight)),
    "standardize": lambda net, x: F.linear(x, (net.a.weight - net.a.weight.mean()) / net.a.weight.std()),
    "layer_norm_of_weight": lambda net, x: F.linear(x, F.layer_norm(net.a.weight, (6,))),
    "cumsum_sort_topk": _read(lambda w: w.cumsum(0) * w.sort(1).values + w.topk(1).values),
    "max_min": _read(lambda w: w.max(1).values * w.min() + w.amax()),
    "norms": _read(lambda w: torch.stack([w.norm(), torch.linalg.matrix_norm(w, "nuc"), torch.linalg.norm(w, 2)])),
    "svd_values": _read(lambda w: torch.linalg.svdvals(w)),
    "solve_gram": _read(lambda w: torch.linalg.solve(w @ w.t() + torch.eye(5, dtype=w.dtype), w)),
    "cholesky": _read(lambda w: torch.linalg.cholesky(w @ w.t() + torch.eye(5, dtype=w.dtype))),
    "fft": _read(lambda w: torch.fft.rfft(w).abs()),
    "complex_view": _read(lambda w: torch.view_as_complex(w.reshape(5, 3, 2)).prod(1)),
    "cosine_distance": lambda net, x: F.cosine_similarity(x[:, None], net.a.weight, dim=-1),
    "cdist": lambda net, x: torch.cdist(x, net.a.weight),
    "conv1d_of_weight": lambda net, x: F.conv1d(x[:, None], net.a.weight[:, None, :3]),
    "embedding_of_weight": lambda net, x: F.embedding(x.argmax(1) % 5, net.a.weight) * x,
    "bilinear_of_weight": lambda net, x: F.bilinear(x, x, net.a.weight[:, :, None] * net.a.weight[:, None]),
    "dropconnect": lambda net, x: F.linear(x, F.dropout(net.a.weight, 0.5)) + net.a(x),
    "in_place_mul": _in_place(lambda w: w.mul_(2)),
    "in_place_assign_row": _in_place(lambda w: w.__setitem__(0, 0.5)),
    "in_place_index_add": _in_place(lambda w: w.index_add_(0, torch.tensor([0, 0]), torch.ones(2, 6, dtype=w.dtype))),
    "in_place_on_row_of_clone": _in_place(lambda w: w[1].tanh_()),
    "in_place_without_grad": _clipped,
    "no_grad_read": _without_grad,
    "detach": lambda net, x: net.a(x) + x @ net.a.weight.detach().t(),
    "data": lambda net, x: net.a(x) + x @ net.a.weight.data.t(),
    "to_numpy": lambda net, x: net.a(x) * float(net.a.weight.detach().numpy()[0, 1]),
    "tolist_item": lambda net, x: net.a(x) * (net.a.weight.tolist()[0][1] + net.a.weight[0, 0].item()),
    "to_dtype": lambda net, x: F.linear(x, net.a.weight.to(torch.complex128).real.contiguous()),
    "clone": lambda net, x: F.linear(x, net.a.weight.clone(), net.a.bias.clone()),
    "deepcopy_weight": lambda net, x: net.a(x) + x @ copy.deepcopy(net.a.weight).t(),
    "deepcopy_layer": lambda net, x: net.a(x) + copy.deepcopy(net.a)(x),
    "repr": lambda net, x: net.a(x) * float(len(repr(net.a)) > 0 and len(repr(net.a.weight)) > 0),
    "tensor_hook": _hooked,
    "tensor_hook_then_layer": lambda net, x: _hooked(net, x, read_later=True),
    "retain_grad": lambda net, x: (net.a.weight.retain_grad(), net.a(x))[1],
    "shape": lambda net, x: net.a(x) * net.a.weight.shape[0] + net.a.weight.size(1) - net.a.weight.dim(),
    "dtype_device": lambda net, x: net.a(x.to(net.a.weight.device, net.a.weight.dtype)),
    "numel_len": lambda net, x: net.a(x) * net.a.weight.numel() / len(net.a.weight),
    "requires_grad": lambda net, x: net.a(x) * (2.0 if net.a.weight.requires_grad else 3.0),
    "is_leaf": lambda net, x: net.a(x) * float(net.a.weight.is_leaf in (True, False)),
    "stride_layout": lambda net, x: net.a(x) * net.a.weight.stride(0) * float(net.a.weight.is_contiguous()),
    "is_floating_point": lambda net, x: net.a(x) * float(net.a.weight.is_floating_point()) * net.a.weight.itemsize,
    "isinstance_tensor": lambda net, x: net.a(x) * (2.0 if isinstance(net.a.weight, Tensor) else 3.0),
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
