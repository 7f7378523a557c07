"""Convolutions of one, two and three dimensions, grouped ones included, and transposed convolutions.

Rows are output channels; columns are input channels x kernel positions, with the kernel innermost.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from gbfunc.layers.base import LayerKind, Shape
from gbfunc.layers.linear import WEIGHT_NAMES
from gbfunc.types import MatrixDims


def _is_conv(module: nn.Module, attribute: str, shape: Shape) -> bool:
    if not isinstance(module, _ConvNd) or isinstance(module, _ConvTransposeNd):
        return False
    # The whole shape: the magnitudes of a weight-norm parametrisation, [out, 1, 1, ...], are no kernels.
    return attribute in WEIGHT_NAMES and shape == _shape(module, module.out_channels, module.in_channels)


def _is_conv_transpose(module: nn.Module, attribute: str, shape: Shape) -> bool:
    if not isinstance(module, _ConvTransposeNd):
        return False
    return attribute in WEIGHT_NAMES and shape == _shape(module, module.in_channels, module.out_channels)


def _shape(module: _ConvNd, first: int, second: int) -> Shape:
    return (first, second // module.groups, *module.kernel_size)


def conv_matrices(shape: Shape) -> tuple[MatrixDims, ...]:
    """Weight [out, in, *kernel] as [out, in * prod(kernel)]."""
    return (MatrixDims(shape[0], math.prod(shape[1:]), shape[2:]),)


def conv_fold(matrices: list[Tensor], shape: Shape) -> Tensor:
    """[out, in * prod(kernel)] -> [out, in, *kernel]."""
    return matrices[0].reshape(shape)


def conv_unfold(weight: Tensor) -> list[Tensor]:
    """[out, in, *kernel] -> [out, in * prod(kernel)]."""
    return [weight.reshape(weight.shape[0], -1)]


CONV = LayerKind("conv", True, _is_conv, conv_matrices, conv_fold, conv_unfold)

CONV_TRANSPOSE = LayerKind(
    "conv_transpose",
    True,
    _is_conv_transpose,
    # Stored as [in, out / groups, *kernel].
    lambda s: conv_matrices((s[1], s[0], *s[2:])),
    lambda m, s: m[0].reshape(s[1], s[0], *s[2:]).transpose(0, 1),
    lambda weight: conv_unfold(weight.transpose(0, 1)),
)
