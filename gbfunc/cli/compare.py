"""`gbfunc compare`: genomes beside what else one would do, at equal bytes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from rich.table import Table
from tyro.conf import FlagCreatePairsOff, arg

from gbfunc.cli.options import DataOptions
from gbfunc.cli.output import make_folder, wide_console, write_figure, write_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gbfunc.lab.compare import Problem, Results
    from gbfunc.tasks import Metric

_SIZES = (600, 1_300, 2_000, 6_000, 20_000)


@dataclass(frozen=True)
class Compare(DataOptions):
    """Genomes and what else one would do, within the same bytes; settings by validation, a row per seed."""

    sizes: Annotated[
        tuple[int, ...] | None, arg(metavar="INT ...", help_behavior_hint=f"(default: {' '.join(map(str, _SIZES))})")
    ] = None
    """Budgets: the bytes of a periodic genome's file of so many parameters, its header included."""

    bytes: Annotated[tuple[int, ...] | None, arg(metavar="INT ...", help_behavior_hint="(default: none)")] = None
    """Budgets in bytes, in place of --sizes."""

    methods: Annotated[tuple[str, ...] | None, arg(metavar="NAME ...", help_behavior_hint="(default: all)")] = None
    """Only these: periodic, smaller_dense, low_rank, random_subspace, pruned, int8, int4, and the other types of g-net:
    gnet, stochastic, low_rank_genome, xox."""

    seeds: int = 3
    """Trainings of each method at each size, seeded 0, 1, ..."""

    epochs: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: the task's recipe)")] = None
    """Passes over the training examples, for all alike; the choice among candidates takes a third of them each."""

    dtype: Literal["float32", "float16"] = "float32"
    """dtype that every method stores which has no other format; training is in float32."""

    quick: FlagCreatePairsOff[bool] = False
    """One epoch, one seed, two candidates: shows that all of it runs, and nothing else."""

    threads: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: torch's)")] = None
    """Threads of the CPU."""

    out: Path = Path("compare")
    """Folder for compare.json, the figure and the data of every network; rows that it holds are not run again."""

    def run(self) -> None:
        """Run what is missing, print one table, write the results."""
        from gbfunc.lab.bench.cases import choose
        from gbfunc.lab.bench.report import describe
        from gbfunc.lab.compare import METHODS, of_problem, read_results, run_missing, to_json

        methods = choose(METHODS, self.methods, "--methods")
        problems = self._problems()
        folder = make_folder(self.out)
        results = read_results(folder / "compare.json")
        about = describe(torch.device("cpu"), torch.get_num_threads())
        seeds, most = (1, 2) if self.quick else (self.seeds, None)

        def report(line: str) -> None:
            print(line, file=sys.stderr, flush=True)

        nets = make_folder(folder / "nets")
        for newer in run_missing(methods, problems, seeds, results, nets, report, most):
            results = newer
            # After each row: what is measured is kept, should a later one fail.
            write_metrics(folder / "compare.json", about | to_json(results))
        known = {name: [of_problem(results, problem, name) for problem in problems] for name in methods}
        metric = problems[0].task.metric
        if any(part.rows for parts in known.values() for part in parts):
            write_figure(folder / "tradeoff.png", tradeoff_figure(known, metric))
        print_tradeoff(known, problems)

    def _problems(self) -> list[Problem]:
        from gbfunc.cli.job import load_task
        from gbfunc.lab.compare import Problem, reference_bytes, size_within

        if self.sizes is not None and self.bytes is not None:
            sizes, budgets = (" ".join(map(str, given)) for given in (self.sizes, self.bytes))
            raise ValueError(f"give at most one of --sizes and --bytes, got {sizes} and {budgets}")
        for name, value in (("seeds", self.seeds), ("epochs", self.epochs), ("threads", self.threads)):
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        task = load_task(self)
        if self.bytes is not None:
            budgets = [(size_within(task, budget), budget) for budget in sorted(set(self.bytes))]
        else:
            budgets = [(size, reference_bytes(task, size)) for size in sorted(set(self.sizes or _SIZES))]
        problems = []
        for size, budget in budgets:
            recipe = task.recipe(size)
            epochs = 1 if self.quick else self.epochs
            if epochs is not None:
                recipe = replace(recipe, epochs=epochs, steps=None)
            problems.append(Problem(task, size, budget, getattr(torch, self.dtype), recipe))
        return problems


def shown_values(results: Results, metric: Metric) -> list[float]:
    """The metric on the test split in the unit in which it is shown, by seed."""
    rows = sorted(results.rows, key=lambda row: row.seed)
    return [100 * row.test if metric.unit == "%" else row.test for row in rows]


def tradeoff_figure(known: Mapping[str, Sequence[Results]], metric: Metric) -> Figure:
    """`tradeoff_curves` of a metric; parts of one are shown by what they lack, on a logarithmic axis.

    Args:
        known: results of every method, at each budget.
        metric: of the task.
    """
    from gbfunc.plots import tradeoff_curves

    errors = metric.unit == "%" and metric.higher_is_better
    curves: dict[str, list[tuple[float, list[float]]]] = {}
    for name, parts in known.items():
        for part in parts:
            if part.rows:
                values = [100 - value if errors else value for value in shown_values(part, metric)]
                curves.setdefault(name, []).append((mean(row.bytes for row in part.rows), values))
    if errors:
        return tradeoff_curves(curves, f"test error = 100 - {metric.label} (%, logarithmic)", yscale="log")
    return tradeoff_curves(curves, f"test {metric.label} ({metric.unit})")


def print_tradeoff(known: Mapping[str, Sequence[Results]], problems: Sequence[Problem]) -> None:
    """The metric on the test split as one table on standard output: a row for a method, a column for a budget.

    Args:
        known: results of every method, at each budget.
        problems: the budgets.
    """
    first = problems[0]
    metric = first.task.metric
    table = Table("method")
    extreme = max if metric.higher_is_better else min
    best = []
    for problem, parts in zip(problems, zip(*known.values(), strict=True), strict=True):
        table.add_column(f"{problem.budget:,} bytes", justify="right", no_wrap=True)
        best.append(extreme((mean(shown_values(part, metric)) for part in parts if part.rows), default=0.0))
    for name, parts in known.items():
        table.add_row(name, *(_cell(part, metric, top) for part, top in zip(parts, best, strict=True)))
    console = wide_console()
    console.print(table)
    console.print(
        f"{first.task.name}: test {metric.label} in {metric.unit}, mean and standard deviation over seeds; "
        f"{first.steps:,} steps; -: nothing is as small as that.",
        style="dim",
    )


def _cell(results: Results, metric: Metric, best: float) -> str:
    tests = shown_values(results, metric)
    if not tests:
        # Nothing fits, or nothing is known.
        return "-" if any(choice.settings is None for choice in results.choices) else ""
    digits = 2 if mean(tests) > 10 else 4
    spread = f" ± {stdev(tests):.{digits}f}" if len(tests) > 1 else ""
    text = f"{mean(tests):.{digits}f}{spread}"
    return f"[bold]{text}[/bold]" if mean(tests) == best else text
