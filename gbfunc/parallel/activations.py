"""Activations between the ranks of an axis: from one layout to another, each move with its gradient.

A tensor of activations is *whole* on every rank, *split* along a dimension, or *partial*: a summand of the whole. The
gradient of a whole tensor is whole, and the gradient of a split tensor is split alike. *Used in part*: every rank
computes another function of the tensor, and its gradient is a sum over ranks. (Megatron-LM: Shoeybi et al., 2019;
sequence parallel: Korthikanti et al., 2022.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from gbfunc.parallel.collectives import Sizes, all_gather, reduce_scatter, sum_ranks
from gbfunc.parallel.mesh import Axis, Mesh

Activation = Literal["whole", "split", "partial", "used in part"]
Move = Literal["keep", "all_reduce", "gather", "reduce_scatter", "slice"]

MOVES: Mapping[tuple[Activation, Activation], tuple[Move, Move]] = {
    ("partial", "whole"): ("all_reduce", "keep"),  # The end of a row-parallel layer,
    ("partial", "split"): ("reduce_scatter", "gather"),  # and with sequence parallel.
    ("whole", "used in part"): ("keep", "all_reduce"),  # The start of a column-parallel layer,
    ("split", "used in part"): ("gather", "reduce_scatter"),  # and with sequence parallel.
    ("split", "whole"): ("gather", "slice"),
    ("whole", "split"): ("slice", "gather"),
}
"""Moves of forward and backward."""


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
        return sum(sizes[: self.axis.rank])

    def move(self, x: Tensor, start: Activation, end: Activation, dim: int = 0, sizes: Sizes = ()) -> Tensor:
        """A tensor in another layout, and its gradient moved back; split it is along `dim`, in parts of `sizes`."""
        moved: Any = _Moved.apply(x, self, *MOVES[start, end], dim, sizes)
        return moved

    def joined(self, x: Tensor, placement: Any, sizes: Sizes = ()) -> Any:
        """A DTensor of this rank's part; `sizes` has the parts of every rank along a split dimension, even or not."""
        shape = list(x.shape)
        if isinstance(placement, Shard):
            shape[placement.dim] = sum(sizes)
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        whole: Any = {"shape": torch.Size(shape), "stride": stride}
        return DTensor.from_local(x, self.mesh.tensor_mesh, [placement], run_check=False, **whole)

    def sizes_of(self, n: int) -> Sizes:
        """How long a tensor is on each rank, from how long it is here; all ranks must call."""
        mine = torch.tensor([n], dtype=torch.int64, device=self.mesh.device)
        sizes = _moved(self, mine, "gather", 0, (1,) * self.axis.size)
        return tuple(sizes.tolist())


def _moved(wire: Wire, x: Tensor, move: Move, dim: int, sizes: Sizes) -> Tensor:
    mesh, axis = wire
    if move == "keep":
        return x.view_as(x)
    if move == "slice":
        return x.narrow(dim, wire.start(sizes), sizes[axis.rank]).contiguous()
    if move == "all_reduce":
        # A sum of narrow numbers is rounded once.
        dtype, order = torch.promote_types(x.dtype, torch.float32), torch.contiguous_format
        return sum_ranks(mesh, x.detach().to(dtype, memory_format=order, copy=True), axis.name).to(x.dtype)
    exchange = all_gather if move == "gather" else reduce_scatter
    rows = x.detach().movedim(dim, 0).contiguous()
    return exchange(mesh, [rows], [sizes], axis.name)[0].movedim(0, dim).contiguous()


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Wire, there: Move, back: Move, dim: int, sizes: Sizes) -> Tensor:
        ctx.back = wire, back, dim, sizes
        return _moved(wire, x, there, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        wire, back, dim, sizes = ctx.back
        return _moved(wire, grads[0], back, dim, sizes), None, None, None, None, None


def scale_gradient(x: Tensor, factor: float, seen: list[Tensor] | None = None) -> Tensor:
    """Return `x` unchanged, and multiply its gradient by `factor`; `seen` gets the gradient as it came."""
    if factor == 1.0 or not (y := x.view_as(x)).requires_grad:
        return x

    def scaled(grad: Tensor) -> Tensor:
        if seen is not None:
            seen.append(grad.detach())
        return grad * factor

    y.register_hook(scaled)
    return y
