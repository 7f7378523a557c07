"""`gbfunc compare`: genomes beside what else one would do, at equal bytes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from tyro.conf import FlagCreatePairsOff, arg

from gbfunc.cli.options import DataOptions
from gbfunc.cli.output import wide_console

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gbfunc.lab.compare import Method, Problem, Results, Row
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
        from gbfunc.cli.output import make_folder, write_figure, write_metrics
        from gbfunc.lab.bench.report import describe
        from gbfunc.lab.compare import METHODS, read_results, run_missing, to_json

        methods = {name: METHODS[name] for name in self._method_names(METHODS)}
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
        curves = curves_of(results, problems, methods)
        if any(curves.values()):
            write_figure(folder / "tradeoff.png", tradeoff_figure(curves, problems[0].task.metric))
        print_tradeoff(results, problems, methods)

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

    def _method_names(self, table: Mapping[str, Method]) -> Sequence[str]:
        unknown = [name for name in self.methods or () if name not in table]
        if unknown:
            raise ValueError(f"--methods must be among {', '.join(table)}; got {', '.join(unknown)}")
        return self.methods or tuple(table)


def curves_of(
    results: Results, problems: Sequence[Problem], methods: Mapping[str, Method]
) -> dict[str, list[tuple[float, list[float]]]]:
    """Points (bytes, metric of the seeds on the test split, in its unit) of each method."""
    points: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in methods}
    for problem in problems:
        for name in methods:
            if rows := rows_of(results, problem, name):
                points[name].append((mean(row.bytes for row in rows), shown_values(problem, rows)))
    return {name: found for name, found in points.items() if found}


def tradeoff_figure(curves: Mapping[str, Sequence[tuple[float, Sequence[float]]]], metric: Metric) -> Figure:
    """`tradeoff_curves` of a metric; parts of one are shown by what they lack, on a logarithmic axis."""
    from gbfunc.plots import tradeoff_curves

    if metric.unit != "%" or not metric.higher_is_better:
        return tradeoff_curves(curves, f"test {metric.label} ({metric.unit})")
    errors = {name: [(size, [100 - value for value in seeds]) for size, seeds in c] for name, c in curves.items()}
    return tradeoff_curves(errors, f"test error = 100 - {metric.label} (%, logarithmic)", yscale="log")


def rows_of(results: Results, problem: Problem, method: str) -> list[Row]:
    """The rows of a method at one budget, by seed."""
    from gbfunc.lab.compare import of_problem

    return sorted(of_problem(results, problem, method).rows, key=lambda row: row.seed)


def shown_values(problem: Problem, rows: Sequence[Row]) -> list[float]:
    """The metric on the test split in the unit in which it is shown."""
    return [100 * row.test if problem.task.metric.unit == "%" else row.test for row in rows]


def print_tradeoff(results: Results, problems: Sequence[Problem], methods: Mapping[str, Method]) -> None:
    """The metric on the test split as one table on standard output: a row a method, a column a budget."""
    from rich.table import Table

    table = Table("method")
    for problem in problems:
        table.add_column(f"{problem.budget:,} bytes", justify="right", no_wrap=True)
    cells = {name: [shown_values(problem, rows_of(results, problem, name)) for problem in problems] for name in methods}
    metric = problems[0].task.metric
    extreme = max if metric.higher_is_better else min
    best = [extreme((mean(c[i]) for c in cells.values() if c[i]), default=0.0) for i in range(len(problems))]
    for name, found in cells.items():
        cells_of = zip(problems, found, best, strict=True)
        table.add_row(name, *(_cell(results, problem, name, tests, top) for problem, tests, top in cells_of))
    console = wide_console()
    console.print(table)
    first = problems[0]
    console.print(
        f"{first.task.name}: test {metric.label} in {metric.unit}, mean and standard deviation over seeds; "
        f"{first.steps:,} steps; -: nothing is as small as that.",
        style="dim",
    )


def _cell(results: Results, problem: Problem, method: str, tests: Sequence[float], best: float) -> str:
    from gbfunc.lab.compare import of_problem

    if not tests:
        # Nothing fits, or nothing is known.
        return "-" if any(c.settings is None for c in of_problem(results, problem, method).choices) else ""
    digits = 2 if mean(tests) > 10 else 4
    spread = f" ± {stdev(tests):.{digits}f}" if len(tests) > 1 else ""
    text = f"{mean(tests):.{digits}f}{spread}"
    return f"[bold]{text}[/bold]" if mean(tests) == best else text
