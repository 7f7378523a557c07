"""Microbatches: gradients add up on the weights, and go through the g-nets once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gbfunc.layers.forms import outside_autocast
from gbfunc.train.gradients.loss import NO_GRADIENT, GenomeLoss, Given, Gradients, Result, detached
from gbfunc.trees import DIRECT, differentiable, mean_tree, n_rows, split_batch, split_rows
from gbfunc.types import Params

Split = Callable[[Any, int], list[tuple[Any, float]]]
"""`(batch, rows) -> microbatches`, each with its rows."""


def equal_parts(n: int, batch: Any, rows: float) -> list[tuple[Any, float]]:
    """Equal microbatches, each with its part of the rows."""
    return [(small, rows / n) for small in split_batch(batch, n)] if n > 1 else [(batch, rows)]


def parts_of_share(n: int, takes_parts: bool, batch: Any, rows: float) -> list[tuple[Any, float]]:
    """Microbatches of a rank's share, which ranks may have uneven ones of.

    Ranks with fewer rows may take fewer microbatches: only generation has collectives, unless layers have some
    (`takes_parts`).
    """
    most = n_rows(batch)
    if n == 1 or most is None:
        return equal_parts(n, batch, rows)
    parts = split_rows(batch, n if takes_parts else min(n, most or n))
    return [(small, (n_rows(small) or 0) * rows / most if most else 0) for small in parts]


class Kept:
    """Weights whose graph to the genome is kept from the forward pass to the backward pass."""

    def __init__(self, loss: GenomeLoss) -> None:
        self._loss = loss

    def weights(self, given: Given) -> tuple[Params, list[str]]:
        """The weights, and the names of those that take gradients."""
        weights = self._loss.weights(given)
        return weights, [k for k, w in weights.items() if w.requires_grad and k not in self._loss.generator.frozen]

    def again(self, given: Given, weights: Params) -> Params:
        """The weights with their graph, for backward."""
        return weights


class Regenerated(Kept):
    """Weights that are generated again for the backward pass, so that their graph need not be kept."""

    def weights(self, given: Given) -> tuple[Params, list[str]]:
        """The weights without a graph, and the names of those that may take gradients."""
        with torch.no_grad():
            weights = self._loss.weights(given)
        numbers = (k for k, w in weights.items() if differentiable(w.dtype))
        return weights, [k for k in numbers if k not in self._loss.generator.frozen]

    def again(self, given: Given, weights: Params) -> Params:
        """The weights with their graph."""
        return self._loss.weights(given)


class Accumulated:
    """Gradients of the weights, summed over microbatches, then of the genome."""

    least_rows = 2

    def __init__(self, loss: GenomeLoss, scale: float, split: Split, source: Kept) -> None:
        self.loss, self._scale, self._split, self._source = loss, scale, split, source

    def __call__(self, given: Given, wanted: list[Tensor]) -> Result:
        """Loss, aux and gradients, means over the microbatches."""
        with self.loss.net.kept():
            return self._result(given, wanted)

    def _result(self, given: Given, wanted: list[Tensor]) -> Result:
        made, trained = self._source.weights(given)
        weights, trained = leaves_of(given, made, trained)
        sums: Params = {}
        ends: list[tuple[Tensor, Any, float]] = []
        for small, n in self._split(given.batch, given.rows):
            loss, aux = self.loss.on(weights, given.buffers, small)
            rows = self.loss.rows(n)
            given.buffers.update(detached(given.buffers))
            ends.append((loss.detach(), given.detached(aux), rows))
            gradients = self.loss.gradients(loss * (self._scale * rows), [weights[k] for k in trained])
            for k, g in zip(trained, gradients, strict=True):
                if g is not None:
                    sums[k] = sums[k] + g if k in sums else g
        gradients = through_gnets(self._source.again(given, made), sums, wanted)
        if all(g is None for g in gradients):
            raise ValueError(NO_GRADIENT)
        return Result(*mean_of(ends), gradients, sum(rows for *_, rows in ends))


def leaves_of(given: Given, weights: Params, trained: list[str]) -> tuple[Params, list[str]]:
    """The weights as leaves of a new graph, and the names of those that take gradients.

    Direct parameters are there themselves, unless rounded: a forward may set their `data`. Leaves that g-nets of
    several weights share are not: each of those weights would get the gradient of all.
    """
    own = {id(x) for k, x in given.leaves.items() if k.startswith(DIRECT) and x.is_leaf}
    direct = {k for k, w in weights.items() if id(w) in own}
    leaves = {k: w if k in direct else w.detach() for k, w in weights.items()}
    trained = [k for k in trained if k not in direct or leaves[k].requires_grad]
    return leaves | {k: leaves[k].requires_grad_() for k in trained if k not in direct}, trained


def through_gnets(weights: Params, sums: Params, wanted: list[Tensor]) -> Gradients:
    """Gradients of the genome from those of the weights."""
    used = [k for k in sums if weights[k].requires_grad]
    if not used:
        return (None,) * len(wanted)
    with outside_autocast(wanted[0].device):
        return torch.autograd.grad([weights[k] for k in used], wanted, [sums[k] for k in used], allow_unused=True)


def mean_of(ends: list[tuple[Tensor, Any, float]]) -> tuple[Tensor, Any]:
    """Mean loss and aux of microbatches, by their rows; empty ones are skipped."""
    kept = [end for end in ends if end[2]] or ends[:1]
    total = sum(rows for *_, rows in kept) or 1
    fractions = [rows / total for *_, rows in kept]
    aux = mean_tree([aux for _, aux, _ in kept], fractions) if len(kept) > 1 else kept[0][1]
    return mean_tree([loss for loss, *_ in kept], fractions), aux
