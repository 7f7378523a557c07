"""Linear layers: `nn.Linear` and its subclasses, and Hugging Face `Conv1D`, which stores the transpose."""

from __future__ import annotations

from torch import nn

from gbfunc.layers.base import WEIGHT_NAMES, LayerKind, Shape
from gbfunc.types import MatrixDims


def _is_linear(module: nn.Module, attribute: str, shape: Shape) -> bool:
    if not isinstance(module, nn.Linear):
        return False
    return attribute in WEIGHT_NAMES and shape == (module.out_features, module.in_features)


def _is_conv1d(module: nn.Module, attribute: str, shape: Shape) -> bool:
    # By name: the class belongs to a library that need not be installed.
    named = any(base.__name__ == "Conv1D" for base in type(module).__mro__)
    return named and hasattr(module, "nf") and attribute == "weight" and len(shape) == 2


LINEAR = LayerKind("linear", True, _is_linear)

TRANSPOSED_LINEAR = LayerKind(
    "transposed_linear",
    True,
    _is_conv1d,
    lambda s: (MatrixDims(s[1], s[0]),),
    lambda m, s: m[0].t().reshape(s),
    lambda weight: [weight.t()],
    lambda shape, block: block[::-1],
)
