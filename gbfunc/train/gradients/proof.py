"""The first step that is compiled, or that ranks with parts of the p-net take, against the plain one."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gbfunc.parallel import Layout, gather_objects, sum_ranks
from gbfunc.parallel.mesh import AxisName, Mesh
from gbfunc.train.gradients.loss import GenomeLoss, Given, Gradients, OneGraph, seeded
from gbfunc.trees import differentiable
from gbfunc.types import Params

Part = Callable[[Given, list[Tensor]], Gradients]


class Proof(NamedTuple):
    """A comparison of the first step's gradient and changes of buffers with those of the whole p-net, on a few rows."""

    whole: Callable[[], GenomeLoss]  # makes the loss of the whole p-net on this rank
    part: Part  # computes this rank's part of the gradient as training steps do
    loss: Callable[[], GenomeLoss | None]  # returns the loss that training steps use
    few: Callable[[Any], Any]  # takes the rows from a batch
    axes: tuple[AxisName, ...]  # along which the parts are summed
    cause: str  # of a difference, and its cure

    def compare(self, layout: Layout, given: Given, trained: Params) -> None:
        """Compare them with equal seeds, and where they differ once more in evaluation mode; all ranks call.

        Raises:
            ValueError: on every rank, if they differ by more than rounding does.
        """
        mesh, whole, wanted = layout.mesh, self.whole(), [*trained.values()]
        most, given = whole.without_amp().tolerance, given._replace(batch=self.few(given.batch), rows=1)
        nets = [loss.net.skeleton for loss in (whole, self.loss()) if loss is not None]
        ranks, worst = f"over {' and '.join(self.axes)} ranks", [math.inf]
        # Split features, and stages, draw different random numbers.
        for mode in nullcontext(), _evaluating(nets):
            with mode:
                found = gradient_and_changes(self.part, given, wanted, 0)
                alone = gradient_and_changes(plainly(whole), given, wanted, 0)
                for axis in self.axes:
                    sum_ranks(mesh, found[0], axis)
                worst = [largest_distance(mesh, x, y) for x, y in zip(found, alone, strict=True)]
                if max(worst) <= most:
                    return
                again = gradient_and_changes(plainly(whole), given, wanted, 1)
                drawn = max(largest_distance(mesh, x, y) for x, y in zip(again, alone, strict=True)) > most
            if not drawn:
                raise ValueError(
                    f"{ranks} the gradient is {worst[0]:.2g} of its norm, and the change of buffers {worst[1]:.2g} of "
                    f"its, away from those of the p-net on one rank: {self.cause}"
                )
        warnings.warn(
            f"the first step {ranks} was not compared with one on one rank: the p-net's forward is random in eval mode",
            stacklevel=2,
        )


def as_vector(found: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    """Gradients as one vector, float64; zeros for None."""
    dense = (torch.zeros_like(x) if g is None else g.to_dense() for g, x in zip(found, like, strict=True))
    parts = (torch.view_as_real(x) if x.is_complex() else x for x in dense)
    none = torch.zeros(0, device=like[0].device if like else "cpu")
    return torch.cat([none, *(x.reshape(-1) for x in parts)]).double()


def largest_distance(mesh: Mesh, found: Tensor, expected: Tensor) -> float:
    """The largest `|found - expected| / |expected|` over all ranks; 0 where `expected` is not finite."""
    by, size = (float(torch.linalg.vector_norm(x)) for x in (found - expected, expected))
    apart = by / size if size and math.isfinite(by) else math.inf if by else 0.0
    return max(gather_objects(mesh, apart if math.isfinite(size) else 0.0))


def plainly(loss: GenomeLoss) -> Part:
    """The gradient by one graph, in the p-net's own precision."""
    return lambda given, wanted: OneGraph(loss.without_amp(), 1.0)(given, wanted).gradients


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


def gradient_and_changes(part: Part, given: Given, wanted: list[Tensor], seed: int) -> tuple[Tensor, Tensor]:
    """The gradient and the change of buffers as vectors; `given` is not changed."""
    fresh = given.copied()
    with given.restored(), seeded(seed, wanted[0].device), torch.enable_grad():
        gradients = part(fresh, wanted)
    return as_vector(gradients, wanted), changes_of(given.buffers, fresh.buffers)


def changes_of(before: Params, after: Params) -> Tensor:
    """The change of buffers as a vector; a number that is not finite counts as zero."""
    pairs = [(x, after[k].detach()) for k, x in before.items() if differentiable(x.dtype)]
    changes = [y - x if x.shape == y.shape else y for x, y in pairs]
    return as_vector([x.nan_to_num(0.0, 0.0, 0.0) for x in changes], changes)
