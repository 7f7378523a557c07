"""Genomes as EvoTorch's solutions: each judged as it would be alone, in units of its steps."""

import itertools
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gbfunc as gb

pytest.importorskip("evotorch", reason="the extra `evolve`")
pytest.importorskip("gymnasium")

from evotorch.algorithms import CMAES, PGPE, SNES, GeneticAlgorithm
from evotorch.operators import GaussianMutation, OnePointCrossOver

from gbfunc.evolution import STEPS, ControlProblem, GenomeProblem
from gbfunc.tasks.control import Episodes, evaluate, find_environment
from tests.support.zoo import ZOO, dtype_of
from tests.support.zoo import loss_fn as zoo_loss

PLANS: dict[str, dict[str, Any]] = {
    "periodic": {"hypernet": gb.periodic(features=3)},
    "relu": {"hypernet": gb.gnet((4,), activation="relu"), "max_tile": 8},
    "low rank": {"hypernet": gb.low_rank(rank=2)},
    "dense": {"rules": [(".*", None)]},
}
LEARNERS: dict[str, Callable[[Any], Any]] = {
    "PGPE": lambda p: PGPE(p, popsize=32, center_learning_rate=0.5, stdev_learning_rate=0.1, stdev_init=1.0),
    "SNES": lambda p: SNES(p, popsize=32, stdev_init=1.0),
    "CMA-ES": lambda p: CMAES(p, popsize=32, stdev_init=1.0),  # pyright: ignore[reportArgumentType]
    "genetic": lambda p: GeneticAlgorithm(
        p, popsize=32, operators=[OnePointCrossOver(p, tournament_size=2), GaussianMutation(p, stdev=0.5)]
    ),
}


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("evotorch").setLevel(logging.WARNING)


def small(plan: str = "periodic") -> tuple[gb.Plan, nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pnet = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    return gb.make_plan(pnet, **PLANS[plan]), pnet


def loss_fn(net: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


def batches(n: int | None = None) -> Any:
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batch = x, x[:, :3].argmax(-1)
    return itertools.repeat(batch) if n is None else itertools.repeat(batch, n)


def problem(plan: str = "periodic", **options: Any) -> GenomeProblem:
    return GenomeProblem(*small(plan), loss_fn, options.pop("batches", batches()), **options)


def mutants(p: GenomeProblem, n: int = 5) -> Tensor:
    return torch.randn(n, len(p.start_P), generator=torch.Generator().manual_seed(2), dtype=p.start_P.dtype)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_members_have_the_losses_of_their_grown_networks(plan: str, lazy: bool) -> None:
    p, batch = problem(plan, lazy=lazy), next(batches())
    z = mutants(p)
    alone = torch.stack([loss_fn(p.net(one), batch) for one in z])
    for found in (p.losses(z, batch), problem(plan, lazy=lazy, chunk=2).losses(z, batch)):
        torch.testing.assert_close(found, alone.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("animal", ["conv_bn", "grouped_conv", "tied", "attention", "shared", "running"])
def test_odd_pnets_are_judged_as_they_are_in_use(animal: str) -> None:
    pnet = ZOO[animal].pnet().eval()
    plan, batch = ZOO[animal].plan(pnet), ZOO[animal].batch(dtype_of(pnet))
    p = GenomeProblem(plan, pnet, zoo_loss, itertools.repeat(batch))
    z = 3 * mutants(p, 3)
    alone = torch.stack([zoo_loss(p.net(one).eval(), batch).detach() for one in z])
    torch.testing.assert_close(p.losses(z, batch), alone, rtol=1e-4, atol=1e-5)


def test_steps_are_parts_of_each_leafs_deviation() -> None:
    steps = {"code": 0.5, "linear": 0.25, "direct": 2.0}
    plan, pnet = small()
    pnet.get_parameter("2.bias").requires_grad_(False)
    p, start = GenomeProblem(plan, pnet, loss_fn, batches(), steps=steps), gb.init_genome(plan, pnet)
    moved = p.genome(torch.ones_like(p.start_P))
    leaves = [
        (moved.gnets[e.name][k], start.gnets[e.name][k], x.role) for e in plan.ensembles for k, x in e.leaves.items()
    ]
    assert {role for *_, role in leaves} == {"code", "linear"}
    for after, before, role in (*leaves, (moved.direct["0.bias"], start.direct["0.bias"], "direct")):
        expected = steps[role] * before.std(correction=0)
        torch.testing.assert_close(after - before, expected.expand_as(before))
    # Frozen parameters stay.
    assert torch.equal(moved.direct["2.bias"], start.direct["2.bias"])


def test_the_search_starts_where_it_is_told_and_goes_on_in_a_subspace() -> None:
    start = gb.init_genome(*small(), seed=7)
    p = problem(start=start)
    torch.testing.assert_close(p.vector(torch.zeros_like(p.start_P)), gb.flatten(start)[0])
    new = p.generate_values(3)
    assert new[0].abs().max() == 0 < new[1:].abs().min()
    basis = torch.randn(4, len(p.start_P), dtype=torch.float64)
    p = problem(subspace=(4, lambda z: z @ basis))
    assert p.solution_length == 4
    moved = gb.flatten(p.genome(torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=p.start_P.dtype)))[0]
    torch.testing.assert_close(moved, p.start_P + p.steps_P * basis[1])


@pytest.mark.filterwarnings("ignore::UserWarning:evotorch", "ignore::DeprecationWarning:evotorch")  # of its CMA-ES
@pytest.mark.parametrize("name", LEARNERS)
def test_algorithms_lower_the_loss_without_a_gradient(name: str) -> None:
    p, batch = problem(steps={role: 0.2 for role in STEPS}), next(batches())
    searcher = LEARNERS[name](p)
    searcher.run(25)
    losses = p.losses(torch.stack([torch.zeros_like(p.start_P), searcher.status["best"].values.clone()]), batch)
    assert losses[1] < losses[0] - 0.15
    # A genetic algorithm judges parents anew, as the batch is another one.
    assert p.evaluations == 25 * 32 * (2 if name == "genetic" else 1)


def test_a_search_is_repeated_by_its_seed() -> None:
    found = []
    for _ in range(2):
        searcher = LEARNERS["PGPE"](p := problem(seed=3))
        searcher.run(3)
        found.append(gb.flatten(p.genome(searcher.status["center"]))[0])
    assert torch.equal(*found)


def test_stochastic_genomes_have_one_noise_a_generation() -> None:
    plan, batch = gb.make_plan(small()[1], gb.stochastic((4,)), max_tile=8), next(batches())
    first, second = (GenomeProblem(plan, small()[1], loss_fn, batches(), seed=0) for _ in range(2))
    twins = torch.zeros(2, len(first.start_P), dtype=first.start_P.dtype)
    losses = [first.losses(twins, batch) for _ in range(2)]
    assert losses[0][0] == losses[0][1] != losses[1][0]
    assert torch.equal(second.losses(twins, batch), losses[0])


def test_members_without_a_finite_loss_are_the_worst() -> None:
    def broken(net: Any, batch: Any) -> Tensor:
        return torch.where(net[0].weight[0, 0] > 0, loss_fn(net, batch), torch.nan)

    p = GenomeProblem(*small(), broken, batches(), steps={role: 3.0 for role in STEPS})
    batch: Any = p.generate_batch(16)
    p.evaluate(batch)
    losses = p.losses(batch.values.clone().as_subclass(Tensor), next(batches()))
    bad = losses.isnan()
    assert 0 < bad.sum() < 16 and (batch.evals[:, 0][bad] == losses[~bad].max()).all()
    p = GenomeProblem(*small(), lambda net, batch: loss_fn(net, batch) * torch.nan, batches())
    with pytest.raises(FloatingPointError, match="no member"):
        LEARNERS["SNES"](p).run(1)
    with pytest.raises(ValueError, match="no batch is left after 32 evaluations"):
        LEARNERS["SNES"](problem(batches=batches(1))).run(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": {"code": 0.1}}, "a positive number for each of code, linear, direct"),
        ({"steps": dict(STEPS) | {"direct": 0.0}}, "'direct': 0.0"),
        ({"steps": dict(STEPS) | {"gain": 1.0}}, "'gain': 1.0"),
        ({"subspace": (2, lambda z: z)}, "must give"),
        ({"start": gb.init_genome(*small("relu"))}, "does not fit the plan"),
    ],
    ids=["steps", "zero", "role", "subspace", "start"],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        problem(**options)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def instance_norm() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.BatchNorm1d(4), "1.running_mean, 1.running_var, 1.num_batches_tracked"),
        (instance_norm, "1.1.running_mean, 1.1.running_var"),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), "1.parametrizations.weight.0._u"),
        (Counting, "1.calls, which"),
    ],
    ids=["batch norm", "instance norm", "spectral norm", "own"],
)
def test_a_forward_that_changes_buffers_is_refused_by_their_names(make: Callable[[], nn.Module], words: str) -> None:
    pnet = nn.Sequential(nn.Linear(6, 4), make(), nn.Linear(4, 3)).double()
    plan = gb.make_plan(pnet, gb.periodic(2))
    with pytest.raises(ValueError, match=f"must not change buffers in place, got {words}"):
        LEARNERS["SNES"](GenomeProblem(plan, pnet, loss_fn, batches())).run(1)
    if make is not Counting:
        LEARNERS["SNES"](GenomeProblem(plan, pnet.eval(), loss_fn, batches())).run(1)


