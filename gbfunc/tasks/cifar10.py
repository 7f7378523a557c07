"""CIFAR-10 (Krizhevsky, 2009, https://www.cs.toronto.edu/~kriz/cifar.html): photographs of 32 x 32 in ten classes.

Its python batches are pickles, and a pickle is a program. They are read without running it: what stands in for the few
names that a batch needs only keeps what it is given.

Suffixes: N images, C channels, h rows, w columns.
"""

from __future__ import annotations

import math
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gbfunc.tasks.base import Recipe, Task, scaling
from gbfunc.tasks.data import Split, flip_and_crop, hold_out
from gbfunc.tasks.pnets import PNETS, Interface

SPLIT_SEED = 0
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_VAL_PART = 10
_MAX_UNPACKED = 1 << 30
_SHAPE = (3, 32, 32)

Images = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images [N, C, h, w] and labels [N]."""


def cifar10(data_dir: Path | None = None) -> Task:
    """The CIFAR-10 task; a tenth of the training images, the same ones always, is held out for validation.

    Args:
        data_dir: folder with the standard python batches (`data_batch_1` to `data_batch_5`, `test_batch`), or with
            `cifar10_train*.npz` and `cifar10_test*.npz`, whose `delta` holds differences of neighbouring pixels.
    """
    if data_dir is None:
        raise ValueError("the cifar10 task needs --data-dir: the folder with its python batches (cifar-10-batches-py)")
    (images, labels), test = load_cifar10(data_dir)
    val, train = hold_out(labels, (len(labels) // _VAL_PART,), SPLIT_SEED)
    mean_C = images[train].mean((0, 2, 3), keepdims=True, dtype=np.float64)
    std_C = images[train].std((0, 2, 3), keepdims=True, dtype=np.float64)

    def split(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> Split:
        x = (images - mean_C.astype(np.float32)) / std_C.astype(np.float32)
        return Split(torch.from_numpy(x), torch.from_numpy(labels))

    interface = Interface(_SHAPE, 10)
    return Task(
        name="cifar10",
        interface=interface,
        train=split(images[train], labels[train]),
        val=split(images[val], labels[val]),
        test=split(*test),
        pnet=PNETS["allconv"](interface),
        settings=lambda pnet, genome_params: _recipe(genome_params),
        genome_params=14_958,
        about=scaling(mean_C, std_C) | {"classes": list(CLASSES)},
    )


def _recipe(genome_params: float) -> Recipe:
    """Small genomes see their images where they are: they do not learn 20,000 of them by heart.

    Large ones gain nothing at the rate of small ones.
    """
    lr = 3e-2 if genome_params < 30_000 else 2e-2
    shift = 0 if genome_params < 5_000 else 2 if genome_params < 15_000 else 4
    return Recipe(lr=lr, dense_lr=3e-2, augment=flip_and_crop(shift), clip_norm=1.0, warmup=0.2)


def load_cifar10(data_dir: Path) -> tuple[Images, Images]:
    """Training images and test images of a folder, of whichever form."""
    if not data_dir.is_dir():
        raise FileNotFoundError(f"no such folder: {data_dir} (it must hold CIFAR-10's python batches or .npz files)")
    packed = [sorted(data_dir.glob(f"cifar10_{part}*.npz")) for part in ("train", "test")]
    if any(packed):
        if (counts := [len(paths) for paths in packed]) != [1, 1]:
            raise FileNotFoundError(f"{data_dir} must hold one cifar10_train*.npz and one cifar10_test*.npz, "
                                    f"not {counts[0]} and {counts[1]}")  # fmt: skip
        return read_packed(packed[0][0]), read_packed(packed[1][0])
    folder = inner if (inner := data_dir / "cifar-10-batches-py").is_dir() else data_dir
    if not any(folder.glob("data_batch_*")):
        raise FileNotFoundError(f"{folder} holds neither CIFAR-10's python batches nor cifar10_train*.npz")
    parts = [read_batch(folder / f"data_batch_{i}") for i in range(1, 6)]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return (images, labels), read_batch(folder / "test_batch")


def read_packed(path: Path) -> Images:
    """Read an `.npz` of CIFAR-10: `labels` [N], and `delta` [N, 3, 32, 32] with R - G, G, B - G as differences.

    Where it says which images are `exact`, the others are left out.
    """
    try:
        with zipfile.ZipFile(path) as file:
            if (size := sum(member.file_size for member in file.infolist())) > _MAX_UNPACKED:
                raise ValueError(f"it would unpack to {size:,} bytes")
        with np.load(path, allow_pickle=False) as arrays:
            delta, labels = arrays["delta"], arrays["labels"]
            exact = arrays["exact"] if "exact" in arrays else np.ones(labels.shape, bool)
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise ValueError(f"{path} is not a valid CIFAR-10 .npz: {error}") from error
    n = len(labels) if labels.ndim == 1 else 0
    if delta.dtype != np.uint8 or delta.shape != (n, *_SHAPE) or not n or labels.dtype.kind not in "iu":
        raise ValueError(f"{path} must hold delta (N, 3, 32, 32) of bytes and as many labels, got {delta.dtype} "
                         f"{delta.shape} and {labels.dtype} {labels.shape}")  # fmt: skip
    if exact.shape != (n,) or exact.dtype != bool or not exact.any():
        raise ValueError(f"{path} must say of each of {n} images if it is exact, got {exact.dtype} {exact.shape}")
    if not 0 <= labels.min() <= labels.max() <= 9:
        raise ValueError(f"{path} must hold labels 0 to 9, got {labels.min()} to {labels.max()}")
    images = delta[exact]
    for axis in (2, 3):
        np.cumsum(images, axis, dtype=np.uint8, out=images)
    images[:, 0] += images[:, 1]
    images[:, 2] += images[:, 1]
    return images, labels[exact].astype(np.int64)


_PIXELS = 3_072
_MAX_BYTES = 64 << 20
"""A batch of 10,000 images has 31 MB."""


class _Stub:
    """What a file makes of one of numpy's names: its arguments and its state are kept, nothing is run."""

    def __init__(self, *args: Any) -> None:
        self.args, self.state = args, None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _pixels(array: Any) -> NDArray[np.uint8] | None:
    """The array of bytes that a file describes; None where it describes none."""
    if not isinstance(array, _Stub):
        return None
    if array.state is None:
        data, dtype, shape, order = array.args
        columns_first = order != "C"
    else:
        _, shape, dtype, columns_first, data = array.state
    if columns_first or dtype.args[0] not in ("u1", b"u1", "uint8") or not isinstance(data, bytes | bytearray):
        raise pickle.UnpicklingError("its array is not one of unsigned bytes, row by row")
    if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) != len(data):
        raise pickle.UnpicklingError(f"its array of shape {shape} holds {len(data)} bytes")
    return np.frombuffer(bytes(data), np.uint8).reshape(shape)


