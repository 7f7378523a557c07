"""Examples to learn from: batches of a pass in random order, and chunks of all of them in order.

Whatever is random is drawn on the CPU: it does not depend on the device.

Suffixes: N examples of a split, B examples of a batch, L positions of a text, C channels, h rows, w columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from gbfunc.trees import n_rows

Batch = tuple[Tensor, Tensor]
"""Inputs [B, ...] and what is to be predicted: classes [B], or tokens [B, L]."""

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""Inputs [B, ...] and a CPU generator to inputs of the same shape."""


class Data(Protocol):
    """Examples that belong together: whatever has these four methods can be a split of a task."""

    def __len__(self) -> int:
        """Examples of one pass."""
        ...

    def batches(self, batch_size: int, generator: torch.Generator) -> Iterator[Batch]:
        """One pass in full batches, as the CPU generator has it, which is passed on from pass to pass."""
        ...

    def chunks(self, size: int) -> Iterator[Batch]:
        """All examples once, in order, at most `size` at a time."""
        ...

    def to(self, device: torch.device | str) -> Data:
        """Move the examples to `device`."""
        ...


@dataclass(frozen=True, eq=False)
class Split:
    """Examples with a class each.

    Attributes:
        x: inputs [N, ...], float32, normalised.
        y: classes [N], int64.
    """

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"a split must have a class for each input, got {len(self.x)} and {len(self.y)}")

    def __len__(self) -> int:
        return len(self.y)

    def batches(self, batch_size: int, generator: torch.Generator) -> Iterator[Batch]:
        """One shuffled pass in full batches; what does not fill one is left out."""
        steps = steps_per_epoch(self, batch_size)
        order_N = torch.randperm(len(self.y), generator=generator).to(self.y.device)
        for index_B in order_N[: steps * batch_size].split(batch_size):
            yield self.x[index_B], self.y[index_B]

    def chunks(self, size: int) -> Iterator[Batch]:
        """All examples in order."""
        return zip(self.x.split(size), self.y.split(size), strict=True)

    def to(self, device: torch.device | str) -> Split:
        """A copy whose examples are on `device`."""
        return Split(self.x.to(device), self.y.to(device))


@dataclass(frozen=True, eq=False)
class Windows:
    """A text in windows of `context` tokens, at each position of which the next token is to be predicted.

    Attributes:
        tokens: the text [N], int64.
        context: L.
        chars: characters that the text has.
    """

    tokens: Tensor
    context: int
    chars: int

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def batches(self, batch_size: int, generator: torch.Generator) -> Iterator[Batch]:
        """As many windows as a pass has, each from a random place."""
        offsets_L = torch.arange(self.context + 1)
        for _ in range(steps_per_epoch(self, batch_size)):
            start_B = torch.randint(len(self.tokens) - self.context, (batch_size,), generator=generator)
            windows = self.tokens[(start_B[:, None] + offsets_L).to(self.tokens.device)]
            yield windows[:, :-1], windows[:, 1:]

    def chunks(self, size: int) -> Iterator[Batch]:
        """The windows that do not overlap; what does not fill one is left out."""
        for windows in self.tokens.unfold(0, self.context + 1, self.context).split(size):
            yield windows[:, :-1], windows[:, 1:]

    def to(self, device: torch.device | str) -> Windows:
        """A copy whose tokens are on `device`."""
        return Windows(self.tokens.to(device), self.context, self.chars)


def steps_per_epoch(data: Data, batch_size: int) -> int:
    """Full batches in a pass."""
    if not 1 <= batch_size <= len(data):
        raise ValueError(f"batch size must be between 1 and the {len(data)} training examples, got {batch_size}")
    return len(data) // batch_size


def epoch_batches(
    data: Data, batch_size: int, generator: torch.Generator, augment: Augment | None = None
) -> Iterator[Batch]:
    """One pass over the data in full batches, augmented; one CPU generator goes on from pass to pass.

    A last one that is not full is left out.

    Raises:
        ValueError: at its end, for a split that gives fewer or more batches, of which none could be drawn again.
    """
    expected = steps_per_epoch(data, batch_size)
    batches = iter(data.batches(batch_size, generator))
    for count in range(expected):
        if (batch := next(batches, None)) is None:
            got = f"a pass of {len(data)} examples has {expected} full batches of {batch_size}, got {count}"
            raise ValueError(f"{got}: a split must give as many")
        yield batch if augment is None else (augment(batch[0], generator), batch[1])
    rest = [n_rows(batch) or 0 for batch in islice(batches, 2)]
    if len(rest) > 1 or batch_size in rest:
        raise ValueError(f"a pass of {len(data)} examples has {expected} full batches of {batch_size}, got more")


def endless_batches(
    data: Data, batch_size: int, generator: torch.Generator, augment: Augment | None = None
) -> Iterator[Batch]:
    """Pass after pass of `epoch_batches`."""
    while True:
        yield from epoch_batches(data, batch_size, generator, augment)


def noise(deviation: float) -> Augment:
    """Add normal noise of a standard deviation, in units of the normalised inputs."""
    # A copy is laid out as the inputs are, which their sum with other numbers would not be.
    return lambda x, generator: x.clone().add_((deviation * torch.randn(x.shape, generator=generator)).to(x.device))


