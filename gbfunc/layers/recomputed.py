"""A weight that is made for each use and made again in backward, so that none is kept.

Suffixes: b rows of a flattened batch, o out features, i in features.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gbfunc.layers.forms import WeightForm, dense_linear

Make = Callable[..., Tensor]


class RecomputedWeight(WeightForm):
    """A weight `make(*inputs)` that lives only while an operation uses it.

    Under `torch.compile` the values are right, but the compiler chooses what to keep; forward mode
    and `torch.func.grad` do not work inside a compiled function.

    Args:
        name: name of the parameter.
        inputs: names of the tensors that it is made of, at least one; attributes of the form.
        maker: `maker(*inputs) -> weight`, a pure function that draws no random numbers.
        transposed: the layer stores the transpose of the matrix that it multiplies by.
    """

    def __init__(self, name: str, inputs: tuple[str, ...], maker: Make, transposed: bool) -> None:
        super().__init__(name, inputs)
        self.maker, self.transposed = maker, transposed

    def make(self) -> Tensor:
        """The weight, kept by whatever uses it."""
        return self.maker(*(self.given[k] for k in self.inputs))

    def linear(self, x: Tensor, bias: Tensor | None, rows: slice = slice(None)) -> Tensor:
        """`x @ W[rows].T + bias`; the whole weight is made for some rows, too."""
        if rows.stop is None and not self.transposed:
            return self._recompute(_LINEAR, x, bias)

        def forward(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return dense_linear(weight, self.transposed, rows, x, bias)

        return self._recompute(_by_vjp(forward), x, bias)

    def conv(self, conv: Callable[..., Tensor], x: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        """`conv(x, W, bias, **options)`, any groups."""

        def forward(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return conv(x, weight, bias, **options)

        return self._recompute(_by_vjp(forward), x, bias)

    def embedding(self, index: Tensor, padding_idx: int | None) -> Tensor:
        """Rows of the weight."""

        def forward(weight: Tensor, index: Tensor) -> Tensor:
            return F.embedding(index, weight, padding_idx)

        return self._recompute(_by_vjp(forward), index, None)

    def _recompute(self, operation: _Operation, x: Tensor, bias: Tensor | None) -> Tensor:
        others = (x,) if bias is None else (x, bias)
        if self.held is not None:
            return operation.forward(self.held, *others)
        inputs = tuple(self.given[k] for k in self.inputs)
        device = inputs[0].device.type
        use = _Use(self.maker, len(inputs), operation, _autocast_dtype(device), device)
        function = _Recompute if torch.compiler.is_compiling() else _RecomputeForward
        return function.apply(use, *inputs, *others)  # pyright: ignore[reportReturnType]


class _Operation(NamedTuple):
    """What is done with a weight: forward(W, *others) -> y and pull(W, others, needs, dy) -> gradients.

    `needs` says which of (W, *others) want a gradient; `pull` returns one entry for each, None where not.
    """

    forward: Callable[..., Tensor]
    pull: Callable[[Tensor, tuple[Tensor, ...], tuple[bool, ...], Tensor], list[Tensor | None]]


class _Use(NamedTuple):
    """One use of a weight: how it is made, from how many tensors, for what, under which autocast."""

    make: Make
    inputs: int
    operation: _Operation
    autocast: torch.dtype | None
    device_type: str


class _Recompute(torch.autograd.Function):
    """Make the weight, use it, drop it; in backward make it again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(use: _Use, *tensors: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.autocast(use.device_type, enabled=False):
            weight = use.make(*tensors[: use.inputs])
        return use.operation.forward(weight, *tensors[use.inputs :])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.use = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        use: _Use = ctx.use
        inputs, others = ctx.saved_tensors[: use.inputs], ctx.saved_tensors[use.inputs :]
        needs = tuple(
            need and tensor.is_floating_point()
            for need, tensor in zip(ctx.needs_input_grad[1:], ctx.saved_tensors, strict=True)
        )
        wanted = [i for i in range(use.inputs) if needs[i]]

        def make_from(*chosen: Tensor) -> Tensor:
            merged = list(inputs)
            for i, tensor in zip(wanted, chosen, strict=True):
                merged[i] = tensor
            return use.make(*merged)

        gradients: list[Tensor | None] = [None] * use.inputs
        if wanted:
            weight, pull_make = _vjp(make_from, *(inputs[i] for i in wanted))
        else:
            weight, pull_make = use.make(*inputs), None
        with _autocast(use):
            d_weight, *d_others = use.operation.pull(weight, others, (bool(wanted), *needs[use.inputs :]), dy)
        del weight
        if pull_make is not None and d_weight is not None:
            for i, gradient in zip(wanted, pull_make(d_weight), strict=True):
                gradients[i] = gradient
        return (None, *gradients, *d_others)


class _RecomputeForward(_Recompute):
    """The same with forward-mode derivatives, which torch.compile does not trace."""

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        use: _Use = ctx.use
        moved = [i for i, tangent in enumerate(tangents) if tangent is not None]

        def run(*chosen: Tensor) -> Tensor:
            merged = list(ctx.saved_tensors)
            for i, tensor in zip(moved, chosen, strict=True):
                merged[i] = tensor
            return _Recompute.forward(use, *merged)

        points = tuple(ctx.saved_tensors[i] for i in moved)
        return torch.func.jvp(run, points, tuple(tangents[i] for i in moved))[1]


def _linear_pull(
    weight_oi: Tensor, others: tuple[Tensor, ...], needs: tuple[bool, ...], dy: Tensor
) -> list[Tensor | None]:
    """Gradients of `x @ W.T + b`: dW = dy.T x, dx = dy W, db = sum dy, in dtypes as autocast has them."""
    x = others[0]
    batch = math.prod(dy.shape[:-1])
    dy_bo = dy.reshape(batch, dy.shape[-1])
    gradients: list[Tensor | None] = [None] * (1 + len(others))
    if needs[1]:
        gradients[1] = (dy @ weight_oi.to(dy.dtype)).to(x.dtype)
    if needs[0]:
        gradients[0] = (dy_bo.t() @ x.reshape(batch, x.shape[-1]).to(dy.dtype)).to(weight_oi.dtype)
    if len(others) > 1 and needs[2]:
        gradients[2] = dy_bo.sum(0).to(others[1].dtype)
    return gradients


def _linear_forward(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def _by_vjp(forward: Callable[..., Tensor]) -> _Operation:
    """An operation whose gradients come from running it once more."""

    def pull(weight: Tensor, others: tuple[Tensor, ...], needs: tuple[bool, ...], dy: Tensor) -> list[Tensor | None]:
        values = (weight, *others)
        wanted = [i for i, need in enumerate(needs) if need]

        def run(*chosen: Tensor) -> Tensor:
            merged = list(values)
            for i, tensor in zip(wanted, chosen, strict=True):
                merged[i] = tensor
            return forward(*merged)

        gradients: list[Tensor | None] = [None] * len(values)
        _, pull_back = _vjp(run, *(values[i] for i in wanted))
        for i, gradient in zip(wanted, pull_back(dy), strict=True):
            gradients[i] = gradient
        return gradients

    return _Operation(forward, pull)


def _vjp(function: Callable[..., Tensor], *primals: Tensor) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """`torch.func.vjp` of a function without auxiliary output."""
    result: Any = torch.func.vjp(function, *primals)
    return result


_LINEAR = _Operation(_linear_forward, _linear_pull)


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _autocast(use: _Use) -> contextlib.AbstractContextManager[Any]:
    """The autocast state of the forward pass, which backward does not inherit."""
    if use.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(use.device_type, dtype=use.autocast)