def _latin1(text: Any, encoding: Any) -> bytes:
    """How Python 3 writes bytes for Python 2."""
    if encoding != "latin1" or not isinstance(text, str):
        raise pickle.UnpicklingError(f"it encodes a {type(text).__name__} as {encoding!r}")
    return text.encode("latin1")


_ARRAYS = ("multiarray._reconstruct", "numeric._frombuffer")
_NUMPY = {"numpy.dtype", "numpy.ndarray", *(f"numpy.{core}.{name}" for core in ("core", "_core") for name in _ARRAYS)}


class _Reader(pickle.Unpickler):
    """An unpickler that imports nothing."""

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name; `UnpicklingError` for one that no batch has."""
        if (full := f"{module}.{name}") != "_codecs.encode" and full not in _NUMPY:
            raise pickle.UnpicklingError(f"it asks for {full}, which no batch of images needs")
        return _Stub if full in _NUMPY else _latin1


def read_batch(path: Path) -> Images:
    """Images [N, 3, 32, 32] and labels [N] of one batch."""
    if not path.is_file():
        raise FileNotFoundError(f"no such CIFAR-10 batch: {path}")
    if (size := path.stat().st_size) > _MAX_BYTES:
        raise ValueError(f"{path} has {size:,} bytes, a CIFAR-10 batch has at most {_MAX_BYTES:,}")
    try:
        with path.open("rb") as file:
            batch = _Reader(file, encoding="bytes").load()
        if not isinstance(batch, dict):
            raise ValueError(f"it holds a {type(batch).__name__}, no dict")
        # Keys are bytes in a file of Python 2.
        entries = {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in batch.items()}
        pixels, labels = _pixels(entries.get("data")), entries.get("labels")
        if pixels is None or pixels.ndim != 2 or pixels.shape[1] != _PIXELS or not len(pixels):
            raise ValueError(f"data must be N x {_PIXELS} bytes, got {None if pixels is None else pixels.shape}")
        if not isinstance(labels, list) or len(labels) != len(pixels) or not all(type(x) is int for x in labels):
            raise ValueError(f"it needs a list of {len(pixels)} labels")
    except Exception as error:  # A damaged pickle can raise nearly anything.
        reason = str(error) or type(error).__name__
        raise ValueError(f"{path} is not a valid CIFAR-10 batch: {reason}") from error
    if not 0 <= min(labels) <= max(labels) <= 9:
        raise ValueError(f"{path} must hold labels 0 to 9, got {min(labels)} to {max(labels)}")
    return pixels.reshape(-1, 3, 32, 32), np.array(labels, np.int64)
