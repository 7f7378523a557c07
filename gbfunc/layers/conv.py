"""Convolutions of one, two and three dimensions, grouped ones included, and transposed convolutions."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from gbfunc.layers.base import WEIGHT_NAMES, LayerKind, Shape


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


CONV = LayerKind("conv", True, _is_conv)

CONV_TRANSPOSE = LayerKind(
    "conv_transpose",
    True,
    _is_conv_transpose,
    # Stored as [in, out / groups, *kernel].
    lambda s: CONV.matrices((s[1], s[0], *s[2:])),
    lambda m, s: m[0].reshape(s[1], s[0], *s[2:]).transpose(0, 1),
    lambda weight: CONV.unfold(weight.transpose(0, 1)),
)
