"""Examples spread over clients, alike or by label."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEAST = 10
"""Examples that a client has at least: splits with fewer are drawn again (Li et al., 2021)."""


def partition(labels: ArrayLike, clients: int, alpha: float = math.inf, seed: int = 0) -> list[NDArray[np.int64]]:
    """Split the examples over clients; give the indices of each client's, the same for a seed on every machine.

    With a finite `alpha` every class [N] is spread over the clients in parts drawn from a Dirichlet distribution of
    that concentration (Hsu, Qi and Brown, 2019): at 0.3 a client of MNIST has most of its examples from some three
    classes. `math.inf` spreads examples alike, in parts of equal size.

    Raises `ValueError` for arguments out of range, or if not every client can have `LEAST` examples.

    >>> [len(part) for part in partition([0, 1] * 50, clients=4)]
    [25, 25, 25, 25]
    """
    labels_N = np.asarray(labels)
    if labels_N.ndim != 1 or clients < 1 or not alpha > 0:
        got = f"{labels_N.shape}, {clients} and {alpha}"
        raise ValueError(f"expected labels [N], clients >= 1 and alpha > 0, got {got}")
    if len(labels_N) < LEAST * clients:
        raise ValueError(f"{clients} clients need {LEAST} examples each, got {len(labels_N)} in all")
    # RandomState's stream is frozen across numpy versions; Generator's is not.
    draw = np.random.RandomState(seed)
    if math.isinf(alpha):
        return [np.sort(part) for part in np.array_split(draw.permutation(len(labels_N)), clients)]
    classes = [np.flatnonzero(labels_N == label) for label in np.unique(labels_N)]
    for _ in range(1_000):
        pieces = []
        for members in classes:
            order, shares = draw.permutation(members), draw.dirichlet([alpha] * clients)
            pieces.append(np.split(order, (np.cumsum(shares)[:-1] * len(members)).astype(np.int64)))
        parts = [np.sort(np.concatenate(of_client)) for of_client in zip(*pieces, strict=True)]
        if min(map(len, parts)) >= LEAST:
            return parts
    raise ValueError(f"no split of {len(labels_N)} examples gives each of {clients} clients {LEAST} at alpha {alpha:g}")
