"""The lazy weight: a tensor subclass that turns torch's operations on a weight into methods of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gbfunc.factored import operations
from gbfunc.factored.attention import attention_forward
from gbfunc.factored.interface import LazyTensor, densified
from gbfunc.factored.metadata import METADATA, changes_in_place, contiguous_strides, is_contiguous


class LazyWeight(LazyTensor):
    """A weight that is known by what generates it, and stands in for the dense tensor."""

    @classmethod
    def __torch_function__(  # noqa: D105
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **options)
        handler = _HANDLERS.get(func)
        if handler is not None:
            result = handler(*args, **options)
            if result is not NotImplemented:
                return result
        return _run_dense(func, args, options)


def _run_dense(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run `func` with every lazy argument replaced by its dense tensor."""
    name = _operation(func)
    first = next(iter((*args, *kwargs.values())), None)
    if isinstance(first, LazyWeight) and changes_in_place(name):
        raise TypeError(f"a generated weight cannot be changed in place by {name}, got {first!r}; clone it first")
    return func(*densified(args, name), **densified(kwargs, name))


def _operation(func: Callable[..., Any]) -> str:
    """The name of an operation; of a property, the property's."""
    if torch.compiler.is_compiling():
        return "compiled"  # The compiler does not know the names of tensor methods.
    return func.__self__.__name__ if func.__name__ == "__get__" else func.__name__  # pyright: ignore[reportFunctionMemberAccess]


# A plain dict: torch.compile refuses a mapping proxy with functions as keys.
_HANDLERS: Mapping[Any, Callable[..., Any]] = {
    F.linear: operations.linear,
    torch.matmul: operations.matmul,
    torch.mm: operations.matmul,
    torch.mv: operations.matmul,
    Tensor.matmul: operations.matmul,
    Tensor.__matmul__: operations.matmul,
    Tensor.__rmatmul__: operations.rmatmul,
    Tensor.mm: operations.matmul,
    Tensor.mv: operations.matmul,
    torch.addmm: operations.addmm,
    Tensor.addmm: operations.addmm,
    torch.t: operations.flip,
    Tensor.t: operations.flip,
    Tensor.T.__get__: operations.flip,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.mT.__get__: operations.flip,  # pyright: ignore[reportAttributeAccessIssue]
    torch.transpose: operations.transpose,
    Tensor.transpose: operations.transpose,
    torch.conv1d: operations.conv_handler(torch.conv1d),
    torch.conv2d: operations.conv_handler(torch.conv2d),
    torch.conv3d: operations.conv_handler(torch.conv3d),
    F.embedding: operations.embedding,
    torch.chunk: operations.chunk,
    Tensor.chunk: operations.chunk,
    F.multi_head_attention_forward: attention_forward,
    Tensor.requires_grad.__get__: operations.requires_grad,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.is_leaf.__get__: operations.is_leaf,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.stride: contiguous_strides,
    Tensor.is_contiguous: is_contiguous,
}
