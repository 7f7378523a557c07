"""CIFAR-10 (Krizhevsky, 2009): photographs of 32 x 32 pixels in ten classes.

Suffixes: N images, C channels, h rows, w columns.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from gbfunc.tasks.base import Recipe, Task
from gbfunc.tasks.batches import read_batch
from gbfunc.tasks.data import Split, flip_and_crop, hold_out
from gbfunc.tasks.pnets import PNETS, Interface, PNet

SPLIT_SEED = 0
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

    Raises:
        FileNotFoundError: if the folder or a file is missing.
        ValueError: if no folder is given, or a file is damaged.
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
        settings=_recipe,
        genome_params=14_958,
    )


def _recipe(pnet: PNet, genome_params: float) -> Recipe:
    return Recipe(
        lr=3e-2,
        dense_lr=3e-2,
        batch_size=128,
        epochs=10,
        augment=flip_and_crop(4),
        clip_norm=1.0,
        warmup=0.2,
    )


def load_cifar10(data_dir: Path) -> tuple[Images, Images]:
    """Training images and test images of a folder, of whichever form.

    Raises:
        FileNotFoundError: if the folder or a file is missing.
        ValueError: if a file is damaged.
    """
    if not data_dir.is_dir():
        raise FileNotFoundError(f"no such folder: {data_dir} (it must hold CIFAR-10's python batches or .npz files)")
    packed = [sorted(data_dir.glob(f"cifar10_{part}*.npz")) for part in ("train", "test")]
    if any(packed):
        if not all(len(found) == 1 for found in packed):
            counts = " and ".join(str(len(found)) for found in packed)
            expected = "one cifar10_train*.npz and one cifar10_test*.npz"
            raise FileNotFoundError(f"{data_dir} must hold {expected}, not {counts}")
        return read_packed(packed[0][0]), read_packed(packed[1][0])
    inner = data_dir / "cifar-10-batches-py"
    folder = inner if inner.is_dir() else data_dir
    if not any(folder.glob("data_batch_*")):
        raise FileNotFoundError(f"{folder} holds neither CIFAR-10's python batches nor cifar10_train*.npz")
    parts = [read_batch(folder / f"data_batch_{i}") for i in range(1, 6)]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return (images, labels), read_batch(folder / "test_batch")


def read_packed(path: Path) -> Images:
    """Read an `.npz` of CIFAR-10: `labels` [N], and `delta` [N, 3, 32, 32] with R - G, G, B - G as differences.

    Where it says which images are `exact`, the others are left out.

    Raises:
        ValueError: if it is damaged or holds something else.
    """
    try:
        with zipfile.ZipFile(path) as file:
            if (size := sum(member.file_size for member in file.infolist())) > _MAX_UNPACKED:
                raise ValueError(f"it would unpack to {size:,} bytes")
        with np.load(path, allow_pickle=False) as arrays:
            delta, labels = arrays["delta"], arrays["labels"]
            exact = arrays["exact"] if "exact" in arrays else np.ones(labels.shape, bool)
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise ValueError(f"{path} is not a sound CIFAR-10 .npz: {error}") from error
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
