"""Makes training steps: checks the options, which must be equal on all ranks, and chooses how to compute gradients."""

import warnings
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import nn

from gbfunc.formats import AUTO, Steps, check_steps
from gbfunc.genome import check_plan
from gbfunc.parallel import Layout, Mesh, check_equal, make_layout, text_of
from gbfunc.plan import Plan
from gbfunc.pnet.describe import eval_mode_warning
from gbfunc.train.allocation import AutoTrainStep
from gbfunc.train.captured import CapturedTrainStep
from gbfunc.train.gradients.accumulated import Accumulated, equal_parts, parts_of_share
from gbfunc.train.gradients.compiled import CompiledGraph
from gbfunc.train.gradients.loss import GenomeLoss, LossFn, Objective, OneGraph, Strategy
from gbfunc.train.gradients.ranks import RankObjective, SplitLoss, SplitObjective, split_proof
from gbfunc.train.local import LocalTrainStep
from gbfunc.train.optimizers import Optimizer
from gbfunc.train.options import StepOptions
from gbfunc.train.step import TrainStep


def make_train_step(plan: Plan, pnet: nn.Module, loss_fn: LossFn, optimizer: Optimizer, **options: Any) -> TrainStep:
    """Make a pure function that trains a genome on one batch: `train_step(state, batch) -> (state, info)`.

    `train_step.init(seed)` gives the first state, a `TrainState` of the genome, the buffers and the optimizer's state.
    A training step generates the p-net's weights from the genome, calls `loss_fn`, and updates the genome by the
    gradient of the loss with respect to the genome. `info` is a `StepInfo`: loss, gradient norm, aux. Every step uses
    the mode that the p-net has now (training or evaluation). Parameters that do not require grad are not trained.
    `materialize` makes a network from the trained genome. For a loop with `loss.backward()`, use `GenomeModule`.

    Args:
        plan: the plan.
        pnet: the p-net that the plan was made for, which is not changed.
        loss_fn: `(net, batch) -> loss` or `(loss, aux)`. `net` is the p-net with generated weights. The function may
            call modules of `net` and read tensors of `net`, as in an ordinary module, but must not change or keep
            `net`. The guide "The contract" lists the rules for p-nets and loss functions.
        optimizer: an optimizer made by `torch_optimizer`.
        **options: fields of `StepOptions`, which lists them all: `clip_norm`, `microbatches`, `amp`, `compile`, ...

    Raises:
        TypeError: for an unknown option, or an optimizer that `torch_optimizer` did not make.
        ValueError: for options out of range, a p-net that does not fit the plan, or an impure p-net (see `check_pnet`).

    >>> import gbfunc as gb
    >>> optimizer = gb.torch_optimizer(torch.optim.Adam, lr=1e-2)
    >>> plan = gb.make_plan(pnet := nn.Linear(30, 20), gb.periodic(features=2))
    >>> train_step = gb.make_train_step(plan, pnet, lambda net, x: net(x).square().mean(), optimizer)
    >>> state, info = train_step(train_step.init(seed=0), torch.ones(3, 30))
    """
    known = list(StepOptions.__dataclass_fields__)
    for name in sorted(options.keys() - known):
        near = get_close_matches(name, known) or [k for k in known if {*k.split("_")} & {*name.split("_")}]
        cure = f"did you mean {', '.join(near)}?" if near else "StepOptions lists the options"
        raise TypeError(f"make_train_step has no option {name!r}: {cure}")
    settings = StepOptions(**options)
    if not isinstance(optimizer, Optimizer):
        got = getattr(optimizer, "__name__", type(optimizer).__name__)
        raise TypeError(f"optimizer must come from gb.torch_optimizer(torch.optim.Adam, lr=...), got {got}")
    check_plan(plan, pnet)
    if (word := eval_mode_warning(pnet)) is not None:
        warnings.warn(word, UserWarning, stacklevel=2)
    if isinstance(settings.rounding, Steps):
        check_steps(plan, settings.rounding)
    mesh = Mesh({}) if settings.mesh is None else settings.mesh
    replicate = (settings.local_steps is not None or settings.rounding == AUTO) and settings.placement == "auto"
    layout = make_layout(plan, mesh, "replicated" if replicate else settings.placement, lazy=settings.lazy is not False)
    what = "ranks must have the same plan (make the p-net after the same torch.manual_seed on all of them)"
    check_equal(mesh, {"plan": plan.to_json(), "placement": layout.placement}, what)
    texts = {"options": text_of(replace(settings, mesh=None, parallel=None, outer=None))}
    texts |= {"parallel": text_of(settings.parallel), "outer": text_of(settings.outer and settings.outer.settings)}
    texts |= {"what requires grad": text_of({name: x.requires_grad for name, x in pnet.named_parameters()})}
    texts |= {"training mode": text_of({name: module.training for name, module in pnet.named_modules()})}
    check_equal(mesh, texts | {"optimizer": text_of(optimizer.settings)}, "ranks must have the same options")
    settings.check_layout(layout)
    captured = settings.cuda_graph is not False and not settings.graph_lacks() and not plan.stochastic
    if settings.cuda_graph is True and not captured:
        raise ValueError("cuda_graph=True: stochastic g-nets draw noise on the CPU, which no graph can replay")
    local, auto = settings.local_steps is not None, settings.rounding == AUTO
    make = LocalTrainStep if local else AutoTrainStep if auto else CapturedTrainStep if captured else TrainStep
    loss_layout = make_layout(plan, Mesh({}), "replicated") if local else layout
    return make(pnet, _make_objective(pnet, loss_fn, loss_layout, settings), optimizer, layout, settings)


