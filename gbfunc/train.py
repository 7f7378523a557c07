"""The training step: a pure function of (state, batch), and the state's `init`."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from gbfunc.genome import check_genome, check_plan, init_genome
from gbfunc.gradients import Lazy, LossFn, Objective, Remat
from gbfunc.optim import Optimizer
from gbfunc.plan import Plan
from gbfunc.pnet import owned_parameters
from gbfunc.trees import flat_genome, like_genome
from gbfunc.types import GNets, Kernel, Params

_MIX = 0x9E3779B97F4A7C15
"""2**64 / golden ratio (Knuth, TAOCP 3, section 6.4): spreads steps over seeds."""


class TrainState(NamedTuple):
    """All that a step carries over: a pytree of tensors.

    Attributes:
        gnets: leaves of every ensemble.
        direct: direct parameters.
        buffers: the p-net's buffers.
        opt: the optimizer's state.
        step: steps taken, int64 on the CPU.
        seed: seed of dropout and noise, int64 on the CPU.
    """

    gnets: GNets
    direct: Params
    buffers: Params
    opt: Any
    step: Tensor
    seed: Tensor


class StepInfo(NamedTuple):
    """What a step reports.

    Attributes:
        loss: the loss, detached, averaged over microbatches.
        grad_norm: Euclidean norm of the genome's gradient before clipping.
        finite: whether loss and gradient are finite; where not, the step changed nothing but `step`.
        aux: what the loss function returned beside the loss, detached, averaged over microbatches; {} without.
    """

    loss: Tensor
    grad_norm: Tensor
    finite: bool
    aux: Any


class TrainStep:
    """`train_step(state, batch) -> (state, info)`, and `train_step.init(seed) -> state`. Made by `make_train_step`."""

    def __init__(
        self,
        plan: Plan,
        pnet: nn.Module,
        objective: Objective,
        optimizer: Optimizer,
        donate: bool,
        clip_norm: float | None,
        on_nonfinite: Literal["skip", "raise"],
    ) -> None:
        self.plan = plan
        self._pnet = pnet
        self._objective = objective
        self._optimizer = optimizer
        self._donate = donate
        self._clip_norm = clip_norm
        self._on_nonfinite = on_nonfinite
        self._roles = {f"gnets/{e.name}/{k}": leaf.role for e in plan.ensembles for k, leaf in e.leaves.items()}
        self._roles |= {f"direct/{t.name}": "direct" for t in plan.direct}
        direct = {t.name for t in plan.direct}
        self._frozen = {o.name for o in owned_parameters(pnet) if o.name in direct and not o.tensor.requires_grad}

    def init(self, seed: int = 0, *, device: torch.device | str | None = None) -> TrainState:
        """A fresh state; the same seed gives the same genome.

        Args:
            seed: of the g-nets, of dropout and of noise: 0 <= seed < 2**63.
            device: where it lives; None is the p-net's own device.

        Raises:
            ValueError: for a seed out of range.
        """
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ValueError(f"seed must be an int with 0 <= seed < 2**63, got {seed!r}")
        genome = init_genome(self.plan, self._pnet, seed, device=device)
        flat = self._trained(genome.gnets, genome.direct)
        opt = self._optimizer.init(flat, {k: self._roles[k] for k in flat})
        return TrainState(*genome, opt, torch.tensor(0), torch.tensor(seed))

    def _trained(self, gnets: GNets, direct: Params) -> Params:
        return flat_genome(gnets, {k: v for k, v in direct.items() if k not in self._frozen})

    def __call__(self, gnet_params: TrainState, batch: Any) -> tuple[TrainState, StepInfo]:
        """One step on one batch.

        Args:
            gnet_params: the state; untouched unless the step donates.
            batch: what the loss function takes; with microbatches, its tensors are split along their first dimension.

        Raises:
            FloatingPointError: for a loss or gradient that is not finite, with `on_nonfinite="raise"`.
            ValueError: for a state that does not fit the plan, a batch that microbatches cannot split, or a loss that
                is no scalar or does not depend on what is trained.
        """
        state = gnet_params
        check_genome(self.plan, state)
        flat = {k: v.detach().requires_grad_() for k, v in self._trained(state.gnets, state.direct).items()}
        buffers = {k: v.clone() for k, v in state.buffers.items()}
        seed = (int(state.seed) + _MIX * (int(state.step) + 1)) % 2**63
        frozen = {f"direct/{k}": state.direct[k] for k in self._frozen}
        gnets, direct = like_genome(flat | frozen, state.gnets, state.direct)
        loss, aux, gradients = self._objective(gnets, direct, flat, buffers, batch, seed)
        norm = _global_norm(list(gradients.values()))
        finite = bool(torch.isfinite(loss) & torch.isfinite(norm))
        info = StepInfo(loss, norm, finite, aux)
        if not finite:
            if self._on_nonfinite == "raise":
                raise FloatingPointError(
                    f"step {int(state.step)}: loss {float(loss)}, gradient norm {float(norm)}; the state is as it was"
                )
            return state._replace(step=state.step + 1), info
        if self._clip_norm is not None:
            factor = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)
            gradients = {k: g * factor for k, g in gradients.items()}
        params = {k: v.detach() for k, v in flat.items()}
        roles = {k: self._roles[k] for k in params}
        params, opt = self._optimizer.update(gradients, state.opt, params, roles, donate=self._donate)
        gnets, direct = like_genome(params | frozen, state.gnets, state.direct)
        # A module may change a buffer with a graph attached, which must not live from step to step.
        buffers = {k: v.detach() for k, v in buffers.items()}
        return TrainState(gnets, direct, buffers, opt, state.step + 1, state.seed), info


def _global_norm(tensors: list[Tensor]) -> Tensor:
    if not tensors:
        return torch.tensor(0.0)
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t) for t in tensors]))


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
            `"layer"` the weights too, each made just before its layer uses it; `"none"` is fastest.
        on_nonfinite: what to do on a loss or gradient that is not finite: `"skip"` keeps the state and reports it,
            `"raise"` raises.
        kernel: implementation of ReLU g-nets.
        compile: generation, p-net and loss become one compiled graph (`torch.compile`); the first step takes long.

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
    check_plan(plan, pnet)
    objective = Objective(
        plan,
        pnet,
        loss_fn,
        microbatches=microbatches,
        amp=amp,
        lazy=lazy,
        remat=remat,
        kernel=kernel,
        compile=compile,
    )
    return TrainStep(plan, pnet, objective, optimizer, donate, clip_norm, on_nonfinite)
