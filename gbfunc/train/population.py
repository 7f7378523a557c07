"""A population: several genomes of one plan, which one vmapped training step trains together.

In small networks, calls of operators take most of the time, and a call for n genomes costs little more than a call for
one genome. Members are independent: each member has its own leaves, noise, loss, gradient norm and learning rate.

Suffixes: n members.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from gbfunc.genome import Noise, check_genome
from gbfunc.train.captured import CapturedTrainStep
from gbfunc.train.gradients.loss import StepInputs, detached, noise_of, seeded
from gbfunc.train.optimizers import OptState
from gbfunc.train.step import StepInfo, TrainState, TrainStep, check_dtypes, checked_state, own_direct, step_seed
from gbfunc.trees import BUFFERS, TensorSpec, compare_trees, flatten_tree, like_genome, refuse_packed, tree_map
from gbfunc.types import Params

# Muon and Adafactor would mix members. ASGD and Rprop do not scale updates by the rate, as `lr_factors` assume.
_REFUSED = ("Muon", "Adafactor", "ASGD", "Rprop")
_VMAP = (
    "the p-net or the loss function failed under torch.func's vmap and grad; if it works with one genome, train the "
    "members one after the other, by the train step"
)


class Population:
    """A training step of n genomes at once: `population(states, batch) -> (states, info)`. See `gb.population`.

    `states` is a `TrainState` whose tensors have the n members as first dimension. `info` is a `StepInfo` of tensors
    [n]. `train_step` is the training step of a single genome, which the population applies to each member.
    """

    def __init__(self, train_step: TrainStep, n: int, lr_factors: Tensor | None, same_batch: bool) -> None:
        self.n, self.train_step = n, train_step
        self._lr_factors, self._same_batch = lr_factors, same_batch
        self._entries: set[tuple[str, str]] | None = None
        self._graphs = train_step.of(self._eager) if isinstance(train_step, CapturedTrainStep) else None

    def init(self, seeds: Sequence[int] | None = None, *, device: torch.device | str | None = None) -> TrainState:
        """Stack the states of `train_step.init(seed)` for all seeds, by default 0, 1, ..., n - 1."""
        seeds = range(self.n) if seeds is None else seeds
        return self.stack([self.train_step.init(seed, device=device) for seed in seeds])

    def stack(self, states: Sequence[TrainState]) -> TrainState:
        """Stack states of `train_step`, one per member, into the states of the population."""
        if len(states) != self.n:
            raise ValueError(f"expected {self.n} members, got {len(states)}")
        return tree_map(lambda *tensors: torch.stack(tensors), *states)

    def member(self, states: TrainState, i: int) -> TrainState:
        """Copy the state of one member, for `gb.save`, `gb.materialize` and `train_step`."""
        return tree_map(lambda x: x[i].clone(), states)

    def __call__(self, states: TrainState, batch: Any) -> tuple[TrainState, StepInfo]:
        """Train every member on one batch. `states` do not change unless `train_step` was made with `donate=True`.

        With `same_batch=False`, member i gets `x[i]` of each tensor x, and all of the batch's numbers and texts.

        Raises:
            FloatingPointError: with `on_nonfinite="raise"`, if a member's loss or gradient is not finite.
            ValueError: the errors of `train_step`. Also if members have different numbers of training steps, if the
                batch contains a packed sequence, or if `torch.func` cannot transform the p-net or the loss function.
        """
        if self._graphs is None:
            return self._eager(states, batch)
        return self._graphs(states, batch, step_seed(int(states.seed[0]), int(states.step[0])))

    def _eager(self, states: TrainState, batch: Any) -> tuple[TrainState, StepInfo]:
        refuse_packed(batch)
        state, step = states, self.train_step
        named, what = checked_state(state), f"the states are not those of a population of {self.n}"
        expected = {k: TensorSpec((self.n, *shape)) for k, shape in step._expected.items()}
        compare_trees(expected, named | flatten_tree(state.buffers, BUFFERS), what)
        if (state.opt.step != state.opt.step[0]).any():
            raise ValueError(f"members must have taken the same number of steps, got {state.opt.step.tolist()}")
        named = named if step._options.donate else own_direct(named)
        flat = {k: named[k].detach() for k in step._trained}
        frozen = {k: named[k] for k in step._frozen}
        buffers = {k: v.clone() for k, v in state.buffers.items()}
        seeds = [step_seed(*both) for both in zip(state.seed.tolist(), state.step.tolist(), strict=True)]
        try:
            loss_n, aux, gradients, buffers = self._gradients(frozen, flat, buffers, batch, seeds)
        except Exception as error:
            raise ValueError(f"{_VMAP}: {error}") from error
        if any(buffers[k].shape != v.shape for k, v in state.buffers.items()):
            check_genome(step.plan, self.member(state._replace(buffers=buffers), 0))
        check_dtypes(state.buffers, buffers)
        norms = torch.stack([torch.linalg.vector_norm(g.reshape(self.n, -1), dim=1) for g in gradients.values()])
        norm_n = torch.linalg.vector_norm(norms, dim=0)
        info = StepInfo(loss_n, norm_n, torch.isfinite(loss_n) & torch.isfinite(norm_n), aux)
        if step._options.clip_norm is not None:
            factor_n = (step._options.clip_norm / (norm_n + 1e-6)).clamp(max=1.0)
            gradients = {k: g * _broadcast(factor_n.to(g.dtype), g) for k, g in gradients.items()}
        return self._committed(state, flat, frozen, gradients, buffers, info), info

    def _gradients(
        self, frozen: Params, trained: Params, buffers: Params, batch: Any, seeds: list[int]
    ) -> tuple[Tensor, Any, Params, Params]:
        objective, plan, same = self.train_step._objective, self.train_step.plan, self._same_batch
        loss, scale, like = objective.strategy.loss, objective.scale, next(iter(trained.values()))
        assert loss is not None
        noises = [noise_of(plan, seed, like) for seed in seeds]
        noise = None if noises[0] is None else tree_map(lambda *tensors: torch.stack(tensors), *noises)
        loss.generator.prepare(frozen | trained)

        def one(leaves: Params, noise: Noise | None, buffers: Params, small: Any) -> Any:
            inputs = StepInputs(leaves, noise, buffers, batch if same else small, 1, True)
            return loss.with_gradients(inputs, [*trained], scale)

        rows = None if same else tree_map(lambda x: 0 if isinstance(x, Tensor) else None, batch)
        dims = (0, None if noise is None else 0, 0, rows)
        with seeded(seeds[0], like.device), torch.enable_grad():
            # Compute vmap(grad). With grad(vmap), a member's loss would not require grad: `loss.on` raises an error.
            many = vmap(one, dims, randomness="different")
            loss_n, aux, buffers, found = many(frozen | trained, noise, buffers, None if same else batch)
            if loss_n.requires_grad:
                loss.gradients(loss_n.sum(), [])
        aux = StepInputs(frozen | trained, None, buffers, None, 1, True).detached(aux)
        # Detach gradients: if the loss function uses other trained modules, gradients would keep the graph alive.
        gradients = {k: g.detach() / scale for k, g in zip(trained, found, strict=True)}
        return loss_n.detach(), aux, gradients, detached(buffers)

    def _committed(
        self, state: TrainState, params: Params, frozen: Params, gradients: Params, buffers: Params, info: StepInfo
    ) -> TrainState:
        if self._lr_factors is not None:
            # Copy the factors to the device once, so that later training steps copy nothing from the CPU.
            self._lr_factors = self._lr_factors.to(info.loss.device)
        step, finite_n, factors_n = self.train_step, info.finite, self._lr_factors
        # Reading `finite_n` would wait for an accelerator, so compute both results on the device and select there.
        choosing = finite_n.device.type != "cpu" or not bool(finite_n.all())
        if choosing and step._options.on_nonfinite == "raise" and not bool(finite_n.all()):
            words = f"loss or gradient of members {(~finite_n).nonzero().flatten().tolist()} is not finite"
            raise FloatingPointError(f"{words}: lower the learning rates; the states are unchanged")
        if choosing:
            gradients = _chosen(finite_n, gradients, {k: torch.zeros_like(g) for k, g in gradients.items()})
        donate = step._options.donate and not choosing and factors_n is None
        shared = self._shared(params)
        one = {k: {e: x[0] if (k, e) in shared else x for e, x in xs.items()} for k, xs in state.opt.leaves.items()}
        old = OptState(state.opt.step[0], one)
        new, opt = step._optimizer.update(gradients, old, params, step._roles, donate=donate)
        if factors_n is not None:
            new = {k: torch.lerp(params[k], v, _broadcast(factors_n.to(v), v)) for k, v in new.items()}
        leaves = {k: dict(entries) for k, entries in opt.leaves.items()}
        for k, e in shared:
            leaves[k][e] = leaves[k][e].expand(self.n, *leaves[k][e].shape).clone()
        if choosing:
            new, buffers = _chosen(finite_n, new, params), _chosen(finite_n, buffers, state.buffers)
        opt = state.opt._replace(step=state.opt.step + 1, leaves=leaves)
        return like_genome(new | frozen, state)._replace(buffers=buffers, opt=opt, step=state.step + 1)

    def _shared(self, params: Params) -> set[tuple[str, str]]:
        if self._entries is None:
            leaves = self.train_step._optimizer.init(params, self.train_step._roles).leaves
            self._entries = {(k, e) for k, xs in leaves.items() for e, x in xs.items() if x.shape != params[k].shape}
        return self._entries


def _broadcast(x_n: Tensor, like: Tensor) -> Tensor:
    return x_n.to(like.device).reshape(-1, *(1,) * (like.ndim - 1))


def _chosen(first_n: Tensor, a: Params, b: Params) -> Params:
    return {k: torch.where(_broadcast(first_n, x), x, b[k]) for k, x in a.items()}


def population(
    train_step: TrainStep, n: int, *, lr_factors: Sequence[float] | Tensor | None = None, same_batch: bool = True
) -> Population:
    """Train n genomes in one vmapped training step, for example with different seeds, learning rates or batches.

    Each member is trained as by `train_step`, except for rounding errors and the random numbers of dropout. If a
    member's loss or gradient is not finite, the member keeps its leaves and buffers, and its optimizer gets a gradient
    of zero. The loss function's `aux` must consist of tensors and numbers.

    Args:
        train_step: the training step of one genome, without a mesh, microbatches, remat or compile.
        n: number of members.
        lr_factors: a factor of the learning rate for each member, by default 1.
        same_batch: True gives the same batch to all members. False gives `x[i]` of the batch's tensors x to member i.

    Raises:
        TypeError: if `train_step` is not a `TrainStep`.
        ValueError: for options that a vmapped training step does not support.

    >>> import gbfunc as gb
    >>> pnet = torch.nn.Linear(6, 3)
    >>> plan = gb.make_plan(pnet, gb.periodic(features=1))
    >>> loss_fn = lambda net, x: net(x).square().mean()
    >>> train_step = gb.make_train_step(plan, pnet, loss_fn, gb.torch_optimizer(torch.optim.Adam, lr=1e-2))
    >>> many = gb.population(train_step, 4, lr_factors=[0.1, 0.3, 1, 3])
    >>> states, info = many(many.init(seeds=[0, 0, 0, 0]), torch.ones(5, 6))
    >>> tuple(info.loss.shape), tuple(many.member(states, 2).direct["bias"].shape)
    ((4,), (3,))
    """
    if not isinstance(train_step, TrainStep):
        raise TypeError(f"a population is made of a train step (gb.make_train_step), got {type(train_step).__name__}")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"a population must have n >= 1 members, got {n!r}")
    options, cls = train_step._options, train_step._optimizer.settings["cls"]
    alone = train_step.mesh.world == options.microbatches == 1 and not options.compile and options.local_steps is None
    if not alone or options.remat != "none" or options.rounding is not None:
        needs = "no mesh, microbatches=1, remat='none', compile=False, rounding=None, local_steps=None"
        raise ValueError(f"a population is one vmapped step: it needs {needs}")
    if refused := [name for name in _REFUSED if issubclass(cls, getattr(torch.optim, name, ()))]:
        words = "mixes members or their learning rates: take SGD, Adam, AdamW or another such class"
        raise ValueError(f"{refused[0]} {words}")
    if lr_factors is None:
        return Population(train_step, n, None, same_batch)
    factors, leaves = torch.as_tensor(lr_factors, dtype=torch.float64), train_step.plan.leaves
    if factors.shape != (n,) or not (factors.isfinite() & (factors >= 0)).all():
        raise ValueError(f"lr_factors must be {n} finite numbers >= 0, got {factors.tolist()}")
    if short := [k for k in train_step._trained if leaves[k].element_size() < 4]:
        dtype = leaves[short[0]].dtype
        raise ValueError(f"lr_factors multiply steps, which {dtype} rounds away: {short[0]!r} needs float32")
    return Population(train_step, n, factors, same_batch)
