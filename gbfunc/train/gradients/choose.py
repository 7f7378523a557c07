"""Which strategy computes a genome's gradient."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from gbfunc.parallel import Layout
from gbfunc.train.gradients.accumulated import Accumulated, equal_parts, parts_of_share
from gbfunc.train.gradients.compiled import CompiledGraph
from gbfunc.train.gradients.loss import GenomeLoss, LossFn, Objective, OneGraph, Strategy
from gbfunc.train.gradients.proof import Proof
from gbfunc.train.gradients.ranks import RankObjective, SplitLoss, SplitObjective, split_proof
from gbfunc.train.options import StepOptions

if TYPE_CHECKING:
    from gbfunc.parallel.tensor import TensorParallel

_FP16_SCALE, _FP16_SCALE_PER_ROW = 2.0**10, 2.0**4
"""Loss scales under float16 against underflow of small gradients (Micikevicius et al., 2018); a row's with a mesh."""


def make_objective(pnet: nn.Module, loss_fn: LossFn, layout: Layout, options: StepOptions) -> Objective:
    """Choose how loss and gradient of a plan's genomes are computed, from the options and the mesh."""
    ranks, split, scale = layout.mesh.world, None, 1.0
    if options.parallel is not None:
        # Torch's DTensor takes half a second to import.
        from gbfunc.parallel.tensor import TensorParallel, resolve

        styles = resolve(pnet, options.parallel)
        split = TensorParallel(pnet, styles, layout.mesh) if layout.mesh.sizes["tensor"] > 1 else None
    if options.amp == torch.float16:
        scale = _FP16_SCALE if ranks == 1 else _FP16_SCALE_PER_ROW
    strategy, proof = _strategy(pnet, loss_fn, layout, options, split, scale)
    if ranks == 1:
        return Objective(layout.plan, strategy, scale)
    if split is None:
        return RankObjective(layout, strategy, scale, options.check_every, proof)
    return SplitObjective(split, layout, strategy, scale, options.check_every, proof)


def _strategy(
    pnet: nn.Module, loss_fn: LossFn, layout: Layout, options: StepOptions, split: TensorParallel | None, scale: float
) -> tuple[Strategy, Proof | None]:
    """The strategy, and the comparison for its first step if ranks have parts of the p-net."""
    # Weights are there one layer at a time.
    whole = partial(GenomeLoss, pnet, loss_fn, layout, replace(options, compile=False, remat="layer", microbatches=1))
    takes_parts = split is not None and split.takes_parts
    again, n = options.remat == "generate", options.microbatches
    make = partial(GenomeLoss if split is None else partial(SplitLoss, split), pnet, loss_fn, layout, options)
    if options.pipeline is not None and layout.mesh.sizes["pipeline"] > 1:
        # Torch's pipelines take a while to import.
        from gbfunc.parallel.pipeline import Pipeline
        from gbfunc.train.gradients.pipelined import Pipelined

        pieces = {} if split is None else {"adapt": split.shrink}
        pipeline = Pipeline(pnet, options.pipeline, layout.mesh, n, options.stages, **pieces)
        strategy = Pipelined(pipeline, make, loss_fn, scale, again, split, options.amp)
        return strategy, strategy.proof(whole)
    loss = make()
    proof = None if split is None or takes_parts else split_proof(whole, loss, split)
    if options.compile:
        return CompiledGraph(loss, scale, layout, options.amp, joint=split is None), proof
    if n == 1 and not again:
        return OneGraph(loss, scale), proof
    alone = layout.mesh.world == 1 and options.local_steps is None
    parts = partial(equal_parts, n) if alone else partial(parts_of_share, n, takes_parts)
    return Accumulated(loss, scale, parts, again), proof
