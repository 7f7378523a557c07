"""Local steps: each rank trains on its own rows, and every H steps an outer optimizer applies the ranks' mean update.

The algorithm is DiLoCo (Douillard et al., 2023, algorithm 1, https://arxiv.org/abs/2311.08105), a kind of federated
averaging (Reddi et al., 2021). In a round, rank i trains for H steps, on n_i rows, from the genome theta to theta_i:

    delta = sum_i n_i (theta - theta_i) / sum_i n_i,    theta <- outer optimizer(theta, gradient delta).

The ranks average their genomes and running statistics at the end of a round, instead of gradients in every step. The
state of the inner optimizer, with which a rank trains, stays on the rank.
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
    """One rank's optimizer state: the states of the inner and the outer optimizer, and of the current round."""

    inner: OptState
    rows: Tensor  # number of rows that this rank has trained on in this round, float64
    start: Params  # genome and running statistics at the start of the round, by names such as `direct/bias`
    outer: OptState


class WholeLocalState(NamedTuple):
    """The `LocalState` of every rank. `start` and `outer` are equal on every rank, and therefore stored once."""

    start: Params
    outer: OptState
    ranks: Params  # all other tensors of the state, by names such as `opt/step`, stacked over ranks: [ranks, ...]


torch.serialization.add_safe_globals([LocalState, WholeLocalState])


class LocalTrainStep(TrainStep):
    """A `TrainStep` whose ranks average their genomes every `local_steps` steps. `info` describes this rank's rows."""

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
        """The settings of a `TrainStep`, with `local_steps` and `outer` among the optimizer's options."""
        settings, own = super().settings, {"local_steps": self._length, "outer": self._outer.settings}
        return {**settings, "options": {**settings["options"], **own}}

    def __call__(self, gnet_params: TrainState, batch: Any) -> tuple[TrainState, StepInfo]:
        """Train on this rank's share of the batch. After every `local_steps` steps, ranks average their genomes.

        Raises the errors of `TrainStep`, and ValueError if ranks began a round with different states or have no rows.
        """
        checked_state(gnet_params)
        if not isinstance(gnet_params.opt, LocalState):
            words = "expected this rank's part of a state with local steps, got another state"
            raise ValueError(f"{words}: call train_step.shard(state)")
        rows = n_rows(batch) if self.mesh.world > 1 else None
        if rows == 0:
            raise ValueError(f"rank {self.mesh.rank} has no row of the batch: local steps need one on every rank")
        state = self._start_round(gnet_params)
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
        # `total` is all ranks' number of rows in this round's steps with a finite loss. If it is 0, undo the round.
        outer, (total, mean, new) = local.outer, self._averaged(state)
        if total > 0:
            delta, before = ({k: tensors[k] for k in self._trained} for tensors in (mean, local.start))
            stepped, outer = self._outer.update(delta, outer, before, self._roles)
            new |= stepped
        return _with_leaves(state, _leaves(state) | new)._replace(opt=state.opt._replace(outer=outer)), info

    def shard(self, state: TrainState) -> TrainState:
        """Return this rank's state from the state of all ranks. With a state of a plain `TrainStep`, a round begins."""
        check_genome(self.plan, state)
        saved = state.opt
        if isinstance(saved, LocalState):
            return state
        if not isinstance(saved, WholeLocalState):
            outer = self._outer.init({k: flat_genome(state)[k] for k in self._trained}, self._roles)
            rows = torch.zeros((), dtype=torch.float64, device=next(iter(flat_genome(state).values())).device)
            return self._start_round(state._replace(opt=LocalState(saved, rows, {}, outer)), force=True)
        mine = {name: x[self.mesh.rank].clone() for name, x in saved.ranks.items()}
        trained = {k: mine[k] for k in self._trained}
        opt = unflatten_tree(mine, self._optimizer.init(trained, self._roles), "opt/")
        return _with_leaves(state, mine)._replace(opt=LocalState(opt, mine["rows"], saved.start, saved.outer))

    def gather(self, gnet_params: TrainState) -> TrainState:
        """Return the ranks' mean genome with all optimizer states, on every rank. All ranks must call this method."""
        check_genome(self.plan, gnet_params)
        if not isinstance(gnet_params.opt, LocalState):
            raise ValueError("expected this rank's part of a state, got another state: call train_step.shard(state)")
        state = self._start_round(gnet_params)
        local = state.opt
        ranks = stack_ranks(self.mesh, {**_leaves(state), "rows": local.rows, **flatten_tree(local.inner, "opt/")})
        full = {k: x[0] for k, x in ranks.items()} | self._averaged(state)[2]
        return _with_leaves(state, full)._replace(opt=WholeLocalState(local.start, local.outer, ranks))

    def fitted(self, tensors: Params) -> Params:
        """Give rank r of this mesh the tensors of rank r mod n of the n ranks whose state was saved."""
        if not any(name.startswith(_RANKS) for name in tensors):
            raise ValueError("it is from a training without local steps: load it without local_steps=, then shard it")
        index = torch.arange(self.mesh.world)
        return {k: x[index % len(x)] if k.startswith(_RANKS) else x for k, x in tensors.items()}

    def _start_round(self, state: TrainState, force: bool = False) -> TrainState:
        if int(state.step) % self._length and not force:
            return state
        named, local = _leaves(state), state.opt
        start = {k: named[k].detach().clone() for k in self._exchanged}
        return state._replace(opt=local._replace(start=start, rows=torch.zeros_like(local.rows)))

    def _averaged(self, state: TrainState) -> tuple[Tensor, Params, Params]:
        named, start = _leaves(state), state.opt.start
        changes = [decrease(start[k], named[k]) for k in self._exchanged]
        total, means = weighted_mean(self._layout, state.opt.rows, changes)
        mean = dict(zip(self._exchanged, means, strict=True))
        return total, mean, {k: start[k] - mean[k] if total > 0 else start[k].clone() for k in self._exchanged}


def nesterov(lr: float = 1.0, momentum: float = 0.5) -> Optimizer:
    """Make SGD with Nesterov's momentum. The defaults had the best validation loss in `notebooks/guides/ranks.md`."""
    return torch_optimizer(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)


def _leaves(state: TrainState) -> Params:
    return flat_genome(state) | flatten_tree(state.buffers, BUFFERS)


def _with_leaves(state: TrainState, named: Params) -> TrainState:
    return like_genome(named, state)._replace(buffers=unflatten_tree(named, state.buffers, BUFFERS))
