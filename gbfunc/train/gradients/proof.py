"""Checks that a p-net can be split over ranks: compares the ranks' first gradient with the gradient on one rank."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gbfunc.parallel import Layout, gather_objects, sum_ranks
from gbfunc.parallel.mesh import AxisName, Mesh
from gbfunc.train.gradients.loss import GenomeLoss, Gradients, OneGraph, StepInputs, seeded
from gbfunc.trees import differentiable
from gbfunc.types import Params

GradientFn = Callable[[StepInputs, list[Tensor]], Gradients]


class Proof(NamedTuple):
    """Compares gradient and buffers over several ranks with gradient and buffers of the whole p-net on one rank."""

    make_full_loss: Callable[[], GenomeLoss]  # makes the loss of the whole p-net
    local_gradients: GradientFn  # computes, as a training step does, this rank's term of the sum over `axes`
    step_loss: Callable[[], GenomeLoss | None]  # returns the loss of training steps, None before the first step
    take_rows: Callable[[Any], Any]  # selects a few rows of a batch
    axes: tuple[AxisName, ...]  # mesh axes along which the ranks' terms are summed
    advice: str  # for the error message: why results may differ, and what to do

    def compare(self, layout: Layout, inputs: StepInputs, trained: Params) -> None:
        """Compare gradient and buffers over ranks with gradient and buffers on one rank. All ranks call this method.

        Raises ValueError on every rank if the results differ by more than rounding errors. If the cause may be dropout
        or other random numbers, compares again in evaluation mode.
        """
        mesh, full, wanted = layout.mesh, self.make_full_loss(), [*trained.values()]
        most, inputs = full.without_amp().tolerance, inputs._replace(batch=self.take_rows(inputs.batch), rows=1)
        nets = [loss.net.skeleton for loss in (full, self.step_loss()) if loss is not None]
        ranks, worst = f"over {' and '.join(self.axes)} ranks", [math.inf]
        # Dropout in split layers or stages draws other numbers than in the p-net on one rank: retry in evaluation mode.
        for mode in nullcontext(), _evaluating(nets):
            with mode:
                found = gradient_and_changes(self.local_gradients, inputs, wanted, 0)
                alone = gradient_and_changes(plain_gradients(full), inputs, wanted, 0)
                for axis in self.axes:
                    sum_ranks(mesh, found[0], axis)
                worst = [largest_distance(mesh, x, y) for x, y in zip(found, alone, strict=True)]
                if max(worst) <= most:
                    return
                # If another seed also changes the whole p-net's results, the difference may come from random numbers.
                other = gradient_and_changes(plain_gradients(full), inputs, wanted, 1)
                random = max(largest_distance(mesh, x, y) for x, y in zip(other, alone, strict=True)) > most
            if not random:
                raise ValueError(
                    f"{ranks} the gradient differs by {worst[0]:.2g} of its norm, and the change of buffers by "
                    f"{worst[1]:.2g} of its norm, from those of the p-net on one rank: {self.advice}"
                )
        warnings.warn(
            f"the first step {ranks} was not compared with one on one rank: the p-net's forward is random in eval mode",
            stacklevel=2,
        )


def as_vector(found: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    """Concatenate gradients to one float64 vector, with zeros for None."""
    dense = (torch.zeros_like(x) if g is None else g.to_dense() for g, x in zip(found, like, strict=True))
    real = (torch.view_as_real(x) if x.is_complex() else x for x in dense)
    none = torch.zeros(0, device=like[0].device if like else "cpu")
    return torch.cat([none, *(x.reshape(-1) for x in real)]).double()


def largest_distance(mesh: Mesh, found: Tensor, expected: Tensor) -> float:
    """Return the ranks' largest `|found - expected| / |expected|`, which is 0 on ranks with a nonfinite `expected`."""
    difference, size = (float(torch.linalg.vector_norm(x)) for x in (found - expected, expected))
    distance = difference / size if size and math.isfinite(difference) else math.inf if difference else 0.0
    return max(gather_objects(mesh, distance if math.isfinite(size) else 0.0))


def plain_gradients(loss: GenomeLoss) -> GradientFn:
    """Make a function that computes gradients in one eager graph without autocast."""
    return lambda inputs, wanted: OneGraph(loss.without_amp(), 1.0)(inputs, wanted).gradients


@contextmanager
def _evaluating(nets: Sequence[nn.Module]) -> Iterator[None]:
    training = [module for net in nets for module in net.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def gradient_and_changes(f: GradientFn, inputs: StepInputs, wanted: list[Tensor], seed: int) -> tuple[Tensor, Tensor]:
    """Return the gradient `f(inputs, wanted)` and the change of the buffers, as vectors. `inputs` are not changed."""
    fresh = inputs.copied()
    with inputs.restored(), seeded(seed, wanted[0].device), torch.enable_grad():
        gradients = f(fresh, wanted)
    return as_vector(gradients, wanted), changes_of(inputs.buffers, fresh.buffers)


def changes_of(before: Params, after: Params) -> Tensor:
    """Return the change of the buffers as a vector. Zeros replace nonfinite numbers."""
    pairs = [(x, after[k].detach()) for k, x in before.items() if differentiable(x.dtype)]
    changes = [y - x if x.shape == y.shape else y for x, y in pairs]
    return as_vector([x.nan_to_num(0.0, 0.0, 0.0) for x in changes], changes)
