"""Linear layers: `nn.Linear` and its subclasses, and Hugging Face `Conv1D`, which stores the transpose."""

from __future__ import annotations

from torch import Tensor, nn

from gbfunc.layers.base import LayerKind, Shape
from gbfunc.types import MatrixDims

WEIGHT_NAMES = frozenset({"weight", "weight_v", "weight_orig"})
"""A layer's weight under its own name, or as a (legacy) weight-norm or spectral-norm parametrisation stores it."""


def _is_linear(module: nn.Module, attribute: str, shape: Shape) -> bool:
    return (
        isinstance(module, nn.Linear)
        and attribute in WEIGHT_NAMES
        and shape == (module.out_features, module.in_features)
    )


def _is_conv1d(module: nn.Module, attribute: str, shape: Shape) -> bool:
    # By name: the class belongs to a library that need not be installed.
    named = any(base.__name__ == "Conv1D" for base in type(module).__mro__)
    return named and hasattr(module, "nf") and attribute == "weight" and len(shape) == 2


def _unfold(weight: Tensor) -> list[Tensor]:
    return [weight]


LINEAR = LayerKind(
    "linear", True, _is_linear, lambda s: (MatrixDims(s[0], s[1]),), lambda m, s: m[0].reshape(s), _unfold
)

TRANSPOSED_LINEAR = LayerKind(
    "transposed_linear",
    True,
    _is_conv1d,
    lambda s: (MatrixDims(s[1], s[0]),),
    lambda m, s: m[0].t().reshape(s),
    lambda weight: [weight.t()],
)
