"""`gbfunc compare`: genomes beside what else one would do, at equal bytes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from statistics import mean, stdev
from types import MappingProxyType

import torch
from matplotlib.figure import Figure
from rich.table import Table

from gbfunc.cli.commands import SIZES, Compare
from gbfunc.cli.job import load_task
from gbfunc.cli.options import DataOptions
from gbfunc.cli.output import open_folder, wide_console, write_figure, write_metrics
from gbfunc.lab import compare as lab
from gbfunc.lab.bench.cases import choose
from gbfunc.lab.bench.report import describe
from gbfunc.lab.compare import Problem, Published, Results
from gbfunc.plots import tradeoff_curves
from gbfunc.tasks import Metric, Task

_BYTES = (1_500, 3_000, 6_000, 12_000, 24_000, 48_000, 186_000)
"""Budgets of adapters; the last one is the file of LoRA of rank 1 on all layers of MiniLM, with its classifier."""


def run(options: Compare) -> None:
    """Run what is missing, print one table, write the results."""
    task, dtype = _task(options), getattr(torch, options.dtype)
    references = lab.REFERENCES if lab.is_pretrained(task) else {}
    chosen = choose({**lab.methods_for(task, dtype), **references}, options.methods, "--methods")
    references = {name: method for name, method in chosen.items() if name in references}
    methods = {name: method for name, method in chosen.items() if name not in references}
    problems = _problems(options, task, dtype)
    free = [lab.reference_problem(problems[0])] if references else []
    about = describe(torch.device("cpu"), torch.get_num_threads())
    seeds, most = (1, 2) if options.quick else (options.seeds, None)

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with open_folder(options.out) as folder, open_folder(folder / "nets") as nets:
        results = lab.read_results(folder / "compare.json")
        for parts in ((methods, problems), (references, free)):
            for newer in lab.run_missing(*parts, seeds, results, nets, report, most):
                results = newer
                # After each row: what is measured is kept, should a later one fail.
                write_metrics(folder / "compare.json", about | lab.to_json(results))
        known = {name: [lab.of_problem(results, problem, name) for problem in problems] for name in methods}
        levels = {name: lab.of_problem(results, free[0], name) for name in references}
        published = lab.PUBLISHED.get(task.name, ()) if task.metric.name == "accuracy" else ()
        if any(part.rows for parts in known.values() for part in parts):
            write_figure(folder / "tradeoff.png", tradeoff_figure(known, task.metric, levels, published))
    print_tradeoff(known, problems, levels, published)


def _task(options: Compare) -> Task:
    if options.sizes is not None and options.bytes is not None:
        sizes, budgets = (" ".join(map(str, given)) for given in (options.sizes, options.bytes))
        raise ValueError(f"give at most one of --sizes and --bytes, got {sizes} and {budgets}")
    for name, value in (("seeds", options.seeds), ("epochs", options.epochs), ("threads", options.threads)):
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return load_task(DataOptions(**{f.name: getattr(options, f.name) for f in fields(DataOptions)}))


def _problems(options: Compare, task: Task, dtype: torch.dtype) -> list[Problem]:
    problems = []
    for size, budget in _budgets(options, task):
        recipe = replace(task.recipe(size), amp=options.amp and getattr(torch, options.amp))
        epochs = 1 if options.quick else options.epochs
        if epochs is not None:
            recipe = replace(recipe, epochs=epochs, steps=None)
        problems.append(Problem(task, size, budget, dtype, recipe))
    return problems


def _budgets(options: Compare, task: Task) -> list[tuple[int, int]]:
    pretrained = lab.is_pretrained(task)
    given = options.bytes or (_BYTES if pretrained and options.sizes is None else None)
    if given is None:
        return [(size, lab.reference_bytes(task, size)) for size in sorted(set(options.sizes or SIZES))]
    # The numbers that a budget could hold are the same whatever is the best genome of the day.
    return [(b // 4 if pretrained else lab.size_within(task, b), b) for b in sorted(set(given))]


def shown_values(results: Results, metric: Metric) -> list[float]:
    """The metric on the test split in the unit in which it is shown, by seed."""
    rows = sorted(results.rows, key=lambda row: row.seed)
    return [100 * row.test if metric.unit == "%" else row.test for row in rows]


def tradeoff_figure(
    known: Mapping[str, Sequence[Results]],
    metric: Metric,
    levels: Mapping[str, Results] = MappingProxyType({}),
    published: Sequence[Published] = (),
) -> Figure:
    """`tradeoff_curves` of a metric; parts of one are shown by what they lack, on a logarithmic axis.

    `known` are results of every method at each budget, `levels` those that no budget bounds, each a dashed line;
    `published` ones, of accuracy in %, are hollow.
    """
    errors = metric.unit == "%" and metric.higher_is_better

    def shown(results: Results) -> list[float]:
        return [100 - value if errors else value for value in shown_values(results, metric)]

    curves: dict[str, list[tuple[float, list[float]]]] = {}
    for name, parts in known.items():
        for part in parts:
            if part.rows:
                curves.setdefault(name, []).append((mean(row.bytes for row in part.rows), shown(part)))
    label = f"test error = 100 - {metric.label} (%, logarithmic)" if errors else f"test {metric.label} ({metric.unit})"
    points = {of.label: [(size, 100 - value) for size, value in of.points] for of in published if errors}
    figure = tradeoff_curves(curves, label, yscale="log" if errors else "linear", hollow=points)
    (axes,) = figure.axes
    for name, results in levels.items():
        if results.rows:
            level = mean(shown(results))
            axes.axhline(level, color="0.5", linestyle="--", linewidth=1)
            axes.annotate(_level(name, results), (0.01, level), xycoords=axes.get_yaxis_transform(), fontsize="small")
    return figure


def _level(name: str, results: Results) -> str:
    """What a result that no budget bounds is called."""
    return f"{name} ({results.rows[0].bytes:,} bytes)"


def print_tradeoff(
    known: Mapping[str, Sequence[Results]],
    problems: Sequence[Problem],
    levels: Mapping[str, Results] = MappingProxyType({}),
    published: Sequence[Published] = (),
) -> None:
    """The metric on the test split as one table on standard output: a row for a method, a column for a budget.

    The last column has the training steps that chose each method's settings.
    """
    first = problems[0]
    metric = first.task.metric
    table = Table("method")
    extreme = max if metric.higher_is_better else min
    best = []
    for i, problem in enumerate(problems):
        table.add_column(f"{problem.budget:,} bytes", justify="right", no_wrap=True)
        column = [parts[i] for parts in known.values()]
        best.append(extreme((mean(shown_values(part, metric)) for part in column if part.rows), default=0.0))
    table.add_column("steps of search", justify="right")
    for name, parts in known.items():
        table.add_row(name, *(_cell(part, metric, top) for part, top in zip(parts, best, strict=True)), _search(parts))
    console = wide_console()
    if known:
        console.print(table)
    for name, results in levels.items():
        if results.rows:
            console.print(f"{_level(name, results)}: {_spread(shown_values(results, metric))}")
    for of in published:
        shown = ", ".join(f"{size:,} bytes: {value:.2f}" for size, value in of.points)
        console.print(f"published: {of.label}: {shown}", style="dim")
    console.print(
        f"{first.task.name}: test {metric.label} in {metric.unit}, mean and standard deviation over seeds; "
        f"{first.steps:,} steps; -: nothing is as small as that.",
        style="dim",
    )


def _search(parts: Sequence[Results]) -> str:
    """Steps of the search at each budget, from the fewest to the most; nothing where it is not known."""
    steps = [choice.searched for part in parts for choice in part.choices if choice.searched is not None]
    if not steps:
        return ""
    return f"{min(steps):,}" if min(steps) == max(steps) else f"{min(steps):,} to {max(steps):,}"


def _cell(results: Results, metric: Metric, best: float) -> str:
    tests = shown_values(results, metric)
    if not tests:
        # Nothing fits, or nothing is known.
        return "-" if any(choice.settings is None for choice in results.choices) else ""
    text = _spread(tests)
    return f"[bold]{text}[/bold]" if mean(tests) == best else text


def _spread(values: list[float]) -> str:
    """Mean and standard deviation."""
    digits = 2 if mean(values) > 10 else 4
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"
