"""Functions with hand-written forward and backward passes, differentiable to any order, also in forward mode.

Suffixes: T tiles; r, c rows and columns of a tile; H hidden units.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gbfunc.hypernets.kernels.waves import Tensors, have_memory, is_plain_needed
from gbfunc.tiling import unbatched
from gbfunc.types import Params


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


class Operation(NamedTuple):
    """A function of tensors with a definition in PyTorch, and with faster forward and backward passes.

    `run(*inputs)` computes `definition(*inputs)`. `pull(*output_gradients, *inputs)` returns gradients of all inputs
    except the first `constants` inputs. If compiled code cannot read a tensor, or `pull` is None, `definition` is used.
    """

    definition: Callable[..., Tensors]
    run: Callable[..., Tensors]
    pull: Callable[..., Tensors] | None = None
    constants: int = 0

    def apply(self, *inputs: Tensor) -> Tensors:
        if is_plain_needed():
            return self.definition(*inputs)
        return _Function.apply(self, *inputs)

    def gradient(self, outputs: int) -> Operation:
        """Return the backward pass as an operation on the gradients of the `outputs` outputs, and all of `inputs`."""
        first = outputs + self.constants

        def definition(*tensors: Tensor) -> Tensors:
            of_rest = partial(self.definition, *tensors[outputs:first])
            pull: Any = torch.func.vjp(of_rest, *tensors[first:])[1]
            return pull(tensors[:outputs])

        return Operation(definition, self.pull or definition)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(operation: Operation, *inputs: Tensor) -> Tensors:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Switch off autocast, because backward runs without autocast, and both need the same precision.
        with _without_autocast(inputs[0].device.type):
            return (operation.run if have_memory(inputs) else operation.definition)(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.operation = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        operation: Operation = ctx.operation
        gradients = operation.gradient(len(cotangents)).apply(*cotangents, *ctx.saved_tensors)
        return None, *(None,) * operation.constants, *gradients

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], operation: Operation, *inputs: Tensor) -> tuple[Tensors, Any]:
        # Compute the batch entries of `vmap` one after another: the passes support no batch dimension.
        members = zip(*unbatched(info.batch_size, in_dims[1:], inputs), strict=True)
        outputs = tuple(map(torch.stack, zip(*(operation.apply(*x) for x in members), strict=True)))
        return outputs, (0,) * len(outputs)


# Blocks of 64 MiB make the overhead of calls small, and are small compared to p-nets that need blocks.
def chunked_apply(
    fn: Callable[[Tensor, Params], Tensor], A: Tensor, B: Tensor, params: Params, *, max_bytes: int = 2**26
) -> Tensor:
    """Generate tiles [tiles, rows, columns] of g-nets in blocks of rows, which backward recomputes to save memory.

    The first layer of a g-net is a sum: unit h for the weight (i, j) is `A[i, h] + B[j, h]`, where `A` [tiles, rows,
    units] includes the bias and `B` is [tiles, columns, units]. `fn` computes the following layers: it maps the sums
    [rows, columns, units] and the g-net's `params` to weights [rows, columns], row by row and without random numbers.
    `max_bytes` bounds the estimated memory of a block, which has at least one row. Transforms and compiled graphs
    compute all rows at once.
    """

    def all_rows(A: Tensor, B: Tensor, params: Params) -> Tensor:
        return torch.vmap(lambda A_rH, B_cH, params: fn(A_rH[:, None] + B_cH, params))(A, B, params)

    if is_plain_needed() or not have_memory((A, B, *params.values())):
        return all_rows(A, B, params)
    # Count two numbers per unit, because forward stores the values before and after the activation function.
    floats = 2 * A.shape[-1] + sum(max(p.shape[1:], default=1) for p in params.values())
    at_once = max(1, max_bytes // (B.shape[-2] * floats * A.element_size()))
    tiles = []
    with _without_autocast(A.device.type):
        for A_TrH, B_TcH, *leaves in zip(
            *(x.split(max(1, at_once // A.shape[1])) for x in (A, B, *params.values())), strict=True
        ):
            own = dict(zip(params, leaves, strict=True))
            rows = [
                checkpoint(all_rows, x, B_TcH, own, use_reentrant=False, preserve_rng_state=False)
                for x in A_TrH.split(at_once, 1)
            ]
            tiles.append(torch.cat(rows, 1))
        return torch.cat(tiles)
