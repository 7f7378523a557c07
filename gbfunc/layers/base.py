"""What a layer kind is: which tensors it claims, and how they fold from matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from gbfunc.types import MatrixDims

Shape = tuple[int, ...]


class LayerKind(NamedTuple):
    """How the weight tensor of one kind of layer is seen as one or more matrices [rows, columns].

    Rows are output channels and columns input channels (times kernel positions), whatever the layer's own layout.

    Attributes:
        name: the kind's name, as it stands in plans and files.
        selected: whether the default selection generates tensors of this kind.
        claims: `(module, attribute, shape) -> bool`: is this tensor of this kind?
        matrices: `shape -> (MatrixDims, ...)`.
        fold: `(matrices, shape) -> tensor` of that shape.
        unfold: `tensor -> matrices`, the inverse of `fold`.
    """

    name: str
    selected: bool
    claims: Callable[[nn.Module, str, Shape], bool]
    matrices: Callable[[Shape], tuple[MatrixDims, ...]]
    fold: Callable[[list[Tensor], Shape], Tensor]
    unfold: Callable[[Tensor], list[Tensor]]
