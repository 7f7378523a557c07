"""What a layer kind is: which tensors it claims, and how they fold from matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from gbfunc.types import MatrixDims

Shape = tuple[int, ...]

WEIGHT_NAMES = frozenset({"weight", "weight_v", "weight_orig"})
"""A layer's weight by its name, or as a (legacy) weight-norm or spectral-norm parametrisation stores it."""


class LayerKind(NamedTuple):
    """How the weight tensor of one kind of layer is seen as one or more matrices [rows, columns].

    Rows are output channels and columns input channels (times kernel positions, innermost), whatever the layer's
    layout. By default a tensor [out, in, *kernel] is one matrix [out, in * prod(kernel)].

    Attributes:
        name: the kind's name, as it stands in plans and files.
        selected: whether the default selection generates tensors of this kind.
        claims: `(module, attribute, shape) -> bool`: is this tensor of this kind?
        matrices: `shape -> (MatrixDims, ...)`.
        fold: `(matrices, shape) -> tensor` of that shape.
        unfold: `tensor -> matrices`, the inverse of `fold`.
        block_shape: `(shape, (rows, columns)) -> shape` of what `fold` makes of a block of its one matrix.
    """

    name: str
    selected: bool
    claims: Callable[[nn.Module, str, Shape], bool]
    matrices: Callable[[Shape], tuple[MatrixDims, ...]] = lambda s: (MatrixDims(s[0], math.prod(s[1:]), s[2:]),)
    fold: Callable[[list[Tensor], Shape], Tensor] = lambda m, s: m[0].reshape(s)
    unfold: Callable[[Tensor], list[Tensor]] = lambda weight: [weight.flatten(1)]
    block_shape: Callable[[Shape, tuple[int, int]], Shape] = lambda shape, block: block[: len(shape)]
