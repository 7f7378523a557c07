"""The loss of a batch as a function of the p-net's weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gbfunc.pnet import PureNet
from gbfunc.trees import tree_map
from gbfunc.types import Params

LossFn = Callable[[Callable[..., Any], Any], Any]
"""`(net, batch) -> loss` or `(loss, aux)`; `net` is the p-net closed over its generated weights."""

Lazy = bool | Literal["auto"]
Remat = Literal["none", "generate", "layer"]


class Loss:
    """A loss function with the p-net it is of, under autocast to `amp` if that is given."""

    def __init__(self, pnet: nn.Module, loss_fn: LossFn, amp: torch.dtype | None) -> None:
        self._net = PureNet(pnet)
        self._loss_fn = loss_fn
        self._amp = amp

    def __call__(self, weights: Params, buffers: Params, batch: Any) -> tuple[Tensor, Any]:
        """Loss, and aux without graph, for these weights; buffers are updated.

        Raises:
            ValueError: for a loss that is no scalar or does not depend on what is trained.
        """
        net = self._net.bind(weights, buffers)
        if self._amp is None:
            out = self._loss_fn(net, batch)
        else:
            device = next((w.device.type for w in weights.values()), "cpu")
            with torch.autocast(device, self._amp):
                out = self._loss_fn(net, batch)
        loss, aux = out if isinstance(out, tuple) else (out, {})
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn must return a scalar tensor, or (scalar tensor, aux), got {shape}")
        if not loss.requires_grad:
            raise ValueError("the loss does not depend on any trained leaf: it must come from net(...), with its graph")
        return loss.reshape(()), tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, aux)
