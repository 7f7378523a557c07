"""Weight tensors as matrices. A new kind of layer is one file and one entry in `KINDS`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import nn

from gbfunc.layers.attention import IN_PROJ, PROJ
from gbfunc.layers.base import LayerKind, Shape
from gbfunc.layers.conv import CONV, CONV_TRANSPOSE
from gbfunc.layers.embedding import EMBEDDING, MATRIX, VECTOR
from gbfunc.layers.linear import LINEAR, TRANSPOSED_LINEAR

__all__ = ["KINDS", "LayerKind", "layer_kind"]

_KINDS = (LINEAR, TRANSPOSED_LINEAR, CONV, CONV_TRANSPOSE, IN_PROJ, PROJ, EMBEDDING, VECTOR, MATRIX)
KINDS: Mapping[str, LayerKind] = MappingProxyType({kind.name: kind for kind in _KINDS})
"""Every layer kind by name; the first that claims a tensor has it, and the last claims all that is left."""


def layer_kind(module: nn.Module, attribute: str, shape: Shape) -> LayerKind:
    """The kind of the tensor that `module` holds as `attribute`."""
    return next(kind for kind in KINDS.values() if kind.claims(module, attribute, shape))
