"""The loss of a genome with its gradient: which strategy computes it, and this rank's share of the batch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from gbfunc.parallel import Layout
from gbfunc.parallel.undivided import Undivided
from gbfunc.train.gradients.accumulated import Accumulated, Kept, Regenerated
from gbfunc.train.gradients.batched import Batched
from gbfunc.train.gradients.loss import GenomeLoss, Given, Gradients, LossFn, noise_of, seeded
from gbfunc.train.gradients.one_graph import CompiledGraph, OneGraph
from gbfunc.train.options import StepOptions
from gbfunc.trees import n_rows, split_batch, split_rows, tree_map
from gbfunc.types import Params

if TYPE_CHECKING:
    from gbfunc.parallel.pipeline import Pipeline
    from gbfunc.train.gradients.pipelined import Pipelined

_FP16_SCALE = 2.0**10
"""Loss scale under float16, which keeps small gradients of activations from underflow (Micikevicius et al., 2018)."""

_FP16_SCALE_PER_ROW = 2.0**4
"""Loss scale under float16 with a mesh, for each row of a rank's share: as large at 64 rows."""

_RANK_MIX = 0xBF58476D1CE4E5B9
"""An odd constant of splitmix64 (Steele et al., 2014): separates the random numbers of ranks."""


class LossAndGrads(NamedTuple):
    """Loss and gradient of one rank's share of the batch.

    Attributes:
        loss: mean over the share.
        aux: what the loss function returned beside it.
        gradients: by flat name; with a mesh of more than one rank, summands of that of the rows' losses.
        rows: of the share, divided by the ranks that have the same ones.
        counts: whether the gradients count: not those of rows of zeros in the place of an empty share.
    """

    loss: Tensor
    aux: Any
    gradients: Params
    rows: float
    counts: bool


class Objective:
    """The loss as a function of the genome, with its gradient."""

    def __init__(
        self, pnet: nn.Module, loss_fn: LossFn, layout: Layout, options: StepOptions, divided: Undivided | None = None
    ) -> None:
        self._plan, self._microbatches = layout.plan, options.microbatches
        self._divided = Undivided() if divided is None else divided
        self._shard, self._ranks = layout.mesh.shard, layout.mesh.world
        half = options.amp == torch.float16
        self._scale = (_FP16_SCALE if self._ranks == 1 else _FP16_SCALE_PER_ROW) if half else 1.0
        self._strategy = self._chosen(pnet, loss_fn, layout, options)

    def _chosen(
        self, pnet: nn.Module, loss_fn: LossFn, layout: Layout, options: StepOptions
    ) -> OneGraph | Accumulated | Pipelined:
        make = partial(GenomeLoss, pnet, loss_fn, layout, options, self._divided)
        source = Regenerated if options.remat == "generate" else Kept
        if options.pipeline is not None and layout.mesh.sizes["pipeline"] > 1:
            # Torch's pipelines take a while to import.
            from gbfunc.parallel.pipeline import Pipeline
            from gbfunc.train.gradients.pipelined import Pipelined

            def build(pipeline: Pipeline) -> GenomeLoss:
                return make(
                    names=pipeline.names,
                    adapt=pipeline.adapt,
                    submodule_call_error=pipeline.submodule_call_error,
                    others=pipeline.fill,
                )

            pipeline = Pipeline(pnet, options.pipeline, layout.mesh, self._microbatches, options.stages)
            split = partial(self._split, equal=True)
            return Pipelined(
                pipeline, build, loss_fn, self._scale, split, source, layout, self._divided, self._microbatches
            )
        loss = make()
        if options.compile:
            return CompiledGraph(loss, self._scale, layout)
        if options.microbatches > 1 or source is Regenerated:
            return Accumulated(loss, self._scale, self._split, source(loss))
        return OneGraph(loss, self._scale)

    @property
    def takes_parts(self) -> bool:
        """Whether tensor ranks may have parts of the same rows."""
        return self._divided.takes_parts

    @property
    def dense_reads(self) -> dict[str, int]:
        """How often the p-net has read weights as dense tensors, of those that are not: by name."""
        loss = self._strategy.loss
        return {} if loss is None else loss.net.dense_reads

    def batched(self, same: bool) -> Batched:
        """Losses and gradients of many genomes by one call; `same` says whether all have one batch."""
        assert self._strategy.loss is not None
        return Batched(self._plan, self._strategy.loss, self._scale, same)

    def __call__(self, leaves: Params, trained: Params, buffers: Params, batch: Any, seed: int) -> LossAndGrads:
        """Loss, aux and gradients by name.

        Args:
            leaves: the genome's, flat by name, as the loss sees them.
            trained: those that gradients are wanted for, which require grad; `leaves` are them, or made of them.
            buffers: clones of the p-net's buffers, which are updated.
            batch: the batch, with a mesh this rank's share of it.
            seed: of dropout and of stochastic g-nets.

        Raises:
            ValueError: for a loss that is no scalar or does not depend on what is trained, or a batch that microbatches
                cannot split.
        """
        wanted = list(trained.values())
        noise, device = noise_of(self._plan, seed, wanted[0]), wanted[0].device
        batch, rows, counts = self._share(batch)
        seed = (seed + _RANK_MIX * self._shard + self._strategy.seed_shift) % 2**63
        given = Given(leaves, noise, buffers, batch, rows, counts)
        with torch.enable_grad():
            self._strategy.prepare(given, wanted)
        assert self._strategy.loss is not None
        with seeded(seed, device), torch.enable_grad(), self._strategy.loss.net.held():
            loss, aux, gradients, counted = self._strategy(given, wanted)
        filled = _filled(trained, gradients, self._scale)
        self._divided.compare(loss)
        counted /= self._divided.ranks if self._divided.local_rows is None else 1
        return LossAndGrads(loss, aux, filled, counted if rows else 0, counts)

    def _share(self, batch: Any) -> tuple[Any, int, bool]:
        """This rank's rows, their number, and whether they count: zeros stand for an empty share."""
        rows = 1 if self._ranks == 1 else n_rows(batch)
        if rows is None:
            return batch, 1, True
        # Where ranks may have parts of the same rows, an empty one is as good as any.
        if rows or self._divided.takes_parts:
            return batch, rows, True
        # All ranks must build the same graph, with its collectives.
        least = self._strategy.least_rows

        def zeros(x: Any) -> Any:
            return x.new_zeros((least, *x.shape[1:])) if isinstance(x, Tensor) and x.ndim else x

        return tree_map(zeros, batch), 0, False

    def _split(self, batch: Any, rows: int, equal: bool = False) -> list[tuple[Any, float]]:
        """The microbatches, each with its rows; equal ones but for uneven shares of a mesh."""
        n = self._microbatches
        if n == 1:
            return [(batch, rows)]
        if equal or self._ranks == 1 or n_rows(batch) is None:
            return [(small, rows / n) for small in split_batch(batch, n)]
        # Ranks with fewer rows may take fewer microbatches: only generation has collectives, unless layers have some.
        n = n if self._divided.takes_parts else min(n, n_rows(batch) or n)
        return [(small, n_rows(small) or 0) for small in split_rows(batch, n)]


def _filled(leaves: Params, gradients: Gradients, scale: float) -> Params:
    """Gradients of the leaves by name, of the loss without its scale; sparse ones (`nn.Embedding`) made dense."""
    filled: Params = {}
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        gradient = torch.zeros_like(leaf) if gradient is None else gradient
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        filled[name] = gradient if scale == 1.0 else gradient / scale
    return filled
