"""Pipeline parallelism: each rank runs some blocks of the p-net, and microbatches pass from rank to rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gbfunc.parallel import gather_objects
from gbfunc.parallel.pipeline import Pipeline
from gbfunc.train.gradients.accumulated import equal_parts, mean_of, through_gnets, weights_of
from gbfunc.train.gradients.loss import GenomeLoss, Gradients, LossFn, Result, StepInputs, Strategy, generators_of
from gbfunc.train.gradients.proof import Proof
from gbfunc.train.gradients.ranks import SPLIT_ADVICE

if TYPE_CHECKING:
    from gbfunc.parallel.tensor import TensorParallel

_ADVICE = (
    "a pipeline runs the operators that torch.export records, which leave out all other code (the backward of a "
    "torch.autograd.Function, a counter or a random number in Python)"
)
# An odd constant of splitmix64 (Steele et al., 2014), which gives each stage and microbatch its own seed.
_STAGE_MIX = 0x94D049BB133111EB


class Pipelined(Strategy):
    """Computes gradients of this rank's weights by a pipeline schedule, and then the genome's gradient.

    The first call records a forward of the p-net, to find the parameters that this rank uses. `build` then makes a
    `GenomeLoss` that generates only these parameters.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        build: Callable[..., GenomeLoss],
        loss_fn: LossFn,
        scale: float,
        regenerate: bool,
        split: TensorParallel | None,
        amp: torch.dtype | None,
    ) -> None:
        self._pipeline, self._build, self._loss_fn, self._scale = pipeline, build, loss_fn, scale
        self._regenerate, self._split, self._amp, self._n = regenerate, split, amp, pipeline.microbatches
        self.least_rows = max(2, self._n)

    def __call__(self, inputs: StepInputs, wanted: list[Tensor]) -> Result:
        split = equal_parts(self._n, inputs.batch, inputs.rows)
        return self._result(inputs, wanted, self._prepared(split[0][0], wanted[0].device, self._amp), split, False)

    def proof(self, make_full_loss: Callable[[], GenomeLoss]) -> Proof:
        """Make the `Proof` that compares a microbatch's gradient over pipeline ranks with the gradient on one rank."""

        def local_gradients(inputs: StepInputs, wanted: list[Tensor]) -> Gradients:
            loss = self._prepared(inputs.batch, wanted[0].device, None).without_amp()
            found = self._result(inputs, wanted, loss, [(inputs.batch, 1 / self._n)] * self._n, True).gradients
            return tuple(None if g is None else g / self._scale for g in found)

        def take_rows(batch: Any) -> Any:
            return equal_parts(self._n, batch, 1)[0][0]

        axes = ("pipeline",) if self._split is None else ("pipeline", "tensor")
        advice = _ADVICE if self._split is None else f"{_ADVICE}; or {SPLIT_ADVICE}"
        return Proof(make_full_loss, local_gradients, lambda: self.loss, take_rows, axes, advice)

    def _prepared(self, microbatch: Any, device: torch.device, amp: torch.dtype | None) -> GenomeLoss:
        with torch.autocast(device.type, amp) if amp else nullcontext():
            self._pipeline.prepare(self._loss_fn, microbatch, self.loss and self.loss.net.skeleton)
        if self.loss is None:
            self.loss = self._build(names=self._pipeline.names)
        return self.loss

    def _result(
        self, inputs: StepInputs, wanted: list[Tensor], loss_of: GenomeLoss, microbatches: list[Any], repeated: bool
    ) -> Result:
        pipeline, before = self._pipeline, inputs.buffers
        of_stages = dict.fromkeys(pipeline.mine, before)
        generated, weights, trained = weights_of(loss_of, inputs, self._regenerate)
        ends: list[tuple[Tensor, Any, float]] = []
        seed, device = torch.initial_seed(), wanted[0].device
        generators = generators_of(device)
        numbers = {stage: count() for stage in pipeline.mine}

        def call(stage: int, received: Tensor) -> Tensor:
            number = next(numbers[stage])
            small, n = microbatches[number]
            for generator in generators:
                generator.manual_seed((seed + _STAGE_MIX * (1 + number + stage * len(microbatches))) % 2**63)
            # Copy the buffers, because other microbatches may change them before this microbatch's backward.
            current = before if repeated else of_stages[stage]
            buffers = of_stages[stage] = {k: x.detach().clone() for k, x in current.items()}
            out = loss_of.call(weights | pipeline.absent, buffers, pipeline.compute, stage, small, received)
            if stage < pipeline.stages - 1:
                return out
            if self._split is not None and self._split.by_class:
                raise ValueError("a pipeline cannot split classes over ranks: leave out loss_parallel or pipeline=")
            (loss, aux), rows = loss_of.returned(out), loss_of.rows(n)
            ends.append((loss.detach().reshape(()), inputs._replace(buffers=buffers).detached(aux), rows))
            return loss.reshape(1) * (self._scale * rows)

        sums = pipeline.run(call, {k: weights[k] for k in trained})
        gradients = through_gnets(generated or loss_of.weights(inputs), sums, wanted)
        moved = {k: x.detach() for s in pipeline.mine for k, x in of_stages[s].items() if not _same(x, before[k])}
        found = gather_objects(pipeline.mesh, (ends, moved), "pipeline")
        for _, of_rank in found:
            inputs.buffers.update({k: x.to(before[k].device) for k, x in of_rank.items()})
        ends = [(loss.to(device), aux, rows) for ends, _ in found for loss, aux, rows in ends]
        loss, aux = mean_of(ends)
        return Result(loss, aux, gradients, sum(rows for *_, rows in ends) / pipeline.ranks)


def _same(x: Tensor, y: Tensor) -> bool:  # NaNs are equal
    return x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())
