"""MNIST (LeCun, Cortes and Burges) and Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017): 70,000 images of 28 x 28 pixels.

Suffixes: N images, P pixels of an image.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gbfunc.tasks import data
from gbfunc.tasks.base import Recipe, Task
from gbfunc.tasks.data import data_folder, image_splits, labels_of, reading, scaling
from gbfunc.tasks.pnets import PNETS, Interface, PNet

IMAGE_SHAPE = (28, 28)
N_TRAIN, N_TEST, N_VAL = 60_000, 10_000, 5_000
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_SMALL = 1_000  # largest genomes, in parameters, that take a high rate and little noise
_LARGE = 3_000  # genomes of convolutional networks of more parameters gain from images that are distorted
_PIXELS = 1.5  # largest shift of distorted images, up or down and left or right


def read_idx(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Read a gzipped IDX file of unsigned bytes of a known shape.

    Format: two zero bytes, 8 (unsigned byte), the number of axes, their lengths (32-bit, big-endian), the data.
    """
    header = bytes((0, 0, 8, len(shape))) + b"".join(n.to_bytes(4, "big") for n in shape)
    size = len(header) + math.prod(shape)
    with reading(path, "IDX file"), gzip.open(path) as file:
        # One byte more than expected: a longer file does not pass, and a bomb does not fill the memory.
        content = file.read(size + 1)
        if (got := content[: len(header)]) != header:
            raise ValueError(f"bytes of shape {shape} start with {header.hex()}, got {got.hex() or 'nothing'}")
        if len(content) != size:
            raise ValueError(f"it must unpack to {size} bytes, got {'more' if len(content) > size else len(content)}")
    return np.frombuffer(content, np.uint8, offset=len(header)).reshape(shape)


def load_mnist(data_dir: Path) -> tuple[NDArray[Any], ...]:
    """Read images [N, 28, 28] and labels [N] for training, then for the test, from the four `.gz` files of a folder."""
    arrays = []
    for stem, n in (("train", N_TRAIN), ("t10k", N_TEST)):
        path = data_dir / f"{stem}-labels-idx1-ubyte.gz"
        images = read_idx(data_dir / f"{stem}-images-idx3-ubyte.gz", (n, *IMAGE_SHAPE))
        labels = read_idx(path, (n,))
        with reading(path, "file of labels"):
            arrays += [images, labels_of(labels)]
    return tuple(arrays)


def load_task(
    name: str,
    data_dir: Path | None = None,
    *,
    noise: float | None = None,
    shift: float | None = None,
    distort: float | None = None,
) -> Task:
    """Load a task of such images; 5,000 training images, the same ones always, are held out for validation.

    Args:
        name: name of the task.
        data_dir: folder with the four IDX `.gz` files.
        noise: standard deviation of the normal noise on training images, relative to the deviation of their pixels;
            None for the best known value, which depends on the size of the genome.
        shift: part of the training images (0 to 1) that are moved by up to one pixel each way; None as for `noise`.
        distort: how far training images are turned, stretched and sheared, as a part of their size (0 to 1); they are
            then also moved by up to 1.5 pixels. None as for `noise`.
    """
    asked = {"noise": noise, "shift": shift, "distort": distort}
    for option, x in asked.items():
        most, expected = (math.inf, "a number >= 0") if option == "noise" else (1, "a number from 0 to 1")
        if x is not None and not (isinstance(x, int | float) and 0 <= x <= most and x < math.inf):
            raise ValueError(f"{option} of the {name} task must be {expected}, got {x!r}")
    images, labels, test_images, test_labels = load_mnist(data_folder(name, data_dir, "its four IDX .gz files"))
    learned, tested = (images[:, None], labels), (test_images[:, None], test_labels)
    (train, val, test), mean, std = image_splits(learned, (N_VAL,), tested)
    interface = Interface((1, *IMAGE_SHAPE), 10)
    pnet = PNETS["mlp"](interface, hidden=(800,), bandwidth=6.0)
    about = scaling(mean, std) | ({"classes": list(FASHION)} if name == "fashion-mnist" else {})

    def settings(pnet: PNet, genome_params: float) -> Recipe:
        return _recipe(pnet, genome_params, asked, (-mean / std).item())

    return Task(name, interface, train, val, test, pnet, settings, genome_params=1_973, about=about)


mnist, fashion_mnist = partial(load_task, "mnist"), partial(load_task, "fashion-mnist")


def _recipe(pnet: PNet, genome_params: float, asked: Mapping[str, float | None], blank: float) -> Recipe:
    """Choose the settings; training images are changed as the user says, or otherwise in the best known way.

    `blank` is a pixel of the background.
    """
    recipe, known = Recipe(lr=1e-2), {"noise": 0.0, "shift": 0.0, "distort": 0.0}
    if pnet.name == "mlp":
        # Genomes also learn images by heart: without noise and shifts the later epochs gain nothing.
        small = genome_params <= _SMALL
        known |= {"noise": 0.25 if small else 0.4, "shift": 0.3}
        lr, betas, epochs = (8e-2, (0.9, 0.95), 120) if small else (4e-2, (0.9, 0.99), 50)
        recipe = Recipe(lr=lr, betas=betas, batch_size=256, epochs=epochs)
    if pnet.name in ("convnet", "lenet5"):
        if genome_params > _LARGE:
            known, recipe = known | {"distort": 0.1}, Recipe(lr=3e-2, batch_size=256, epochs=60)
        else:
            batch_size, epochs = (64, 60) if pnet.name == "convnet" else (256, 30)
            known |= {"noise": 0.2, "shift": 0.3}
            recipe = Recipe(lr=6e-2, batch_size=batch_size, epochs=epochs)
    change = known | {name: x for name, x in asked.items() if x is not None}
    changes = [data.distort(change["distort"], _PIXELS, blank)] if change["distort"] else []
    changes += [data.shift(1, change["shift"], blank)] if change["shift"] else []
    changes += [data.noise(change["noise"])] if change["noise"] else []
    return replace(recipe, augment=data.in_turn(*changes) if changes else None)
