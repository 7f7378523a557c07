"""Genomes that evolve: problems for EvoTorch's algorithms, whose solutions are genomes and need no gradient.

A solution z is a genome's way from where the search starts, in units of its steps: `start + steps * z`, where `start`
is the vector of `gb.flatten`. So a standard deviation of 1 is right for every algorithm, CMA-ES with its single one
among them, and the steps say what that means for code weights, linear coefficients and direct parameters. The members
of a generation grow and are judged by one `vmap`.

EvoTorch: N. E. Toklu et al., 2023 (https://docs.evotorch.ai).

Suffixes: n members, z numbers of a solution, P of a genome, E episodes, N environments, O numbers of an observation.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm

from gbfunc.extras import import_extra
from gbfunc.generate import make_generator
from gbfunc.genome import Noise, check_genome, flatten, init_genome, sample_noise
from gbfunc.materialize import materialize
from gbfunc.plan import Plan
from gbfunc.pnet import RunnableNet
from gbfunc.tasks.control import find_environment, make_envs, step_envs
from gbfunc.train.gradients.loss import LossFn, loss_and_aux
from gbfunc.trees import DIRECT, GNET, flat_genome
from gbfunc.types import Genome, GenomeLike, Params

with warnings.catch_warnings():
    # Of torch.jit, which EvoTorch uses.
    warnings.simplefilter("ignore", DeprecationWarning)
    import_extra("evotorch", "evolution", "gbfunc[evolve]")
    from evotorch import Problem, SolutionBatch

STEPS: Mapping[str, float] = MappingProxyType({"code": 0.1, "linear": 0.1, "direct": 0.1})
"""Steps by role of leaf, as parts of the deviation that a leaf has at the start."""


class GenomeProblem(Problem):
    """The numbers of a genome, to be found by their network's loss: `PGPE(GenomeProblem(...), stdev_init=1.0, ...)`.

    The members of a generation see the same batch, the next one of `batches`, and the same noise of stochastic g-nets.
    A loss that is not finite counts as the worst of its generation. New solutions are the start (z = 0) and, where more
    are asked for, mutants of it, z being standard normal.

    Args:
        plan: the plan. One whose rules keep every tensor direct makes a problem of the p-net's own weights.
        pnet: the p-net that it was made for; its training mode counts. `vmap` must know its operations: it does not
            know those of `nn.LSTM` and `nn.GRU`.
        loss_fn: `(net, batch) -> loss` or `(loss, aux)`, as for `make_train_step`.
        batches: a batch for each generation, in whatever form `loss_fn` takes; `itertools.repeat(batch)` for the same.
        sense: whether the loss is to be as small as can be, or as large.
        start: the genome where the search starts; None draws one from `seed`.
        steps: by role of leaf (code, linear, direct), what z = 1 stands for: a part of the deviation that the numbers
            of a leaf have at the start (of 1, where they are all alike).
        subspace: numbers d of a solution and a function [d] -> [P] from it to z of all numbers, for a search in a part
            of the genomes (see `gbfunc.lab.compare.subspace.Projection`); None searches all of them.
        lazy: whether weights stay factors, as for `make_train_step`.
        chunk: members that grow at once, which bounds memory; None is all.
        seed: of the start, of noise, and of what the algorithm draws.
        options: EvoTorch's (https://docs.evotorch.ai/latest/reference/evotorch/core/#evotorch.core.Problem).

    Attributes:
        plan: the plan.
        pnet: the p-net.
        evaluations: members judged so far.

    Raises:
        TypeError: if `start` is no genome.
        ValueError: if it, the p-net or the subspace does not fit the plan, for a step that is not positive or of an
            unknown role, or, from the algorithm's step, if the batches are at an end.
        FloatingPointError: from the algorithm's step, if no member of a generation has a finite loss.
    """

    def __init__(
        self,
        plan: Plan,
        pnet: nn.Module,
        loss_fn: LossFn | None,
        batches: Iterable[Any],
        *,
        sense: Literal["min", "max"] = "min",
        start: GenomeLike | None = None,
        steps: Mapping[str, float] = STEPS,
        subspace: tuple[int, Callable[[Tensor], Tensor]] | None = None,
        lazy: bool | Literal["auto"] = "auto",
        chunk: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        fresh = init_genome(plan, pnet, seed)
        genome = fresh if start is None else start
        check_genome(plan, genome)
        for name, module in pnet.named_modules():
            if isinstance(module, _BatchNorm) and module.training and module.running_mean is not None:
                raise ValueError(f"{name!r} changes its running statistics, which members share: pnet.eval()")
        if chunk is not None and (type(chunk) is not int or chunk < 1):
            raise ValueError(f"chunk must be a positive number of members, got {chunk!r}")
        self.plan, self.evaluations, self._sense = plan, 0, sense
        self.start_P, self._unflatten = flatten(genome)
        frozen = {f"{DIRECT}{k}" for k, p in pnet.named_parameters() if not p.requires_grad}
        self.steps_P = _steps(plan, genome, steps, frozen)
        self.pnet, self._loss_fn, self._batches, self._chunk = pnet, loss_fn, iter(batches), chunk
        self._buffers = {k: v.detach() for k, v in genome.buffers.items()}
        base = plan.base_tensors(pnet)
        self._weights_of = make_generator(plan, pnet=pnet, lazy=lazy, base=base)
        self._call = RunnableNet(pnet, self._weights_of.forms, frozen=base)
        self._noise_draws = torch.Generator().manual_seed(seed)
        length, self._expand = subspace if subspace is not None else (len(self.start_P), None)
        if self._expand is not None and self._expand(self.start_P.new_zeros(length)).shape != self.start_P.shape:
            raise ValueError(f"the subspace must give {len(self.start_P)} numbers, got another shape")
        where = {"dtype": self.start_P.dtype, "device": self.start_P.device}
        super().__init__(sense, solution_length=length, seed=seed, **where, **options)

    def vector(self, solution_z: Tensor) -> Tensor:
        """The genome of a solution [z] as a vector [P] of `gb.flatten`."""
        z_P = solution_z if self._expand is None else self._expand(solution_z)
        return self.start_P + self.steps_P * z_P

    def genome(self, solution_z: Any) -> Genome:
        """The genome of a solution: a vector [z], or what an algorithm's `status` has under `"center"` or `"best"`."""
        values = solution_z if isinstance(solution_z, Tensor) else solution_z.values
        return self._unflatten(self.vector(values.clone().as_subclass(Tensor)).detach())

    def net(self, solution_z: Any) -> nn.Module:
        """The network that a solution grows, as `gb.materialize` gives it."""
        return materialize(self.plan, self.genome(solution_z), self.pnet)

    @torch.no_grad()
    def losses(self, solutions_nz: Tensor, batch: Any) -> Tensor:
        """The losses [n] of some solutions [n, z] on a batch, by one `vmap`."""
        loss_fn = self._loss_fn
        if loss_fn is None:
            raise TypeError("a problem of control has no losses: see its method returns")
        noise = self._drawn_noise()

        def one(solution_z: Tensor) -> Tensor:
            weights = self._grown(solution_z, noise)
            return loss_and_aux(self._call.run(weights, dict(self._buffers), loss_fn, batch))[0].reshape(())

        chunk = None if self._chunk is None or len(solutions_nz) <= self._chunk else self._chunk
        return vmap(one, randomness="different", chunk_size=chunk)(solutions_nz)

    def _drawn_noise(self) -> Noise | None:
        """Noise of stochastic g-nets, after the constants were made, which cannot be inside of `vmap`."""
        self._weights_of.prepare(flat_genome(self._unflatten(self.start_P)))
        return sample_noise(self.plan, self._noise_draws, self.start_P) if self.plan.stochastic else None

    def _grown(self, solution_z: Tensor, noise: Noise | None) -> Params:
        """The weights of a solution, in their forms."""
        return self._weights_of(flat_genome(self._unflatten(self.vector(solution_z))), noise)

    def _judged(self, solutions_nz: Tensor) -> Tensor:
        """Fitness [n] of a generation."""
        batch = next(self._batches, self)
        if batch is self:
            raise ValueError(f"the batches are at an end after {self.evaluations} evaluations: give one per generation")
        return self.losses(solutions_nz, batch)

    def _evaluate_batch(self, solutions: SolutionBatch) -> None:
        values: Any = solutions.values
        fitness_n = self._judged(values.clone().as_subclass(Tensor))
        good_n = torch.isfinite(fitness_n)
        if not bool(good_n.any()):
            raise FloatingPointError("no member of this generation has a finite fitness: smaller steps may help")
        worst = fitness_n[good_n].max() if self._sense == "min" else fitness_n[good_n].min()
        self.evaluations += len(fitness_n)
        solutions.set_evals(torch.where(good_n, fitness_n, worst))

    def _fill(self, values: Tensor) -> None:
        values.normal_(generator=self.generator)
        values[0] = 0.0


