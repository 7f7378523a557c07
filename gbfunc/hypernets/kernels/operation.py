"""Functions with forward and backward passes of their own, differentiable to any order in every mode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gbfunc.hypernets.kernels.waves import Tensors, have_memory, is_plain_needed
from gbfunc.tiling import unbatched


class Operation(NamedTuple):
    """A function of tensors, from its definition and from faster passes.

    `run(*inputs)` computes `definition(*inputs)`, and `pull(*cotangents, *inputs)` the gradients of all inputs but the
    first `constants`. Both take plain tensors with memory. Without `pull`, gradients are those of the definition.
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
        """Return the gradient, a function of the cotangents of the outputs and the inputs."""
        first = outputs + self.constants

        def definition(*tensors: Tensor) -> Tensors:
            of_rest = partial(self.definition, *tensors[outputs:first])
            pull: Any = torch.func.vjp(of_rest, *tensors[first:])[1]
            return pull(tensors[:outputs])

        return Operation(definition, self.pull or definition)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(operation: Operation, *inputs: Tensor) -> Tensors:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Forward may run under autocast but backward does not; both need the same precision.
        device = inputs[0].device.type
        with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
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
        # One by one, as the passes know neither batches nor the memory of many.
        members = zip(*unbatched(info.batch_size, in_dims[1:], inputs), strict=True)
        outputs = tuple(map(torch.stack, zip(*(operation.apply(*x) for x in members), strict=True)))
        return outputs, (0,) * len(outputs)
