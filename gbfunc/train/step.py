"""The training step: a pure function of (state, batch), and the state's `init`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from gbfunc.genome import check_genome, init_genome
from gbfunc.parallel import Layout, Placement, Rows, check_equal, from_rank_0, gather_state, reduce_step, shard_state
from gbfunc.plan import DTYPES, Plan
from gbfunc.pnet import parameter_infos
from gbfunc.train.objective import Objective
from gbfunc.train.optimizers import Optimizer, OptState
from gbfunc.trees import flat_genome, like_genome
from gbfunc.types import Genome, GNets, Params

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
    """`train_step(state, batch) -> (state, info)`, and `train_step.init(seed) -> state`. Made by `make_train_step`.

    Attributes:
        plan: the plan.
        mesh: the ranks that take each step together.
    """

    def __init__(
        self,
        plan: Plan,
        pnet: nn.Module,
        objective: Objective,
        optimizer: Optimizer,
        layout: Layout,
        donate: bool,
        clip_norm: float | None,
        on_nonfinite: Literal["skip", "raise"],
        check_every: int,
    ) -> None:
        self.plan = plan
        self.mesh = layout.mesh
        self._layout = layout
        self._check_every = check_every
        self._checked = False
        self._pnet = pnet
        self._objective = objective
        self._optimizer = optimizer
        self._donate = donate
        self._clip_norm = clip_norm
        self._on_nonfinite = on_nonfinite
        self._roles = {f"gnets/{e.name}/{k}": leaf.role for e in plan.ensembles for k, leaf in e.leaves.items()}
        self._roles |= {f"direct/{t.name}": "direct" for t in plan.direct}
        # Running statistics; caches, which are not persistent, are each rank's own.
        self._averaged = [b.name for b in plan.buffers if b.persistent and DTYPES[b.dtype].is_floating_point]
        direct = {t.name for t in plan.direct}
        self._frozen = {o.name for o in parameter_infos(pnet) if o.name in direct and not o.tensor.requires_grad}

    def init(self, seed: int = 0, *, device: torch.device | str | None = None) -> TrainState:
        """A fresh state; the same seed gives the same genome, whatever the mesh and the placement.

        With a mesh of more than one rank, all of them call this: direct parameters and buffers are those of rank 0's
        p-net, and where the genome is split, each rank gets its part.

        Args:
            seed: of the g-nets, of dropout and of noise: 0 <= seed < 2**63.
            device: where it lives; None is the p-net's own device, with a mesh of many GPUs the mesh's.

        Raises:
            ValueError: for a seed out of range.
            CollectiveError: if a rank is missing.
        """
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ValueError(f"seed must be an int with 0 <= seed < 2**63, got {seed!r}")
        if device is None and self.mesh.world > 1 and self.mesh.device.type != "cpu":
            device = self.mesh.device
        genome = init_genome(self.plan, self._pnet, seed, device=device)
        if self.mesh.world > 1:
            named = flat_genome(genome.gnets, genome.direct) | {f"buffers/{k}": v for k, v in genome.buffers.items()}
            equal = dict(zip(named, from_rank_0(self.mesh, list(named.values())), strict=True))
            buffers = {k: equal[f"buffers/{k}"] for k in genome.buffers}
            genome = Genome(*like_genome(equal, genome.gnets, genome.direct), buffers)
        flat = self._trained(genome.gnets, genome.direct)
        opt = self._optimizer.init(flat, {k: self._roles[k] for k in flat})
        return self.shard(TrainState(*genome, opt, torch.tensor(0), torch.tensor(seed)))

    @property
    def placement(self) -> Placement:
        """Where the genome lives: `"replicated"`, `"sharded"` or `"factors"`."""
        return self._layout.placement

    @property
    def ownership(self) -> Mapping[str, Rows]:
        """Rows `(first, count, total)` of each trained leaf on this rank, by `gnets/ENSEMBLE/LEAF` or `direct/NAME`."""
        return self._layout.ownership

    def shard(self, state: TrainState) -> TrainState:
        """This rank's part of a whole state; the state itself where the genome is not split.

        Raises:
            ValueError: if the state is not a whole one of the plan.
        """
        return shard_state(self._layout, state)

    def gather(self, gnet_params: TrainState) -> TrainState:
        """The whole state, on every rank, for `gb.save`, `gb.generate` and `gb.materialize`; all ranks must call.

        Raises:
            ValueError: if the state is not this rank's part of a state of the plan.
            CollectiveError: if a rank is missing.
        """
        return gather_state(self._layout, gnet_params)

    def _trained(self, gnets: GNets, direct: Params) -> Params:
        return flat_genome(gnets, {k: v for k, v in direct.items() if k not in self._frozen})

    def __call__(self, gnet_params: TrainState, batch: Any) -> tuple[TrainState, StepInfo]:
        """One step on one batch.

        Args:
            gnet_params: the state; untouched unless the step donates.
            batch: what the loss function takes; with microbatches, its tensors are split along their first dimension.
                With a mesh, this rank's share of the global batch (`mesh.shard_batch(batch)`): all its tensors have the
                share's rows as their first dimension, which may be 0, and aux may hold scalars only.

        Raises:
            CollectiveError: if a rank is missing.
            FloatingPointError: for a loss or gradient that is not finite, with `on_nonfinite="raise"`.
            ValueError: for a state that does not fit the plan, a batch that microbatches cannot split, or a loss that
                is no scalar or does not depend on what is trained.
        """
        state = gnet_params
        check_genome(self.plan, state, self._layout.shapes if self._layout.sharded else None)
        flat = {k: v.detach().requires_grad_() for k, v in self._trained(state.gnets, state.direct).items()}
        if self.mesh.world > 1:
            self._check_ranks(state, flat)
        buffers = {k: v.clone() for k, v in state.buffers.items()}
        seed = (int(state.seed) + _MIX * (int(state.step) + 1)) % 2**63
        frozen = {f"direct/{k}": state.direct[k] for k in self._frozen}
        gnets, direct = like_genome(flat | frozen, state.gnets, state.direct)
        found = self._objective(gnets, direct, flat, buffers, batch, seed)
        loss, aux, gradients, _ = found
        if self.mesh.world > 1:
            buffers = {k: v.detach() for k, v in buffers.items()}
            before = {k: state.buffers[k] for k in self._averaged}
            loss, aux, gradients, buffers, norm = reduce_step(
                self._layout, found.rows, loss, aux, gradients, buffers, before
            )
        else:
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
        params, opt = self._update(gradients, state.opt, params)
        gnets, direct = like_genome(params | frozen, state.gnets, state.direct)
        # A module may change a buffer with a graph attached, which must not live from step to step.
        buffers = {k: v.detach() for k, v in buffers.items()}
        return TrainState(gnets, direct, buffers, opt, state.step + 1, state.seed), info

    def _update(self, gradients: Params, opt: OptState, params: Params) -> tuple[Params, OptState]:
        """The optimizer's step on the leaves of which this rank has rows."""
        empty = {k for k in self._layout.split if not len(params[k])}
        own = {k: v for k, v in params.items() if k not in empty}
        roles = {k: self._roles[k] for k in own}
        some = opt._replace(leaves={k: opt.leaves[k] for k in own}) if empty else opt
        gradients = {k: gradients[k] for k in own}
        new, made = self._optimizer.update(gradients, some, own, roles, donate=self._donate)
        if not empty:
            return new, made
        leaves = {k: made.leaves[k] if k in own else opt.leaves[k] for k in params}
        return {k: new[k] if k in own else v for k, v in params.items()}, made._replace(leaves=leaves)

    def _check_ranks(self, state: TrainState, flat: Params) -> None:
        """Compare what must be equal between ranks, at the first step and every so many."""
        if self._checked and (not self._check_every or int(state.step) % self._check_every):
            return
        self._checked = True
        same = {k: v for k, v in flat.items() if k not in self._layout.split}
        what = "ranks must hold the same state (make it by train_step.init(seed), or load the same on all of them)"
        check_equal(self.mesh, {**same, "step": state.step, "seed": state.seed}, what)
        check_equal(self.mesh, {k: flat[k] for k in self._layout.split}, what, "data")


def _global_norm(tensors: list[Tensor]) -> Tensor:
    if not tensors:
        return torch.tensor(0.0)
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t) for t in tensors]))