def leave_out(part: float, pad: int) -> Augment:
    """Texts [B, L] without a part of their tokens, drawn anew each time: pads stand there. The first ones stay."""

    def change(x_BL: Tensor, generator: torch.Generator) -> Tensor:
        gone_BL = torch.rand(x_BL.shape, generator=generator) < part
        gone_BL[:, 0] = False
        return x_BL.masked_fill(gone_BL.to(x_BL.device), pad)

    return change


def flip_and_crop(padding: int) -> Augment:
    """Mirror every other image, and shift each by up to `padding` pixels, zeros coming in (He et al., 2015, 4.2)."""

    def change(x_BChw: Tensor, generator: torch.Generator) -> Tensor:
        flip_B = torch.rand(len(x_BChw), generator=generator) < 0.5
        return _moved(x_BChw, torch.randint(2 * padding + 1, (2, len(x_BChw)), generator=generator), padding, 0, flip_B)

    return change


def shift(pixels: int, part: float, fill: float) -> Augment:
    """Move a part of the images, each by up to `pixels` pixels up or down and left or right, `fill` coming in."""

    def change(x_BChw: Tensor, generator: torch.Generator) -> Tensor:
        stays_B = torch.rand(len(x_BChw), generator=generator) >= part
        by_2B = torch.randint(2 * pixels + 1, (2, len(x_BChw)), generator=generator)
        return _moved(x_BChw, torch.where(stays_B, pixels, by_2B), pixels, fill)

    return change


def distort(change: float, pixels: float, fill: float) -> Augment:
    """Turn, stretch, shear and move each image at random, `fill` coming in.

    The image at y is what was at (I + C) y + d, both from its middle: numbers of C [2, 2] are from `-change` to
    `change`, those of d up to `pixels` pixels (Simard et al., 2003, section 2, for digits). It is read between pixels.
    """

    def change_images(x_BChw: Tensor, generator: torch.Generator) -> Tensor:
        n, _, rows, cols = x_BChw.shape
        drawn_B23 = 2 * torch.rand((n, 2, 3), generator=generator) - 1
        # Sides of images are from -1 to 1, columns before rows.
        reach_23 = torch.tensor([[change, change, 2 * pixels / cols], [change, change, 2 * pixels / rows]])
        map_B23 = (torch.eye(2, 3) + reach_23 * drawn_B23).to(x_BChw.device)
        places_Bhw2 = F.affine_grid(map_B23, list(x_BChw.shape), align_corners=False)
        changed = F.grid_sample(x_BChw - fill, places_Bhw2, align_corners=False) + fill
        # On a CPU a step of a convolutional net then takes a third less time.
        return changed.to(memory_format=torch.channels_last)

    return change_images


def _moved(x_BChw: Tensor, by_2B: Tensor, padding: int, fill: float, flip_B: Tensor | None = None) -> Tensor:
    """Crops of padded images at rows and columns `by_2B`, mirrored where `flip_B`."""
    (n, _, rows, cols), device = x_BChw.shape, x_BChw.device
    row_Bh, col_Bw = by_2B[0, :, None] + torch.arange(rows), by_2B[1, :, None] + torch.arange(cols)
    if flip_B is not None:
        col_Bw = torch.where(flip_B[:, None], col_Bw.flip(1), col_Bw)
    padded_BhwC = F.pad(x_BChw, (padding,) * 4, value=fill).permute(0, 2, 3, 1)
    image_B = torch.arange(n, device=device)[:, None, None]
    return padded_BhwC[image_B, row_Bh.to(device)[:, :, None], col_Bw.to(device)[:, None, :]].permute(0, 3, 1, 2)


def in_turn(*changes: Augment) -> Augment:
    """One change after the other."""
    return lambda x, generator: reduce(lambda x, change: change(x, generator), changes, x)


def hold_out(labels_N: NDArray[np.int64], counts: tuple[int, ...], seed: int) -> tuple[NDArray[np.int64], ...]:
    """Stratified, disjoint parts of a data set: indices of `counts[0]`, ... examples, then of the rest.

    Every part holds the classes in proportion. The same seed gives the same parts on every machine.
    """
    n = len(labels_N)
    if min(counts, default=0) < 0 or sum(counts) > n:
        raise ValueError(f"cannot hold out {counts} of {n} examples")
    # RandomState's stream is frozen across numpy versions; Generator's is not.
    shuffled_N = np.random.RandomState(seed).permutation(n)
    share_N = np.empty(n)
    for label in np.unique(labels_N):
        members = shuffled_N[labels_N[shuffled_N] == label]
        share_N[members] = (np.arange(len(members)) + 0.5) / len(members)
    # Sorted by position within its class, any stretch of the order holds the classes in proportion.
    rank_N = np.lexsort((shuffled_N, share_N))
    bounds = np.cumsum((0, *counts, n - sum(counts)))
    return tuple(np.sort(rank_N[a:b]) for a, b in zip(bounds[:-1], bounds[1:], strict=True))
