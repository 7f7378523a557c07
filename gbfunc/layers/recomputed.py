"""A weight that is made for each use and again in backward, so that no weight is kept.

Suffixes: b rows of a flattened batch, o out features, i in features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gbfunc.hypernets.kernels.chunked import InputsOnly
from gbfunc.layers.forms import Needs, Source, Use, Weight, WeightForm
from gbfunc.types import Params

Make = Callable[..., Tensor]
Pull = Callable[[Tensor, Sequence[Tensor], list[bool], Tensor], list[Tensor | None]]
"""`(W, others, needs, dy) -> gradients` of (W, *others), None for those that need none."""


class RecomputedWeight(WeightForm):
    """A weight `maker(*inputs)` that lives only during an operation; the layer may store it `transposed`.

    `maker` is pure and draws no random numbers. Only the layer may read a `split` weight. Under `torch.compile` the
    compiler chooses what to keep, and neither forward mode nor `torch.func.grad` works inside.
    """

    needs: Needs = "leaves"

    def __init__(self, name: str, inputs: tuple[str, ...], maker: Make, transposed: bool, split: bool = False) -> None:
        super().__init__(name, inputs, transposed)
        self.maker, self.split = maker, split

    def of(self, sources: Sequence[Source]) -> Params:
        """The leaves and noise of all sources."""
        return dict(zip(self.keys, (x for source in sources for x in source.inputs()), strict=True))

    def make(self, given: Params) -> Tensor:
        """The dense weight; RuntimeError if this rank has only a piece of the weight."""
        if self.split:
            raise RuntimeError(f"{self.name!r} is split over ranks and made in pieces: read it with remat='none'")
        return self.maker(*(given[k] for k in self.inputs))

    def apply(self, weight: Weight, use: Use, x: Tensor, bias: Tensor | None) -> Tensor:
        """Make the weight, use it, and make it again in backward."""
        others = (x,) if bias is None else (x, bias)
        # Only torch's own operations have gradients of nested tensors.
        if weight.formed is not None or x.is_nested:
            return use.run(weight.dense(), *others)
        inputs = tuple(weight.given[k] for k in self.inputs)
        device = inputs[0].device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        plain = use.operation == "linear" and use.options == (None,) and not self.transposed
        what = _Recipe(self.maker, len(inputs), use.run, _linear_pull if plain else None, autocast, device)
        function = _Recompute if torch.compiler.is_compiling() else _RecomputeForward
        return function.apply(what, *inputs, *others)  # pyright: ignore[reportReturnType]


class _Recipe(NamedTuple):
    """One use of a weight: `forward(make(*tensors[:inputs]), *others)`, under autocast to a dtype or None.

    Without a `pull`, the gradients of the operation come from another run of `forward`.
    """

    make: Make
    inputs: int
    forward: Callable[..., Tensor]
    pull: Pull | None
    autocast: torch.dtype | None
    device_type: str


class _Recompute(InputsOnly):
    generate_vmap_rule = True

    @staticmethod
    def forward(recipe: _Recipe, *tensors: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.autocast(recipe.device_type, enabled=False):
            weight = recipe.make(*tensors[: recipe.inputs])
        return recipe.forward(weight, *tensors[recipe.inputs :])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        recipe: _Recipe = ctx.what
        n, tensors = recipe.inputs, ctx.saved_tensors
        needs = [need and x.is_floating_point() for need, x in zip(ctx.needs_input_grad[1:], tensors, strict=True)]
        needs_weight = [any(needs[:n]), *needs[n:]]
        # Backward may be called under another autocast than forward.
        with torch.autocast(recipe.device_type, enabled=False):
            weight, pull_make = _vjp(recipe.make, tensors[:n], needs[:n])
            with torch.autocast(recipe.device_type, recipe.autocast) if recipe.autocast else nullcontext():
                if recipe.pull is None:
                    d_weight, *d_others = _vjp(recipe.forward, (weight, *tensors[n:]), needs_weight)[1](dy)
                else:
                    d_weight, *d_others = recipe.pull(weight, tensors[n:], needs_weight, dy)
            del weight
            return (None, *pull_make(d_weight), *d_others)


class _RecomputeForward(_Recompute):
    # For eager code: with forward-mode derivatives, and outputs that in-place layers may change.

    @staticmethod
    def forward(recipe: _Recipe, *tensors: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        out = _Recompute.forward(recipe, *tensors)
        # Views that custom functions return cannot be changed in place: a product of many dimensions is one.
        return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        moved = [i for i, tangent in enumerate(tangents) if tangent is not None]
        run = _of_some(partial(_Recompute.forward, ctx.what), ctx.saved_tensors, moved)
        points = tuple(ctx.saved_tensors[i] for i in moved)
        return torch.func.jvp(run, points, tuple(tangents[i] for i in moved))[1]


def _linear_pull(weight_oi: Tensor, others: Sequence[Tensor], needs: list[bool], dy: Tensor) -> list[Tensor | None]:
    """Gradients of `x @ W.T + b`: dW = dy.T x, dx = dy W, db = sum dy."""
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
    """Return `function(*values)`, and its vector-Jacobian product, with None for values that need no gradient."""
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
