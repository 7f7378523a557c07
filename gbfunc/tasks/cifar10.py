"""CIFAR-10 (Krizhevsky, 2009, https://www.cs.toronto.edu/~kriz/cifar.html): photographs of 32 x 32 in ten classes.

Its python batches are pickles, and a pickle is a program. They are read without running it: stand-ins for the few names
that a batch needs only keep their arguments.

Suffixes: N images, C channels, h rows, w columns.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from gbfunc.tasks.base import Recipe, Task
from gbfunc.tasks.data import Images, data_folder, flip_and_crop, image_splits, labels_of, reading, scaling
from gbfunc.tasks.pnets import PNETS, Interface, PNet

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_VAL_PART = 10
_MAX_BYTES, _MAX_UNPACKED = 64 << 20, 1 << 30  # A batch of 10,000 images has 31 MB
_SHAPE, _PIXELS = (3, 32, 32), 3_072


def cifar10(data_dir: Path | None = None) -> Task:
    """Load the CIFAR-10 task; a tenth of the training images, the same ones always, is held out for validation.

    Args:
        data_dir: folder with the standard python batches (`data_batch_1` to `data_batch_5`, `test_batch`), or with
            `cifar10_train*.npz` and `cifar10_test*.npz`, whose `delta` holds differences of neighbouring pixels.
    """
    folder = data_folder("cifar10", data_dir, "its python batches (cifar-10-batches-py) or cifar10_train*.npz")
    learned, tested = load_cifar10(folder)
    (train, val, test), *scale = image_splits(learned, (len(learned[1]) // _VAL_PART,), tested, by_channel=True)
    interface = Interface(_SHAPE, 10)
    about = scaling(*scale) | {"classes": list(CLASSES)}
    pnet = PNETS["allconv"](interface)
    return Task("cifar10", interface, train, val, test, pnet, _recipe, genome_params=14_958, about=about)


def _recipe(pnet: PNet, genome_params: float) -> Recipe:
    """Choose the settings: small genomes do not learn images by heart, so that these need not be shifted.

    Large genomes gain nothing at the rate of small ones.
    """
    lr = 3e-2 if genome_params < 30_000 else 2e-2
    shift = 0 if genome_params < 5_000 else 2 if genome_params < 15_000 else 4
    return Recipe(lr=lr, dense_lr=3e-2, augment=flip_and_crop(shift), clip_norm=1.0, warmup=0.2)


def load_cifar10(data_dir: Path) -> tuple[Images, Images]:
    """Read the training images and the test images of a folder, of either form."""
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

    If the file says which images are `exact`, the others are left out.
    """
    with reading(path, "CIFAR-10 .npz"):
        with zipfile.ZipFile(path) as file:
            if (size := sum(member.file_size for member in file.infolist())) > _MAX_UNPACKED:
                raise ValueError(f"it would unpack to {size:,} bytes")
        with np.load(path, allow_pickle=False) as arrays:
            delta, labels = arrays["delta"], labels_of(arrays["labels"])
            exact = arrays["exact"] if "exact" in arrays else np.ones(labels.shape, bool)
        if delta.dtype != np.uint8 or delta.shape != (len(labels), *_SHAPE):
            raise ValueError(f"delta must be {len(labels)} x 3 x 32 x 32 bytes, got {delta.dtype} {delta.shape}")
        if exact.shape != labels.shape or exact.dtype != bool or not exact.any():
            raise ValueError(f"exact must say which of {len(labels)} images are, got {exact.dtype} {exact.shape}")
    images = delta[exact]
    for axis in (2, 3):
        np.cumsum(images, axis, dtype=np.uint8, out=images)
    images[:, 0] += images[:, 1]
    images[:, 2] += images[:, 1]
    return images, labels[exact]


class _Stub:
    """A stand-in for one of numpy's names: keeps its arguments and its state."""

    def __init__(self, *args: Any) -> None:
        self.parts = args

    def __setstate__(self, state: Any) -> None:
        self.parts = state


def _latin1(text: Any, encoding: Any) -> bytes:
    """Encode text as Python 3 writes bytes for Python 2."""
    if encoding != "latin1" or not isinstance(text, str):
        raise pickle.UnpicklingError(f"it encodes a {type(text).__name__} as {encoding!r}")
    return text.encode("latin1")


class _Dtype(_Stub):
    def __setstate__(self, state: Any) -> None:
        """Ignore the byte order, which bytes do not have."""


_ARRAYS = ("multiarray._reconstruct", "numeric._frombuffer")
_NAMES: dict[str, Any] = {f"numpy.{core}.{name}": _Stub for core in ("core", "_core") for name in _ARRAYS}
_NAMES |= {"numpy.ndarray": _Stub, "numpy.dtype": _Dtype, "_codecs.encode": _latin1}


class _Reader(pickle.Unpickler):
    """An unpickler that imports nothing."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name; `UnpicklingError` for a name that no batch has."""
        if (full := f"{module}.{name}") not in _NAMES:
            raise pickle.UnpicklingError(f"it asks for {full}, which no batch of images needs")
        return _NAMES[full]


def read_batch(path: Path) -> Images:
    """Read images [N, 3, 32, 32] and labels [N] of one batch."""
    with reading(path, "CIFAR-10 batch"):
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise ValueError(f"it has {size:,} bytes, a batch has at most {_MAX_BYTES:,}")
        with path.open("rb") as file:
            batch = _Reader(file, encoding="bytes").load()
        # Keys are bytes in a file of Python 2.
        entries = {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in batch.items()}
        labels, array = labels_of(entries["labels"]), entries["data"]
        # Arguments of `_frombuffer`, or the state of an array after its version.
        data, dtype, shape, order = array.parts if len(array.parts) == 4 else [array.parts[i] for i in (4, 2, 1, 3)]
        if shape != (len(labels), _PIXELS) or dtype.parts[0] not in ("u1", b"u1", "uint8") or order not in (False, "C"):
            raise ValueError(f"data must be {len(labels)} x {_PIXELS} unsigned bytes, row by row, got {shape}")
        return np.frombuffer(data, np.uint8).reshape(-1, *_SHAPE), labels
