"""The python batches of CIFAR-10 (https://www.cs.toronto.edu/~kriz/cifar.html), read without running what they say.

A pickle is a program. This reader knows the few names that such a batch needs, and stands in for each with something
that holds bytes and numbers alone: no class or function that a file names is ever imported or called.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PIXELS = 3_072
_MAX_BYTES = 64 << 20
"""A batch of 10,000 images has 31 MB."""


class _DType:
    """What a file says of the type of an array's entries."""

    def __init__(self, name: Any = None, *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        # Byte order and the like, which bytes have none of.
        pass


class _Array:
    """An array of bytes as a file holds it."""

    values: NDArray[np.uint8] | None = None

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, columns_first, data = state
        self.fill(data, dtype, shape, columns_first)

    def fill(self, data: Any, dtype: Any, shape: Any, columns_first: Any) -> None:
        """Take the bytes, if they are what they must be."""
        name = dtype.name if isinstance(dtype, _DType) else None
        if name not in ("u1", b"u1", "uint8") or columns_first or not isinstance(data, bytes | bytearray):
            raise pickle.UnpicklingError("its array is not one of unsigned bytes, row by row")
        if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) != len(data):
            raise pickle.UnpicklingError(f"its array of shape {shape} holds {len(data)} bytes")
        self.values = np.frombuffer(bytes(data), np.uint8).reshape(shape)


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.fill(data, dtype, shape, order != "C")
    return array


def _latin1(text: Any, encoding: Any) -> bytes:
    """How Python 3 writes bytes for Python 2."""
    if encoding != "latin1" or not isinstance(text, str):
        raise pickle.UnpicklingError(f"it encodes a {type(text).__name__} as {encoding!r}")
    return text.encode("latin1")


_KNOWN: Mapping[tuple[str, str], Callable[..., Any]] = MappingProxyType(
    {
        ("numpy", "dtype"): _DType,
        ("numpy", "ndarray"): _Array,
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy._core.multiarray", "_reconstruct"): _Array,
        ("numpy.core.numeric", "_frombuffer"): _from_buffer,
        ("numpy._core.numeric", "_frombuffer"): _from_buffer,
        ("_codecs", "encode"): _latin1,
    }
)


class _Reader(pickle.Unpickler):
    """An unpickler that imports nothing."""

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name.

        Raises:
            UnpicklingError: for any other name.
        """
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no batch of images needs")
        return _KNOWN[module, name]


def read_batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images [N, 3, 32, 32] and labels [N] of one batch.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is damaged, holds something else, or would run anything.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such CIFAR-10 batch: {path}")
    if (size := path.stat().st_size) > _MAX_BYTES:
        raise ValueError(f"{path} has {size:,} bytes, a CIFAR-10 batch has at most {_MAX_BYTES:,}")
    try:
        with path.open("rb") as file:
            found = _Reader(file, encoding="bytes").load()
    except Exception as error:  # A damaged pickle can raise nearly anything.
        reason = str(error) or type(error).__name__
        raise ValueError(f"{path} is not a sound CIFAR-10 batch: {reason}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a sound CIFAR-10 batch: it holds a {type(found).__name__}, no dict")
    # Keys are bytes in a file of Python 2.
    entries = {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in found.items()}
    array, labels = entries.get("data"), entries.get("labels")
    pixels = array.values if isinstance(array, _Array) else None
    if pixels is None or pixels.ndim != 2 or pixels.shape[1] != _PIXELS or not len(pixels):
        shape = None if pixels is None else pixels.shape
        raise ValueError(f"{path} is not a sound CIFAR-10 batch: data must be N x {_PIXELS} bytes, got {shape}")
    if not isinstance(labels, list) or len(labels) != len(pixels) or not all(type(x) is int for x in labels):
        raise ValueError(f"{path} is not a sound CIFAR-10 batch: it needs a list of {len(pixels)} labels")
    if not 0 <= min(labels) <= max(labels) <= 9:
        raise ValueError(f"{path} must hold labels 0 to 9, got {min(labels)} to {max(labels)}")
    return pixels.reshape(-1, 3, 32, 32), np.array(labels, np.int64)
