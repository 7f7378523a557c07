"""Compute the tables of evolution.md: `python notebooks/results/evolution.py TABLE`, such as digits or mnist.

The script uses one thread. Within a table, all searches have the same population, batches and number of evaluations.
`--step` gives the step size. Without `--step`, several step sizes are tried with seed 100 for a quarter of the
evaluations, and the best on validation images or episodes is chosen. The search of a genome has one step size for code
weights and one for all other numbers, except in the table widths, where both are equal. The search is then run with
seeds 0 to 2. The network that is measured is not the last center of the search, which is noisy, but a mean of all
centers. In this mean, a weight halves in 35 of 1,000 generations.
"""

import argparse
import itertools
import json
import logging
import os
import statistics
import time
from collections import Counter
from typing import Any, NamedTuple

import torch
from evotorch.algorithms import CMAES, PGPE, SNES
from subspace import Projection
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.evolution import ControlProblem, GenomeProblem
from gbfunc.tasks import accuracy, endless_batches, find_task, loss_fn
from gbfunc.tasks.control import find_environment

DENSE: Any = {"rules": [(".*", None)]}
"""Options of a plan in which every tensor is direct, so that the search is over the p-net's weights."""


class Size(NamedTuple):
    """The size of a search, equal for all rows of a table."""

    generations: int
    members: int
    rows: int  # images per evaluation
    noise: float  # standard deviation of the noise on the images


SIZES = {"digits": Size(1000, 128, 128, 0.4), "mnist": Size(1000, 128, 128, 0.0), "widths": Size(1000, 16, 128, 0.4)}
Step = tuple[float, ...]
"""Step size of the code weights and of all other numbers, or one step size of all numbers."""

STEPS = ((0.02,), (0.05,), (0.15,), (0.4,))
LARGE_STEPS = ((0.05,), (0.15,), (0.4,), (0.8,))


def by_role(step: Step) -> dict[str, float]:
    """Return the step size of each role of leaves."""
    return {"code": step[0], "linear": step[-1], "direct": step[-1]}


PAIRS = tuple(itertools.product((0.03, 0.06, 0.12, 0.24), (0.06, 0.15, 0.4)))


def algorithm(name: str, problem: Any, members: int) -> Any:
    """Make a search algorithm of EvoTorch. Its step sizes are in units of the problem's step sizes."""
    if name == "SNES":
        return SNES(problem, popsize=members, stdev_init=1.0)
    if name == "CMA-ES":
        return CMAES(problem, popsize=members, stdev_init=1.0)
    return PGPE(
        problem,
        popsize=members,
        center_learning_rate=0.3,
        stdev_learning_rate=0.1,
        stdev_init=1.0,
        optimizer="adam",
    )


def noisy_batches(task: Any, size: Size, seed: int) -> Any:
    """Yield batches of images with noise, without end."""
    draws = torch.Generator().manual_seed(seed + 1)
    for x, y in endless_batches(task.train, size.rows, torch.Generator().manual_seed(seed)):
        yield x + size.noise * torch.randn(x.shape, generator=draws), y


def problem_of(what: str, task: Any, hidden: int, numbers: int, step: Step, size: Size, seed: int) -> GenomeProblem:
    """Make the search problem of a genome, of dense weights, of a small dense net or of a random subspace."""
    if what == "small dense net":
        inputs, classes = task.train.x[0].numel(), task.interface.outputs
        hidden = (numbers - classes) // (inputs + 1 + classes)
    sized = task.with_pnet(task.pnet.scaled(hidden / task.pnet.config["hidden"][0]))
    net = sized.build(seed)
    plan = sized.plan(net, genome_params=numbers) if what == "genome" else gb.make_plan(net, **DENSE)
    subspace = None
    if what == "random subspace":
        drawn = Projection(numbers, plan.genome_params, seed)
        # Scale the projection: z with standard deviation 1 moves every weight by about its step size.
        subspace = numbers, lambda z: drawn(z) * (drawn.D / drawn.d) ** 0.5
    steps = by_role(step)
    batches = noisy_batches(sized, size, seed)
    return GenomeProblem(plan, net, loss_fn, batches, steps=steps, subspace=subspace, seed=seed)


