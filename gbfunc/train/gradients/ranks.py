"""Computes the loss and the gradient of a genome on several ranks. Each rank computes on some rows of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gbfunc.parallel import Entries, Layout, check_equal, gather_objects, reduce_step, text_of
from gbfunc.parallel.mesh import AxisName
from gbfunc.train.gradients.loss import GenomeLoss, LossAndGrads, Objective, StepInputs, detached, noise_of
from gbfunc.train.gradients.proof import Proof, gradient_and_changes, plain_gradients
from gbfunc.trees import GNET, n_rows, tree_leaves, tree_map
from gbfunc.types import Params

if TYPE_CHECKING:
    from gbfunc.parallel.tensor import TensorParallel
    from gbfunc.train.gradients.loss import Gradients, Strategy

SPLIT_ADVICE = (
    "code between layers gets only this rank's part of the features or of the sequence, and a softmax, mean or loss of "
    "a part differs: gather the parts first, by output_layouts=Replicate() of the style"
)
# An odd constant of splitmix64 (Steele et al., 2014), which gives each rank its own seed.
RANK_MIX = 0xBF58476D1CE4E5B9
SAME_STATE = "ranks must hold the same state (make it by train_step.init(seed), or load the same on all of them)"


class RankObjective(Objective):
    """Computes the loss and the gradient of a genome on a global batch, of which each rank has a share."""

    splits_inputs: bool = False  # True if each tensor rank gets a slice of every row, such as some tokens of a sequence

    def __init__(self, layout: Layout, strategy: Strategy, scale: float, check_every: int, proof: Proof | None) -> None:
        super().__init__(layout.plan, strategy, scale)
        self._layout, self._check_every, self._checked, self._proof = layout, check_every, False, proof
        self._first_step_checked, self._entries = False, Entries()
        self._averaged = [b.name for b in layout.plan.averaged]

    def __call__(
        self, leaves: Params, trained: Params, buffers: Params, batch: Any, seed: int, step: int
    ) -> LossAndGrads:
        """Return the loss and the gradient of the global batch, and buffers averaged over ranks."""
        due = not self._checked or bool(self._check_every and step % self._check_every == 0)
        self._check_batch(batch, due)
        if due:
            self._checked, mesh, split = True, self._layout.mesh, self._layout.split
            same = {k: v for k, v in trained.items() if k not in split}
            check_equal(mesh, {**same, "step": str(step), "seed": str(seed)}, SAME_STATE)
            check_equal(mesh, {k: trained[k] for k in split}, SAME_STATE, "replicas")
        noise = noise_of(self._plan, seed, next(iter(trained.values())))
        share, counts = n_rows(batch), True
        rows = 1 if share is None else share
        # With `splits_inputs`, layers accept an empty share of the batch.
        if not rows and not self.splits_inputs:
            # Replace an empty share by rows of zeros: without this rank's collectives, other ranks would wait forever.
            least, counts = self.strategy.least_rows, False
            batch = tree_map(
                lambda x: x.new_zeros((least, *x.shape[1:])) if isinstance(x, Tensor) and x.ndim else x, batch
            )
        inputs = StepInputs(leaves, noise, {k: v.clone() for k, v in buffers.items()}, batch, rows, counts)
        seed = (seed + RANK_MIX * self._layout.mesh.shard) % 2**63
        loss, aux, gradients, counted = self._with_gradients(inputs, trained, seed)
        if not self._first_step_checked:
            with self._layout.mesh.uncounted():
                self._check_first_step(loss, inputs, trained)
            self._first_step_checked = True
        if not counts:
            # Discard gradients of the rows of zeros. Keep gradients of split g-nets, which come from other ranks' rows.
            kept = {k for k in gradients if self._layout.sharded and k.startswith(GNET)}
            gradients = {k: g if k in kept else torch.zeros_like(g) for k, g in gradients.items()}
        before = {k: buffers[k] for k in self._averaged}
        counted, buffers = counted if rows else 0, detached(inputs.buffers)
        loss, aux, gradients, buffers, norm, self._entries = reduce_step(
            self._layout, counted, loss, aux, gradients, buffers, before, self._entries
        )
        return LossAndGrads(loss, aux, gradients, buffers, norm)

    def _check_first_step(self, loss: Tensor, inputs: StepInputs, trained: Params) -> None:
        if self._proof is not None:
            self._proof.compare(self._layout, inputs, trained)

    def _check_batch(self, batch: Any, with_values: bool) -> None:
        """Check that ranks which must get the same batch got equal shapes and, if `with_values`, equal values.

        Shapes are checked in every training step, because shapes determine the sizes of messages, and gloo aborts a
        process that receives a message of an unexpected size.
        """
        mesh = self._layout.mesh
        axes: tuple[AxisName, ...] = ("pipeline",) if self.splits_inputs else ("pipeline", "tensor")
        if all(mesh.sizes[axis] == 1 for axis in axes):
            return
        leaves = tree_leaves(batch, "batch")
        forms = {path: f"{[*x.shape]}, {x.dtype}" if isinstance(x, Tensor) else x for path, x in leaves}
        named = {"shapes": text_of(forms)} | ({"the batch": text_of(dict(leaves))} if with_values else {})
        for axis in axes:
            with mesh.uncounted():
                check_equal(mesh, named, f"{axis} ranks must get the same batch", axis)


class SplitLoss(GenomeLoss):
    """A `GenomeLoss` of a p-net whose layers are split over tensor ranks."""

    def __init__(self, split: TensorParallel, *args: Any, **options: Any) -> None:
        self._split = split
        super().__init__(*args, pieces=split.pieces, adapt=split.adapt, **options)

    def call(self, weights: Params, buffers: Params, function: Callable[..., Any], *args: Any) -> Any:
        with _explained():
            return super().call(self._split.place(weights), buffers, function, *args)

    def returned(self, out: Any) -> tuple[Tensor, Any]:
        loss, aux = super().returned(out)
        # If ranks split the classes, the loss is a DTensor. Avoid `isinstance`: importing DTensor takes half a second.
        return getattr(loss, "full_tensor", lambda: loss)(), aux

    def rows(self, rows: float) -> float:
        return super().rows(rows) if self._split.local_rows is None else self._split.local_rows

    def gradients(self, loss: Tensor, wanted: list[Tensor]) -> Gradients:
        with self._split.backward(), _explained():
            return super().gradients(loss, wanted)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        words = f"{SPLIT_ADVICE}; or give each layer that takes a split tensor a style"
        raise ValueError(f"over tensor ranks an operator failed ({error}): {words}") from error


def split_proof(make_full_loss: Callable[[], GenomeLoss], loss: GenomeLoss, split: TensorParallel) -> Proof:
    """Make the `Proof` of a p-net whose layers are split over tensor ranks. The `Proof` uses a few rows of a batch."""

    def take_rows(batch: Any) -> Any:
        return tree_map(lambda x: x[: max(2, split.ranks)] if isinstance(x, Tensor) and x.ndim else x, batch)

    def local_gradients(inputs: StepInputs, wanted: list[Tensor]) -> Gradients:
        found = plain_gradients(loss)(inputs, wanted)
        if split.local_rows is None:
            return found
        # `found` has gradients of the sum of losses over rows. The whole p-net's loss is the mean: divide by rows.
        rows = sum(gather_objects(split.wire.mesh, split.local_rows, "tensor"))
        return tuple(None if g is None else g / rows for g in found)

    return Proof(make_full_loss, local_gradients, lambda: loss, take_rows, ("tensor",), SPLIT_ADVICE)


class SplitObjective(RankObjective):
    """Computes the loss and the gradient of a genome on a global batch, with layers split over tensor ranks."""

    def __init__(self, split: TensorParallel, *args: Any) -> None:
        super().__init__(*args)
        self._split, self.splits_inputs = split, split.splits_inputs

    def _with_gradients(self, inputs: StepInputs, trained: Params, seed: int) -> tuple[Tensor, Any, Params, float]:
        loss, aux, gradients, counted = super()._with_gradients(inputs, trained, seed)
        # All tensor ranks have the same rows, so each rank counts a fraction of the number of rows. If the last layer
        # splits the rows over ranks, each rank counts its own rows.
        return loss, aux, gradients, counted / (self._split.ranks if self._split.local_rows is None else 1)

    def _check_first_step(self, loss: Tensor, inputs: StepInputs, trained: Params) -> None:
        self._split.compare(loss)
        rows_split = any(gather_objects(self._layout.mesh, self._split.local_rows is not None))
        if not rows_split or all(gather_objects(self._layout.mesh, self._accepts_full_outputs(inputs, trained))):
            super()._check_first_step(loss, inputs, trained)

    def _accepts_full_outputs(self, inputs: StepInputs, trained: Params) -> bool:
        if self._proof is None:
            return False
        inputs = inputs._replace(batch=self._proof.take_rows(inputs.batch), rows=1)
        try:
            gradient_and_changes(plain_gradients(self._proof.make_full_loss()), inputs, [*trained.values()], 0)
        except Exception:  # The user's loss function may raise any error for outputs that are not split.
            return False
        return True
