"""The commands `bench` (speed of genomes and dense p-nets) and `compare` (accuracy of genomes and other methods)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from matplotlib.figure import Figure

from gbfunc.cli.commands import SIZES, Bench, Compare
from gbfunc.cli.job import load_task
from gbfunc.cli.options import DataOptions
from gbfunc.cli.output import open_folder, print_table, write_figure, write_metrics
from gbfunc.cli.ranks import find_device
from gbfunc.lab import compare as lab
from gbfunc.lab.bench import cases, report
from gbfunc.lab.bench.cases import Setting, choose
from gbfunc.lab.bench.report import describe, over_runs
from gbfunc.lab.compare.base import Problem
from gbfunc.lab.compare.genome import reference_bytes, size_within
from gbfunc.lab.compare.rows import Results, of_problem, read_results, run_missing, to_json
from gbfunc.plots import tradeoff_curves
from gbfunc.tasks import Metric, Task


def run_bench(options: Bench) -> None:
    device = find_device(options.device)
    if options.calibrate:
        torch.set_num_threads(options.threads or torch.get_num_threads())
        spec, first = report.calibrate(device)
        if first:
            print(spec.to_json())
        return
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, got {options.device}")
    setting = Setting(device, options.threads or torch.get_num_threads())
    size = "quick" if options.quick else "full" if device.type == "cpu" else "cuda"
    benches = choose(cases.BENCHES[size], options.cases)
    with open_folder(options.out) as folder:
        visit = 0.02 if options.quick else 0.1
        print_results(measure(benches, setting, folder, visit=visit, repeat=options.repeat))


def measure(
    benches: Mapping[str, cases.Bench], setting: Setting, folder: Path, visit: float, repeat: int = 1, rounds: int = 7
) -> dict[str, Any]:
    torch.set_num_threads(setting.threads)
    results: dict[str, Any] = describe(setting.device, setting.threads)
    results |= {"device": setting.device.type, "rows": []}
    runs: dict[str, list[list[report.Row]]] = {name: [] for name in benches}
    for run, (i, (name, bench)) in product(range(repeat), enumerate(benches.items(), 1)):
        print(f"{name} ({i} of {len(benches)}, run {run + 1} of {repeat})", file=sys.stderr, flush=True)
        runs[name].append(report.run_bench(bench, setting, rounds=rounds, visit=visit, memory=run == 0))
        results["rows"] = [row for some in runs.values() for row in over_runs(some)]
        # Write the file after every bench, so that a later failure loses no results.
        write_metrics(folder / "bench.json", results)
    return results


def print_results(results: Mapping[str, Any]) -> None:
    r, rows = results, list[tuple[str, ...]]()

    def number(value: float | None, form: str, unit: str = "") -> str:
        return "" if value is None else f"{value:{form}}{unit}"

    on_gpu = {"launches": ",.0f", "busy": ".0%"} if r["device"] == "cuda" else {}
    for previous, row in zip([None, *r["rows"]], r["rows"], strict=False):
        is_first = previous is None or previous["case"] != row["case"]
        rows += [()] * (is_first and previous is not None)
        ratios = [ratio for ratio in row["ratios_to_dense"] if ratio is not None]
        rows.append(
            (
                row["case"] if is_first else "",
                row["variant"],
                number(row["step_ms"], ",.2f", " ms"),
                number(row["first_ms"], ",.0f", " ms"),
                number(row["ratio_to_dense"], ".3g"),
                f"{min(ratios):.3g} to {max(ratios):.3g}" if len(ratios) > 1 else "",
                number(row["ratio_to_naive"], ".3g"),
                number(row["peak_mb"], ",.0f") or "out of memory",
                *(number(row[name], form) for name, form in on_gpu.items()),
            )
        )
    machine = f"{r['machine']}, {r['threads']} threads, torch {r['torch']}"
    columns = ("case", "variant", "step", "first", "x dense", "range", "x naive", "peak MB", *on_gpu)
    print_table(columns, rows, captions=[machine])


def run_compare(options: Compare) -> None:
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    task = load_task(DataOptions(**{field.name: getattr(options, field.name) for field in fields(DataOptions)}))
    dtype = getattr(torch, options.dtype)
    pretrained = bool(task.pnet.config.get("pretrained"))
    known, references = (lab.PRETRAINED_METHODS, lab.REFERENCES) if pretrained else (lab.METHODS, {})
    chosen = choose({**known, **references}, options.methods, "--methods")
    references = {name: method for name, method in chosen.items() if name in references}
    methods = {name: method for name, method in chosen.items() if name not in references}
    problems = _problems(options, task, dtype, pretrained)
    free = [lab.reference_problem(problems[0])] if references else []
    about = describe(torch.device("cpu"), torch.get_num_threads())
    seeds, most = (1, 2) if options.quick else (options.seeds, None)
    report = partial(print, file=sys.stderr, flush=True)
    with open_folder(options.out) as folder, open_folder(folder / "nets") as nets:
        results = read_results(folder / "compare.json")
        for pair in ((methods, problems), (references, free)):
            for newer in run_missing(*pair, seeds, results, nets, report, most):
                results = newer
                write_metrics(folder / "compare.json", about | to_json(results))
        known = {name: [of_problem(results, problem, name) for problem in problems] for name in methods}
        levels = {name: of_problem(results, free[0], name) for name in references}
        levels = {f"{name} ({found.rows[0].bytes:,} bytes)": found for name, found in levels.items() if found.rows}
        if any(found.rows for by_problem in known.values() for found in by_problem):
            write_figure(folder / "tradeoff.png", lambda: tradeoff_figure(known, task.metric, levels))
    print_tradeoff(known, problems, levels)


def _problems(options: Compare, task: Task, dtype: torch.dtype, pretrained: bool) -> list[Problem]:
    problems = []
    # The last budget is enough for the classifier and LoRA of rank 1 on all layers of MiniLM.
    usual = (1_500, 3_000, 6_000, 12_000, 24_000, 48_000, 186_000)
    budgets = options.bytes or (usual if pretrained and options.sizes is None else None)
    if budgets is None:
        sized = [(size, reference_bytes(task, size)) for size in sorted(set(options.sizes or SIZES))]
    else:
        # The size is the budget in float32 numbers for a pretrained p-net, otherwise a periodic genome's parameters.
        sized = [(b // 4 if pretrained else size_within(task, b), b) for b in sorted(set(budgets))]
    for size, budget in sized:
        recipe = replace(task.recipe(size), amp=options.amp and getattr(torch, options.amp))
        if (epochs := 1 if options.quick else options.epochs) is not None:
            recipe = replace(recipe, epochs=epochs, steps=None)
        problems.append(Problem(task, size, budget, dtype, recipe))
    return problems


def _tested(results: Results, metric: Metric) -> list[float]:
    rows = sorted(results.rows, key=lambda row: row.seed)
    return [100 * row.test if metric.unit == "%" else row.test for row in rows]


def tradeoff_figure(known: Mapping[str, Sequence[Results]], metric: Metric, levels: Mapping[str, Results]) -> Figure:
    """Plot test metrics against bytes (accuracies as 100 - accuracy, logarithmic), and `levels` as horizontal lines."""
    errors = metric.unit == "%" and metric.higher_is_better

    def shown(results: Results) -> list[float]:
        return [100 - value if errors else value for value in _tested(results, metric)]

    curves = {
        name: [(mean(row.bytes for row in found.rows), shown(found)) for found in by_budget if found.rows]
        for name, by_budget in known.items()
        if any(found.rows for found in by_budget)
    }
    label = f"test error = 100 - {metric.label} (%, logarithmic)" if errors else f"test {metric.label} ({metric.unit})"
    figure = tradeoff_curves(curves, label, yscale="log" if errors else "linear")
    (axes,) = figure.axes
    for name, results in levels.items():
        level = mean(shown(results))
        axes.axhline(level, color="0.5", linestyle="--", linewidth=1)
        axes.annotate(name, (0.01, level), xycoords=axes.get_yaxis_transform(), fontsize="small")
    return figure


def print_tradeoff(
    known: Mapping[str, Sequence[Results]], problems: Sequence[Problem], levels: Mapping[str, Results]
) -> None:
    first, metric = problems[0], problems[0].task.metric

    def with_deviation(values: Sequence[float]) -> str:
        digits = 2 if mean(values) > 10 else 4
        return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")

    def cell(found: Results) -> str:
        if found.rows:
            return with_deviation(_tested(found, metric))
        # Show "-" if no network fits the budget, and "" if the trainings have not run yet.
        return "-" if any(choice.settings is None for choice in found.choices) else ""

    rows = []
    for name, by_budget in known.items():
        searched = [choice.searched for found in by_budget for choice in found.choices]
        ends = dict.fromkeys((min(searched), max(searched))) if searched else ()
        rows.append([name, *map(cell, by_budget), " to ".join(f"{n:,}" for n in ends)])
    captions = [f"{name}: {with_deviation(_tested(results, metric))}" for name, results in levels.items()]
    captions.append(
        f"{first.task.name}: test {metric.label} in {metric.unit}, mean and standard deviation over seeds; "
        f"{first.steps:,} steps; -: no network fits the budget."
    )
    budgets = [f"{problem.budget:,} bytes" for problem in problems]
    print_table(("method", *budgets, "steps of search"), rows, captions=captions)