def search(problem: Any, name: str, generations: int, members: int, weight: float = 0.02) -> Tensor:
    """Run a search. Return the mean of its centers, in which the last center has the weight `weight`."""
    searcher, mean = algorithm(name, problem, members), torch.zeros(problem.solution_length)
    for generation in range(1, generations + 1):
        searcher.step()
        center = searcher.status["center"].clone().as_subclass(Tensor).detach()
        mean = torch.lerp(mean, center, max(weight, 1 / generation))
    return mean


def choices(table: str, what: str) -> tuple[Step, ...]:
    """Return the step sizes that are tried."""
    if table == "widths":
        return LARGE_STEPS
    return PAIRS if what == "genome" else STEPS


@torch.no_grad()
def score(net: nn.Module, task: Any, table: str) -> float:
    """Return the accuracy on validation images. For the table widths, return minus the loss."""
    return -float(loss_fn(net, (task.val.x, task.val.y))[0]) if table == "widths" else accuracy(net, task.val)


def images(
    table: str, rivals: list[tuple[str, str, int]], numbers: int, seeds: int, data: str | None, given: Step | None
) -> None:
    """Print a row for each search: what is searched, the algorithm and the number of hidden units."""
    task = find_task("mnist", data, {}) if table == "mnist" else find_task("digits", None, {})
    size = SIZES[table]
    for what, name, hidden in rivals:
        scores = {}
        for step in choices(table, what) if given is None else ():
            problem = problem_of(what, task, hidden, numbers, step, size, 100)
            net = problem.net(search(problem, name, size.generations // 4, size.members))
            scores[step] = score(net, task, table)
        step = given or max(scores, key=scores.__getitem__)
        found, seconds = [], []
        for seed in range(seeds):
            start = time.process_time()
            problem = problem_of(what, task, hidden, numbers, step, size, seed)
            net = problem.net(search(problem, name, size.generations, size.members, 20 / size.generations))
            seconds.append(time.process_time() - start)
            found.append((accuracy(net, task.test), accuracy(net, task.val), accuracy(net, task.train)))
        row = {"what": what, "algorithm": name, "hidden": hidden, "numbers": problem.solution_length}
        row |= {"weights": sum(p.numel() for p in net.parameters()), "evaluations": problem.evaluations, "step": step}
        for i, split in enumerate(("test", "val", "train")):
            row[split] = [round(100 * of[i], 2) for of in found]
        row |= {"mean": statistics.mean(row["test"]), "deviation": statistics.pstdev(row["test"])}
        chosen = {str(of): round(score, 4) for of, score in scores.items()}
        print(json.dumps(row | {"cpu_s": round(statistics.mean(seconds)), "choice": chosen}), flush=True)


CONTROL = {"CartPole-v1": (25, 1), "Acrobot-v1": (15, 1), "Pendulum-v1": (100, 1)}
"""Number of generations of 32 members, and episodes per member and generation."""


def actor(inputs: int, hidden: int, actions: int, seed: int) -> nn.Module:
    """Make a tanh network without biases. With biases, observations near zero would hardly change the actions."""
    torch.manual_seed(seed)
    first, second = nn.Linear(inputs, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(hidden, actions, bias=False))


def control(env: str, rivals: list[str], seeds: int, given: Step | None) -> None:
    """Print the mean return over 100 new episodes of the genome, of dense weights and of a small dense net."""
    known, (generations, episodes) = find_environment(env), CONTROL[env]
    for what in rivals:

        def made(step: Step, seed: int, what: str = what) -> ControlProblem:
            net = actor(known.inputs[0], 8 if what == "small dense net" else 32, known.n_actions, seed)
            options = {"hypernet": gb.periodic(), "genome_params": 120} if what == "genome" else DENSE
            steps = by_role(step)
            return ControlProblem(gb.make_plan(net, **options), net, env, episodes=episodes, steps=steps, seed=seed)

        scores = {}
        for step in ((0.1,), (0.3,)) if given is None else ():
            problem = made(step, 100)
            found = search(problem, "PGPE", generations // 2, 32)
            scores[step] = float(problem.returns(found[None], 20, 1000).mean())
        step = given or max(scores, key=scores.__getitem__)
        returns, spent, numbers = [], [], 0
        for seed in range(seeds):
            problem, start = made(step, seed), time.process_time()
            found = search(problem, "PGPE", generations, 32)
            spent.append((problem.env_steps, time.process_time() - start))
            returns.append(float(problem.returns(found[None], 100, 2000 + seed).mean()))
            numbers = problem.solution_length
        row = {"env": env, "what": what, "numbers": numbers, "evaluations": problem.evaluations, "step": step}
        row |= {"returns": [round(r, 1) for r in returns], "env_steps": [n for n, _ in spent]}
        row |= {"cpu_s": round(sum(s for _, s in spent) / seeds)}
        print(json.dumps(row | {"choice": {str(of): score for of, score in scores.items()}}), flush=True)


def speed(hidden: int, rows: int) -> None:
    """Print the times of a generation of 256 genomes in one `vmap` and one by one, and the slowest operations."""
    task, size = find_task("digits", None, {}), SIZES["digits"]._replace(rows=rows)
    problem = problem_of("genome", task, hidden, 450, (0.1,), size, 0)
    z, batch = problem.generate_values(256).clone().as_subclass(Tensor), next(noisy_batches(task, size, 0))
    calls = {
        "one vmap": lambda: problem.losses(z, batch),
        "one by one": lambda: alone(problem, z, batch),
        "one by one, problem.losses": lambda: torch.cat([problem.losses(row[None], batch) for row in z]),
    }
    times: dict[str, float] = {}
    for name, call in calls.items():
        call()
        spent = []
        for _ in range(5):
            start = time.process_time()
            call()
            spent.append(time.process_time() - start)
        times[name] = round(1e3 * min(spent), 1)
    with torch.profiler.profile() as profile:
        problem.losses(z, batch)
    total = Counter({e.key: e.self_cpu_time_total for e in profile.key_averages()})
    parts = {k: round(100 * v / sum(total.values())) for k, v in total.most_common(4)}
    print(json.dumps({"hidden": hidden, "rows": rows, "ms": times, "profile_%": parts}), flush=True)


def alone(problem: GenomeProblem, z: Tensor, batch: Any) -> list[float]:
    """Compute each genome's loss in a loop, as a user of `gb.generate` would."""
    losses = []
    for row in z:
        weights = gb.generate(problem.plan, problem.genome(row))
        with torch.no_grad():
            losses.append(
                float(loss_fn(lambda x, w=weights: torch.func.functional_call(problem.pnet, w, (x,)), batch)[0])
            )
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=("digits", "widths", "algorithms", "mnist", "speed", *CONTROL))
    parser.add_argument("--what", help="compute only this row")
    parser.add_argument("--step", type=float, nargs="+", help="step size (of code weights and of all other numbers)")
    parser.add_argument("--hidden", type=int, nargs="+", default=(64, 256, 1100), help="widths of the p-net")
    parser.add_argument("--members", type=int, help="population (default: as in the table)")
    parser.add_argument("--generations", type=int)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data-dir", default=f"{os.environ.get('GBFUNC_DATA', '../shared/data')}/mnist")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("evotorch").setLevel(logging.WARNING)
    four = [options.what] if options.what else ["genome", "dense weights", "small dense net", "random subspace"]
    if options.table in SIZES:
        given = {k: getattr(options, k) for k in ("members", "generations") if getattr(options, k)}
        SIZES[options.table] = SIZES[options.table]._replace(**given)
    if options.table == "digits":
        images("digits", [(what, "PGPE", 64) for what in four], 450, options.seeds, None, options.step)
    elif options.table == "widths":
        rivals = [(what, "PGPE", hidden) for hidden in options.hidden for what in four[:2]]
        images("widths", rivals, 450, options.seeds, None, options.step)
    elif options.table == "algorithms":
        images("digits", [("genome", "SNES", 64), ("genome", "CMA-ES", 64)], 450, options.seeds, None, options.step)
    elif options.table == "mnist":
        images("mnist", [(what, "PGPE", 100) for what in four], 600, options.seeds, options.data_dir, options.step)
    elif options.table == "speed":
        for hidden, rows in itertools.product((16, 64, 256), (32, 256)):
            speed(hidden, rows)
    else:
        control(options.table, four[:3], options.seeds, options.step)
