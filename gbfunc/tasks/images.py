"""Tasks of images: digits (scikit-learn's), MNIST, Fashion-MNIST and CIFAR-10.

Suffixes: N images, C channels, h rows, w columns.
"""

import gzip
import math
import pickle
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gbfunc.extras import import_extra
from gbfunc.tasks import data
from gbfunc.tasks.base import Recipe, Task
from gbfunc.tasks.data import Images, data_folder, image_splits, labels_of, scaling
from gbfunc.tasks.pnets import PNETS, Interface, PNet
from gbfunc.untrusted import one_error, read_arrays

FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_SHAPE = (3, 32, 32)  # shape of an image of CIFAR-10
_MAX_BYTES = 64 << 20  # largest size of a batch's file; CIFAR-10's files of 10,000 images have 31 MB
_MAX_UNPACKED = 1 << 30  # largest size of an unpacked .npz


def digits() -> Task:
    """Load the 1,797 handwritten digits of 8 x 8 pixels that scikit-learn contains."""
    datasets = import_extra("sklearn.datasets", "the digits task", "gbfunc[cli]")
    pixels, labels = datasets.load_digits(return_X_y=True)
    interface = Interface((1, 8, 8), 10)
    images = (pixels.reshape(-1, *interface.inputs), labels.astype(np.int64))
    (train, test, val), *scale = image_splits(images, (360, 240))
    recipe = Recipe(lr=4e-2, dense_lr=1e-2, betas=(0.9, 0.95), batch_size=64, epochs=100, augment=data.noise(0.4))
    about, pnet = scaling(*scale, white=16), PNETS["mlp"](interface)
    return Task("digits", interface, train, val, test, pnet, lambda pnet, size: recipe, genome_params=450, about=about)