def _make_objective(pnet: nn.Module, loss_fn: LossFn, layout: Layout, options: StepOptions) -> Objective:
    ranks, split, scale = layout.mesh.world, None, 1.0
    if options.parallel is not None:
        # Import TensorParallel here, because the import of torch's DTensor takes half a second.
        from gbfunc.parallel.tensor import TensorParallel, resolve

        styles = resolve(pnet, options.parallel)
        split = TensorParallel(pnet, styles, layout.mesh) if layout.mesh.sizes["tensor"] > 1 else None
    if options.amp == torch.float16:
        # Scale the loss against underflow (Micikevicius et al., 2018), but less on several ranks, as sums may overflow.
        scale = 2.0**10 if ranks == 1 else 2.0**4
    # A `Proof` runs the whole p-net on one rank. remat="layer" saves memory: only one layer's weights exist at a time.
    make_full_loss = partial(
        GenomeLoss, pnet, loss_fn, layout, replace(options, compile=False, remat="layer", microbatches=1)
    )
    splits_inputs = split is not None and split.splits_inputs
    regenerate, n = options.remat == "generate", options.microbatches
    make = partial(GenomeLoss if split is None else partial(SplitLoss, split), pnet, loss_fn, layout, options)
    if options.pipeline is not None and layout.mesh.sizes["pipeline"] > 1:
        from gbfunc.parallel.pipeline import Pipeline
        from gbfunc.train.gradients.pipelined import Pipelined

        pieces = {} if split is None else {"adapt": split.shrink}
        pipeline = Pipeline(pnet, options.pipeline, layout.mesh, n, options.stages, **pieces)
        strategy: Strategy = (stages := Pipelined(pipeline, make, loss_fn, scale, regenerate, split, options.amp))
        proof = stages.proof(make_full_loss)
    else:
        loss = make()
        proof = None if split is None or splits_inputs else split_proof(make_full_loss, loss, split)
        if options.compile:
            strategy = CompiledGraph(loss, scale, layout, joint=split is None)
        elif n == 1 and not regenerate:
            strategy = OneGraph(loss, scale)
        else:
            alone = ranks == 1 and options.local_steps is None
            split_batch = partial(equal_parts, n) if alone else partial(parts_of_share, n, splits_inputs)
            strategy = Accumulated(loss, scale, split_batch, regenerate)
    if ranks == 1:
        return Objective(layout.plan, strategy, scale)
    if split is None:
        return RankObjective(layout, strategy, scale, options.check_every, proof)
    return SplitObjective(split, layout, strategy, scale, options.check_every, proof)
