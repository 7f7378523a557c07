"""Local steps: each rank trains on its rows, and every so many steps an outer step takes the mean of the changes.

DiLoCo (Douillard et al., 2023, algorithm 1, https://arxiv.org/abs/2311.08105), a federated average (Reddi et al., 2021)
of ranks. In a round of H steps each rank takes H inner steps from the genome theta that all have, and comes to theta_i.
With n_i rows of the batches that it has counted,

    delta = sum_i n_i (theta - theta_i) / sum_i n_i,    theta <- outer optimizer(theta, gradient delta),

an all-reduce of the genome in H steps, not in each. Inner optimizers keep their states, which never travel. Running
statistics become their means.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gbfunc.genome import check_genome
from gbfunc.parallel import Layout, Mesh, check_equal, decrease, make_layout, stack_ranks, weighted_mean
from gbfunc.train.gradients.loss import Objective
from gbfunc.train.gradients.ranks import RANK_MIX, SAME_STATE
from gbfunc.train.optimizers import Optimizer, OptState, torch_optimizer
from gbfunc.train.options import StepOptions
from gbfunc.train.step import StepInfo, TrainState, TrainStep, checked_state
from gbfunc.trees import BUFFERS, flat_genome, flatten_tree, like_genome, n_rows, unflatten_tree
from gbfunc.types import Params

_RANKS = "opt/ranks/"


class LocalState(NamedTuple):
    """The optimizer's state of a training with local steps, on a rank."""

    inner: OptState
    rows: Tensor  # that this rank has counted since the round began, float64
    start: Params  # the genome and running statistics when the round began, by flat name
    outer: OptState


class WholeLocalState(NamedTuple):
    """The state of all ranks, which have equal `start` and `outer`."""

    start: Params
    outer: OptState
    ranks: Params  # the rest, by flat name, [ranks, ...] each


torch.serialization.add_safe_globals([LocalState, WholeLocalState])


