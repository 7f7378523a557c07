"""Names and containers that all rooms share."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

Params: TypeAlias = dict[str, Tensor]
"""Flat `{name: tensor}`."""

GNets: TypeAlias = dict[str, Params]
"""`{ensemble: {leaf: tensor}}`; a leaf has a leading dimension of tiles [T, ...] or of groups [G, ...]."""

Kernel: TypeAlias = Literal["auto", "eager", "compiled"]
"""The implementation of ReLU, periodic and bilinear g-nets.

`"compiled"` is C++ on a CPU and Triton on a GPU; `"eager"` is PyTorch; `"auto"` is `"compiled"` where available,
otherwise `"eager"`.
"""

Lazy: TypeAlias = bool | Literal["auto"]
"""Whether weights stay factors: wherever possible, nowhere, or where factors are faster."""

JSON: TypeAlias = dict[str, Any]

_NAMES = "int64 float64 complex64 float32 int32 bfloat16 float16 int16 int8 uint8 bool"
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}
"""Dtypes of tensors in files, in the order of safetensors, which writes wider dtypes first."""


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> `"float32"`."""
    return str(dtype).removeprefix("torch.")


class Genome(NamedTuple):
    """All tensors that build the p-net: trained, saved and sent.

    Attributes:
        gnets: leaves of every ensemble of g-nets.
        direct: the p-net's parameters that no g-net generates (biases, norms, ...), by name.
        buffers: the p-net's buffers (running statistics, ...), by name.
    """

    gnets: GNets
    direct: Params
    buffers: Params


class Factors(NamedTuple):
    """A tile as two thin matrices: `tile = left @ right.T`, left [..., r, k], right [..., c, k]."""

    left: Tensor
    right: Tensor


class TileDims(NamedTuple):
    """Rows and columns of a tile, and the widths of their codes."""

    rows: int
    cols: int
    row_width: int
    col_width: int


class MatrixDims(NamedTuple):
    """A matrix of a tensor."""

    rows: int  # output channels
    cols: int  # input channels x kernel positions
    kernel: tuple[int, ...] = ()  # kernel shape that every group of columns spans; tiles never cut kernels


GenomeLike: TypeAlias = Any
"""A `Genome` or anything with the same three attributes, such as a `TrainState`."""

TensorMap: TypeAlias = Mapping[str, Tensor]
