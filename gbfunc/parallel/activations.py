"""Moves that change the layout of an activation over the ranks of an axis, and in backward the layout of its gradient.

An activation is *replicated* (equal on all ranks), *split* along a dimension, or *partial* (the sum of the ranks'
tensors). Gradients of split activations are split, and all others replicated. The exception is the layout *partial
gradient*: the activation is replicated, but ranks compute different outputs, so its gradient is a sum over ranks.
Sources: Megatron-LM (Shoeybi et al., 2019), sequence parallelism (Korthikanti et al., 2022).
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

Activation = Literal["replicated", "split", "partial", "partial gradient"]
Move = Literal["keep", "all_reduce", "gather", "reduce_scatter", "slice"]

MOVES: Mapping[tuple[Activation, Activation], tuple[Move, Move]] = {
    ("partial", "replicated"): ("all_reduce", "keep"),  # Output of a row-parallel layer
    ("partial", "split"): ("reduce_scatter", "gather"),  # Output of a row-parallel layer, with sequence parallelism
    ("replicated", "partial gradient"): ("keep", "all_reduce"),  # Input of a column-parallel layer
    ("split", "partial gradient"): ("gather", "reduce_scatter"),  # Column-parallel layer, with sequence parallelism
    ("split", "replicated"): ("gather", "slice"),
    ("replicated", "split"): ("slice", "gather"),
}
"""{(layout before, layout after): (move in forward, move in backward)}"""


def chunk_sizes(n: int, ranks: int) -> Sizes:
    """Return how many entries every rank gets if `torch.chunk` or a DTensor splits n entries.

    >>> chunk_sizes(32, 3), chunk_sizes(4, 3)
    ((11, 11, 10), (2, 2, 0))
    """
    most = -(-n // ranks)
    return tuple(min(most, max(0, n - rank * most)) for rank in range(ranks))


class Wire(NamedTuple):
    """Exchanges activations between the ranks along an axis of a mesh."""

    mesh: Mesh
    axis: Axis

    def start(self, sizes: Sizes) -> int:
        return sum(sizes[: self.axis.rank])

    def move(self, x: Tensor, start: Activation, end: Activation, dim: int = 0, sizes: Sizes = ()) -> Tensor:
        """Change the layout of `x` from `start` to `end`. If `dim` is split, `sizes` has its lengths on all ranks."""
        moved: Any = _Moved.apply(x, self, *MOVES[start, end], dim, sizes)
        return moved

    def joined(self, x: Tensor, placement: Any, sizes: Sizes = ()) -> Any:
        """Build a DTensor from this rank's piece `x`. For a `Shard`, `sizes` has the lengths of all pieces."""
        shape = list(x.shape)
        if isinstance(placement, Shard):
            shape[placement.dim] = sum(sizes)
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        layout: Any = {"shape": torch.Size(shape), "stride": stride}
        return DTensor.from_local(x, self.mesh.tensor_mesh, [placement], run_check=False, **layout)

    def sizes_of(self, n: int) -> Sizes:
        """Return the lengths of a split dimension on all ranks; `n` is this rank's length. All ranks must call."""
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
        # Sum half precision in float32, so that the result is rounded only once.
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
    """Return `x`. Backward multiplies the gradient by `factor`. A list `seen` records the gradient, for checks."""
    if factor == 1.0 or not (y := x.view_as(x)).requires_grad:
        return x

    def scaled(grad: Tensor) -> Tensor:
        if seen is not None:
            seen.append(grad.detach())
        return grad * factor

    y.register_hook(scaled)
    return y
