"""What a lazy weight can be asked for, before any of torch's operations are mapped to it.

Shape suffixes: W_oi a stored weight (o out, i in).
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor

Report = MutableMapping[tuple[str, str], int]


class LazyTensor(torch.Tensor):
    """A weight known by what generates it; a placeholder carries its shape, dtype and device.

    Subclasses give `dense` and the operations that need no dense weight; an operation that answers
    `NotImplemented`, and every operation without a handler, runs on `dense()` and is counted in the
    `report` mapping under `(name, operation)`.
    """

    # Kept apart from `shape`, which each time costs a trip through `__torch_function__`.
    _shape: tuple[int, ...]
    _name: str
    _report: Report | None

    def dense(self) -> Tensor:
        """The weight itself, in the autograd graph of its sources."""
        raise NotImplementedError

    def sources(self) -> tuple[Tensor, ...]:
        """The tensors that the weight is made of."""
        raise NotImplementedError

    def with_sources(self, sources: tuple[Tensor, ...]) -> LazyTensor:
        """The same weight made of other tensors in the places of `sources()`."""
        raise NotImplementedError

    def flipped(self) -> LazyTensor:
        """The transposed matrix, still lazy: [o, i] -> [i, o]."""
        return NotImplemented

    def row_block(self, start: int, stop: int) -> LazyTensor:
        """Rows start to stop of the stored matrix, still lazy: [o, i] -> [stop - start, i]."""
        return NotImplemented

    def apply_linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ W.T + bias`: [..., i] -> [..., o]."""
        return NotImplemented

    def apply_conv(self, conv: Callable[..., Tensor], x: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        """`conv(x, W, bias, **options)` for `torch.conv1d`, `conv2d` or `conv3d`."""
        return NotImplemented

    def apply_embedding(self, index: Tensor, padding_idx: int | None) -> Tensor:
        """Rows of the weight: integers [...] -> [..., i]."""
        return NotImplemented

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Name the kind and the metadata; printing values would densify."""
        return f"{type(self).__name__}({self._name!r}, shape={self._shape}, dtype={self.dtype})"


def new_lazy(
    cls: type[LazyTensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    name: str,
    report: Report | None,
) -> Any:
    """A placeholder of class `cls` with one element of storage; the caller adds the sources."""
    # torch.compile traces this construction; it does not trace `_make_wrapper_subclass` with attributes.
    weight = torch.empty((), dtype=dtype, device=device).expand(shape).as_subclass(cls)
    weight._shape = shape
    weight._name = name
    weight._report = report
    return weight


def densified(value: Any, operation: str) -> Any:
    """Replace the lazy weights in a value or in nested lists, tuples and dicts, and count them."""
    if isinstance(value, LazyTensor):
        if value._report is not None:
            key = (value._name, operation)
            value._report[key] = value._report.get(key, 0) + 1
        return value.dense()
    if isinstance(value, tuple) and type(value) is not tuple:
        return value if isinstance(value, torch.Size) else type(value)(*(densified(v, operation) for v in value))
    if isinstance(value, list | tuple):
        return type(value)(densified(v, operation) for v in value)
    if isinstance(value, dict):
        return {k: densified(v, operation) for k, v in value.items()}
    return value
