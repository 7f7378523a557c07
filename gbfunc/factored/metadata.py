"""Questions about a tensor that need none of its values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_PROPERTIES = (
    "shape dtype device ndim layout is_cuda is_cpu is_meta is_mps is_xpu is_sparse is_sparse_csr is_mkldnn "
    "is_quantized is_nested grad itemsize nbytes"
)
_METHODS = (
    "size dim numel nelement ndimension element_size is_floating_point is_complex is_signed get_device "
    "storage_offset is_inference __len__ __hash__"
)

METADATA: frozenset[Any] = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split()),
        *(getattr(Tensor, name) for name in _METHODS.split()),
        torch.numel,
        torch.is_floating_point,
        torch.is_complex,
    }
)
"""What a placeholder of the right shape, dtype and device answers rightly by itself."""

_IN_PLACE_OPERATORS = frozenset(
    f"__{name}__" for name in "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor setitem set".split()
)


def changes_in_place(operation: str) -> bool:
    """Whether an operation of this name changes its first argument."""
    return operation in _IN_PLACE_OPERATORS or (operation.endswith("_") and not operation.endswith("__"))


def contiguous_strides(weight: Tensor, dim: int | None = None) -> Any:
    """The strides of a contiguous tensor of the same shape; the placeholder's own are all 0."""
    shape = weight.shape
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return strides if dim is None else strides[dim]


def is_contiguous(weight: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
    """Whether the dense weight would be stored contiguously."""
    return memory_format in (torch.contiguous_format, torch.preserve_format)