def read_idx(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Read a gzipped IDX file, which must hold unsigned bytes in the shape `shape`.

    Format: bytes 0, 0, 8 and the number of axes; the length of each axis (32-bit, big-endian); the data.
    """
    header = bytes((0, 0, 8, len(shape))) + b"".join(n.to_bytes(4, "big") for n in shape)
    size = len(header) + math.prod(shape)
    with one_error(path, "IDX file"), gzip.open(path) as file:
        # Read at most one byte more than expected: enough to refuse a longer file, and a zip bomb cannot fill memory.
        if not (content := file.read(size + 1)).startswith(header) or len(content) != size:
            got = f"{len(content)} or more that start with {content[: len(header)].hex() or 'nothing'}"
            raise ValueError(f"expected {size} bytes that start with {header.hex()} (shape {shape}), got {got}")
    return np.frombuffer(content, np.uint8, offset=len(header)).reshape(shape)


def load_mnist(data_dir: Path) -> tuple[Images, Images]:
    """Read the training set and the test set from four `.gz` files: images [N, 1, 28, 28] and labels [N]."""
    if not any(data_dir.glob("*-ubyte.gz")):
        found = next(data_dir.glob("*/*-ubyte.gz"), Path("FOLDER/FILE")).parent
        words = "expected train-images-idx3-ubyte.gz and three more IDX files in"
        raise FileNotFoundError(f"{words} {data_dir}, got none: pass --data-dir {found}")
    sets = []
    for stem, n in (("train", 60_000), ("t10k", 10_000)):
        path = data_dir / f"{stem}-labels-idx1-ubyte.gz"
        images = read_idx(data_dir / f"{stem}-images-idx3-ubyte.gz", (n, 28, 28))
        labels = read_idx(path, (n,))
        with one_error(path, "file of labels"):
            sets.append((images[:, None], labels_of(labels)))
    return sets[0], sets[1]


def mnist_like(
    name: str,
    data_dir: Path | None = None,
    *,
    noise: float | None = None,
    shift: float | None = None,
    distort: float | None = None,
) -> Task:
    """Load MNIST (LeCun, Cortes and Burges) or another data set of 28 x 28 grey pixels in four IDX `.gz` files.

    The validation split has 5,000 fixed training images. Three options augment the training images. `noise` is the
    standard deviation of normal noise, in standard deviations of the pixels. `shift` is the fraction of images that
    move by up to one pixel along each axis. With `distort`, images are rotated, stretched and sheared (see `change` of
    `data.distort`), and move by up to 1.5 pixels. None means the best known value for the size of the genome.
    """
    asked = {"noise": noise, "shift": shift, "distort": distort}
    for option, x in asked.items():
        most, expected = (math.inf, "a number >= 0") if option == "noise" else (1, "a number from 0 to 1")
        if x is not None and not (isinstance(x, int | float) and 0 <= x <= most and x < math.inf):
            raise ValueError(f"{option} of the {name} task must be {expected}, got {x!r}")
    learned, tested = load_mnist(data_folder(name, data_dir, "its four IDX .gz files"))
    (train, val, test), mean, std = image_splits(learned, (5_000,), tested)
    interface = Interface((1, 28, 28), 10)
    about = scaling(mean, std) | ({"classes": list(FASHION)} if name == "fashion-mnist" else {})
    settings = partial(_mnist_recipe, asked=asked, blank=(-mean / std).item())
    return Task(name, interface, train, val, test, PNETS["mlp"](interface), settings, genome_params=1_973, about=about)


mnist, fashion_mnist = partial(mnist_like, "mnist"), partial(mnist_like, "fashion-mnist")


def _mnist_recipe(pnet: PNet, genome_params: float, asked: Mapping[str, float | None], blank: float) -> Recipe:
    recipe, known = Recipe(lr=1e-2), {"noise": 0.0, "shift": 0.0, "distort": 0.0}
    if pnet.name == "mlp":
        # Genomes of an MLP overfit: without noise and shifts, later epochs do not raise the validation accuracy.
        small = genome_params <= 1_000
        known |= {"noise": 0.25 if small else 0.4, "shift": 0.3}
        lr, betas, epochs = (8e-2, (0.9, 0.95), 120) if small else (4e-2, (0.9, 0.99), 50)
        recipe = Recipe(lr=lr, betas=betas, batch_size=256, epochs=epochs)
    elif pnet.name in ("convnet", "lenet5") and genome_params > 3_000:
        known["distort"], recipe = 0.1, Recipe(lr=3e-2, batch_size=256, epochs=60)
    elif pnet.name in ("convnet", "lenet5"):
        known |= {"noise": 0.2, "shift": 0.3}
        batch_size, epochs = (64, 60) if pnet.name == "convnet" else (256, 30)
        recipe = Recipe(lr=6e-2, batch_size=batch_size, epochs=epochs)
    change = known | {name: x for name, x in asked.items() if x is not None}
    changes = [data.distort(change["distort"], 1.5, blank)] if change["distort"] else []
    changes += [data.shift(1, change["shift"], blank)] if change["shift"] else []
    changes += [data.noise(change["noise"])] if change["noise"] else []
    return replace(recipe, augment=data.in_turn(*changes) if changes else None)


def cifar10(data_dir: Path | None = None) -> Task:
    """Load CIFAR-10 (Krizhevsky, 2009, https://www.cs.toronto.edu/~kriz/cifar.html): photographs in ten classes.

    The folder holds the standard python batches (`data_batch_1` to `data_batch_5`, `test_batch`), or the files
    `cifar10_train*.npz` and `cifar10_test*.npz` (see `read_packed`). A fixed, stratified tenth of the training images
    is for validation.
    """
    folder = data_folder("cifar10", data_dir, "its python batches (cifar-10-batches-py) or cifar10_train*.npz")
    learned, tested = load_cifar(folder)
    (train, val, test), *scale = image_splits(learned, (len(learned[1]) // 10,), tested, by_channel=True)
    interface = Interface(_SHAPE, 10)
    about = scaling(*scale) | {"classes": list(CIFAR10)}
    pnet = PNETS["allconv"](interface)
    return Task("cifar10", interface, train, val, test, pnet, cifar10_recipe, genome_params=14_958, about=about)


def cifar10_recipe(pnet: PNet, genome_params: float) -> Recipe:
    """Choose the recipe for photographs of about 32 x 32 pixels."""
    # Small genomes hardly overfit, so shift their images less. Large genomes can diverge at 3e-2 (60,266 parameters).
    lr = 3e-2 if genome_params < 30_000 else 2e-2
    pixels = 0 if genome_params < 5_000 else 2 if genome_params < 15_000 else 4
    augment = data.shift(pixels, 0.5, 0.0, mirrors=True)
    return Recipe(lr=lr, dense_lr=3e-2, augment=augment, clip_norm=1.0, warmup=0.2)


def load_cifar(data_dir: Path, name: str = "cifar10", classes: int = 10) -> tuple[Images, Images]:
    """Read the training set and the test set from python batches, or from `.npz` files that begin with `name`."""
    packed = [sorted(data_dir.glob(f"{name}_{split}*.npz")) for split in ("train", "test")]
    if any(packed):
        if (counts := [len(paths) for paths in packed]) != [1, 1]:
            expected = f"{data_dir} must hold one {name}_train*.npz and one {name}_test*.npz"
            raise FileNotFoundError(f"{expected}, got {counts[0]} and {counts[1]}")
        return read_packed(packed[0][0], classes), read_packed(packed[1][0], classes)
    folder = inner if (inner := data_dir / "cifar-10-batches-py").is_dir() else data_dir
    if not any(folder.glob("data_batch_*")):
        raise FileNotFoundError(f"{folder} must hold CIFAR-10's python batches or cifar10_train*.npz, got neither")
    batches = [read_batch(folder / f"data_batch_{i}") for i in range(1, 6)]
    images, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    return (images, labels), read_batch(folder / "test_batch")


def read_packed(path: Path, classes: int = 10) -> Images:
    """Read an `.npz` with `labels` [N] and `delta` [N, 3, 32, 32]: differences of neighbouring pixels along both axes.

    The channels are R - G, G and B - G. If the file has booleans `exact` [N], inexact images (False) are left out.
    """
    arrays = read_arrays(path, _MAX_UNPACKED, ("delta", "labels", "exact"))
    with one_error(path, "CIFAR-10 .npz"):
        delta, labels = arrays["delta"], labels_of(arrays["labels"], classes)
        exact = arrays.get("exact", np.ones(labels.shape, bool))
        if delta.dtype != np.uint8 or delta.shape != (len(labels), *_SHAPE):
            raise ValueError(f"delta must be {len(labels)} x 3 x 32 x 32 bytes, got {delta.dtype} {delta.shape}")
        if exact.shape != labels.shape or exact.dtype != bool or not exact.any():
            raise ValueError(f"exact must be {len(labels)} booleans, some True, got {exact.dtype} {exact.shape}")
    images = delta[exact]
    for axis in (2, 3):
        np.cumsum(images, axis, dtype=np.uint8, out=images)
    images[:, (0, 2)] += images[:, 1:2]
    return images, labels[exact]


class _Stub:
    """Replaces a pickled object, and stores its state and its constructor's arguments. No code of the pickle runs."""

    def __init__(self, *args: Any) -> None:
        self.contents = args

    def __setstate__(self, state: Any) -> None:
        self.contents += state


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (full := f"{module}.{name}") not in ("numpy.core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype"):
            raise pickle.UnpicklingError(f"expected only arrays in the pickle, got {full}: use the original files")
        return _Stub


def read_batch(path: Path) -> Images:
    """Read the images [N, 3, 32, 32] and labels [N] of one of CIFAR-10's python batches, a pickle of Python 2."""
    with one_error(path, "CIFAR-10 batch"):
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise ValueError(f"expected at most {_MAX_BYTES:,} bytes, got {size:,}: use the original files")
        with path.open("rb") as file:
            batch = _Reader(file, encoding="latin1").load()
        labels = labels_of(batch["labels"])
        # `contents` of an array: the three arguments of numpy's `_reconstruct`, not needed here, and the array's state.
        *_, shape, dtype, by_columns, data = batch["data"].contents
        if shape != (len(labels), 3_072) or dtype.contents[0] != "u1" or by_columns:
            raise ValueError(f"data must be {len(labels)} x 3072 unsigned bytes, row by row, got {shape}")
        return np.frombuffer(data.encode("latin1"), np.uint8).reshape(-1, *_SHAPE), labels
