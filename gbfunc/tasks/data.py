"""Data sets, which yield random batches for training, and chunks of all examples in order for evaluation.

All random numbers are drawn on the CPU, so that results do not depend on the device.

Suffixes: N examples of a split, B examples of a batch, L positions of a text, C channels, h rows, w columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Batch = tuple[Tensor, Tensor]
"""Inputs [B, ...] and targets: classes [B], or tokens [B, L]."""

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""Function `(inputs [B, ...], CPU generator) -> inputs of the same shape`."""

Images = tuple[NDArray[Any], NDArray[np.int64]]
"""Images [N, C, h, w] and their classes [N]."""

Data = Any
"""Examples of a split: an object with a length and the methods `batches`, `chunks` and `to` of a `Split`."""

SPLIT_SEED = 0


@dataclass(frozen=True, eq=False)
class Split:
    """Examples with one class per example."""

    x: Tensor  # inputs [N, ...], float32, normalised
    y: Tensor  # classes [N], int64

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"a split needs a class for each input, got {len(self.y)} for {len(self.x)}: add classes")

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: Any) -> Batch:
        return self.x[index], self.y[index]

    def batches(self, batch_size: int, generator: torch.Generator) -> Iterator[Batch]:
        """Yield all full batches of one shuffled pass. Examples that do not fill a batch are left out."""
        used = steps_per_epoch(self, batch_size) * batch_size
        for index_B in self.order(torch.randperm(len(self), generator=generator)[:used], batch_size, generator):
            yield self[index_B]

    def order(self, shuffled_N: Tensor, batch_size: int, generator: torch.Generator) -> Sequence[Tensor]:
        return shuffled_N.split(batch_size)

    def chunks(self, size: int) -> Iterator[Batch]:
        """Yield all examples once, in order, at most `size` at a time."""
        return (self[start : start + size] for start in range(0, len(self), size))

    def to(self, device: torch.device | str) -> Split:
        return replace(self, x=self.x.to(device), y=self.y.to(device))


@dataclass(frozen=True, eq=False)
class Windows:
    """A text in windows of `context` tokens; the target at each position is the next token."""

    tokens: Tensor  # the text [N], int64
    context: int  # L
    chars: int  # number of characters of the text

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def batches(self, batch_size: int, generator: torch.Generator) -> Iterator[Batch]:
        """Yield the batches of one pass. The windows start at random places of the text and may overlap."""
        offsets_L = torch.arange(self.context + 1)
        for _ in range(steps_per_epoch(self, batch_size)):
            start_B = torch.randint(len(self.tokens) - self.context, (batch_size,), generator=generator)
            windows = self.tokens[(start_B[:, None] + offsets_L).to(self.tokens.device)]
            yield windows[:, :-1], windows[:, 1:]

    def chunks(self, size: int) -> Iterator[Batch]:
        """Yield the text in windows that do not overlap, `size` windows at a time. An incomplete window is left out."""
        for windows in self.tokens.unfold(0, self.context + 1, self.context).split(size):
            yield windows[:, :-1], windows[:, 1:]

    def to(self, device: torch.device | str) -> Windows:
        return replace(self, tokens=self.tokens.to(device))


def steps_per_epoch(data: Data, batch_size: int) -> int:
    """Count the full batches of a pass; raises ValueError if the data have fewer than `batch_size` examples."""
    if not 1 <= batch_size <= len(data):
        raise ValueError(f"batch size must be between 1 and the {len(data)} training examples, got {batch_size}")
    return len(data) // batch_size


def endless_batches(
    data: Data, batch_size: int, generator: torch.Generator, augment: Augment | None = None
) -> Iterator[Batch]:
    """Yield full, augmented batches without end. All passes draw random numbers from the same CPU generator.

    A pass has the first `len(data) // batch_size` batches of `data.batches`. If `data.batches` yields fewer, raises
    `ValueError`, because a training could not be resumed in the middle of such a pass.
    """
    expected = steps_per_epoch(data, batch_size)
    while True:
        got = 0
        for x, y in islice(data.batches(batch_size, generator), expected):
            got += 1
            yield x if augment is None else augment(x, generator), y
        if got < expected:
            raise ValueError(f"a pass must have {expected} full batches of {batch_size}, got {got}: correct len(split)")


def data_folder(task: str, data_dir: Path | None, holds: str) -> Path:
    """Return `data_dir`, or raise an error that lists `holds`, the needed files, if `data_dir` is None or missing."""
    if data_dir is None:
        raise ValueError(f"the {task} task needs --data-dir: the folder with {holds}")
    if not data_dir.is_dir():
        raise FileNotFoundError(f"no such folder: {data_dir} (it must hold {holds})")
    return data_dir


def labels_of(labels: Any, classes: int = 10) -> NDArray[np.int64]:
    """Return the labels as an array; raises ValueError for labels outside of 0 to `classes` - 1."""
    array, last = np.asarray(labels), classes - 1
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu" or not 0 <= array.min() <= array.max() <= last:
        raise ValueError(f"labels must be integers from 0 to {last}, got {labels!r:.80}")
    return array.astype(np.int64)


def image_splits(
    images: Images, counts: tuple[int, ...], tested: Images | None = None, *, by_channel: bool = False
) -> tuple[list[Split], NDArray[Any], NDArray[Any]]:
    """Hold out random sets of `counts[0]`, `counts[1]`, ... images (bytes or float64). The others are for training.

    Return the splits (training, held-out sets, and the test set `tested` if given), and the mean and the standard
    deviation of the training pixels, which normalise all splits: [1, 1, 1, 1], or [1, C, 1, 1] if `by_channel`.
    """
    x, labels = images
    *held_out, train = hold_out(labels, counts, SPLIT_SEED)
    axes = (0, 2, 3) if by_channel else None
    mean, std = (np.asarray(f(x[train], axis=axes, dtype=np.float64, keepdims=True)) for f in (np.mean, np.std))
    dtype = np.result_type(x, np.float32)

    def split(images: NDArray[Any], labels: NDArray[np.int64]) -> Split:
        normalised = (images - mean.astype(dtype)) / std.astype(dtype)
        return Split(torch.from_numpy(normalised.astype(np.float32, copy=False)), torch.from_numpy(labels))

    splits = [split(x[index], labels[index]) for index in (train, *held_out)]
    return splits + ([] if tested is None else [split(*tested)]), mean, std


