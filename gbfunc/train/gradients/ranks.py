"""The loss of a genome with its gradient, where many ranks take each step together: each computes those of its rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gbfunc.parallel import CollectiveError, Entries, Layout, check_equal, reduce_step, text_of, zero_uncounted
from gbfunc.train.gradients.loss import Given, LossAndGrads, Objective, Strategy, detached, noise_of
from gbfunc.train.gradients.proof import Proof
from gbfunc.trees import n_rows, tree_map
from gbfunc.types import Params

RANK_MIX = 0xBF58476D1CE4E5B9
"""An odd constant of splitmix64 (Steele et al., 2014): separates the random numbers of ranks."""

SAME_STATE = "ranks must hold the same state (make it by train_step.init(seed), or load the same on all of them)"


class RankObjective(Objective):
    """The loss of a genome on a global batch, of which each rank has a share."""

    takes_parts: bool = False  # whether ranks may have parts of the same rows

    def __init__(self, layout: Layout, strategy: Strategy, scale: float, check_every: int, proof: Proof | None) -> None:
        super().__init__(layout.plan, strategy, scale)
        self._layout, self._check_every, self._checked, self._proof = layout, check_every, False, proof
        self._proven, self._entries = False, Entries()
        self._averaged = [b.name for b in layout.plan.averaged]

    def __call__(
        self, leaves: Params, trained: Params, buffers: Params, batch: Any, seed: int, step: int
    ) -> LossAndGrads:
        """Loss and gradient of the global batch; buffers are averaged."""
        due = not self._checked or bool(self._check_every and step % self._check_every == 0)
        self._check_batch(batch, due)
        if due:
            self._checked, mesh, parts = True, self._layout.mesh, self._layout.split
            same = {k: v for k, v in trained.items() if k not in parts}
            check_equal(mesh, {**same, "step": str(step), "seed": str(seed)}, SAME_STATE)
            check_equal(mesh, {k: trained[k] for k in parts}, SAME_STATE, "replicas")
        noise = noise_of(self._plan, seed, next(iter(trained.values())))
        share, counts = n_rows(batch), True
        rows = 1 if share is None else share
        # Where ranks may have parts of the same rows, an empty one is as good as any.
        if not rows and not self.takes_parts:
            # All ranks must build the same graph, with its collectives: zeros stand for the rows.
            least, counts = self.strategy.least_rows, False
            batch = tree_map(
                lambda x: x.new_zeros((least, *x.shape[1:])) if isinstance(x, Tensor) and x.ndim else x, batch
            )
        given = Given(leaves, noise, {k: v.clone() for k, v in buffers.items()}, batch, rows, counts)
        seed = (seed + RANK_MIX * self._layout.mesh.shard) % 2**63
        loss, aux, gradients, counted = self._found(given, trained, seed)
        gradients = gradients if counts else zero_uncounted(self._layout, gradients)
        before = {k: buffers[k] for k in self._averaged}
        counted, buffers = counted if rows else 0, detached(given.buffers)
        loss, aux, gradients, buffers, norm, self._entries = reduce_step(
            self._layout, counted, loss, aux, gradients, buffers, before, self._entries
        )
        return LossAndGrads(loss, aux, gradients, buffers, norm)

    def _found(self, given: Given, trained: Params, seed: int) -> tuple[Tensor, Any, Params, float]:
        try:
            found = super()._found(given, trained, seed)
        except Exception as error:
            if given.counts or isinstance(error, CollectiveError):
                raise
            where = f"rank {self._layout.mesh.rank} has no row of the batch"
            what = "computes the loss of rows of zeros to take part in what all do"
            raise ValueError(f"{where}, and {what}, which failed: {error}") from error
        if not self._proven:
            with self._layout.mesh.traffic.uncounted():
                self._prove(found[0], given, trained)
            self._proven = True
        return found

    def _prove(self, loss: Tensor, given: Given, trained: Params) -> None:
        """Check what the first step has found; all ranks call."""
        if self._proof is not None:
            self._proof.compare(self._layout, given, trained)

    def _check_batch(self, batch: Any, whole: bool) -> None:
        """Compare shapes of batches, or the `whole` of them, along axes whose ranks must get the same one.

        Messages take their sizes from the shapes, and gloo aborts a process that gets a longer one.
        """
        mesh = self._layout.mesh
        axes = ("pipeline",) if self.takes_parts else ("pipeline", "tensor")
        shapes = tree_map(lambda x: f"{[*x.shape]}, {x.dtype}" if isinstance(x, Tensor) else x, batch)
        for axis in axes:
            if mesh.sizes[axis] == 1:
                continue
            named = {"shapes": text_of(shapes)} | ({"the batch": text_of(batch)} if whole else {})
            with mesh.traffic.uncounted():
                check_equal(mesh, named, f"{axis} ranks must get the same batch", axis)
