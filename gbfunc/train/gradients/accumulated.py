"""Microbatches: sums gradients of the weights over microbatches, then computes the genome's gradient once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gbfunc.layers.forms import outside_autocast
from gbfunc.train.gradients.loss import NO_GRADIENT, GenomeLoss, Gradients, OneGraph, Result, StepInputs, detached
from gbfunc.trees import differentiable, mean_tree, n_rows, split_batch, split_rows
from gbfunc.types import Params

Split = Callable[[Any, int], list[tuple[Any, float]]]  # `(batch, rows) -> [(microbatch, rows)]`: `rows` is divided


def equal_parts(n: int, batch: Any, rows: float) -> list[tuple[Any, float]]:
    """Split a batch into `n` equal microbatches. Returns `[(microbatch, rows / n)]`; see `StepInputs.rows`."""
    return [(small, rows / n) for small in split_batch(batch, n)] if n > 1 else [(batch, rows)]


def parts_of_share(n: int, splits_inputs: bool, batch: Any, rows: float) -> list[tuple[Any, float]]:
    """Split a rank's share of a batch into at most `n` microbatches. Returns `[(microbatch, its part of rows)]`.

    With `splits_inputs` (tensor ranks divide each row), there are exactly n microbatches, and some may be empty: layers
    exchange messages in each microbatch, so all ranks need the same number of microbatches.
    """
    most = n_rows(batch)
    if n == 1 or most is None:
        return equal_parts(n, batch, rows)
    microbatches = split_rows(batch, n if splits_inputs else min(n, most or n))
    return [(small, (n_rows(small) or 0) * rows / most if most else 0) for small in microbatches]


class Accumulated(OneGraph):
    """Sums gradients of the weights over microbatches, and computes the genome's gradient from the sum."""

    def __init__(self, loss: GenomeLoss, scale: float, split: Split, regenerate: bool) -> None:
        super().__init__(loss, scale)
        self._split, self._regenerate = split, regenerate

    def __call__(self, inputs: StepInputs, wanted: list[Tensor]) -> Result:
        with self.loss.net.kept():
            generated, weights, trained = weights_of(self.loss, inputs, self._regenerate)
            sums: Params = {}
            ends: list[tuple[Tensor, Any, float]] = []
            for small, n in self._split(inputs.batch, inputs.rows):
                loss, aux = self.loss.on(weights, inputs.buffers, small)
                rows = self.loss.rows(n)
                inputs.buffers.update(detached(inputs.buffers))
                ends.append((loss.detach(), inputs.detached(aux), rows))
                gradients = self.loss.gradients(loss * (self._scale * rows), [weights[k] for k in trained])
                for k, g in zip(trained, gradients, strict=True):
                    if g is not None:
                        sums[k] = sums[k] + g if k in sums else g
            gradients = through_gnets(generated or self.loss.weights(inputs), sums, wanted)
            if all(g is None for g in gradients):
                raise ValueError(NO_GRADIENT)
            return Result(*mean_of(ends), gradients, sum(rows for *_, rows in ends))


def weights_of(loss: GenomeLoss, inputs: StepInputs, regenerate: bool) -> tuple[Params, Params, list[str]]:
    """Generate the weights, and cut the graph between g-nets and p-net, to sum gradients of the weights at the cut.

    Returns the weights with their graph, the detached weights that the p-net gets, and the names of weights that need
    gradients. With `regenerate`, the first value is {}: to save memory, the caller generates the weights again.
    """
    with torch.set_grad_enabled(not regenerate):
        weights = loss.weights(inputs)
    at_cut, trained = Params(), list[str]()
    for k, w in weights.items():
        at_cut[k] = w.detach()
        if (w.requires_grad or (regenerate and differentiable(w.dtype))) and k not in loss.generator.frozen:
            trained.append(k)
            at_cut[k].requires_grad_()
    return {} if regenerate else weights, at_cut, trained


def through_gnets(weights: Params, sums: Params, wanted: list[Tensor]) -> Gradients:
    """Compute gradients of the genome's leaves `wanted` from `sums`, gradients of weights summed over microbatches."""
    used = [k for k in sums if weights[k].requires_grad]
    if not used:
        return (None,) * len(wanted)
    with outside_autocast(wanted[0].device):
        return torch.autograd.grad([weights[k] for k in used], wanted, [sums[k] for k in used], allow_unused=True)


def mean_of(ends: list[tuple[Tensor, Any, float]]) -> tuple[Tensor, Any]:
    """Average `[(loss, aux, number of rows), ...]` of microbatches, weighted by their rows; skip empty ones."""
    kept = [end for end in ends if end[2]] or ends[:1]
    total = sum(rows for *_, rows in kept) or 1
    fractions = [rows / total for *_, rows in kept]
    aux = mean_tree([aux for _, aux, _ in kept], fractions) if len(kept) > 1 else kept[0][1]
    return mean_tree([loss for loss, *_ in kept], fractions), aux
