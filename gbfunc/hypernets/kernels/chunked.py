"""Generates tiles in row blocks that backward recomputes, with bounded memory.

Suffixes: T tiles; r, c rows and columns of a tile; H hidden units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gbfunc.hypernets.kernels.operation import Operation
from gbfunc.hypernets.kernels.waves import Tensors
from gbfunc.types import Params


def _pieces(length: int, longest: int) -> Iterator[slice]:
    """Cut `length` into the fewest pieces of at most `longest`, as equal as possible."""
    step = -(-length // -(-length // longest))
    return (slice(start, min(length, start + step)) for start in range(0, length, step))


# By default 64 MiB: large against the cost of dispatch, small against p-nets that need blocks.
def chunked_apply(
    fn: Callable[[Tensor, Params], Tensor], A: Tensor, B: Tensor, params: Params, *, max_bytes: int = 2**26
) -> Tensor:
    """Generate tiles [T, r, c] from separable pre-activations, in row blocks that backward recomputes.

    `fn(pre-activations [rows, c, H], params) -> weights [rows, c]` is one g-net after its first layer; `fn` treats rows
    independently and draws no random numbers. `A` [T, r, H] with the bias and `B` [T, c, H] are pre-activations of rows
    and columns, and `params` [T, ...] belong to all g-nets. `max_bytes` bounds the estimated memory of a block, but a
    row is never divided. `A`, `B` and `params` are differentiable in every order and mode; the closure of `fn` is not.
    Forward mode, compiled graphs and second derivatives use no blocks.
    """
    names, leaves = tuple(params), tuple(params.values())

    def whole(A: Tensor, B: Tensor, *leaves: Tensor) -> Tensors:
        def tile(A_rH: Tensor, B_cH: Tensor, *leaves: Tensor) -> Tensor:
            return fn(A_rH[:, None] + B_cH, dict(zip(names, leaves, strict=True)))

        return (torch.vmap(tile)(A, B, *leaves),)

    # Weight and bias count each activation about twice, as forward keeps activations before and after nonlinearities.
    floats = 2 * A.shape[-1] + sum(max(p.shape[1:], default=1) for p in leaves)
    at_once = max(1, max_bytes // (B.shape[-2] * floats * A.element_size()))

    def blocks(A: Tensor) -> Iterator[tuple[slice, slice]]:
        tiles, rows = A.shape[:2]
        for t in _pieces(tiles, max(1, at_once // rows)):
            for i in _pieces(rows, min(rows, at_once)):
                yield t, i

    def run(A: Tensor, *shared: Tensor) -> Tensors:
        made = A.new_empty(*A.shape[:2], shared[0].shape[1])
        for t, i in blocks(A):
            made[t, i] = whole(A[t, i], *(x[t] for x in shared))[0]
        return (made,)

    def pull(g: Tensor, A: Tensor, *shared: Tensor) -> Tensors:
        dA, sums = torch.empty_like(A), [torch.zeros_like(x) for x in shared]
        for t, i in blocks(A):
            of_block: Any = torch.func.vjp(whole, A[t, i], *(x[t] for x in shared))[1]
            dA[t, i], *parts = of_block((g[t, i],))
            for total, part in zip(sums, parts, strict=True):
                total[t] += part
        return dA, *sums

    return Operation(whole, run, pull).apply(A, B, *leaves)[0]
