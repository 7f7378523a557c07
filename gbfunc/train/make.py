"""`make_train_step`: all options, checked at the door."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from gbfunc.genome import check_plan
from gbfunc.parallel import Mesh, Placement, check_equal, make_layout, single_rank_mesh
from gbfunc.plan import Plan
from gbfunc.train.loss import Lazy, LossFn, Remat
from gbfunc.train.objective import Objective
from gbfunc.train.optimizers import Optimizer
from gbfunc.train.step import TrainStep
from gbfunc.types import Kernel


def make_train_step(
    plan: Plan,
    pnet: nn.Module,
    loss_fn: LossFn,
    optimizer: Optimizer,
    *,
    donate: bool = False,
    microbatches: int = 1,
    clip_norm: float | None = None,
    amp: torch.dtype | None = None,
    lazy: Lazy = "auto",
    remat: Remat = "none",
    on_nonfinite: Literal["skip", "raise"] = "skip",
    kernel: Kernel = "auto",
    compile: bool = False,
    mesh: Mesh | None = None,
    placement: Placement | Literal["auto"] = "auto",
    check_every: int = 100,
) -> TrainStep:
    """Make the step that trains a genome: pure, `(gnet_params, batch) -> (gnet_params, info)`.

    The p-net is copied without its weights: it is never changed, and the step keeps the training mode it has now.
    Direct parameters that do not require grad stay as they are.

    Args:
        plan: the plan.
        pnet: the p-net that it was made for.
        loss_fn: `(net, batch) -> loss` or `(loss, aux)`, `net` being the p-net as a pure callable.
        optimizer: from `torch_optimizer`.
        donate: the step may update the state's buffers in place: less memory and time; use only the state it returns.
        microbatches: split each batch in so many equal parts; weights are generated once, and the loss is their mean.
        clip_norm: largest Euclidean norm of the genome's gradient.
        amp: `torch.bfloat16` or `torch.float16` runs the p-net under autocast; weights are generated in float32.
        lazy: whether weights stay factors (see `generate`): True wherever they can, False nowhere, `"auto"` where a
            count of operations and bytes says that it pays (at the first batch of a shape, whose loss is then computed
            once more); values are the same up to rounding.
        remat: what backward makes again instead of keeping: `"generate"` what lies between genome and weights,
            `"layer"` the weights too, each made just before its layer uses it (where the genome is split, each
            is gathered once more in backward, none stays factors, and all ranks must use the same layers); `"none"` is
            fastest.
        on_nonfinite: what to do on a loss or gradient that is not finite: `"skip"` keeps the state and reports it,
            `"raise"` raises.
        kernel: implementation of ReLU g-nets.
        compile: generation, p-net and loss become one compiled graph (`torch.compile`); the first step takes long.
        mesh: the ranks (`gb.mesh`) that take each step together, each on its share of the batch: the loss is the mean
            over the global batch, and all ranks call with the same arguments. None is this process alone.
        placement: where the genome lives on the mesh: `"replicated"`, each rank generates every weight, and only the
            genome's gradient is summed; `"sharded"`, each rank along the g-net axis owns an equal share of every
            ensemble's tiles, which are gathered; `"factors"`, the same, but types that have factors gather those;
            `"auto"`, by a count of bytes and operations (`gbfunc.parallel.cost`).
        check_every: steps between checks that ranks hold the same state, 0 for a check of the first step alone.

    Raises:
        ValueError: for options out of range, a p-net that is not the plan's, or one that cannot be a pure function (see
            `check_pnet`).
    """
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(f"microbatches must be an int >= 1, got {microbatches!r}")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm must be a number > 0 or None, got {clip_norm!r}")
    if amp not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"amp must be None, torch.bfloat16 or torch.float16, got {amp!r}")
    for name, value, known in (
        ("lazy", lazy, (True, False, "auto")),
        ("remat", remat, ("none", "generate", "layer")),
        ("on_nonfinite", on_nonfinite, ("skip", "raise")),
        ("kernel", kernel, ("auto", "eager", "compiled", "reference")),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {known}, got {value!r}")
    if compile and (microbatches > 1 or remat != "none"):
        raise ValueError("compile=True decides itself what to keep: it needs microbatches=1 and remat='none'")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must come from gb.torch_optimizer, got {type(optimizer).__name__}")
    if isinstance(check_every, bool) or not isinstance(check_every, int) or check_every < 0:
        raise ValueError(f"check_every must be an int >= 0, got {check_every!r}")
    check_plan(plan, pnet)
    layout = make_layout(plan, single_rank_mesh() if mesh is None else mesh, placement, lazy=lazy is not False)
    if layout.sharded and remat == "layer" and microbatches > 1:
        # Ranks with fewer rows may have fewer microbatches, and would miss the gathers of the others.
        raise ValueError("remat='layer' on a split genome gathers for each use: it needs microbatches=1")
    if layout.sharded and layout.placement == "sharded" and lazy is True:
        raise ValueError("lazy=True needs factors, and placement='sharded' gathers tiles: take placement='factors'")
    what = "ranks must have the same plan (make the p-net after the same torch.manual_seed on all of them)"
    check_equal(layout.mesh, {"plan": plan.to_json(), "placement": layout.placement}, what)
    objective = Objective(
        plan,
        pnet,
        loss_fn,
        layout,
        microbatches=microbatches,
        amp=amp,
        lazy=lazy,
        remat=remat,
        kernel=kernel,
        compile=compile,
    )
    return TrainStep(plan, pnet, objective, optimizer, layout, donate, clip_norm, on_nonfinite, check_every)