@pytest.mark.parametrize(("env", "actions"), [("CartPole-v1", 2), ("Pendulum-v1", 1)])
def test_networks_act_as_they_would_alone(env: str, actions: int) -> None:
    inputs = find_environment(env).inputs[0]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pnet = nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, actions))
    p = ControlProblem(gb.make_plan(pnet, gb.periodic(features=2)), pnet, env, steps={role: 1.0 for role in STEPS})
    solution = mutants(p, 1)

    class Policy(nn.Module):
        def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
            out = p.net(solution[0])(obs)
            return (out if actions == 2 else torch.cat([out, out], -1)), out[..., 0]

    alone = evaluate(Policy(), Episodes(find_environment(env), 5, 3))
    torch.testing.assert_close(p.returns(solution, 3, 5)[0], torch.from_numpy(alone), rtol=1e-4, atol=1e-3)


@pytest.mark.process
def test_a_controller_evolves() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pnet = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    steps = {role: 0.5 for role in STEPS}
    p = ControlProblem(gb.make_plan(pnet, gb.periodic(features=2)), pnet, "CartPole-v1", episodes=2, steps=steps)
    searcher = PGPE(p, popsize=16, center_learning_rate=0.5, stdev_learning_rate=0.1, stdev_init=1.0, optimizer="adam")
    searcher.run(10)
    center = searcher.status["center"].clone().as_subclass(Tensor)
    both = p.returns(torch.stack([torch.zeros_like(center), center]), 20, 0).mean(1)
    assert both[1] > both[0] + 20
    assert p.evaluations == 10 * 16 and p.env_steps > 10 * 16 * 2


def test_environments_of_images_are_refused() -> None:
    pytest.importorskip("ale_py")
    with pytest.raises(ValueError, match="must have vectors as observations"):
        ControlProblem(*small(), "ALE/Breakout-v5")
