"""A weight that is made for each use and made again in backward, so that none is kept.

Suffixes: b rows of a flattened batch, o out features, i in features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gbfunc.hypernets.kernels.chunked import InputsOnly
from gbfunc.layers.forms import Needs, Source, Weight, WeightForm, dense_linear
from gbfunc.types import Params

Make = Callable[..., Tensor]
Pull = Callable[[Tensor, Sequence[Tensor], list[bool], Tensor], list[Tensor | None]]
"""`(W, others, needs, dy) -> gradients` of (W, *others), None for those that need none."""


class RecomputedWeight(WeightForm):
    """A weight `maker(*inputs)` that lives only while an operation uses it; the layer may store it `transposed`.

    `maker` is pure and draws no random numbers. A weight that is `split` may be read by nobody but the layer. Under
    `torch.compile` the compiler chooses what to keep, and neither forward mode nor `torch.func.grad` works inside.
    """

    needs: Needs = "leaves"

    def __init__(self, name: str, inputs: tuple[str, ...], maker: Make, transposed: bool, split: bool = False) -> None:
        super().__init__(name, inputs)
        self.maker, self.transposed, self.split = maker, transposed, split

    def of(self, sources: Sequence[Source]) -> Params:
        """What the weight is made of."""
        return dict(zip(self.keys, (x for source in sources for x in source.inputs()), strict=True))

    def make(self, given: Params) -> Tensor:
        """The weight, kept by whatever uses it; RuntimeError where this rank has a piece of it."""
        if self.split:
            raise RuntimeError(f"{self.name!r} is split over ranks and made in pieces: read it with remat='none'")
        return self.maker(*(given[k] for k in self.inputs))

    def linear(self, weight: Weight, x: Tensor, bias: Tensor | None, rows: slice | None) -> Tensor:
        """`x @ W[rows].T + bias`; all of the weight is made, for some rows too."""

        def forward(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return dense_linear(weight, self.transposed, rows, x, bias)

        pull = _linear_pull if rows is None and not self.transposed else None
        return self._recompute(weight, forward, x, bias, pull)

    def conv(
        self, weight: Weight, conv: Callable[..., Tensor], x: Tensor, bias: Tensor | None, **options: Any
    ) -> Tensor:
        """`conv(x, W, bias, **options)`, any groups."""

        def forward(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return conv(x, weight, bias, **options)

        return self._recompute(weight, forward, x, bias)

    def embedding(self, weight: Weight, index: Tensor, padding_idx: int | None) -> Tensor:
        """Rows of the weight."""

        def forward(weight: Tensor, index: Tensor) -> Tensor:
            return F.embedding(index, weight, padding_idx)

        return self._recompute(weight, forward, index, None)

    def _recompute(
        self,
        weight: Weight,
        forward: Callable[..., Tensor],
        x: Tensor,
        bias: Tensor | None,
        pull: Pull | None = None,
    ) -> Tensor:
        others = (x,) if bias is None else (x, bias)
        # Gradients of nested tensors are torch's alone: a Function would have to take them apart.
        if weight.formed is not None or x.is_nested:
            return forward(weight.dense(), *others)
        inputs = tuple(weight.given[k] for k in self.inputs)
        device = inputs[0].device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        use = _Use(self.maker, len(inputs), forward, pull, autocast, device)
        function = _Recompute if torch.compiler.is_compiling() else _RecomputeForward
        return function.apply(use, *inputs, *others)  # pyright: ignore[reportReturnType]


class _Use(NamedTuple):
    """One use of a weight: how it is made, from how many tensors, for what operation, under which autocast.

    Without a `pull`, the gradients of the operation come from running `forward(W, *others)` once more.
    """

    make: Make
    inputs: int
    forward: Callable[..., Tensor]
    pull: Pull | None
    autocast: torch.dtype | None
    device_type: str


class _Recompute(InputsOnly):
    """Make the weight, use it, drop it; in backward make it again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(use: _Use, *tensors: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.autocast(use.device_type, enabled=False):
            weight = use.make(*tensors[: use.inputs])
        return use.forward(weight, *tensors[use.inputs :])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        use: _Use = ctx.what
        n, tensors = use.inputs, ctx.saved_tensors
        needs = [need and x.is_floating_point() for need, x in zip(ctx.needs_input_grad[1:], tensors, strict=True)]
        needs_weight = [any(needs[:n]), *needs[n:]]
        # Backward has the autocast state of who calls it, as a forward does that takes gradients itself.
        with torch.autocast(use.device_type, enabled=False):
            weight, pull_make = _vjp(use.make, tensors[:n], needs[:n])
            with torch.autocast(use.device_type, use.autocast) if use.autocast else nullcontext():
                if use.pull is None:
                    d_weight, *d_others = _vjp(use.forward, (weight, *tensors[n:]), needs_weight)[1](dy)
                else:
                    d_weight, *d_others = use.pull(weight, tensors[n:], needs_weight, dy)
            del weight
            return (None, *pull_make(d_weight), *d_others)


class _RecomputeForward(_Recompute):
    """`_Recompute` for eager code: with forward-mode derivatives, and what in-place layers behind it may change."""

    @staticmethod
    def forward(use: _Use, *tensors: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        out = _Recompute.forward(use, *tensors)
        # Views that custom functions return cannot be changed in place: a product of many dimensions is one.
        return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        moved = [i for i, tangent in enumerate(tangents) if tangent is not None]
        run = _of_some(partial(_Recompute.forward, ctx.what), ctx.saved_tensors, moved)
        points = tuple(ctx.saved_tensors[i] for i in moved)
        return torch.func.jvp(run, points, tuple(tangents[i] for i in moved))[1]


def _linear_pull(weight_oi: Tensor, others: Sequence[Tensor], needs: list[bool], dy: Tensor) -> list[Tensor | None]:
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


def _vjp(
    function: Callable[..., Tensor], values: Sequence[Tensor], needs: list[bool]
) -> tuple[Tensor, Callable[[Any], list[Tensor | None]]]:
    """`function(*values)`, and what takes its gradient to those of the values, None for those that need none."""
    wanted = [i for i, need in enumerate(needs) if need]
    if not wanted:
        return function(*values), lambda dy: [None] * len(values)
    made: Any = torch.func.vjp(_of_some(function, values, wanted), *(values[i] for i in wanted))
    out, pull = made

    def gradients(dy: Tensor) -> list[Tensor | None]:
        pulled = iter(pull(dy))
        return [next(pulled) if need else None for need in needs]

    return out, gradients


def _of_some(function: Callable[..., Tensor], values: Sequence[Tensor], places: list[int]) -> Callable[..., Tensor]:

    def of_chosen(*chosen: Tensor) -> Tensor:
        merged = list(values)
        for i, x in zip(places, chosen, strict=True):
            merged[i] = x
        return function(*merged)

    return of_chosen
