"""`gbfunc bench`: what generation costs here, against the dense p-net and the naive implementation.

With `--calibrate`: the speeds of this machine, for the planner.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch

from gbfunc.cli.commands import Bench
from gbfunc.cli.output import open_folder, print_table, write_metrics
from gbfunc.cli.ranks import find_device
from gbfunc.lab.bench import cases, report
from gbfunc.lab.bench.cases import Setting, why_not
from gbfunc.lab.bench.report import describe, over_runs
from gbfunc.types import dtype_name

_ROUNDS = 7


def run_bench(options: Bench) -> None:
    device = find_device(options.device)
    if options.calibrate:
        from gbfunc.lab.bench.calibrate import calibrate

        torch.set_num_threads(options.threads or torch.get_num_threads())
        spec, first = calibrate(device)
        if first:
            print(spec.to_json())
        return
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, got {options.device}")
    on_cuda = device.type == "cuda"
    setting = Setting(device, torch.bfloat16 if on_cuda else None, options.threads or torch.get_num_threads())
    benches = cases.choose(cases.BENCHES["quick" if options.quick else "cuda" if on_cuda else "full"], options.cases)
    with open_folder(options.out) as folder:
        visit = 0.02 if options.quick else 0.1
        print_results(measure(benches, setting, folder, visit=visit, repeat=options.repeat))


def measure(
    benches: Mapping[str, cases.Bench],
    setting: Setting,
    folder: Path,
    *,
    rounds: int = _ROUNDS,
    visit: float,
    repeat: int = 1,
) -> dict[str, Any]:
    """Run benches `repeat` times, write `bench.json` and return its content.

    The rows of several runs are medians (`over_runs`); `rounds` and `visit` (s) go to `time_together`.
    """
    torch.set_num_threads(setting.threads)
    results: dict[str, Any] = describe(setting.device, setting.threads)
    results |= {"device": setting.device.type, "dtype": dtype_name(setting.amp or torch.float32)}
    results["rows"] = []
    reasons = {case.name: why_not(case, setting) for bench in benches.values() for case in bench}
    results["skipped"] = [reason for reason in reasons.values() if reason]
    chosen = {k: some for k, bench in benches.items() if (some := tuple(c for c in bench if not reasons[c.name]))}
    runs: dict[str, list[list[report.Row]]] = {name: [] for name in chosen}
    for run, (i, (name, bench)) in product(range(repeat), enumerate(chosen.items(), 1)):
        print(f"{name} ({i} of {len(chosen)}, run {run + 1} of {repeat})", file=sys.stderr, flush=True)
        runs[name].append(report.run_bench(bench, setting, rounds=rounds, visit=visit, memory=run == 0))
        results["rows"] = [row for some in runs.values() for row in over_runs(some)]
        # Written after every bench: a later failure loses nothing.
        write_metrics(folder / "bench.json", results)
    return results


def print_results(results: Mapping[str, Any]) -> None:
    r, rows, previous = results, list[tuple[str, ...]](), None

    def number(value: float | None, form: str, unit: str = "") -> str:
        return "" if value is None else f"{value:{form}}{unit}"

    for row in r["rows"]:
        if previous not in (None, row["case"]):
            rows.append(())
        ratios = [ratio for ratio in row["ratios_to_dense"] if ratio is not None]
        rows.append(
            (
                "" if row["case"] == previous else row["case"],
                row["variant"],
                number(row["step_ms"], ",.2f", " ms"),
                number(row["first_ms"], ",.0f", " ms"),
                number(row["ratio_to_dense"], ".3g"),
                f"{min(ratios):.3g} to {max(ratios):.3g}" if len(ratios) > 1 else "",
                number(row["ratio_to_naive"], ".3g"),
                number(row["peak_mb"], ",.0f") or "out of memory",
            )
        )
        previous = row["case"]
    machine = f"{r['machine']}, {r['threads']} threads, torch {r['torch']}, {r['dtype']}"
    columns = ("case", "variant", "step", "first", "x dense", "range", "x naive", "peak MB")
    print_table(columns, rows, notes=[machine, *r["skipped"]])
