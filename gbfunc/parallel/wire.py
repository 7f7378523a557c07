"""The collectives themselves, on flat or row-wise tensors without graph; each counts what it sends.

All but the sums are exchanges of uneven, maybe empty shares, without padding. On gloo ranks send to each other: its own
reduce-scatter is an all-reduce inside (measured: twice the bytes), and its all-to-all sends in one direction at a time
(measured: twice the time on a slow link). A compiled graph, which knows no sends, has the all-to-all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from gbfunc.parallel.mesh import Axis, AxisName, Mesh

Sizes = tuple[int, ...]
"""Rows of every rank along an axis."""

Way = Literal["nccl", "all_to_all", "sends"]
"""How rows are exchanged: by nccl's collectives, by one all-to-all, or rank by rank."""

# Names of torch 2.13; before it, those that 2.13 deprecates.
_gather_even: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_even: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def exchange_gather(xs: Sequence[Tensor], sizes: Sequence[Sizes], axis: Axis, way: Way) -> tuple[Tensor, ...]:
    """Rows of all ranks, tensor by tensor: [own, ...] -> [sum(sizes), ...]."""
    if way != "sends":
        return tuple(_gather_at_once(x.contiguous(), s, axis, way) for x, s in zip(xs, sizes, strict=True))
    whole, given, taken = [], [], []
    for x, rows in zip(xs, sizes, strict=True):
        out = x.new_empty((sum(rows), *x.shape[1:]))
        parts = list(out.split(list(rows)))
        parts[axis.index].copy_(x)
        whole.append(out)
        given.append([parts[axis.index]] * axis.size)
        taken.append(parts)
    _send(given, taken, axis)
    return tuple(whole)


def exchange_scatter(xs: Sequence[Tensor], sizes: Sequence[Sizes], axis: Axis, way: Way) -> tuple[Tensor, ...]:
    """The sum over ranks of this rank's rows, tensor by tensor: [sum(sizes), ...] -> [own, ...]."""
    if way != "sends":
        return tuple(_scatter_at_once(x.contiguous(), s, axis, way) for x, s in zip(xs, sizes, strict=True))
    given, taken = [], []
    for x, rows in zip(xs, sizes, strict=True):
        parts = x.contiguous().split(list(rows))
        own = parts[axis.index]
        given.append(parts)
        taken.append([own if rank == axis.index else torch.empty_like(own) for rank in range(axis.size)])
    _send(given, taken, axis)
    return tuple(_total(parts) for parts in taken)


