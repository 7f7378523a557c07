"""Which tensors of a plan can have another form than dense, and the form of those that stay factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gbfunc.layers.factored import DeltaWeight, FactoredWeight
from gbfunc.layers.install import formable, transposed
from gbfunc.plan.slots import TensorPlan
from gbfunc.tiling import TileGrid


def is_formable(tensor: TensorPlan, pnet: nn.Module) -> bool:
    """Whether every layer that has a generated tensor can have it in another form, and reads it as its kind says."""
    places = [name.rpartition(".") for name in (tensor.name, *tensor.aliases)]
    layers = [(pnet.get_submodule(prefix), attribute) for prefix, _, attribute in places]
    kind = tensor.kind == "transposed_linear"
    return bool(tensor.slots) and all(formable(m, attribute) and transposed(m) == kind for m, attribute in layers)


def factored_form(
    tensor: TensorPlan, dtype: torch.dtype, lazy: Any, base: Callable[[torch.device], Tensor] | None = None
) -> FactoredWeight | None:
    """The form of a tensor that stays factors where `lazy` (`"auto"`: where it pays); None where it is dense.

    `base` gives what a delta belongs to; without it the form is good for its shapes alone.
    """
    if not lazy or not tensor.can_factor(dtype):
        return None
    first = tensor.slots[0].grid
    grid = TileGrid(len(tensor.slots) * first.rows, first.cols, first.tile_rows, first.tile_cols)
    rank, transposed = tensor.slots[0].hypernet.factor_width, tensor.kind == "transposed_linear"
    options = (tensor.name, tensor.shape, grid, rank, transposed, lazy == "auto")
    return DeltaWeight(base, *options) if tensor.base else FactoredWeight(*options)
