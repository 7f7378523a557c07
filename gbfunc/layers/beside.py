"""Adds deltas to linear layers that hide their weight, such as quantised layers: `y = layer(x) + x delta^T`.

Such a layer has the integers `in_features` and `out_features`, and a custom forward. In a plan, the delta of the layer
NAME is called `NAME.delta` [out, in], but the p-net has no such tensor. Factors apply the delta (`FactoredWeight`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gbfunc.layers.forms import weight_of
from gbfunc.layers.kinds import DELTA

_SAMPLED = 64  # Number of columns from which a weight's standard deviation is estimated
_CHUNK = 256  # Number of the weight's columns that backward computes in one call of the layer
_LINEAR = 0.05  # Tolerated |f(x) + f(y) - f(x + y)| of a linear layer f, relative to its largest output


def hidden_layers(net: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, layer) of layers that hide their weight: with `in_features`, but no floating-point weight."""
    for name, layer in net.named_modules():
        sizes = getattr(layer, "out_features", None), getattr(layer, "in_features", None)
        inner = [m for m in layer.modules() if m is not layer]
        own = [p for p in layer._parameters.values() if p is not None and p.shape in (sizes, sizes[::-1])]
        matrices = own + [p for m in inner for p in m._parameters.values() if p is not None and p.ndim > 1]
        nested = any(hasattr(m, "in_features") for m in inner) or any(p.is_floating_point() for p in matrices)
        if isinstance(sizes[1], int) and not nested:
            yield name, layer


def unit_outputs(layer: Any, like: Tensor) -> Tensor:
    """Sample up to 64 columns [out, n] of a hidden weight: outputs for unit vectors of `like`'s dtype and device.

    Raises:
        ValueError: if the layer is not a linear map from `in_features` to `out_features` numbers.
    """
    rows, cols = getattr(layer, "out_features", None), layer.in_features
    if not isinstance(rows, int) or hasattr(layer, DELTA) or "forward" in vars(layer):
        raise ValueError(
            "it has no out_features, has an attribute 'delta', or has a forward that is not its class's forward"
        )
    if like.is_meta:
        return like.new_empty(rows, cols)
    which = torch.linspace(0, cols - 1, min(cols, _SAMPLED), device="cpu").long()
    unit = torch.eye(cols, dtype=like.dtype, device="cpu")[which].to(like.device)
    try:
        with torch.no_grad():
            zero, out, of_sums = (type(layer).forward(layer, x) for x in (unit[:1] * 0, unit, unit + unit.flip(0)))
    except Exception as error:  # A layer may raise any error.
        raise ValueError(f"its forward fails for {like.dtype}: {str(error).partition(chr(10))[0]}") from error
    if not isinstance(out, Tensor) or out.shape != (len(which), rows) or not out.is_floating_point():
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(f"its forward maps {tuple(unit.shape)} to {got} instead of {(len(which), rows)}")
    if float((of_sums - (out + out.flip(0) - zero)).abs().max()) > _LINEAR * float(out.abs().max()):
        raise ValueError("its forward is not linear")
    return (out - zero).t()


class _Layer(torch.autograd.Function):
    """Applies a layer, `run(x)`. To save memory, autograd keeps only x, and backward runs the layer again.

    If the output has no autograd graph, for example because of integer kernels, backward multiplies the gradient by
    the hidden weight. The columns of the hidden weight are the layer's outputs for unit vectors.
    """

    @staticmethod
    def forward(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, Tensor], output: Tensor) -> None:
        ctx.run, x = inputs
        ctx.save_for_backward(x)
        kind = x.device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        with torch.autocast(*ctx.autocast), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            again = x.detach().requires_grad_()
            out = ctx.run(again)
            found = torch.autograd.grad(out, again, grad, allow_unused=True)[0] if out.requires_grad else None
        return None, _through_units(ctx.run, x, grad) if found is None else found

    @staticmethod
    def vmap(info: Any, in_dims: tuple[None, int], run: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, int]:
        return _Layer.apply(run, x.movedim(in_dims[1], 0)), 0


def _kept(layer: nn.Module) -> nn.Module:
    """Copy a layer, without copying tensors, for backward: after a call, the p-net's layer may lack its tensors."""
    kept = object.__new__(type(layer))
    tensors = {"_parameters": dict(layer._parameters), "_buffers": dict(layer._buffers)}
    vars(kept).update(vars(layer), _modules={k: m and _kept(m) for k, m in layer._modules.items()}, **tensors)
    return kept


def _through_units(run: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Tensor:
    cols, gradients = x.shape[-1], list[Tensor]()
    zero = run(x.new_zeros(1, cols))
    for first in range(0, cols, _CHUNK):
        unit = x.new_zeros(min(_CHUNK, cols - first), cols)
        unit.diagonal(first).fill_(1)
        gradients.append(grad @ (run(unit) - zero).to(grad.dtype).t())
    return torch.cat(gradients, -1).to(x.dtype)


def beside_forward(layer: Any, input: Tensor) -> Tensor:
    """Add the delta's output to the layer's own output. Without autocast, the delta is applied in its own dtype."""
    y = _Layer.apply(partial(layer._stock.forward, _kept(layer)), input)
    weight = weight_of(layer, DELTA)
    wide = input if torch.is_autocast_enabled(input.device.type) else input.to(weight.inputs["left"].dtype)
    return y + weight.linear(wide, None).to(y.dtype)
