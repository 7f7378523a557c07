"""A weight that is made for each use and made again in backward, so that none is kept.

Shape suffixes: b rows of a flattened batch, o out features, i in features.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gbfunc.factored.interface import Report, new_lazy
from gbfunc.factored.lazy import LazyWeight

Make = Callable[..., Tensor]


class RematWeight(LazyWeight):
    """A weight `make(*inputs)` that lives only while an operation uses it; built by `remat_weight`."""

    _make: Make
    _inputs: tuple[Tensor, ...]

    def sources(self) -> tuple[Tensor, ...]:
        """The inputs of `make`."""
        return self._inputs

    def dense(self) -> Tensor:
        """The weight, kept by whatever uses it."""
        with torch.autocast(self._inputs[0].device.type, enabled=False):
            return self._make(*self._inputs)

    def with_sources(self, sources: tuple[Tensor, ...]) -> RematWeight:
        """Made from other tensors."""
        kind = self._shape, self.dtype, self.device
        return remat_weight(self._make, sources, *kind, name=self._name, report=self._report)

    def flipped(self) -> RematWeight:
        """The transposed matrix, made from the same inputs."""
        make = self._make
        return self._derived(lambda *inputs: make(*inputs).t(), (self._shape[1], self._shape[0]))

    def row_block(self, start: int, stop: int) -> RematWeight:
        """Some rows; the whole weight is made for them."""
        make = self._make
        return self._derived(lambda *inputs: make(*inputs)[start:stop], (stop - start, *self._shape[1:]))

    def apply_linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ W.T + bias`: [..., i] -> [..., o]."""
        return self._recompute(_LINEAR, x, bias)

    def apply_conv(self, conv: Callable[..., Tensor], x: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        """`conv(x, W, bias, **options)`, any groups."""

        def forward(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return conv(x, weight, bias, **options)

        return self._recompute(_by_vjp(forward), x, bias)

    def apply_embedding(self, index: Tensor, padding_idx: int | None) -> Tensor:
        """Rows of the weight: integers [...] -> [..., i]."""

        def forward(weight: Tensor, index: Tensor) -> Tensor:
            return F.embedding(index, weight, padding_idx)

        return self._recompute(_by_vjp(forward), index, None)

    def _derived(self, make: Make, shape: tuple[int, ...]) -> RematWeight:
        return remat_weight(make, self._inputs, shape, self.dtype, self.device, name=self._name, report=self._report)

    def _recompute(self, operation: _Operation, x: Tensor, bias: Tensor | None) -> Tensor:
        others = (x,) if bias is None else (x, bias)
        use = _Use(self._make, len(self._inputs), operation, _autocast_dtype(self.device.type), self.device.type)
        function = _Recompute if torch.compiler.is_compiling() else _RecomputeForward
        return function.apply(use, *self._inputs, *others)  # pyright: ignore[reportReturnType]


def remat_weight(
    make: Make,
    inputs: tuple[Tensor, ...],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    name: str = "",
    report: Report | None = None,
) -> RematWeight:
    """Stand `make(*inputs)` in for a dense weight: made for each use, dropped, and made again in backward.

    Under `torch.compile` the values are right, but the compiler chooses what to keep; forward mode
    and `torch.func.grad` do not work inside a compiled function.

    Args:
        make: Pure function of `inputs` alone that returns the weight; it must draw no random numbers.
        inputs: At least one tensor; gradients flow to them.
        shape: Shape of the weight.
        dtype: Its dtype.
        device: Its device.
        name: Name of the parameter, for `report`.
        report: Counts the operations which kept the dense weight, by (name, operation).

    Returns:
        A tensor of the given shape for the parameter dict of `torch.func.functional_call`.

    Raises:
        ValueError: There are no inputs.
    """
    if not inputs:
        raise ValueError(f"expected at least one input tensor to make {name!r} from, got none")
    weight = new_lazy(RematWeight, tuple(shape), dtype, device, name, report)
    weight._make, weight._inputs = make, tuple(inputs)
    return weight


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
