"""Evolution of genomes: problems for the gradient-free algorithms of EvoTorch (N. E. Toklu et al., 2023).

A solution z stands for the genome `start + steps * z`, where `start` is the vector of `gb.flatten`. All algorithms can
use a standard deviation of 1, because `steps` scales code weights, linear coefficients and direct parameters
separately. One `vmap` generates and evaluates all members of a generation.

Suffixes: n members, E episodes, N environments; z, P, O, A numbers of a solution, genome, observation, action.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import vmap

from gbfunc.extras import import_extra
from gbfunc.generation import make_generator
from gbfunc.genome import check_genome, check_plan, flatten, init_genome, sample_noise
from gbfunc.grown import materialize
from gbfunc.many.rows import unfused
from gbfunc.plan import Plan
from gbfunc.pnet.pure import PureNet
from gbfunc.tasks.control import find_environment, play
from gbfunc.train.gradients.loss import LossFn, loss_and_aux
from gbfunc.trees import DIRECT, GNET, flat_genome
from gbfunc.types import Genome, GenomeLike, Params

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # EvoTorch uses torch.jit.
    import_extra("evotorch", "evolution", "gbfunc[evolve]")
    from evotorch import Problem, SolutionBatch

STEPS: Mapping[str, float] = MappingProxyType({"code": 0.1, "linear": 0.1, "direct": 0.1})
"""Default `steps` of `GenomeProblem`: {role of a tensor: step, in units of its standard deviation at the start}"""


class GenomeProblem(Problem):
    """The search for the genome with the best loss, for example `PGPE(GenomeProblem(...), stdev_init=1.0, ...)`.

    Each generation takes one batch from `batches` and one draw of the noise of stochastic g-nets, for all members. A
    loss that is not finite is replaced by the worst finite loss of the generation. If an algorithm asks for new
    solutions, the first is z = 0 (the start), and the others are standard normal. `evaluations` counts solutions.

    Args:
        plan: the plan. If the plan generates no tensor, the search is for the p-net's own weights.
        pnet: the p-net, in training or evaluation mode as needed; `vmap` does not support `nn.LSTM` and `nn.GRU`.
        loss_fn: `(net, batch) -> loss` or `(loss, aux)`, as in `make_train_step`.
        batches: one batch per generation. `itertools.repeat(batch)` gives the same batch to all generations.
        sense: `"min"` minimizes the loss, `"max"` maximizes it.
        start: the genome at which the search starts; by default, a random genome drawn with `seed`.
        steps: for each role (code, linear, direct), by how much z = 1 changes the numbers of a tensor, in units of
            the tensor's standard deviation at the start. If all numbers of a tensor are equal, the unit is 1.
        subspace: (d, function) for a search in a subspace of dimension d. The function maps a solution, [d], to z, [P].
            See `Projection` in `notebooks/results/subspace.py`.
        lazy: whether layers multiply by factors of weights, as in `make_train_step`.
        chunk: number of members to evaluate at once, to limit memory; by default, all members.
        seed: seed of the start, of the noise, and of the algorithm's random numbers.
        options: options of EvoTorch (https://docs.evotorch.ai/latest/reference/evotorch/core/#evotorch.core.Problem).

    An algorithm's step raises `ValueError` if no batch is left or a forward changes buffers in place, and
    `FloatingPointError` if no member of a generation has a finite loss.
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
        check_plan(plan, pnet)
        genome = init_genome(plan, pnet, seed) if start is None else start
        check_genome(plan, genome)
        self.plan, self.pnet, self.evaluations, self._sense = plan, pnet, 0, sense
        self._loss_fn, self._batches, self._chunk = loss_fn, iter(batches), chunk
        self.start_P, self._unflatten = flatten(genome)
        self.steps_P = _steps(plan, pnet, genome, steps)
        self._buffers = {k: v.detach() for k, v in genome.buffers.items()}
        base = plan.base_tensors(pnet)
        self._weights_of = make_generator(plan, pnet=pnet, lazy=lazy, base=base)
        self._call = PureNet(pnet, self._weights_of.forms, unfused, base)
        self._noise_draws, self._tried = torch.Generator().manual_seed(seed), False
        length, self._expand = subspace if subspace is not None else (len(self.start_P), None)
        if self._expand is not None and self._expand(self.start_P.new_zeros(length)).shape != self.start_P.shape:
            raise ValueError(f"the subspace must give {len(self.start_P)} numbers, got another shape: return [P]")
        where = {"dtype": self.start_P.dtype, "device": self.start_P.device}
        super().__init__(sense, solution_length=length, seed=seed, **where, **options)

    def vector(self, solution_z: Tensor) -> Tensor:
        """Return the genome of a solution [z] as a vector [P] of `gb.flatten`."""
        z_P = solution_z if self._expand is None else self._expand(solution_z)
        return self.start_P + self.steps_P * z_P

    def genome(self, solution_z: Any) -> Genome:
        """Return the genome of a solution: a vector [z], or an algorithm's `status["center"]` or `status["best"]`."""
        values = solution_z if isinstance(solution_z, Tensor) else solution_z.values
        return self._unflatten(self.vector(values.clone().as_subclass(Tensor)).detach())

    def net(self, solution_z: Any) -> nn.Module:
        """Return the network of a solution, generated by `gb.materialize`."""
        return materialize(self.plan, self.genome(solution_z), self.pnet)

    @torch.no_grad()
    def losses(self, solutions_nz: Tensor, batch: Any) -> Tensor:
        """Compute the losses [n] of solutions [n, z] on a batch, with one `vmap`."""
        if (loss_fn := self._loss_fn) is None:
            raise TypeError("a ControlProblem has no losses: use its method returns")

        def loss(weights: Params, buffers: Params) -> Tensor:
            return loss_and_aux(self._call.run(weights, buffers, loss_fn, batch))[0].reshape(())

        grow = self._grower(loss)
        one = vmap(lambda z: loss(grow(z), dict(self._buffers)), randomness="different", chunk_size=self._chunk)
        return one(solutions_nz)

    def _grower(self, call: Callable[[Params, Params], Any]) -> Callable[[Tensor], Params]:
        leaves = flat_genome(self._unflatten(self.start_P))
        # Compute the generator's constants now, because constants cannot be computed inside of `vmap`.
        self._weights_of.prepare(leaves)
        noise = sample_noise(self.plan, self._noise_draws, self.start_P) if self.plan.stochastic else None
        if not self._tried:
            own = {k: x.clone() for k, x in self._buffers.items()}
            call(self._weights_of(leaves, noise), dict(own))
            if changed := [k for k, x in own.items() if not torch.equal(x.nan_to_num(), self._buffers[k].nan_to_num())]:
                raise ValueError(
                    f"a forward must not change buffers in place, got {', '.join(changed)}, which the members of a "
                    "generation share: pnet.eval() keeps the statistics of norms; store other state elsewhere"
                )
            self._tried = True
        return lambda solution_z: self._weights_of(flat_genome(self._unflatten(self.vector(solution_z))), noise)

    def _judged(self, solutions_nz: Tensor) -> Tensor:
        batch = next(self._batches, self)
        if batch is self:
            raise ValueError(f"no batch is left after {self.evaluations} evaluations: pass one batch per generation")
        return self.losses(solutions_nz, batch)

    def _evaluate_batch(self, solutions: SolutionBatch) -> None:
        values: Any = solutions.values
        fitness_n = self._judged(values.clone().as_subclass(Tensor))
        good_n = torch.isfinite(fitness_n)
        if not good_n.any():
            raise FloatingPointError("no member of this generation has a finite fitness: try smaller steps")
        worst = fitness_n[good_n].max() if self._sense == "min" else fitness_n[good_n].min()
        self.evaluations += len(fitness_n)
        solutions.set_evals(torch.where(good_n, fitness_n, worst))

    def _fill(self, values: Tensor) -> None:
        values.normal_(generator=self.generator)
        values[0] = 0.0


def _steps(plan: Plan, pnet: nn.Module, genome: GenomeLike, steps: Mapping[str, float]) -> Tensor:
    if steps.keys() != STEPS.keys() or not all(math.isfinite(v) and v > 0 for v in steps.values()):
        raise ValueError(f"steps must give a positive number for each of {', '.join(STEPS)}, got {dict(steps)}")
    roles = {f"{GNET}{e.name}/{k}": leaf.role for e in plan.ensembles for k, leaf in e.leaves.items()}
    frozen, sizes = {f"{DIRECT}{k}" for k, p in pnet.named_parameters() if not p.requires_grad}, []
    for name, x in sorted((k, x.detach()) for k, x in flat_genome(genome).items() if x.is_floating_point()):
        deviation = float(x.std(correction=0)) if x.numel() > 1 else 0.0
        size = 0.0 if name in frozen else steps[roles.get(name, "direct")] * (deviation or 1.0)
        sizes.append(torch.full_like(x, size).reshape(-1))
    return torch.cat(sizes)


class ControlProblem(GenomeProblem):
    """The search for the genome whose network has the largest return in an environment of gymnasium.

    One `gymnasium.vector.VectorEnv` runs all members at once, each in `episodes` environments per generation. The
    fitness is the mean undiscounted return. `env_steps` counts the steps of all environments, without steps after the
    end of an episode. For observations [E, O], the p-net returns [E, A]. If actions are indices, the A numbers are
    scores, and the action with the largest score is taken. Otherwise, the A numbers are the action, which is clipped to
    the environment's range. `options` are arguments of `GenomeProblem`.
    """

    def __init__(self, plan: Plan, pnet: nn.Module, env: str, *, episodes: int = 1, **options: Any) -> None:
        self.env, self.episodes, self.env_steps = find_environment(env), episodes, 0
        if len(self.env.inputs) != 1:
            raise ValueError(f"environment {env!r} must have vectors as observations, got images {self.env.inputs}")
        super().__init__(plan, pnet, None, (), sense="max", **options)

    @torch.no_grad()
    def returns(self, solutions_nz: Tensor, episodes: int, seed: int) -> Tensor:
        """Compute undiscounted returns [n, E] of solutions [n, z] in E new episodes. `seed` selects the episodes."""
        n, start_EO = len(solutions_nz), self.start_P.new_zeros((episodes, *self.env.inputs))
        weights = vmap(self._grower(lambda weights, buffers: self._call(weights, buffers, start_EO)))(solutions_nz)
        act = vmap(lambda weights, obs_EO: self._call(weights, dict(self._buffers), obs_EO), randomness="different")

        def actions(obs_NO: Tensor) -> Tensor:
            numbers_NA = act(weights, obs_NO.to(self.start_P).unflatten(0, (n, episodes))).flatten(0, 1)
            return (numbers_NA.argmax(-1) if self.env.discrete else numbers_NA).cpu()

        returns_N, steps = play(self.env, n * episodes, seed, actions)
        self.env_steps += steps
        return torch.from_numpy(returns_N).reshape(n, episodes)

    def _judged(self, solutions_nz: Tensor) -> Tensor:
        seed = int(torch.randint(2**31, (), generator=self._noise_draws))
        return self.returns(solutions_nz, self.episodes, seed).mean(1).to(solutions_nz)