class LocalTrainStep(TrainStep):
    """A `TrainStep` whose ranks exchange the genomes' changes after every `local_steps` steps; reports its own rows."""

    def __init__(
        self, pnet: nn.Module, objective: Objective, optimizer: Optimizer, layout: Layout, options: StepOptions
    ) -> None:
        super().__init__(pnet, objective, optimizer, layout, options)
        alone = make_layout(layout.plan, Mesh({}), "replicated")
        self._inner = TrainStep(pnet, objective, optimizer, alone, options)
        self._outer = options.outer or nesterov()
        self._length, self._checked = options.local_steps or 1, False
        self._exchanged = [*self._trained, *sorted(f"{BUFFERS}{b.name}" for b in layout.plan.averaged)]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a step, with the local steps in the optimizer's options."""
        settings, own = super().settings, {"local_steps": self._length, "outer": self._outer.settings}
        return {**settings, "options": {**settings["options"], **own}}

    def __call__(self, gnet_params: TrainState, batch: Any) -> tuple[TrainState, StepInfo]:
        """One step on this rank's share of the batch; all ranks exchange after every `local_steps` steps.

        Raises as a step of one process, ValueError for ranks that differ in what must be equal, and for no rows.
        """
        checked_state(gnet_params)
        if not isinstance(gnet_params.opt, LocalState):
            words = "a state of other steps or a whole state becomes this rank's part by train_step.shard(state)"
            raise ValueError(words)
        rows = n_rows(batch) if self.mesh.world > 1 else None
        if rows == 0:
            raise ValueError(f"rank {self.mesh.rank} has no row of the batch: local steps need one on every rank")
        state = self._begun(gnet_params)
        start, local = int(state.step), state.opt
        every = self._options.check_every // self._length or 1
        if not self._checked or (self._options.check_every and start % (every * self._length) == 0):
            self._checked = True
            same = {**local.start, "step": str(start), "seed": str(int(state.seed))}
            check_equal(self.mesh, same | flatten_tree(local.outer, "outer/"), SAME_STATE)
        own = (int(state.seed) + RANK_MIX * self.mesh.shard) % 2**63
        seed = torch.tensor(own, dtype=torch.int64, device="cpu")
        new, info = self._inner(state._replace(opt=local.inner, seed=seed), batch)
        counted = local.rows + (1 if rows is None else rows) * info.finite.to(local.rows)
        state = new._replace(opt=local._replace(inner=new.opt, rows=counted), seed=state.seed)
        if (start + 1) % self._length:
            return state, info
        # The state before the round if no rank had a finite step.
        outer, (total, mean, new) = local.outer, self._averaged(state)
        if total > 0:
            delta, before = ({k: of[k] for k in self._trained} for of in (mean, local.start))
            stepped, outer = self._outer.update(delta, outer, before, self._roles)
            new |= stepped
        return _with_leaves(state, _leaves(state) | new)._replace(opt=state.opt._replace(outer=outer)), info

    def shard(self, state: TrainState) -> TrainState:
        """This rank's part of a whole state; one of a step without `local_steps` begins a round."""
        check_genome(self.plan, state)
        whole = state.opt
        if isinstance(whole, LocalState):
            return state
        if not isinstance(whole, WholeLocalState):
            outer = self._outer.init({k: flat_genome(state)[k] for k in self._trained}, self._roles)
            rows = torch.zeros((), dtype=torch.float64, device=next(iter(flat_genome(state).values())).device)
            return self._begun(state._replace(opt=LocalState(whole, rows, {}, outer)), anyway=True)
        mine = {name: x[self.mesh.rank].clone() for name, x in whole.ranks.items()}
        trained = {k: mine[k] for k in self._trained}
        opt = unflatten_tree(mine, self._optimizer.init(trained, self._roles), "opt/")
        return _with_leaves(state, mine)._replace(opt=LocalState(opt, mine["rows"], whole.start, whole.outer))

    def gather(self, gnet_params: TrainState) -> TrainState:
        """The whole state, on every rank, with the plain mean of the ranks' genomes; all ranks must call."""
        check_genome(self.plan, gnet_params)
        if not isinstance(gnet_params.opt, LocalState):
            raise ValueError("the state is not this rank's part: train_step.shard(state) makes it of a whole one")
        state = self._begun(gnet_params)
        local = state.opt
        ranks = stack_ranks(self.mesh, {**_leaves(state), "rows": local.rows, **flatten_tree(local.inner, "opt/")})
        whole = {k: x[0] for k, x in ranks.items()} | self._averaged(state)[2]
        return _with_leaves(state, whole)._replace(opt=WholeLocalState(local.start, local.outer, ranks))

    def fitted(self, tensors: Params) -> Params:
        """A saved whole state's tensors, flat by name, for as many ranks as there are: rank r gets those of r mod n."""
        if not any(name.startswith(_RANKS) for name in tensors):
            raise ValueError("it is of a training without local steps: train_step.shard(state) begins some from it")
        index = torch.arange(self.mesh.world)
        return {k: x[index % len(x)] if k.startswith(_RANKS) else x for k, x in tensors.items()}

    def _begun(self, state: TrainState, anyway: bool = False) -> TrainState:
        """Copy the leaves that a round starts from, since a step may donate them."""
        if int(state.step) % self._length and not anyway:
            return state
        named, local = _leaves(state), state.opt
        start = {k: named[k].detach().clone() for k in self._exchanged}
        return state._replace(opt=local._replace(start=start, rows=torch.zeros_like(local.rows)))

    def _averaged(self, state: TrainState) -> tuple[Tensor, Params, Params]:
        """The rows of all ranks, the mean of the ranks' changes, and the leaves after the mean change."""
        named, start = _leaves(state), state.opt.start
        changes = [decrease(start[k], named[k]) for k in self._exchanged]
        total, means = weighted_mean(self._layout, state.opt.rows, changes)
        mean = dict(zip(self._exchanged, means, strict=True))
        return total, mean, {k: start[k] - mean[k] if total > 0 else start[k].clone() for k in self._exchanged}


def nesterov(lr: float = 1.0, momentum: float = 0.5) -> Optimizer:
    """The outer optimizer, by default what trained a genome best (`notebooks/guides/ranks.md`)."""
    return torch_optimizer(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)


def _leaves(state: TrainState) -> Params:
    return flat_genome(state) | flatten_tree(state.buffers, BUFFERS)


def _with_leaves(state: TrainState, named: Params) -> TrainState:
    return like_genome(named, state)._replace(buffers=unflatten_tree(named, state.buffers, BUFFERS))
