"""Draw garments of ten classes as grey images of 28 x 28 pixels: `--task garments:garments` from this folder.

An image is drawn in coordinates from -1 to 1. A garment is a union of shapes with soft edges. The garment is moved,
turned, scaled and, with a probability of one half, mirrored. The cloth has a random brightness, random stripes and a
random shade, and noise is added to the pixels. Shirts, pullovers and coats differ only in sleeves, collars and buttons,
as in Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017). All machines draw the same images, up to rounding.

Suffixes: N images, h rows, w columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gbfunc.tasks import data
from gbfunc.tasks.base import Recipe, Task
from gbfunc.tasks.data import Split
from gbfunc.tasks.pnets import PNETS, Interface

CLASSES = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
SIZE = 28
NOISE = 0.12
Array = NDArray[Any]


@dataclass(frozen=True)
class Canvas:
    """Coordinates of the pixels of some images [N, h, w], and methods that draw shapes with random lengths."""

    across: Array
    down: Array
    draws: np.random.RandomState

    def length(self, middle: float, part: float = 0.12) -> Array:
        """Draw a length per image [N, 1, 1], uniform between `middle * (1 - part)` and `middle * (1 + part)`."""
        n = len(self.across)
        return (middle * (1 + part * self.draws.uniform(-1, 1, (n, 1, 1)))).astype(np.float32)

    def soft(self, distance: Array) -> Array:
        """Map the distance to an edge to a brightness from 0 (outside) to 1 (inside)."""
        return 1 / (1 + np.exp(-np.clip(25 * distance, -30, 30)))

    def trapezoid(self, top: float, bottom: float, wide_top: float, wide_bottom: float, middle: float = 0.0) -> Array:
        """Draw a shape whose half width changes from `wide_top` to `wide_bottom`."""
        low, high = self.length(bottom, 0.1), top + self.length(0.06, 1.0)
        part = np.clip((self.down - high) / (low - high), 0, 1)
        half = self.length(wide_top) * (1 - part) + self.length(wide_bottom) * part
        across = half - np.abs(self.across - middle)
        return self.soft(np.minimum(across, np.minimum(self.down - high, low - self.down)))

    def strip(self, start: tuple[float, float], end: tuple[float, float], half: float) -> Array:
        """Draw a thick line from `start` to `end` (across, down). The end varies between images."""
        (a, b), c, d = start, self.length(end[0]), self.length(end[1], 0.1)
        along = ((self.across - a) * (c - a) + (self.down - b) * (d - b)) / ((c - a) ** 2 + (d - b) ** 2)
        along = np.clip(along, 0, 1)
        distance = np.hypot(self.across - a - along * (c - a), self.down - b - along * (d - b))
        return self.soft(self.length(half) - distance)

    def pair(self, start: tuple[float, float], end: tuple[float, float], half: float) -> Array:
        """Draw a strip and its mirror image."""
        mirrored = Canvas(np.abs(self.across), self.down, self.draws)
        return mirrored.strip(start, end, half)

    def sleeves(self, across: float, down: float, half: float = 0.15) -> Array:
        """Draw two sleeves from the shoulders to (across, down)."""
        return self.pair((0.3, -0.55), (across, down), half)


def _over(*shapes: Array) -> Array:
    return np.maximum.reduce(shapes)


def _without(shape: Array, hole: Array, part: float = 1.0) -> Array:
    return shape * (1 - part * hole)


def _drawn(label: int, c: Canvas) -> Array:
    """Draw images [N, h, w] of a class, with values from 0 to 1."""
    torso = c.trapezoid(-0.75, 0.8, 0.4, 0.4)
    neck = c.strip((0.0, -0.8), (0.001, -0.72), 0.14)
    front = c.strip((0.0, -0.75), (0.001, 0.85), 0.035)
    collar = c.pair((0.05, -0.8), (0.2, -0.5), 0.05)
    sole = c.trapezoid(0.35, 0.6, 0.8, 0.8)
    match CLASSES[label]:
        case "T-shirt":
            return _without(_over(torso, c.sleeves(0.65, -0.2)), neck)
        case "Trouser":
            legs = _over(c.pair((0.2, -0.7), (0.28, 0.85), 0.16), c.trapezoid(-0.85, -0.45, 0.34, 0.36))
            return _without(legs, c.strip((0.0, -0.3), (0.001, 0.9), 0.03))
        case "Pullover":
            return _without(_over(torso, c.sleeves(0.65, 0.55)), neck)
        case "Dress":
            return _without(_over(c.trapezoid(-0.85, 0.0, 0.26, 0.2), c.trapezoid(-0.05, 0.9, 0.2, 0.5)), neck)
        case "Coat":
            body = _over(c.trapezoid(-0.8, 0.9, 0.38, 0.46), c.sleeves(0.65, 0.55))
            return _without(_without(body, front, 0.8), collar, 0.6)
        case "Sandal":
            heel = c.trapezoid(0.3, 0.75, 0.14, 0.1, -0.65)
            straps = [c.strip((across, 0.4), (0.1, -0.2), 0.06) for across in (-0.6, 0.6)]
            return _over(sole * 0.9, heel, *straps)
        case "Shirt":
            return _without(_without(_over(torso, c.sleeves(0.65, 0.2)), front, 0.5), collar, 0.6)
        case "Sneaker":
            upper = _over(c.strip((-0.55, 0.2), (0.5, 0.35), 0.22), c.trapezoid(-0.25, 0.4, 0.24, 0.34, -0.45))
            return _over(sole * 0.7, upper)
        case "Bag":
            handle = _over(c.pair((0.3, -0.1), (0.25, -0.6), 0.05), c.strip((-0.25, -0.62), (0.25, -0.62), 0.05))
            return _over(c.trapezoid(-0.2, 0.7, 0.6, 0.68), handle)
        case _:
            shaft = c.trapezoid(-0.8, 0.4, 0.3, 0.34, -0.35)
            return _over(sole * 0.8, shaft, c.strip((-0.4, 0.25), (0.55, 0.35), 0.2))


def draw(label: int, n: int, draws: np.random.RandomState) -> Array:
    """Draw images [N, h, w] of a class with random positions, cloth and noise."""

    def varied(low: float, high: float) -> Array:
        return draws.uniform(low, high, (n, 1, 1)).astype(np.float32)

    places = np.linspace(-1.15, 1.15, SIZE, dtype=np.float32)
    down, across = np.meshgrid(places, places, indexing="ij")
    turn, mirrored = varied(-0.2, 0.2), np.where(varied(0, 1) < 0.5, -1, 1)
    x, y = across - varied(-0.2, 0.2), down - varied(-0.2, 0.2)
    turned = np.cos(turn) * x + np.sin(turn) * y, np.cos(turn) * y - np.sin(turn) * x
    canvas = Canvas(mirrored * turned[0] / varied(0.7, 1.1), turned[1] / varied(0.75, 1.05), draws)
    shape = _drawn(label, canvas)
    direction, waves = varied(0, np.pi), varied(3, 12)
    phase = waves * (np.cos(direction) * canvas.across + np.sin(direction) * canvas.down) + varied(0, 2 * np.pi)
    cloth = 1 + varied(0, 0.35) * np.sin(phase) + varied(-0.25, 0.25) * canvas.across
    images = varied(0.35, 0.9) * cloth * shape + NOISE * draws.standard_normal((n, SIZE, SIZE))
    return images.astype(np.float32)


def _split(n: int, seed: int) -> Split:
    """Draw a split with the same number of images for each class."""
    draws = np.random.RandomState(seed)
    labels = np.repeat(np.arange(10), n // 10)
    images = np.concatenate([draw(label, n // 10, draws) for label in range(10)])
    order = draws.permutation(len(labels))
    return Split(torch.from_numpy(images[order])[:, None], torch.from_numpy(labels[order]))


def garments(data_dir: Path | None = None, *, images: int = 20_000) -> Task:
    """Return the task with `images` training images, `images` / 10 for validation and `images` / 4 for the test."""
    del data_dir
    train, val, test = (_split(n, seed) for seed, n in enumerate((images, images // 10, images // 4)))
    mean, std = train.x.mean(), train.x.std()
    train, val, test = (Split((part.x - mean) / std, part.y) for part in (train, val, test))
    interface = Interface((1, SIZE, SIZE), 10)
    recipe = Recipe(lr=4e-2, betas=(0.9, 0.99), batch_size=256, epochs=50, augment=data.noise(0.4))
    pnet, about = PNETS["mlp"](interface, hidden=(200, 200), bandwidth=6.0), {"classes": list(CLASSES)}
    return Task("garments", interface, train, val, test, pnet, lambda p, n: recipe, genome_params=1_998, about=about)
