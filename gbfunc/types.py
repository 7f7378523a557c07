"""Shared names: the containers that every room passes around, and nothing that computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

Params: TypeAlias = dict[str, Tensor]
"""Flat `{name: tensor}`."""

GNets: TypeAlias = dict[str, Params]
"""`{ensemble: {leaf: tensor}}`; a leaf has a leading dimension of tiles [T, ...] or of groups [G, ...]."""

Kernel: TypeAlias = Literal["auto", "eager", "compiled", "reference"]
"""Which implementation evaluates g-nets of the types that have several: ReLU, periodic and bilinear ones.

`"compiled"` is C++ on a CPU and, for ReLU g-nets alone, a Triton kernel on a GPU; `"eager"` is PyTorch; `"reference"`
is the definition, in PyTorch; `"auto"` is `"compiled"` where that is available and pays, otherwise `"eager"`.
"""

Lazy: TypeAlias = bool | Literal["auto"]
"""Whether weights stay factors: wherever they can, nowhere, or where it pays."""

JSON: TypeAlias = dict[str, Any]

_NAMES = "int64 float64 complex64 float32 int32 bfloat16 float16 int16 int8 uint8 bool"
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}
"""Dtypes of a p-net's tensors that files hold, in the order of safetensors, which writes wider ones first."""


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> `"float32"`."""
    return str(dtype).removeprefix("torch.")


class Genome(NamedTuple):
    """Everything that is needed to build the p-net, and all that is trained, saved and shipped.

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
    """What a g-net must know of its tile: rows, columns, and the widths of their codes."""

    rows: int
    cols: int
    row_width: int
    col_width: int


class MatrixDims(NamedTuple):
    """A matrix that a tensor folds from.

    Attributes:
        rows: number of rows (output channels).
        cols: number of columns (input channels x kernel positions).
        kernel: kernel shape that every group of columns spans, `()` where there is none; tiles never cut it.
    """

    rows: int
    cols: int
    kernel: tuple[int, ...] = ()


GenomeLike: TypeAlias = Any
"""A `Genome` or anything with the same three attributes, such as a `TrainState`."""

TensorMap: TypeAlias = Mapping[str, Tensor]
