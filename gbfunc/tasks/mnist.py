"""MNIST (LeCun, Cortes and Burges) and Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017): 70,000 images of 28 x 28 pixels.

Suffixes: N images, P pixels of an image.
"""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gbfunc.tasks import data
from gbfunc.tasks.base import Recipe, Task, scaling
from gbfunc.tasks.data import Split, hold_out
from gbfunc.tasks.pnets import PNETS, Interface, PNet

IMAGE_SHAPE = (28, 28)
N_TRAIN, N_TEST, N_VAL = 60_000, 10_000, 5_000
SPLIT_SEED = 0
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_SMALL = 1_000
"""Genomes of up to so many parameters take a high rate and little noise, which larger ones do not."""
_LARGE = 3_000
"""Genomes of convolutional networks of more parameters gain from images that are distorted."""
_PIXELS = 1.5
"""By how much images that are distorted move, up or down and left or right."""


def read_idx(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Read a gzipped IDX file of unsigned bytes of a known shape.

    Format: two zero bytes, 8 (unsigned byte), the number of axes, their lengths (32-bit, big-endian),
    the data.
    """
    header = bytes((0, 0, 8, len(shape))) + b"".join(n.to_bytes(4, "big") for n in shape)
    size = len(header) + math.prod(shape)
    try:
        with gzip.open(path) as file:
            # One byte more than expected: a longer file does not pass, and a bomb does not fill the memory.
            content = file.read(size + 1)
    except FileNotFoundError:
        raise FileNotFoundError(f"no such IDX file: {path}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"damaged IDX file {path}: {error}") from error
    if content[:4] != header[:4]:
        raise ValueError(f"{path} is not an IDX file of {len(shape)}-d bytes: expected to start with "
                         f"{header[:4].hex()}, got {content[:4].hex() or 'nothing'}")  # fmt: skip
    if content[: len(header)] != header:
        got = tuple(int.from_bytes(content[i : i + 4], "big") for i in range(4, len(header), 4))
        raise ValueError(f"{path} must hold an array of shape {shape}, its header says {got}")
    if len(content) != size:
        relation = "more" if len(content) > size else f"{len(content)}"
        raise ValueError(f"{path} must unpack to {size} bytes, got {relation}")
    return np.frombuffer(content, np.uint8, offset=len(header)).reshape(shape)


def load_mnist(data_dir: Path) -> tuple[NDArray[Any], ...]:
    """Images [N, 28, 28] and labels [N] for training, then for the test, from the four `.gz` files in `data_dir`."""
    if not data_dir.is_dir():
        raise FileNotFoundError(f"no such folder: {data_dir} (it must hold the four IDX .gz files)")
    arrays = []
    for stem, n in (("train", N_TRAIN), ("t10k", N_TEST)):
        images = read_idx(data_dir / f"{stem}-images-idx3-ubyte.gz", (n, *IMAGE_SHAPE))
        path = data_dir / f"{stem}-labels-idx1-ubyte.gz"
        labels = read_idx(path, (n,))
        if labels.max() > 9:
            raise ValueError(f"{path} must hold labels 0 to 9, got {labels.max()}")
        arrays += [images, labels.astype(np.int64)]
    return tuple(arrays)


def mnist(
    data_dir: Path | None = None,
    *,
    noise: float | None = None,
    shift: float | None = None,
    distort: float | None = None,
) -> Task:
    """The MNIST task; 5,000 training images, the same ones always, are held out for validation.

    Args:
        data_dir: folder with the four IDX `.gz` files.
        noise: standard deviation of the normal noise on training images, in that of their pixels; None for what is
            known to be good, by the size of the genome.
        shift: part of the training images (0 to 1) that are moved by up to one pixel each way; None as for `noise`.
        distort: how far training images are turned, stretched and sheared, as a part of their size (0 to 1); they then
            are moved by up to 1.5 pixels, too. None as for `noise`.
    """
    return _task("mnist", data_dir, _Changes(noise, shift, distort))


def fashion_mnist(
    data_dir: Path | None = None,
    *,
    noise: float | None = None,
    shift: float | None = None,
    distort: float | None = None,
) -> Task:
    """The Fashion-MNIST task: as `mnist`, from another folder."""
    return _task("fashion-mnist", data_dir, _Changes(noise, shift, distort))


class _Changes(NamedTuple):
    """What is done to training images, as `mnist` says; None for what is known to be good."""

    noise: float | None = None
    shift: float | None = None
    distort: float | None = None

    def check(self, task: str) -> None:
        """Raise `ValueError` for numbers out of range."""
        for name, x in self._asdict().items():
            most, expected = (math.inf, "a number >= 0") if name == "noise" else (1, "a number from 0 to 1")
            if x is not None and not (isinstance(x, int | float) and 0 <= x <= most and x < math.inf):
                raise ValueError(f"{name} of the {task} task must be {expected}, got {x!r}")

    def augment(self, blank: float) -> data.Augment | None:
        """One after the other; `blank` is a pixel where nothing is."""
        changes = [data.distort(self.distort, _PIXELS, blank)] if self.distort else []
        changes += [data.shift(1, self.shift, blank)] if self.shift else []
        changes += [data.noise(self.noise)] if self.noise else []
        return data.in_turn(*changes) if changes else None


def _task(name: str, data_dir: Path | None, changes: _Changes) -> Task:
    changes.check(name)
    if data_dir is None:
        raise ValueError(f"the {name} task needs --data-dir: the folder with its four IDX .gz files")
    images, labels_N, test_images, test_labels_N = load_mnist(data_dir)
    val, train = hold_out(labels_N, (N_VAL,), SPLIT_SEED)
    mean, std = float(images[train].mean()), float(images[train].std())

    def split(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> Split:
        x = torch.from_numpy(images.astype(np.float32)).sub_(mean).div_(std)
        return Split(x[:, None], torch.from_numpy(labels))

    interface = Interface((1, *IMAGE_SHAPE), 10)
    return Task(
        name=name,
        interface=interface,
        train=split(images[train], labels_N[train]),
        val=split(images[val], labels_N[val]),
        test=split(test_images, test_labels_N),
        pnet=PNETS["mlp"](interface, hidden=(800,), bandwidth=6.0),
        settings=lambda pnet, genome_params: _recipe(pnet, genome_params, changes, -mean / std),
        genome_params=1_973,
        about=scaling(mean, std) | ({"classes": list(FASHION)} if name == "fashion-mnist" else {}),
    )


def _recipe(pnet: PNet, genome_params: float, changes: _Changes, blank: float) -> Recipe:
    """Settings with training images that are changed: by what is known to be good, where the user says nothing."""
    recipe, known = Recipe(lr=1e-2), _Changes(0, 0, 0)
    if pnet.name == "mlp":
        # Genomes learn images by heart, too: without noise and shifts the later epochs are worth nothing.
        small = genome_params <= _SMALL
        known = _Changes(noise=0.25 if small else 0.4, shift=0.3, distort=0)
        lr, betas, epochs = (8e-2, (0.9, 0.95), 120) if small else (4e-2, (0.9, 0.99), 50)
        recipe = Recipe(lr=lr, betas=betas, batch_size=256, epochs=epochs)
    if pnet.name in ("convnet", "lenet5"):
        if genome_params > _LARGE:
            known, recipe = _Changes(0, 0, distort=0.1), Recipe(lr=3e-2, batch_size=256, epochs=60)
        else:
            batch_size, epochs = (64, 60) if pnet.name == "convnet" else (256, 30)
            known, recipe = _Changes(0.2, 0.3, distort=0), Recipe(lr=6e-2, batch_size=batch_size, epochs=epochs)
    asked = {name: x for name, x in changes._asdict().items() if x is not None}
    return replace(recipe, augment=known._replace(**asked).augment(blank))
