"""Differentiable collectives on rows of tensors. They raise `CollectiveError` if a rank is missing.

A gather stacks the rows of all ranks. A reduce-scatter sums over ranks; every rank gets its rows of the sum. The
backward of a gather is a reduce-scatter, and vice versa, also in higher derivatives. Ranks may have different numbers
of rows, or none: no padding is sent. One autograd node sends many tensors, so that their order is equal on all ranks.

On gloo, ranks exchange point-to-point messages, because gloo's reduce-scatter sends twice the bytes. Compiled graphs
use gloo's all-to-all, which takes twice as long as these messages.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gbfunc.parallel.mesh import Axis, AxisName, Mesh
from gbfunc.types import Params

Sizes = tuple[int, ...]
"""The number of rows that each rank along an axis of the mesh holds."""

Kind = Literal["gather", "reduce_scatter"]


class _Exchange(NamedTuple):
    kind: Kind
    sizes: tuple[Sizes, ...]
    axis: Axis
    mesh: Mesh | None  # The mesh that counts the sent bytes; None while torch compiles a graph


def sent_bytes(kind: Kind | Literal["all_reduce"], n_bytes: int, axis: Axis, sizes: Sizes = ()) -> int:
    """Return how many bytes a rank sends in a gather, reduce-scatter or ring all-reduce, if its tensor has `n_bytes`.

    >>> ranks = Axis("tensor", (0, 1, 2, 3), 1, None)
    >>> sent_bytes("gather", 40, ranks), sent_bytes("reduce_scatter", 40, ranks, (3, 1, 3, 3))
    (120, 36)
    >>> sent_bytes("all_reduce", 40, ranks)
    60
    """
    if kind == "gather":
        return n_bytes * (axis.size - 1)
    if kind == "all_reduce":
        return 2 * n_bytes * (axis.size - 1) // axis.size
    return n_bytes * (sum(sizes) - sizes[axis.rank]) // max(1, sum(sizes))


def _moved(exchange: _Exchange, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gather the rows of all ranks, [sum(sizes), ...], or sum over ranks and keep this rank's rows of each sum."""
    kind, sizes, axis, mesh = exchange
    gathers, at_once = kind == "gather", mesh is None or dist.get_backend(axis.group) == "nccl"
    pieces, results = [], []
    for x, s in zip([x.contiguous() for x in xs], sizes, strict=True):
        mine = (s[axis.rank],) * axis.size
        received, sent = (s, mine) if gathers else (mine, s)  # Numbers of rows from every rank, and to every rank
        out = x.new_empty((sum(received), *x.shape[1:]))
        if at_once:
            copies = x.repeat(axis.size, *(1 for _ in x.shape[1:])) if gathers else x
            dist.all_to_all_single(out, copies, list(received), list(sent), group=axis.group)
        else:
            pieces.append(([x] * axis.size if gathers else x.split(sent), out.split(received)))
        results.append(out if gathers else out.split(received))
    # Post all receives before the sends. Gloo announces a receive by a message on the connection that also carries the
    # tensors: posted after a send, the announcement would wait until the sent tensor has arrived.
    works: list[Any] = []
    for i, rank in enumerate(axis.ranks):
        works += [dist.irecv(t[i], rank, group=axis.group) for _, t in pieces if i != axis.rank and t[i].numel()]
    for i, rank in enumerate(axis.ranks):
        works += [dist.isend(s[i], rank, group=axis.group) for s, _ in pieces if i != axis.rank and s[i].numel()]
    for source, target in pieces:
        target[axis.rank].copy_(source[axis.rank])
    for work in works:
        work.wait()
    return tuple(x if isinstance(x, Tensor) else _total(x) for x in results)


