"""Activations between the ranks of an axis: from one layout to another, each move with its gradient.

A tensor of activations is *whole* on every rank, *split* along a dimension, or *partial*: a summand of the whole. With
the gradient of a whole tensor whole, of a split one split alike, the moves are

    from        to           forward          backward
    partial     whole        all-reduce       nothing             end of a row-parallel layer
    partial     split        reduce-scatter   gather              its end, sequence parallel
    whole       used in part nothing          all-reduce          start of a column-parallel layer
    split       used in part gather           reduce-scatter      its start, sequence parallel
    split       whole        gather           slice
    whole       split        slice            gather

(Megatron-LM: Shoeybi et al., 2019; sequence parallel: Korthikanti et al., 2022.) *Used in part*: every rank computes
something else from it, and its gradient is the sum of what the ranks find.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gbfunc.parallel.collectives import Sizes, exchange_rows
from gbfunc.parallel.mesh import Axis, Mesh

Move = Literal["keep", "all_reduce", "gather", "reduce_scatter", "slice"]


def chunk_sizes(n: int, ranks: int) -> Sizes:
    """How `torch.chunk`, and DTensor with it, splits n entries over ranks.

    >>> chunk_sizes(32, 3), chunk_sizes(4, 3)
    ((11, 11, 10), (2, 2, 0))
    """
    most = -(-n // ranks)
    return tuple(min(most, max(0, n - rank * most)) for rank in range(ranks))


class Wire(NamedTuple):
    """The ranks along an axis of a mesh, for moves of activations between them."""

    mesh: Mesh
    axis: Axis

    def start(self, sizes: Sizes) -> int:
        """First entry of this rank's part."""
        return sum(sizes[: self.axis.rank])

    def move(self, x: Tensor, there: Move, back: Move, dim: int = 0, sizes: Sizes = ()) -> Tensor:
        """A tensor moved, and its gradient moved back."""
        moved: Any = _Moved.apply(x, self, there, back, dim, sizes)
        return moved

    def partial_to_whole(self, x: Tensor) -> Tensor:
        """The sum over ranks, on every rank."""
        return self.move(x, "all_reduce", "keep")

    def partial_to_split(self, x: Tensor, dim: int, sizes: Sizes) -> Tensor:
        """This rank's part along a dimension of the sum over ranks."""
        return self.move(x, "reduce_scatter", "gather", dim, sizes)

    def whole_in_part(self, x: Tensor) -> Tensor:
        """Mark a tensor that is equal on all ranks, and of which each then uses another part: gradients are summed."""
        return self.move(x, "keep", "all_reduce")

    def split_in_part(self, x: Tensor, dim: int, sizes: Sizes) -> Tensor:
        """Gather the parts along `dim`; each rank then uses the result in another way: gradients are summed."""
        return self.move(x, "gather", "reduce_scatter", dim, sizes)

    def split_to_whole(self, x: Tensor, dim: int, sizes: Sizes) -> Tensor:
        """Gather the parts along `dim`; all ranks then compute the same from the result: gradients are equal."""
        return self.move(x, "gather", "slice", dim, sizes)

    def whole_to_split(self, x: Tensor, dim: int, sizes: Sizes) -> Tensor:
        """This rank's part along a dimension."""
        return self.move(x, "slice", "gather", dim, sizes)

    def sizes_of(self, n: int) -> Sizes:
        """How long a tensor is on each rank, from how long it is here; all ranks must call."""
        mine = torch.tensor([n], dtype=torch.int64, device=self.mesh.device)
        sizes = _moved(self, mine, "gather", 0, (1,) * self.axis.size)
        return tuple(sizes.tolist())


def _moved(wire: Wire, x: Tensor, move: Move, dim: int, sizes: Sizes) -> Tensor:
    mesh, axis = wire.mesh, wire.axis
    if move == "keep" or axis.size == 1:
        return x.view_as(x)
    if move == "slice":
        return x.narrow(dim, wire.start(sizes), sizes[axis.rank]).contiguous()
    if move == "all_reduce":
        # A sum of narrow numbers is rounded once.
        wide = x.detach().to(torch.promote_types(x.dtype, torch.float32), memory_format=torch.contiguous_format)
        wide = wide.clone() if wide.data_ptr() == x.data_ptr() else wide
        with mesh.sending(move, 2 * wide.nbytes * (axis.size - 1) // axis.size, axis.name):
            dist.all_reduce(wide, group=axis.group)
        return wide.to(x.dtype)
    rows = x.detach().movedim(dim, 0).contiguous()
    return exchange_rows(mesh, axis, move, rows, sizes).movedim(0, dim).contiguous()


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Wire, there: Move, back: Move, dim: int, sizes: Sizes) -> Tensor:
        ctx.back = wire, back, dim, sizes
        return _moved(wire, x, there, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        wire, back, dim, sizes = ctx.back
        return _moved(wire, grads[0], back, dim, sizes), None, None, None, None, None


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.factor, None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return `x` unchanged, and multiply its gradient by `factor`."""
    scaled: Any = _Scaled.apply(x, factor) if factor != 1.0 else x
    return scaled
