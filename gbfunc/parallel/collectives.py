"""Collectives on rows of tensors, in autograd graphs and outside; `CollectiveError` reports that a rank is missing.

A gather stacks the rows of every rank; a reduce-scatter sums over ranks and leaves each its rows; each is the gradient
of the other. Ranks have uneven, maybe empty numbers of rows, sent without padding. One autograd node exchanges many
tensors, in one order on every rank, under `vmap` and in double backward too.

On gloo ranks send to each other: gloo's reduce-scatter sends twice the bytes, and its all-to-all, which a compiled
graph has in its place, takes twice the time.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gbfunc.parallel.mesh import Axis, AxisName, Mesh
from gbfunc.types import Params

Sizes = tuple[int, ...]
"""Rows of every rank along an axis."""

Kind = Literal["gather", "reduce_scatter"]


class _Exchange(NamedTuple):
    kind: Kind
    sizes: tuple[Sizes, ...]
    axis: Axis
    mesh: Mesh | None  # Counts bytes; None while a graph is compiled


def sent_bytes(kind: Kind | Literal["all_reduce"], n_bytes: int, axis: Axis, sizes: Sizes = ()) -> int:
    """Bytes that a rank sends of a tensor: all rows to each other rank, or each row to its rank; a ring sends both.

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
    """Rows of every rank, [n, ...] -> [sum(sizes), ...]; or the sum over ranks of this rank's rows, the reverse."""
    kind, sizes, axis, mesh = exchange
    gathers, at_once = kind == "gather", mesh is None or dist.get_backend(axis.group) == "nccl"
    pieces, results = [], []
    for x, s in zip([x.contiguous() for x in xs], sizes, strict=True):
        mine = (s[axis.rank],) * axis.size
        there, back = (s, mine) if gathers else (mine, s)  # Rows that come from each rank, and rows that go
        out = x.new_empty((sum(there), *x.shape[1:]))
        if at_once:
            copies = x.repeat(axis.size, *(1 for _ in x.shape[1:])) if gathers else x
            dist.all_to_all_single(out, copies, list(there), list(back), group=axis.group)
        else:
            pieces.append(([x] * axis.size if gathers else x.split(back), out.split(there)))
        results.append(out if gathers else out.split(there))
    # Receives come first: gloo signals a sender that its receiver is ready on the connection that the receiver's rows
    # take, and behind these rows if they were there before.
    works: list[Any] = []
    for i, rank in enumerate(axis.ranks):
        works += [dist.irecv(t[i], rank, group=axis.group) for _, t in pieces if i != axis.rank and t[i].numel()]
    for i, rank in enumerate(axis.ranks):
        works += [dist.isend(g[i], rank, group=axis.group) for g, _ in pieces if i != axis.rank and g[i].numel()]
    for given, taken in pieces:
        taken[axis.rank].copy_(given[axis.rank])
    for work in works:
        work.wait()
    return tuple(x if isinstance(x, Tensor) else _total(x) for x in results)


def _total(parts: Sequence[Tensor]) -> Tensor:
    # In the order of ranks, whoever came first; narrow numbers are rounded once.
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32)) + parts[1]
    for part in parts[2:]:
        total += part
    return total.to(parts[0].dtype)


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
        # Rows stay first, the batch comes second.
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
    """Rows of every rank along an axis, tensor by tensor: [n, ...] -> [sum(sizes), ...]; `sizes` may hold 0.

    Backward is a reduce-scatter: every rank's gradient of this rank's rows, summed. All ranks must take part in it.
    """
    return _exchange("gather", mesh, xs, sizes, axis)


def reduce_scatter(mesh: Mesh, xs: list[Tensor], sizes: list[Sizes], axis: AxisName = "gnets") -> list[Tensor]:
    """The sum over ranks of this rank's rows, tensor by tensor: [sum(sizes), ...] -> [n, ...]; backward gathers."""
    return _exchange("reduce_scatter", mesh, xs, sizes, axis)


def sum_ranks(mesh: Mesh, x: Tensor, axis: AxisName = "world") -> Tensor:
    """The sum over the ranks of an axis, in place."""
    ranks = mesh.axis(axis)
    if ranks.size > 1:
        mesh.traffic[axis] += sent_bytes("all_reduce", x.nbytes, ranks)
        with mesh.failing("all_reduce"):
            dist.all_reduce(x, group=ranks.group)
    return x


def from_rank_0(mesh: Mesh, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Rank 0's values of these tensors, on every rank."""
    if mesh.world == 1:
        return list(tensors)
    copies = [x.detach().clone(memory_format=torch.contiguous_format).to(mesh.device) for x in tensors]
    with mesh.failing("broadcast"):
        for x in copies:
            dist.broadcast(x.reshape(-1).view(torch.uint8), 0)  # Gloo does not send all dtypes.
    return [x.to(like.device) for x, like in zip(copies, tensors, strict=True)]


def stack_ranks(mesh: Mesh, named: Mapping[str, Tensor]) -> Params:
    """Tensors of every rank, by name: [...] -> [ranks, ...]; all ranks call with the same names and shapes."""
    rows = [x.detach()[None].to(mesh.device) for x in named.values()]
    found = all_gather(mesh, rows, [(1,) * mesh.world] * len(rows), "world")
    return {k: x.to(like.device) for x, (k, like) in zip(found, named.items(), strict=True)}


def gather_objects(mesh: Mesh, x: Any, axis: AxisName = "world") -> list[Any]:
    """A small object from every rank of an axis, in their order; not counted in `mesh.traffic`."""
    ranks = mesh.axis(axis)
    if ranks.size == 1:
        return [x]
    objects = [None] * ranks.size
    with mesh.failing("gather"):
        dist.all_gather_object(objects, x, group=ranks.group)
    return objects
