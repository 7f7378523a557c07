"""`gbfunc bench`: what generation costs here, against the dense p-net and the naive implementation.

With `--distributed`: what goes over the wire, and how long ranks wait for it. With `--calibrate`: what the planner must
know of this machine.
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
    "distributed": ("quick", "cases", "out", "ranks", "links"),
    "calibrate": ("device", "threads"),
}
"""Options of what is measured: of cases side by side, or instead."""

_GROWTH = {"growth_weights": ("weights", "weights"), "growth_features": ("features", "features H")}


def run(options: Bench) -> None:
    """Run the cases, print one table, write the results."""
    kind = "calibrate" if options.calibrate else "distributed" if options.distributed else None
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
    if options.distributed:
        with open_folder(options.out) as folder:
            run_wire("quick" if options.quick else "full", options.cases, options.ranks, options.links, folder)
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
        if row["counted_mb"] is not None:
            words.append(f"counted {row['counted_mb']:,.0f} MB, weights {row['weights_mb']:,.0f} MB")
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


def run_wire(
    scale: cases.Scale, names: tuple[str, ...] | None, ranks: Sequence[int], links: Sequence[str], folder: Path
) -> None:
    """Measure every case on every number of ranks and link; print one table, write `wire.json` and the figures.

    The loopback is measured always, as slow links are modelled from it.
    """
    from gbfunc.lab.bench import wire
    from gbfunc.lab.bench.links import can_make_links
    from gbfunc.plots import grouped_bars

    chosen, pace = cases.choose(wire.CASES[scale], names, "--distributed --cases"), wire.PACES[scale]
    if not ranks or min(ranks) < 2:
        raise ValueError(f"--ranks must be 2 or more, got {' '.join(map(str, ranks)) or 'none'}")
    print("1 rank", file=sys.stderr, flush=True)
    results: dict[str, Any] = describe(torch.device("cpu"), 1)
    alone = [case for case in chosen.values() if set(wire.PLACEMENTS) <= set(case.variants)]
    results["one_rank"] = {case.name: wire.one_rank_ratios(case, rounds=pace.steps) for case in alone}
    results["rows"] = []
    orders: list[tuple[cases.Scale, str]] = [(scale, name) for name in chosen]
    slow = [link for link in links if link != "loopback"]
    can_limit = bool(slow) and can_make_links()
    for n in ranks:
        print(f"{n} ranks", file=sys.stderr, flush=True)
        measured = wire.measure_ranks(orders, n, ["loopback"], pace)
        if can_limit:
            wait = wire.expected_seconds(measured, slow, pace)
            print(f"{n} ranks on {' and '.join(slow)}, about {wait:,.0f} s", file=sys.stderr, flush=True)
            measured |= wire.measure_ranks(orders, n, slow, pace)
        peaks = (
            {case.name: wire.measure_peaks(scale, name, n, pace) for name, case in chosen.items()}
            if pace.memory
            else {}
        )
        places = [(case.name, link) for case in chosen.values() for link in links]
        results["rows"] += [
            row for case, link in places for row in wire.rows_of(measured, case, n, link, peaks.get(case))
        ]
        write_metrics(folder / "wire.json", results)
    for name, case in chosen.items():
        panels = _panels(case.name, [row for row in results["rows"] if row["case"] == case.name])
        write_figure(folder / f"wire_{name}.png", grouped_bars(panels))
    print_wire(results)


_WORDS = {
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "torchgb": "torchGB's scheme",
    "replicated": "genome on every rank",
    "sharded": "genome split, tiles gathered",
    "factors": "genome split, factors gathered",
}
"""What the figures call variants."""

_Panels = dict[str, tuple[str, Mapping[str, Mapping[str, float]]]]


def _panels(case: str, rows: Sequence[Mapping[str, Any]]) -> _Panels:
    """Bytes by number of ranks, then time by link for each number of ranks."""
    ranks = {n: [row for row in rows if row["ranks"] == n] for n in dict.fromkeys(row["ranks"] for row in rows)}
    sent = {f"{n} ranks": {_words(r): r["counted_bytes"] for r in some} for n, some in ranks.items()}
    panels: _Panels = {f"{case}: bytes": ("bytes that a rank sends per step", sent)}
    for n, some in ranks.items():
        times: dict[str, dict[str, float]] = {}
        for row in some:
            times.setdefault(row["link"], {})[_words(row)] = row["step_ms"]
        panels[f"time, {n} ranks"] = ("time of a step (ms)", times)
    return panels


def _words(row: Mapping[str, Any]) -> str:
    variant = str(row["variant"])
    return _WORDS.get(variant, variant)


def print_wire(results: Mapping[str, Any]) -> None:
    """All rows as one table on standard output; modelled times are in brackets."""
    step = _number("step_ms", ",.1f", " ms")
    columns = [
        ("step", lambda row: step(row) if row["timing"] == "measured" else f"({step(row)})"),
        ("x first", _number("step_ratio", ".3g")),
        ("modelled", _number("modelled_ms", ",.1f")),
        ("counted kB", _number("counted_bytes", ",.1f", scale=1e-3)),
        ("x first", _number("bytes_ratio", ".3g")),
        ("wire kB", _number("wire_bytes", ",.1f", scale=1e-3)),
        ("x first", _number("wire_ratio", ".3g")),
    ]
    machine = (
        f"{results['machine']}, gloo, one thread per rank, torch {results['torch']}; kB are 1,000 bytes that a rank "
        "sends per step: counted from the collectives' tensors, on the wire by its interface, headers included; x "
        "first: to the case's first variant"
    )
    alone = [
        f"{case}, step on a mesh of one rank over one without: {_listed(ratios, '.3f')}"
        for case, ratios in results["one_rank"].items()
    ]
    details = dict.fromkeys(filter(None, map(_purposes, results["rows"])))
    _print_rows(results["rows"], ["case", "ranks", "link"], columns, [machine, *alone, *details])


def _purposes(row: Mapping[str, Any]) -> str:
    """What a variant sends, and the memory of its rank that needs most, in words; the same on every link."""
    sent = {name: row[f"{name}_bytes"] / 1e3 for name in ("activations", "weights", "genome")}
    words = [f"kB of {_listed(sent, ',.1f')}"] if any(sent.values()) else []
    if row["peak_bytes"] is not None:
        words.append(f"peak memory {row['peak_bytes'] / 1e6:,.1f} MB, {row['peak_ratio']:.2f} x first")
    return f"{row['case']}, {row['ranks']} ranks, {row['variant']}: {'; '.join(words)}" if words else ""
