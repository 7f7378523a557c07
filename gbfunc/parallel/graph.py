"""Collectives that carry gradients: a gather whose backward is a reduce-scatter, and the other way round.

One node gathers many tensors, in one order on every rank, whatever the order in which backward needs them. It has a
rule for `vmap`, forward mode, and double backward; under `torch.compile` it has no forward mode, as Dynamo refuses it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gbfunc.parallel.mesh import Axis, AxisName, Mesh
from gbfunc.parallel.wire import Sizes, Way, exchange_gather, exchange_scatter, way_of


class _Call(NamedTuple):
    """What a node needs beside its tensors.

    Attributes:
        sizes: rows of every rank, for each tensor.
        axis: the ranks.
        way: how they exchange rows.
        mute: whether this rank's gradients count for nothing, whatever they are.
        mesh: counts and names failures; None while a graph is compiled.
    """

    sizes: tuple[Sizes, ...]
    axis: Axis
    way: Way
    mute: bool
    mesh: Mesh | None


def _gather(call: _Call, xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if call.mesh is None:
        return exchange_gather(xs, call.sizes, call.axis, call.way)
    call.mesh.traffic.add("gather", sum(x.nbytes for x in xs) * (call.axis.size - 1))
    with call.mesh.faults.named("a gather"):
        return exchange_gather(xs, call.sizes, call.axis, call.way)


def _scatter(call: _Call, xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if call.mesh is None:
        return exchange_scatter(xs, call.sizes, call.axis, call.way)
    own = call.axis.index
    rows = ((x.nbytes // max(1, len(x)), sum(s) - s[own]) for x, s in zip(xs, call.sizes, strict=True))
    call.mesh.traffic.add("reduce_scatter", sum(width * others for width, others in rows))
    with call.mesh.faults.named("a reduce-scatter"):
        return exchange_scatter(xs, call.sizes, call.axis, call.way)


def _rows_first(xs: tuple[Tensor, ...], in_dims: tuple[int | None, ...], batch: int) -> list[Tensor]:
    """Tensors with their batch dimension second: rows stay first."""
    both = zip(xs, in_dims, strict=True)
    return [x.movedim(d, 1) if d is not None else x.unsqueeze(1).expand(len(x), batch, *x.shape[1:]) for x, d in both]


class _Gather(torch.autograd.Function):
    """Rows of all ranks; backward sums every rank's gradient of this rank's rows."""

    @staticmethod
    def forward(call: _Call, *xs: Tensor) -> tuple[Tensor, ...]:
        return _gather(call, xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if ctx.call.mute:
            grads = tuple(torch.zeros_like(g) for g in grads)
        scatter = _Scatter if torch.compiler.is_compiling() else _ScatterForward
        return (None, *scatter.apply(ctx.call, *grads))  # pyright: ignore[reportGeneralTypeIssues]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _Call, *xs: Tensor) -> tuple[Any, Any]:
        out: Any = _GatherForward.apply(call, *_rows_first(xs, in_dims[1:], info.batch_size))
        return out, (1,) * len(out)


class _Scatter(torch.autograd.Function):
    """The sum over ranks of this rank's rows; backward gathers."""

    @staticmethod
    def forward(call: _Call, *xs: Tensor) -> tuple[Tensor, ...]:
        return _scatter(call, xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        gather = _Gather if torch.compiler.is_compiling() else _GatherForward
        return (None, *gather.apply(ctx.call, *grads))  # pyright: ignore[reportGeneralTypeIssues]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _Call, *xs: Tensor) -> tuple[Any, Any]:
        out: Any = _ScatterForward.apply(call, *_rows_first(xs, in_dims[1:], info.batch_size))
        return out, (1,) * len(out)


class _GatherForward(_Gather):
    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        out: Any = _GatherForward.apply(ctx.call, *tangents)
        return out


class _ScatterForward(_Scatter):
    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        out: Any = _ScatterForward.apply(ctx.call, *tangents)
        return out


def all_gather(
    mesh: Mesh, xs: list[Tensor], sizes: list[Sizes], axis: AxisName = "gnets", *, mute: bool = False
) -> list[Tensor]:
    """Rows of all ranks of an axis, tensor by tensor: [own, ...] -> [sum(sizes), ...].

    Backward is a reduce-scatter: every rank's gradient of this rank's rows, summed. All ranks must take part in it.

    Args:
        mesh: the ranks.
        xs: this rank's rows.
        sizes: rows of every rank, for each tensor; any may be 0.
        axis: along which.
        mute: count this rank's gradients as zero, even where they are not finite.

    Raises:
        CollectiveError: if a rank is missing.
    """
    return _apply(_Gather, _GatherForward, mesh, xs, sizes, axis, mute)


def reduce_scatter(mesh: Mesh, xs: list[Tensor], sizes: list[Sizes], axis: AxisName = "gnets") -> list[Tensor]:
    """The sum over ranks of this rank's rows, tensor by tensor: [sum(sizes), ...] -> [own, ...]; backward gathers.

    Raises:
        CollectiveError: if a rank is missing.
    """
    return _apply(_Scatter, _ScatterForward, mesh, xs, sizes, axis, False)


def _apply(
    plain: Any, forward_mode: Any, mesh: Mesh, xs: list[Tensor], sizes: list[Sizes], axis: AxisName, mute: bool
) -> list[Tensor]:
    ranks = mesh.axis(axis)
    if ranks.size == 1:
        return xs
    compiling = torch.compiler.is_compiling()
    call = _Call(tuple(sizes), ranks, way_of(ranks), mute, None if compiling else mesh)
    return list((plain if compiling else forward_mode).apply(call, *xs))
