"""Microbatches that go from rank to rank, each of which has some blocks of the p-net."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gbfunc.parallel import Layout, gather_objects
from gbfunc.parallel.absent import Absent
from gbfunc.parallel.pipeline import Pipeline
from gbfunc.train.gradients.accumulated import Kept, equal_parts, leaves_of, mean_of, through_gnets
from gbfunc.train.gradients.loss import GenomeLoss, Given, Gradients, LossFn, Result, generators_of, seeded
from gbfunc.train.gradients.proof import Proof, seed_elsewhere, seeded_elsewhere
from gbfunc.train.gradients.split import SPLIT_CAUSE
from gbfunc.trees import tree_map
from gbfunc.types import Params

if TYPE_CHECKING:
    from gbfunc.parallel.tensor import TensorParallel

_CAUSE = (
    "a module needs of an earlier one what that does not return (an attribute set in its forward, a change in place "
    "through a view): return it, and take it as an argument"
)

_PLACE_MIX = 0x94D049BB133111EB
"""An odd constant of splitmix64 (Steele et al., 2014): separates the random numbers of places in a pipelined step."""


class Pipelined:
    """Gradients of this rank's weights by a schedule, then of the genome.

    Which parameters a rank needs is known when the p-net has been traced with a first batch: then `build` makes the
    loss of the genome on this rank.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        build: Callable[[Pipeline], GenomeLoss],
        loss_fn: LossFn,
        scale: float,
        microbatches: int,
        source: Callable[[GenomeLoss], Kept],
        layout: Layout,
        split: TensorParallel | None,
        amp: torch.dtype | None,
    ) -> None:
        self._pipeline, self._build, self._loss_fn, self._scale = pipeline, build, loss_fn, scale
        self._microbatches, self._make_source, self._layout, self._split = microbatches, source, layout, split
        self._amp = amp
        self.least_rows = max(2, microbatches)
        self.loss: GenomeLoss | None = None

    def __call__(self, given: Given, wanted: list[Tensor]) -> Result:
        """Loss, aux and gradients: the same loss on all ranks of the pipeline."""
        parts = equal_parts(self._microbatches, given.batch, given.rows)
        loss = self._prepared(parts[0][0], wanted[0].device, self._amp)
        with loss.net.kept_open(), seeded_elsewhere(0):
            return self._result(given, wanted, loss, parts)

    def proof(self, whole: Callable[[], GenomeLoss]) -> Proof:
        """The gradient of a microbatch over the stages, against that of the whole p-net on one rank.

        A trace sees what modules return, and no more: not what one sets in Python, nor how another reads its input.
        """
        n = self._microbatches

        def part(given: Given, wanted: list[Tensor]) -> Gradients:
            loss = self._prepared(given.batch, wanted[0].device, None)
            with loss.net.kept_open(), loss.without_amp():
                found = self._result(given, wanted, loss, [(given.batch, 1 / n)] * n, alike=True).gradients
            return tuple(None if g is None else g / self._scale for g in found)

        def few(batch: Any) -> Any:
            return equal_parts(n, batch, 1)[0][0]

        if self._split is None:
            return Proof(whole, part, lambda: self.loss, few, ("pipeline",), _CAUSE)
        return Proof(whole, part, lambda: self.loss, few, ("pipeline", "tensor"), f"{_CAUSE}; or {SPLIT_CAUSE}")

    def _prepared(self, microbatch: Any, device: torch.device, amp: torch.dtype | None) -> GenomeLoss:
        """The loss, when stages know this form of microbatches."""
        with seeded(0, device), torch.autocast(device.type, amp) if amp else nullcontext():
            self._pipeline.prepare(self._loss_fn, microbatch)
        if self.loss is None:
            self.loss = self._build(self._pipeline)
        return self.loss

    def _result(
        self,
        given: Given,
        wanted: list[Tensor],
        loss_of: GenomeLoss,
        parts: list[tuple[Any, float]],
        alike: bool = False,
    ) -> Result:
        """Loss, aux and gradients of microbatches; `alike` ones all find the buffers that the first does."""
        pipeline, before = self._pipeline, given.buffers
        # Code between modules runs in every stage: each changes its own.
        of_stages = dict.fromkeys(pipeline.mine, before)
        source, shapes = self._make_source(loss_of), {} if self._split is None else self._split.shapes
        made, trained = source.weights(given)
        weights, trained = leaves_of(given, made, trained)
        ends: list[tuple[Tensor, Any, float]] = []

        def call(number: int) -> Tensor:
            stage, (small, n) = pipeline.stage, parts[number]
            # Copies: other microbatches may run before the backward of this one.
            held = before if alike else of_stages[stage]
            buffers = of_stages[stage] = {k: x.detach().clone() for k, x in held.items()}
            small = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, small)
            loss, aux = loss_of.on(pipeline.fill(weights, shapes), buffers, small)
            if self._split is not None and self._split.by_class:
                raise ValueError("classes split over ranks (loss_parallel) and pipeline= do not go together")
            rows = loss_of.rows(n)
            ends.append((loss.detach(), given._replace(buffers=buffers).detached(aux), rows))
            return loss * (self._scale * rows)

        # What `seeded` has set, the same on all ranks of the pipeline.
        seed, generators = torch.initial_seed(), generators_of(wanted[0].device)

        def draw_alike(microbatch: int, position: int) -> None:
            here = (seed + _PLACE_MIX * (1 + microbatch + position * len(parts))) % 2**63
            for generator in generators:
                generator.manual_seed(here)
            seed_elsewhere(here)

        sums = pipeline.run(call, {k: weights[k] for k in trained}, draw_alike)
        gradients = through_gnets(source.again(given, made), sums, wanted)
        changed = {stage: _changed(before, after) for stage, after in of_stages.items()}
        found = gather_objects(self._layout.mesh, (ends, changed), "pipeline")
        ends = next(other for other, _ in found if other)
        for _, moved in sorted((pair for _, of_rank in found for pair in of_rank.items()), key=itemgetter(0)):
            given.buffers.update({k: x.to(before[k].device) for k, x in moved.items()})
        device = wanted[0].device
        loss, aux = mean_of([(loss.to(device), aux, rows) for loss, aux, rows in ends])
        return Result(loss, aux, gradients, sum(rows for *_, rows in ends) / pipeline.ranks)


def _changed(before: Params, after: Params) -> Params:
    """Buffers that a stage has changed."""

    def same(x: Tensor, y: Tensor) -> bool:
        return x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())

    return {k: x.detach() for k, x in after.items() if not isinstance(x, Absent) and not same(x, before[k])}
