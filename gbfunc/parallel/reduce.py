"""The end of a step: from every rank's loss, gradients and buffers to those of the global batch.

The loss is the mean over the global batch, so every rank counts by its rows: sum_i n_i x_i / sum_i n_i.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from gbfunc.parallel.layout import Layout
from gbfunc.parallel.mesh import AxisName
from gbfunc.parallel.wire import sum_ranks
from gbfunc.trees import GNET
from gbfunc.types import Params


class Reduced(NamedTuple):
    """What a step found for the global batch: the same on every rank, but for the rows of split leaves.

    Attributes:
        loss: the loss.
        aux: what the loss function returned beside it.
        gradients: by flat name.
        buffers: the p-net's.
        norm: of the gradient of the whole genome.
    """

    loss: Tensor
    aux: Any
    gradients: Params
    buffers: Params
    norm: Tensor


def reduce_step(
    layout: Layout, rows: int, loss: Tensor, aux: Any, gradients: Params, buffers: Params, before: Mapping[str, Tensor]
) -> Reduced:
    """Means over the global batch, in one all-reduce (and one more, of the split leaves, along the data axis).

    Args:
        layout: who owns what.
        rows: of this rank's share of the batch; 0 counts for nothing.
        loss: mean over the share.
        aux: means over the share. Numbers and scalar tensors are averaged, what is neither is this rank's own.
        gradients: of `rows` times the loss; those of split leaves are summed over the g-net axis already.
        buffers: after the step.
        before: the buffers to average, as they were before the step, when they were equal on all ranks.

    Raises:
        ValueError: for an aux with tensors that are no scalars, and for an empty global batch.
        CollectiveError: if a rank is missing.
    """
    mesh = layout.mesh
    split = {k: g for k, g in gradients.items() if k in layout.split}
    if split:
        split = dict(zip(split, _sum_flat(layout, list(split.values()), "data"), strict=True))
    # Of the gradients' dtype on every rank: what ranks decide by must be the same bits.
    wide = any(g.dtype == torch.float64 for g in gradients.values())
    square = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=mesh.device)
    if mesh.data_index == 0:
        square = square + sum(torch.linalg.vector_norm(g).square() for g in split.values())
    leaves, structure = optree.tree_flatten(aux)
    numbers = [_number(x) for x in leaves]
    whole = [k for k in gradients if k not in split]
    means = [loss, *(x for x in numbers if x is not None), *(_change(x, buffers[k]) for k, x in before.items())]
    weighted = [x.detach() * rows if rows else torch.zeros_like(x) for x in means]
    # Leaves that tiles share get their gradients from the tiles that a rank owns, not from the rows that it has.
    counts = {k: rows > 0 or (layout.sharded and k.startswith(GNET)) for k in whole}
    counted = [gradients[k] if counts[k] else torch.zeros_like(gradients[k]) for k in whole]
    n, square, *sums = _sum_flat(layout, [torch.tensor(float(rows)), square, *weighted, *counted], "world")
    if not n > 0:
        raise ValueError("the global batch is empty: no rank has a row of it")
    found = iter([x / n.to(x.device) for x in sums])
    loss = next(found)
    mean_aux = [x if number is None else next(found) for x, number in zip(leaves, numbers, strict=True)]
    buffers = buffers | {k: x + next(found) for k, x in before.items()}
    reduced = {k: g / n.to(g) for k, g in split.items()} | dict(zip(whole, found, strict=True))
    squares = [torch.linalg.vector_norm(reduced[k]).square() for k in whole]
    norm = (sum(squares, square.to(loss) / n.to(loss).square())).sqrt()
    aux = optree.tree_unflatten(structure, mean_aux)
    return Reduced(loss, aux, {k: reduced[k] for k in gradients}, buffers, norm)


def _change(before: Tensor, after: Tensor) -> Tensor:
    # What stays, infinities too, must stay bit for bit.
    return torch.where(before == after, torch.zeros_like(after), after - before)


def _number(x: Any) -> Tensor | None:
    """A leaf of aux as a floating-point scalar, None if it is no number.

    Raises:
        ValueError: for a tensor that is no scalar, whose shape could differ between ranks.
    """
    if isinstance(x, Tensor):
        if x.ndim:
            shape = tuple(x.shape)
            raise ValueError(f"with a mesh, tensors in aux must be scalars to be averaged over ranks, got {shape}")
        return x if x.is_floating_point() else x.float()
    return torch.tensor(float(x)) if isinstance(x, int | float) else None


def _sum_flat(layout: Layout, tensors: list[Tensor], axis: AxisName) -> list[Tensor]:
    """Sums over the ranks of an axis, in one flat buffer of the widest dtype; each in its own dtype again."""
    if layout.mesh.axis(axis).size == 1:
        return tensors
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
    flat = torch.cat([x.detach().to(layout.mesh.device, dtype).reshape(-1) for x in tensors])
    parts = sum_ranks(layout.mesh, flat, axis).split([x.numel() for x in tensors])
    return [part.reshape(x.shape).to(x.device, x.dtype) for part, x in zip(parts, tensors, strict=True)]
