"""What a task is: real data in three splits, a p-net, a loss and a recipe that trains its genome well.

Suffixes: N examples of a split, B examples of a batch, F features of an input, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from gbfunc.encoding import Encoding
from gbfunc.hypernets import Hypernet

Net = Callable[[Tensor], Tensor]


class Split(NamedTuple):
    """Examples that belong together.

    Attributes:
        x: inputs [N, F], float32, normalised.
        y: classes [N], int64.
    """

    x: Tensor
    y: Tensor

    def to(self, device: torch.device | str) -> Split:
        """The same examples on `device`."""
        return Split(self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class Recipe:
    """Settings that train a genome of a given size well, chosen on validation data.

    Attributes:
        encodings: `{parameter: (code of rows, code of columns)}` for `make_plan`.
        rules: `((pattern, hypernetwork), ...)` for `make_plan`.
        lr: peak learning rate of the genome.
        dense_lr: peak learning rate of a dense net of the same task.
        betas: of Adam.
        batch_size: examples a step.
        epochs: passes over the training split.
        noise: standard deviation of noise on the training inputs, in units of the normalised inputs.
        warmup: part of the steps in which the learning rate rises (one-cycle schedule).
    """

    encodings: dict[str, tuple[Encoding, Encoding]]
    rules: tuple[tuple[str, Hypernet | None], ...]
    lr: float
    dense_lr: float
    betas: tuple[float, float]
    batch_size: int
    epochs: int
    noise: float = 0.0
    warmup: float = 0.1


@dataclass(frozen=True)
class Task:
    """Real data, a p-net and how to train it.

    Attributes:
        name: its key in `TASKS`.
        sizes: layer sizes of the p-net, inputs first.
        image_shape: rows and columns of the image that an input is.
        train: examples to train on.
        val: held-out examples, to choose settings.
        test: held-out examples, to report.
        build: p-net from a seed.
        recipe: settings from the size of the genome, in parameters.
        genome_params: size target where the user gives none.
    """

    name: str
    sizes: tuple[int, ...]
    image_shape: tuple[int, int]
    train: Split
    val: Split
    test: Split
    build: Callable[[int], nn.Module]
    recipe: Callable[[float], Recipe]
    genome_params: int

    def to(self, device: torch.device | str) -> Task:
        """The same task with its examples on `device`."""
        return replace(self, train=self.train.to(device), val=self.val.to(device), test=self.test.to(device))


def loss_fn(net: Net, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean cross entropy (nats) of a batch, and its accuracy (0 to 1) beside it.

    Args:
        net: maps inputs [B, F] to logits [B, K].
        batch: inputs [B, F] and classes [B].
    """
    x_BF, y_B = batch
    logits_BK = net(x_BF)
    hits_B = logits_BK.detach().argmax(1) == y_B
    return F.cross_entropy(logits_BK, y_B), {"accuracy": hits_B.float().mean()}


@torch.no_grad()
def accuracy(net: Net, split: Split, chunk: int = 5_000) -> float:
    """Part of a split (0 to 1) whose class `net` gets right, `chunk` examples at a time.

    Raises:
        ValueError: if the split is empty.
    """
    if not len(split.y):
        raise ValueError("accuracy expects a split with examples, got an empty one")
    pieces = zip(split.x.split(chunk), split.y.split(chunk), strict=True)
    hits = sum(int((net(x_BF).argmax(1) == y_B).sum()) for x_BF, y_B in pieces)
    return hits / len(split.y)


def steps_per_epoch(split: Split, batch_size: int) -> int:
    """Full batches in a split.

    Raises:
        ValueError: if the split holds no full batch.
    """
    n = len(split.y)
    if not 1 <= batch_size <= n:
        raise ValueError(f"batch size must be between 1 and the {n} training examples, got {batch_size}")
    return n // batch_size


def epoch_batches(
    split: Split, batch_size: int, generator: torch.Generator, noise: float = 0.0
) -> Iterator[tuple[Tensor, Tensor]]:
    """One shuffled pass over a split in full batches ([B, F], [B]); what does not fill one is left out.

    Args:
        split: the examples.
        batch_size: B.
        generator: CPU generator of the order and the noise; passed on from epoch to epoch.
        noise: standard deviation of the normal noise added to the inputs, in their units.

    Raises:
        ValueError: if the split holds no full batch.
    """
    steps = steps_per_epoch(split, batch_size)
    # Drawn on the CPU, so that neither order nor noise depends on the device.
    order_N = torch.randperm(len(split.y), generator=generator).to(split.y.device)
    for index_B in order_N[: steps * batch_size].split(batch_size):
        x_BF = split.x[index_B]
        if noise:
            x_BF = x_BF + (noise * torch.randn(x_BF.shape, generator=generator)).to(x_BF.device)
        yield x_BF, split.y[index_B]


def hold_out(labels_N: NDArray[np.int64], counts: tuple[int, ...], seed: int) -> tuple[NDArray[np.int64], ...]:
    """Stratified, disjoint parts of a data set: indices of `counts[0]`, ... examples, then of the rest.

    Every part holds the classes in proportion. The same seed gives the same parts on every machine.

    Args:
        labels_N: classes [N].
        counts: examples in each part.
        seed: of the choice.

    Raises:
        ValueError: if the parts together exceed the data set.
    """
    n = len(labels_N)
    if min(counts, default=0) < 0 or sum(counts) > n:
        raise ValueError(f"cannot hold out {counts} of {n} examples")
    # RandomState's stream is frozen across numpy versions; Generator's is not.
    shuffled_N = np.random.RandomState(seed).permutation(n)
    rank_N, share_N = np.empty(n, np.int64), np.empty(n)
    for label in np.unique(labels_N):
        members = shuffled_N[labels_N[shuffled_N] == label]
        share_N[members] = (np.arange(len(members)) + 0.5) / len(members)
    # Sorted by position within its class, any stretch of the order holds the classes in proportion.
    rank_N = np.lexsort((shuffled_N, share_N))
    bounds = np.cumsum((0, *counts, n - sum(counts)))
    return tuple(np.sort(rank_N[a:b]) for a, b in zip(bounds[:-1], bounds[1:], strict=True))