def scaling(mean: NDArray[np.float64], std: NDArray[np.float64], *, white: int = 255) -> dict[str, Any]:
    """Return entries of `Task.about`: mean and deviation of pixels [1 or C, 1, 1], and their largest possible value."""
    mean_C11, std_C11 = (torch.from_numpy(values.astype(np.float32)).reshape(-1, 1, 1) for values in (mean, std))
    return {"mean": mean_C11, "std": std_C11, "white": white}


def noise(deviation: float) -> Augment:
    """Return an augmentation that adds normal noise with the standard deviation `deviation` to normalised inputs."""
    # Add in place to a copy, so that the result has the memory layout of the inputs (channels_last is faster).
    return lambda x, generator: x.clone().add_((deviation * torch.randn(x.shape, generator=generator)).to(x.device))


def leave_out(probability: float, pad: int) -> Augment:
    """Return an augmentation that replaces random tokens by `pad`. The first token stays, so that no text is empty."""

    def change(x_BL: Tensor, generator: torch.Generator) -> Tensor:
        gone_BL = torch.rand(x_BL.shape, generator=generator) < probability
        gone_BL[:, 0] = False
        return x_BL.masked_fill(gone_BL.to(x_BL.device), pad)

    return change


def shift(pixels: int, fraction: float, fill: float, *, mirrors: bool = False) -> Augment:
    """Return an augmentation that moves a `fraction` of the images by up to `pixels` pixels along each axis.

    Pixels that move in get `fill`. With `mirrors`, all images move; a `fraction` is mirrored (He et al., 2015, 4.2).
    """

    def change(x_BChw: Tensor, generator: torch.Generator) -> Tensor:
        n, _, rows, cols = x_BChw.shape
        chosen_B = torch.rand(n, generator=generator) < fraction
        by_2B = torch.randint(2 * pixels + 1, (2, n), generator=generator)
        by_2B = by_2B if mirrors else torch.where(chosen_B, by_2B, pixels)
        row_Bh, col_Bw = by_2B[0, :, None] + torch.arange(rows), by_2B[1, :, None] + torch.arange(cols)
        col_Bw = torch.where(chosen_B[:, None], col_Bw.flip(1), col_Bw) if mirrors else col_Bw
        padded_BhwC = F.pad(x_BChw, (pixels,) * 4, value=fill).permute(0, 2, 3, 1)
        return padded_BhwC[torch.arange(n)[:, None, None], row_Bh[:, :, None], col_Bw[:, None, :]].permute(0, 3, 1, 2)

    return change


def distort(change: float, pixels: float, fill: float) -> Augment:
    """Return an augmentation that rotates, stretches, shears and moves each image at random (Simard et al., 2003).

    The pixel y, measured from the centre, gets the old image's interpolated value at (I + C) y + d, or `fill` outside
    the old image. Entries of C [2, 2] are drawn from `-change` to `change`, and of d [2] from `-pixels` to `pixels`.
    """

    def change_images(x_BChw: Tensor, generator: torch.Generator) -> Tensor:
        n, _, rows, cols = x_BChw.shape
        drawn_B23 = 2 * torch.rand((n, 2, 3), generator=generator) - 1
        # Convert pixels to the coordinates of `affine_grid`: (column, row), from -1 to 1 along each axis.
        reach_23 = torch.tensor([[change, change, 2 * pixels / cols], [change, change, 2 * pixels / rows]])
        map_B23 = (torch.eye(2, 3) + reach_23 * drawn_B23).to(x_BChw.device)
        places_Bhw2 = F.affine_grid(map_B23, list(x_BChw.shape), align_corners=False)
        changed = F.grid_sample(x_BChw - fill, places_Bhw2, align_corners=False) + fill
        # On a CPU, channels_last makes a training step of a convolutional net a third faster.
        return changed.to(memory_format=torch.channels_last)

    return change_images


def in_turn(*changes: Augment) -> Augment:
    """Chain augmentations: apply each to the output of the previous one."""
    return lambda x, generator: reduce(lambda x, change: change(x, generator), changes, x)


def hold_out(labels_N: NDArray[np.int64], counts: tuple[int, ...], seed: int) -> tuple[NDArray[np.int64], ...]:
    """Split a data set into disjoint random sets: `counts[0]`, `counts[1]`, ... examples, and all remaining examples.

    Return the indices of each set. Sets have equal proportions of classes. A seed gives the same sets on all machines.
    """
    n = len(labels_N)
    # RandomState draws the same numbers in all versions of numpy, unlike numpy's newer Generator.
    shuffled_N = np.random.RandomState(seed).permutation(n)
    share_N = np.empty(n)
    for label in np.unique(labels_N):
        members = shuffled_N[labels_N[shuffled_N] == label]
        share_N[members] = (np.arange(len(members)) + 0.5) / len(members)
    # Sort examples by their position within their class (0 to 1). Then every slice has all classes in proportion.
    rank_N = np.lexsort((shuffled_N, share_N))
    bounds = np.cumsum((0, *counts, n - sum(counts)))
    return tuple(np.sort(rank_N[a:b]) for a, b in zip(bounds[:-1], bounds[1:], strict=True))
