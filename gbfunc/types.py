"""Types, names and containers that all parts of gbfunc use."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

Params: TypeAlias = dict[str, Tensor]
"""Tensors by name."""

GNets: TypeAlias = dict[str, Params]
"""Leaves by ensemble and name. A leaf is [T, ...] for T tiles, or [G, ...] for G groups of tiles."""

Kernel: TypeAlias = Literal["auto", "eager", "compiled"]
"""The implementation of ReLU, periodic and bilinear g-nets.

`"compiled"` is C++ on a CPU and Triton on a GPU; `"eager"` is PyTorch; `"auto"` is `"compiled"` if available,
otherwise `"eager"`.
"""

Lazy: TypeAlias = bool | Literal["auto"]
"""Whether layers apply factors instead of weights: True where possible, False never, `"auto"` where faster."""

JSON: TypeAlias = dict[str, Any]

_NAMES = "int64 float64 complex64 float32 int32 bfloat16 float16 int16 int8 uint8 bool"
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}
"""Dtypes of tensors in files, in the order in which safetensors writes tensors."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: `torch.float32` -> `"float32"`."""
    return str(dtype).removeprefix("torch.")


class Genome(NamedTuple):
    """All tensors that determine the p-net. A genome is trained, saved and sent instead of the p-net's weights.

    Attributes:
        gnets: the leaves of every ensemble of g-nets.
        direct: parameters of the p-net that are trained directly (biases, norms, ...), by name.
        buffers: buffers of the p-net (running statistics, ...), by name.
    """

    gnets: GNets
    direct: Params
    buffers: Params


class Factors(NamedTuple):
    """A tile as two thin matrices, `tile = left @ right.T`: left [..., rows, k] and right [..., columns, k]."""

    left: Tensor
    right: Tensor


class TileDims(NamedTuple):
    """The rows and columns of a tile, and the widths (how many numbers) of the codes of a row and of a column."""

    rows: int
    cols: int
    row_width: int
    col_width: int


class MatrixDims(NamedTuple):
    """The size of a generated matrix, from which a parameter, such as a convolution's weight, is folded (reshaped)."""

    rows: int  # Output channels
    cols: int  # Input channels x kernel positions
    kernel: tuple[int, ...] = ()  # Shape of a convolution's kernel; a tile never splits a kernel


GenomeLike: TypeAlias = Any
"""A `Genome`, or any object with its three attributes, such as a `TrainState`."""

TensorMap: TypeAlias = Mapping[str, Tensor]