def _total(parts: Sequence[Tensor]) -> Tensor:
    """The sum in the order of ranks: it does not depend on who came first. Narrow numbers are rounded once."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(wide) + parts[1]
    for part in parts[2:]:
        total += part
    return total.to(parts[0].dtype)


def _send(given: Sequence[Sequence[Tensor]], taken: Sequence[Sequence[Tensor]], axis: Axis) -> None:
    """Send `given[i][rank]` to every other rank, and receive `taken[i][rank]` from it; empty ones stay where they are.

    Receives come first: gloo tells a sender that its receiver is ready on the connection that the receiver's own rows
    take, and behind these if they were there before.
    """
    others = [(r, dist.get_global_rank(axis.group, r)) for r in range(axis.size) if r != axis.index]
    works: list[Any] = []
    for parts in taken:
        works += [dist.irecv(parts[r], who, group=axis.group) for r, who in others if parts[r].numel()]
    for parts in given:
        works += [dist.isend(parts[r], who, group=axis.group) for r, who in others if parts[r].numel()]
    for work in works:
        work.wait()


def _gather_at_once(x: Tensor, sizes: Sizes, axis: Axis, way: Way) -> Tensor:
    out = x.new_empty((sum(sizes), *x.shape[1:]))
    if way == "nccl" and len(set(sizes)) == 1:
        _gather_even(out, x, group=axis.group)
        return out
    many = x.repeat(axis.size, *(1 for _ in x.shape[1:]))
    dist.all_to_all_single(out, many, list(sizes), [sizes[axis.index]] * axis.size, group=axis.group)
    return out


def _scatter_at_once(x: Tensor, sizes: Sizes, axis: Axis, way: Way) -> Tensor:
    own = sizes[axis.index]
    if way == "nccl" and len(set(sizes)) == 1:
        out = x.new_empty((own, *x.shape[1:]))
        _scatter_even(out, x, group=axis.group)
        return out
    parts = x.new_empty((axis.size * own, *x.shape[1:]))
    dist.all_to_all_single(parts, x, [own] * axis.size, list(sizes), group=axis.group)
    return parts.reshape(axis.size, own, *x.shape[1:]).sum(0)


def way_of(axis: Axis) -> Way:
    """How the ranks of an axis exchange rows."""
    if axis.group is not None and dist.get_backend(axis.group) == "nccl":
        return "nccl"
    return "all_to_all" if torch.compiler.is_compiling() else "sends"


def gather_rows(mesh: Mesh, x: Tensor, sizes: Sizes, axis: AxisName = "world") -> Tensor:
    """Rows of all ranks of an axis, in their order: [own, ...] -> [sum(sizes), ...].

    Raises:
        CollectiveError: if a rank is missing.
    """
    ranks = mesh.axis(axis)
    if ranks.size == 1:
        return x
    mesh.traffic.add("gather", x.nbytes * (ranks.size - 1))
    with mesh.faults.named("a gather"):
        return exchange_gather([x], [sizes], ranks, way_of(ranks))[0]


def sum_ranks(mesh: Mesh, x: Tensor, axis: AxisName = "world") -> Tensor:
    """The sum over the ranks of an axis, in place.

    Raises:
        CollectiveError: if a rank is missing.
    """
    ranks = mesh.axis(axis)
    if ranks.size == 1:
        return x
    mesh.traffic.add("all_reduce", 2 * x.nbytes * (ranks.size - 1) // ranks.size)
    with mesh.faults.named("an all-reduce"):
        dist.all_reduce(x, group=ranks.group)
    return x


def bytes_of(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """What tensors of any dtypes hold, one after another: uint8 [n]."""
    return torch.cat([x.detach().contiguous().reshape(-1).view(torch.uint8).to(device) for x in tensors])


def from_rank_0(mesh: Mesh, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Rank 0's values of these tensors, on every rank.

    Raises:
        CollectiveError: if a rank is missing.
    """
    if mesh.world == 1 or not tensors:
        return list(tensors)
    flat = bytes_of(tensors, mesh.device)
    with mesh.faults.named("a broadcast"):
        dist.broadcast(flat, 0)
    parts = flat.split([x.nbytes for x in tensors])
    # Copies: numbers must lie at multiples of their size.
    return [p.clone().view(x.dtype).reshape(x.shape).to(x.device) for p, x in zip(parts, tensors, strict=True)]


def gather_exactly(mesh: Mesh, xs: Sequence[Tensor], sizes: Sequence[Sizes], axis: AxisName) -> list[Tensor]:
    """Rows of all ranks of an axis, tensor by tensor, in one collective; bit for bit, of any dtypes: no graph.

    Raises:
        CollectiveError: if a rank is missing.
    """
    if mesh.axis(axis).size == 1 or not xs:
        return list(xs)
    ranks = range(mesh.axis(axis).size)
    widths = [math.prod(x.shape[1:]) * x.element_size() for x in xs]
    both = list(zip(sizes, widths, strict=True))
    whole = gather_rows(mesh, bytes_of(xs, mesh.device), tuple(sum(s[r] * w for s, w in both) for r in ranks), axis)
    parts = whole.split([s[r] * w for r in ranks for s, w in both])
    joined = [torch.cat(parts[i :: len(xs)]) for i in range(len(xs))]
    return [j.view(x.dtype).reshape(-1, *x.shape[1:]).to(x.device) for j, x in zip(joined, xs, strict=True)]


def gather_numbers(mesh: Mesh, numbers: Sequence[int], axis: AxisName = "world") -> list[list[int]]:
    """As many int64 numbers from every rank of an axis: a list for each rank."""
    own = torch.tensor([numbers], dtype=torch.int64, device=mesh.device)
    size = mesh.axis(axis).size
    return gather_rows(mesh, own, (1,) * size, axis).tolist()
