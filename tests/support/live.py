"""Bytes of large tensors that are alive at once, counted: no allocator is asked."""

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Follows the memory of the results of all operations while it is active, until that memory is freed.

    Tensors whose memory has `at_least` so many bytes count. Views share memory, which counts once; the memory of older
    tensors counts from their first view on.

    Attributes:
        peak: most bytes alive after any operation.
        peak_tensors: most tensors' memories alive after any operation.
    """

    def __init__(self, at_least: int) -> None:
        super().__init__()
        self.peak = self.peak_tensors = 0
        self._at_least = at_least
        # By address, which weak references keep from being used again.
        self._seen: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            # Absent tensors of a pipeline have a size, and no memory.
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() >= self._at_least and tensor.data_ptr():
                storage = tensor.untyped_storage()
                self._seen.setdefault(storage._cdata, StorageWeakRef(storage))
        kept = {k: torch.UntypedStorage._new_with_weak_ptr(seen.cdata) for k, seen in self._seen.items()}
        self._seen = {k: seen for k, seen in self._seen.items() if kept[k] is not None}
        alive = [storage.nbytes() for storage in kept.values() if storage is not None]
        self.peak, self.peak_tensors = max(self.peak, sum(alive)), max(self.peak_tensors, len(alive))
        return result