def _steps(plan: Plan, genome: GenomeLike, steps: Mapping[str, float], frozen: Collection[str]) -> Tensor:
    """What z = 1 stands for, of every number of the genome's vector [P]; of what is frozen, nothing."""
    bad = {k: v for k, v in steps.items() if k not in STEPS or not (math.isfinite(v) and v > 0)}
    if bad or STEPS.keys() - steps.keys():
        raise ValueError(f"steps must give a positive number for each of {', '.join(STEPS)}, got {dict(steps)}")
    roles = {f"{GNET}{e.name}/{k}": leaf.role for e in plan.ensembles for k, leaf in e.leaves.items()}
    roles |= {f"{DIRECT}{t.name}": "direct" for t in plan.direct}
    leaves: Params = flat_genome(genome)
    sizes: Params = {}
    for name, leaf in leaves.items():
        x = leaf.detach()
        if x.is_floating_point():
            deviation = float(x.std(correction=0)) if x.numel() > 1 else 0.0
            size = 0.0 if name in frozen else steps[roles[name]] * (deviation if deviation > 0 else 1.0)
            sizes[name] = torch.full_like(x, size)
    return torch.cat([sizes[k].reshape(-1) for k in sorted(sizes)])


class ControlProblem(GenomeProblem):
    """Genomes whose networks act in an environment of gymnasium's, to be found by their return.

    All members act at once, each in as many environments as it has episodes, in one `gymnasium.vector.VectorEnv`. The
    fitness is the mean undiscounted return of a generation's own episodes.

    Attributes:
        env_steps: steps of all environments so far, those of episodes that had not ended.

    Args:
        plan: the plan.
        pnet: `net(observations [E, O])` gives a number for each choice [E, A], of which the largest is taken, or the
            numbers of an action [E, A], which are clipped to the environment's range.
        env: the environment's name.
        episodes: of each member in a generation.
        options: as for `GenomeProblem`, but for `sense`.

    Raises:
        ImportError: without gymnasium, or what the environment needs.
        ValueError: for an environment that is not known or has no vectors as observations, or what `GenomeProblem`
            refuses.
    """

    def __init__(self, plan: Plan, pnet: nn.Module, env: str, *, episodes: int = 1, **options: Any) -> None:
        if type(episodes) is not int or episodes < 1:
            raise ValueError(f"episodes must be a positive number, got {episodes!r}")
        self.env, self.episodes, self.env_steps = find_environment(env), episodes, 0
        if len(self.env.inputs) != 1:
            raise ValueError(f"environment {env!r} must have vectors as observations, got images {self.env.inputs}")
        super().__init__(plan, pnet, None, (), sense="max", **options)

    @torch.no_grad()
    def returns(self, solutions_nz: Tensor, episodes: int, seed: int) -> Tensor:
        """Undiscounted returns [n, E] of some solutions [n, z] in fresh episodes, whose starts the seed decides."""
        n, noise = len(solutions_nz), self._drawn_noise()
        weights = vmap(lambda solution_z: self._grown(solution_z, noise))(solutions_nz)
        act = vmap(lambda weights, obs_EO: self._call(weights, dict(self._buffers), obs_EO), randomness="different")
        envs = make_envs(self.env.id, n * episodes)
        returns_N, running_N = np.zeros(n * episodes), np.ones(n * episodes, bool)
        try:
            obs_NO = self.env.reset(envs, seed)
            while running_N.any():
                numbers_NA = act(weights, obs_NO.unflatten(0, (n, episodes))).flatten(0, 1)
                actions = numbers_NA.argmax(-1) if self.env.discrete else numbers_NA
                array_NO, rewards_N, terminated_N, truncated_N = step_envs(envs, actions.cpu())
                obs_NO = self.env.seen(array_NO).to(self.start_P)
                self.env_steps += int(running_N.sum())
                returns_N += rewards_N * running_N
                running_N &= ~(terminated_N | truncated_N)
        finally:
            envs.close()
        return torch.from_numpy(returns_N).reshape(n, episodes)

    def _judged(self, solutions_nz: Tensor) -> Tensor:
        seed = int(torch.randint(2**31, (), generator=self._noise_draws))
        return self.returns(solutions_nz, self.episodes, seed).mean(1).to(solutions_nz)
