"""Making a training step: options and arguments checked, on all ranks alike, and what takes the steps chosen."""

import warnings
from dataclasses import replace
from typing import Any

from torch import nn

from gbfunc.formats import AUTO, Steps, check_steps
from gbfunc.genome import check_plan
from gbfunc.parallel import Mesh, check_equal, make_layout, text_of
from gbfunc.plan import Plan
from gbfunc.pnet.describe import eval_mode_warning
from gbfunc.train.allocation import AutoTrainStep
from gbfunc.train.captured import CapturedTrainStep
from gbfunc.train.gradients.choose import make_objective
from gbfunc.train.gradients.loss import LossFn
from gbfunc.train.local import LocalTrainStep
from gbfunc.train.optimizers import Optimizer
from gbfunc.train.options import StepOptions
from gbfunc.train.step import TrainStep


def make_train_step(plan: Plan, pnet: nn.Module, loss_fn: LossFn, optimizer: Optimizer, **options: Any) -> TrainStep:
    """Make the step that trains a genome: pure, `(gnet_params, batch) -> (gnet_params, info)`.

    The p-net is copied without its weights and never changed; the step keeps the training mode of now. Direct
    parameters that do not require grad stay as they are.

    Args:
        plan: the plan.
        pnet: the p-net that it was made for.
        loss_fn: `(net, batch) -> loss` or `(loss, aux)`. `net` is the p-net on its generated weights: its parts can be
            called and its tensors read, as in an ordinary module. A loss function does not change `net` and does not
            keep it: the guide "The contract" lists the rules for p-nets and loss functions.
        optimizer: from `torch_optimizer`.
        **options: fields of `StepOptions`, which says what each means.

    Raises:
        TypeError: for an unknown option.
        ValueError: for options out of range, a p-net that is not the plan's, or one that cannot be a pure function (see
            `check_pnet`).
    """
    given = StepOptions(**options)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must come from gb.torch_optimizer, got {type(optimizer).__name__}")
    check_plan(plan, pnet)
    if (word := eval_mode_warning(pnet)) is not None:
        warnings.warn(word, UserWarning, stacklevel=2)
    if isinstance(given.rounding, Steps):
        check_steps(plan, given.rounding)
    mesh = Mesh({}) if given.mesh is None else given.mesh
    whole = (given.local_steps is not None or given.rounding == AUTO) and given.placement == "auto"
    layout = make_layout(plan, mesh, "replicated" if whole else given.placement, lazy=given.lazy is not False)
    what = "ranks must have the same plan (make the p-net after the same torch.manual_seed on all of them)"
    check_equal(mesh, {"plan": plan.to_json(), "placement": layout.placement}, what)
    texts = {"options": text_of(replace(given, mesh=None, parallel=None, outer=None))}
    texts |= {"parallel": text_of(given.parallel), "outer": text_of(given.outer and given.outer.settings)}
    texts |= {"what requires grad": text_of({name: x.requires_grad for name, x in pnet.named_parameters()})}
    texts |= {"training mode": text_of({name: module.training for name, module in pnet.named_modules()})}
    check_equal(mesh, texts | {"optimizer": text_of(optimizer.settings)}, "ranks must have the same options")
    given.check_layout(layout)
    captured = given.captures and not plan.stochastic
    if given.cuda_graph is True and not captured:
        raise ValueError("cuda_graph=True: stochastic g-nets draw noise on the CPU, which no graph can replay")
    local, auto = given.local_steps is not None, given.rounding == AUTO
    make = LocalTrainStep if local else AutoTrainStep if auto else CapturedTrainStep if captured else TrainStep
    of = make_layout(plan, Mesh({}), "replicated") if local else layout
    return make(pnet, make_objective(pnet, loss_fn, of, given), optimizer, layout, given)
