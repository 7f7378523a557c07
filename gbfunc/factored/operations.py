"""Handlers: torch's operations on a weight, in their own signatures, as requests to a lazy weight.

A handler returns `NotImplemented` where the operation needs the dense weight. It calls the methods of a lazy
weight and other handlers, never an operation of torch on the weight: torch.compile does not dispatch
operations inside `__torch_function__`, and would read the placeholder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gbfunc.factored.interface import LazyTensor, densified


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """`F.linear` with a lazy weight."""
    if not isinstance(weight, LazyTensor) or len(weight._shape) != 2:
        return NotImplemented
    x = densified(input, "linear")
    _check_features(x, weight, weight._shape[1])
    return weight.apply_linear(x, densified(bias, "linear"))


def matmul(input: Tensor, other: Tensor) -> Any:
    """A matrix product with a lazy matrix on either side; `mm` and `mv` too."""
    if isinstance(other, LazyTensor):
        if len(other._shape) != 2:
            return NotImplemented
        flipped = other.flipped()
        return NotImplemented if flipped is NotImplemented else linear(input, flipped)
    if not isinstance(input, LazyTensor) or len(input._shape) != 2:
        return NotImplemented
    if other.ndim == 1:
        return linear(other, input)
    result = linear(other.mT, input)
    return NotImplemented if result is NotImplemented else result.mT


def rmatmul(input: Tensor, other: Tensor) -> Any:
    """`other @ input`."""
    return matmul(other, input)


def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    """`beta * input + alpha * mat1 @ mat2` with a lazy matrix."""
    product = matmul(mat1, mat2)
    if product is NotImplemented:
        return NotImplemented
    product = product if alpha == 1 else alpha * product
    # addmm defines beta = 0 as "ignore the input", NaN included.
    return product if beta == 0 else product + (input if beta == 1 else beta * input)


def flip(input: Tensor) -> Any:
    """The transpose of a lazy matrix, still lazy."""
    return input.flipped() if isinstance(input, LazyTensor) and len(input._shape) == 2 else NotImplemented


def transpose(input: Tensor, dim0: int, dim1: int) -> Any:
    """`torch.transpose` of a lazy matrix, still lazy."""
    return flip(input) if input.ndim == 2 and {dim0 % 2, dim1 % 2} == {0, 1} else NotImplemented


def conv_handler(conv: Callable[..., Tensor]) -> Callable[..., Any]:
    """The handler of `torch.conv1d`, `conv2d` or `conv3d`."""

    def handler(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        if not isinstance(weight, LazyTensor):
            return NotImplemented
        name = conv.__name__
        x, bias = densified(input, name), densified(bias, name)
        return weight.apply_conv(conv, x, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)

    return handler


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """`F.embedding` with a lazy table."""
    # `sparse` only chooses the layout of a leaf's gradient, and a generated weight is no leaf.
    if not isinstance(weight, LazyTensor) or len(weight._shape) != 2 or max_norm is not None or scale_grad_by_freq:
        return NotImplemented
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight._shape[0]
    return weight.apply_embedding(input, padding_idx)


def chunk(input: Tensor, chunks: int, dim: int = 0) -> Any:
    """Equal blocks of rows of a lazy matrix, still lazy."""
    if not isinstance(input, LazyTensor) or len(input._shape) != 2 or dim != 0 or input._shape[0] % chunks:
        return NotImplemented
    size = input._shape[0] // chunks
    blocks = tuple(input.row_block(i * size, (i + 1) * size) for i in range(chunks))
    return NotImplemented if any(block is NotImplemented for block in blocks) else blocks


def _check_features(x: Tensor, weight: LazyTensor, features: int) -> None:
    if x.shape[-1] != features:
        raise ValueError(f"expected an input with {features} features for {weight!r}, got shape {tuple(x.shape)}")


def requires_grad(weight: LazyTensor) -> bool:
    """Whether a gradient can flow to what the weight is made of."""
    return any(source.requires_grad for source in weight.sources())


def is_leaf(weight: LazyTensor) -> bool:
    """A generated weight is a leaf only where no gradient flows."""
    return not requires_grad(weight)
