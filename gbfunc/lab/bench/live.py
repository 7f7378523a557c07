"""Bytes of large tensors that are alive at once, counted: no allocator is asked."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Follows the memory of the results of all operations while it is active, until that memory is given back.

    A tensor's memory of `at_least` so many bytes counts. Views share it, and it counts once; that of older tensors
    counts from their first view on.

    Attributes:
        peak: most bytes alive after any operation.
        peak_tensors: most tensors' memories alive after any operation.
    """

    def __init__(self, at_least: int) -> None:
        super().__init__()
        self.peak = self.peak_tensors = 0
        self._at_least = at_least
        self._alive: WeakSet[Any] = WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and count."""
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            # Absent tensors of a pipeline have a size, and no memory.
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() >= self._at_least and tensor.data_ptr():
                self._alive.add(tensor.untyped_storage())
        alive = [storage.nbytes() for storage in self._alive]
        self.peak, self.peak_tensors = max(self.peak, sum(alive)), max(self.peak_tensors, len(alive))
        return result