def _total(summands: Sequence[Tensor]) -> Tensor:
    # Add in the order of the ranks, so that all ranks get the same bits. Add in float32 and round only the sum.
    total = summands[0].to(torch.promote_types(summands[0].dtype, torch.float32)) + summands[1]
    for summand in summands[2:]:
        total += summand
    return total.to(summands[0].dtype)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(exchange: _Exchange, *xs: Tensor) -> tuple[Tensor, ...]:
        kind, sizes, axis, mesh = exchange
        if mesh is None:
            return _moved(exchange, xs)
        n_bytes = (sent_bytes(kind, x.numel() * x.itemsize, axis, s) for x, s in zip(xs, sizes, strict=True))
        mesh.traffic[axis.name] += sum(n_bytes)
        with mesh.failing(kind):
            return _moved(exchange, xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.exchange = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        kind: Kind = "reduce_scatter" if ctx.exchange.kind == "gather" else "gather"
        return (None, *_Node.apply(ctx.exchange._replace(kind=kind), *grads))  # pyright: ignore[reportGeneralTypeIssues]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], exchange: _Exchange, *xs: Tensor) -> tuple[Any, Any]:
        # Rows must be the first dimension, so the dimension over which vmap runs becomes the second.
        n, both = info.batch_size, zip(xs, in_dims[1:], strict=True)
        moved = [x.unsqueeze(1).expand(len(x), n, *x.shape[1:]) if d is None else x.movedim(d, 1) for x, d in both]
        return _Node.apply(exchange, *moved), (1,) * len(xs)


def _exchange(kind: Kind, mesh: Mesh, xs: list[Tensor], sizes: list[Sizes], axis: AxisName) -> list[Tensor]:
    ranks = mesh.axis(axis)
    if ranks.size == 1:
        return xs
    counted = None if torch.compiler.is_compiling() else mesh
    return [*_Node.apply(_Exchange(kind, tuple(sizes), ranks, counted), *xs)]  # pyright: ignore[reportGeneralTypeIssues]


def all_gather(mesh: Mesh, xs: list[Tensor], sizes: list[Sizes], axis: AxisName = "gnets") -> list[Tensor]:
    """Gather the rows of all ranks of an axis, for each tensor: [this rank's rows, ...] -> [sum(sizes), ...].

    `sizes` has the numbers of rows on all ranks, per tensor. Backward is a reduce-scatter: it sums the gradients of
    this rank's rows over the ranks, so all ranks must run backward.
    """
    return _exchange("gather", mesh, xs, sizes, axis)


def reduce_scatter(mesh: Mesh, xs: list[Tensor], sizes: list[Sizes], axis: AxisName = "gnets") -> list[Tensor]:
    """Sum each tensor [sum(sizes), ...] over the ranks of an axis, and return this rank's rows of the sums."""
    return _exchange("reduce_scatter", mesh, xs, sizes, axis)


def sum_ranks(mesh: Mesh, x: Tensor, axis: AxisName = "world") -> Tensor:
    """Sum a tensor over the ranks of an axis, in place."""
    ranks = mesh.axis(axis)
    if ranks.size > 1:
        mesh.traffic[axis] += sent_bytes("all_reduce", x.nbytes, ranks)
        with mesh.failing("all_reduce"):
            dist.all_reduce(x, group=ranks.group)
    return x


def from_rank_0(mesh: Mesh, tensors: Sequence[Tensor]) -> list[Tensor]:
    if mesh.world == 1:
        return list(tensors)
    copies = [x.detach().clone(memory_format=torch.contiguous_format).to(mesh.device) for x in tensors]
    with mesh.failing("broadcast"):
        for x in copies:
            dist.broadcast(x.reshape(-1).view(torch.uint8), 0)  # As bytes: gloo does not support every dtype.
    return [x.to(like.device) for x, like in zip(copies, tensors, strict=True)]


def stack_ranks(mesh: Mesh, named: Mapping[str, Tensor]) -> Params:
    """Stack the tensors of all ranks, by name: [...] -> [ranks, ...]; all ranks call with equal names and shapes."""
    rows = [x.detach()[None].to(mesh.device) for x in named.values()]
    found = all_gather(mesh, rows, [(1,) * mesh.world] * len(rows), "world")
    return {k: x.to(like.device) for x, (k, like) in zip(found, named.items(), strict=True)}


def gather_objects(mesh: Mesh, x: Any, axis: AxisName = "world") -> list[Any]:
    """Return the objects of all ranks of an axis, in the order of ranks. `mesh.traffic` does not count the bytes."""
    ranks = mesh.axis(axis)
    if ranks.size == 1:
        return [x]
    objects = [None] * ranks.size
    with mesh.failing("gather"):
        dist.all_gather_object(objects, x, group=ranks.group)
    return objects
