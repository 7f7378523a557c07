"""`gbfunc bench`: what generation costs here, against the dense p-net and the naive implementation.

With `--calibrate`: what the planner must know of this machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from gbfunc.cli.commands import Bench
from gbfunc.cli.output import open_folder, wide_console, write_figure, write_metrics
from gbfunc.cli.ranks import find_device
from gbfunc.lab.bench import cases
from gbfunc.lab.bench.report import Row, describe, growth_curves, log_slope, measure_ceilings, over_runs, run_bench
from gbfunc.lab.bench.variants import Setting, why_not

_ROUNDS = 7
_TAKEN = {
    None: ("quick", "cases", "repeat", "device", "threads", "out"),
    "calibrate": ("device", "threads"),
}
"""Options of what is measured: of cases side by side, or instead."""

_GROWTH = {"growth_weights": ("weights", "weights"), "growth_features": ("features", "features H")}


def run(options: Bench) -> None:
    """Run the cases, print one table, write the results."""
    kind = "calibrate" if options.calibrate else None
    given = [f.name for f in fields(Bench) if getattr(options, f.name) != f.default]
    if odd := [name for name in given if name not in (kind, *_TAKEN[kind])]:
        raise ValueError(f"bench{f' --{kind}' if kind else ''} takes {', '.join(_TAKEN[kind])}: drop --{odd[0]}")
    if options.repeat < 1:
        raise ValueError(f"--repeat must be at least 1, got {options.repeat}")
    if options.threads is not None and options.threads < 1:
        raise ValueError(f"--threads must be at least 1, got {options.threads}")
    if options.calibrate:
        print_device(find_device(options.device), options.threads)
        return
    device = find_device(options.device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, got {options.device}")
    on_cuda = device.type == "cuda"
    setting = Setting(device, torch.bfloat16 if on_cuda else None, options.threads or torch.get_num_threads())
    benches = cases.choose(cases.BENCHES["quick" if options.quick else "cuda" if on_cuda else "full"], options.cases)
    with open_folder(options.out) as folder:
        visit = 0.02 if options.quick else 0.1
        print_results(measure(benches, setting, folder, visit=visit, repeat=options.repeat))


def print_device(device: torch.device, threads: int | None) -> None:
    """What this machine is like, as JSON on standard output; of many ranks the first speaks."""
    from gbfunc.lab.bench.calibrate import calibrate

    torch.set_num_threads(threads or torch.get_num_threads())
    spec, first = calibrate(device)
    if first:
        print(spec.to_json())


def measure(
    benches: Mapping[str, cases.Bench],
    setting: Setting,
    folder: Path,
    *,
    rounds: int = _ROUNDS,
    visit: float,
    repeat: int = 1,
) -> dict[str, Any]:
    """Run benches `repeat` times one after the other; write the figures of growth, and what is returned (`bench.json`).

    Of several runs the rows are medians (`over_runs`); `rounds` and `visit` (s) are those of `time_together`.
    """
    from gbfunc.plots import cost_curves

    torch.set_num_threads(setting.threads)
    results: dict[str, Any] = describe(setting.device, setting.threads)
    results |= {"device": setting.device.type, "dtype": str(setting.amp or torch.float32).removeprefix("torch.")}
    results |= {"ceilings": measure_ceilings(setting.device, rounds=rounds), "slopes": {}, "rows": [], "skipped": []}
    reasons = {case.name: why_not(case, setting) for bench in benches.values() for case in bench}
    results["skipped"] = [reason for reason in reasons.values() if reason]
    chosen = {k: some for k, bench in benches.items() if (some := tuple(c for c in bench if not reasons[c.name]))}
    runs: dict[str, list[list[Row]]] = {name: [] for name in chosen}
    for run, (i, (name, bench)) in product(range(repeat), enumerate(chosen.items(), 1)):
        print(f"{name} ({i} of {len(chosen)}, run {run + 1} of {repeat})", file=sys.stderr, flush=True)
        runs[name].append(run_bench(bench, setting, rounds=rounds, visit=visit, memory=run == 0))
        results["rows"] = [row for some in runs.values() for row in over_runs(some)]
        if name in _GROWTH:
            by, label = _GROWTH[name]
            curves = growth_curves(over_runs(runs[name]), by)
            results["slopes"][name] = {variant: log_slope(points) for variant, points in curves.items()}
            write_figure(folder / f"{name}.png", cost_curves(curves, label))
        # After each bench: what is measured is kept, should a later one fail.
        write_metrics(folder / "bench.json", results)
    return results


_Cell = Callable[[Mapping[str, Any]], str]


def _number(key: str, form: str, unit: str = "", scale: float = 1.0) -> _Cell:
    """Writes a number of a row, or nothing where it is None."""
    return lambda row: "" if row[key] is None else f"{row[key] * scale:{form}}{unit}"


def _print_rows(
    rows: Iterable[Mapping[str, Any]], place: Sequence[str], columns: Sequence[tuple[str, _Cell]], notes: Iterable[str]
) -> None:
    """Rows as one table on standard output, cut where the place changes, and notes below it.

    `place` are the keys of the first columns, `columns` the others by their titles: numbers, but for one without title.
    """
    table = Table()
    for title in (*place, "variant"):
        table.add_column(title, no_wrap=True)
    for title, _ in columns:
        table.add_column(title, justify="right" if title else "left", no_wrap=bool(title))
    previous: list[str] = []
    for row in rows:
        here = [str(row[key]) for key in place]
        if previous and here != previous:
            table.add_section()
        shown = here if here != previous else [""] * len(place)
        table.add_row(*shown, row["variant"], *(cell(row) for _, cell in columns))
        previous = here
    console = wide_console()
    console.print(table)
    for note in notes:
        console.print(note, style="dim")


def _range(row: Mapping[str, Any]) -> str:
    """Least and largest ratio to dense of all runs."""
    ratios = [ratio for ratio in row["ratios_to_dense"] if ratio is not None]
    return f"{min(ratios):.3g} to {max(ratios):.3g} in {len(ratios)} runs" if ratios else ""


def _listed(values: Mapping[str, float], form: str) -> str:
    return ", ".join(f"{name} {value:{form}}" for name, value in values.items())


def print_results(results: Mapping[str, Any]) -> None:
    """All rows as one table on standard output."""
    r, ceilings = results, results["ceilings"]

    def notes(row: Mapping[str, Any]) -> str:
        words = []
        if row["gflops"] is not None:
            share = row["gflops"] / ceilings["gflops"]
            words.append(f"{row['gflops']:.1f} GFLOP/s ({share:.0%}), {row['gb_s']:.2f} GB/s")
            if row["peak_mb"] is not None:
                words[-1] += f", peak {row['peak_mb'] / row['weights_mb']:.1f}x the weights"
        if row["repeats"] < _ROUNDS:
            words.append(f"{row['repeats']} repeats")
        return "; ".join(words)

    columns = [
        ("step", _number("step_ms", ",.2f", " ms")),
        ("first", _number("first_ms", ",.0f", " ms")),
        ("x dense", _number("ratio_to_dense", ".3g")),
        *([("range", _range)] if any(len(row["ratios_to_dense"]) > 1 for row in r["rows"]) else []),
        ("x naive", _number("ratio_to_naive", ".3g")),
        ("peak MB", lambda row: _number("peak_mb", ",.0f")(row) or "out of memory"),
        ("", notes),
    ]
    machine = (
        f"{r['machine']}, {r['threads']} threads, torch {r['torch']}, {r['dtype']}; matrix product "
        f"{ceilings['gflops']:.0f} GFLOP/s, copy {ceilings['gb_s']:.1f} GB/s"
    )
    slopes = [f"{name}, exponent of the step's time: {_listed(slopes, '.2f')}" for name, slopes in r["slopes"].items()]
    _print_rows(r["rows"], ["case"], columns, [machine, *slopes, *r["skipped"]])
