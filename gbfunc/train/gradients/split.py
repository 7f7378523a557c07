"""Losses and gradients where layers are split over tensor ranks, which all have the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gbfunc.parallel import gather_objects
from gbfunc.train.gradients.loss import GenomeLoss, Given, Gradients
from gbfunc.train.gradients.proof import Proof, gradient_and_changes, plainly, seeded_elsewhere
from gbfunc.train.gradients.ranks import RankObjective
from gbfunc.trees import tree_map
from gbfunc.types import Params

if TYPE_CHECKING:
    from gbfunc.parallel.tensor import TensorParallel


SPLIT_CAUSE = (
    "code between layers gets a rank's part of the features, and a softmax or mean over a part is another function, as "
    "is that of a loss over a part of the sequence: gather them first, by the style's output_layouts=Replicate()"
)


class SplitLoss(GenomeLoss):
    """Loss and aux of a p-net whose layers are split over tensor ranks; other arguments are those of `GenomeLoss`."""

    def __init__(self, split: TensorParallel, *args: Any, **options: Any) -> None:
        self._split = split
        super().__init__(*args, pieces=split.pieces, adapt=split.adapt, **options)

    def call(self, weights: Params, buffers: Params, function: Callable[..., Any], *args: Any) -> Any:
        """`function(net, *args)` on these weights, each rank's pieces of them; buffers are updated."""
        with self._unmixed():
            return super().call(self._split.place(weights), buffers, function, *args)

    def returned(self, out: Any) -> tuple[Tensor, Any]:
        """Loss and aux, the loss as a plain tensor."""
        loss, aux = super().returned(out)
        return self._split.plain(loss), aux

    def rows(self, rows: float) -> float:
        """Rows of this rank's outputs, if these are a part of the rows."""
        return super().rows(rows) if self._split.local_rows is None else self._split.local_rows

    def gradients(self, loss: Tensor, of: list[Tensor]) -> Gradients:
        """Gradients of a loss of the p-net; None for tensors that have no part in it."""
        with self._split.backward(), self._unmixed():
            return super().gradients(loss, of)

    @contextmanager
    def _unmixed(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" in str(error):
                split = ", ".join([*self._split.shapes, "or a style's output"]).removeprefix("or ")
                raise ValueError(
                    f"an operator takes a plain tensor and one that is split over tensor ranks ({split}): give each "
                    "layer that takes it a style, and a loss function x.full_tensor()"
                ) from error
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(f"over tensor ranks an operator failed ({error}): {SPLIT_CAUSE}") from error


def split_proof(whole: Callable[[], GenomeLoss], loss: GenomeLoss, split: TensorParallel) -> Proof:
    """The gradient of a few rows over tensor ranks, against the gradient of the whole p-net on one rank."""

    def few(batch: Any) -> Any:
        return tree_map(lambda x: x[: max(2, split.ranks)] if isinstance(x, Tensor) and x.ndim else x, batch)

    def part(given: Given, wanted: list[Tensor]) -> Gradients:
        found = plainly(loss)(given, wanted)
        if split.local_rows is None:
            return found
        # Each rank's are of the sum over its rows.
        rows = sum(gather_objects(split.wire.mesh, split.local_rows, "tensor"))
        return tuple(None if g is None else g / rows for g in found)

    return Proof(whole, part, lambda: loss, few, ("tensor",), SPLIT_CAUSE)


class SplitObjective(RankObjective):
    """The loss of a genome on a global batch, where layers are split over tensor ranks."""

    def __init__(self, split: TensorParallel, *args: Any) -> None:
        super().__init__(*args)
        self._split, self.takes_parts = split, split.takes_parts

    def _found(self, given: Given, trained: Params, seed: int) -> tuple[Tensor, Any, Params, float]:
        # Tensor ranks must draw the same numbers from Python and NumPy too.
        with seeded_elsewhere(seed):
            loss, aux, gradients, counted = super()._found(given, trained, seed)
        # Tensor ranks have the same rows, unless the last layer's outputs are a part of them.
        return loss, aux, gradients, counted / (self._split.ranks if self._split.local_rows is None else 1)

    def _prove(self, loss: Tensor, given: Given, trained: Params) -> None:
        """Compare ranks, then with the whole p-net, unless the loss function takes only a rank's rows of outputs."""
        self._split.compare(loss)
        parted = any(gather_objects(self._layout.mesh, self._split.local_rows is not None))
        if not parted or all(gather_objects(self._layout.mesh, self._takes_whole(given, trained))):
            super()._prove(loss, given, trained)

    def _takes_whole(self, given: Given, trained: Params) -> bool:
        if self._proof is None:
            return False
        given = given._replace(batch=self._proof.few(given.batch), rows=1)
        try:
            gradient_and_changes(plainly(self._proof.whole()), given, [*trained.values()], 0)
        except Exception:  # Shapes of the user's own may raise anything.
            return False
        return True
