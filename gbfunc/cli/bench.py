"""`gbfunc bench`: what generation costs here, against the dense p-net and the naive implementation.

With `--distributed`: what goes over the wire, and how long ranks wait for it.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from rich.table import Table
from tyro.conf import FlagCreatePairsOff, arg

from gbfunc.cli.job import find_device
from gbfunc.cli.output import make_folder, wide_console, write_figure, write_metrics
from gbfunc.lab import bench
from gbfunc.lab.bench import Row, Setting, choose_benches, describe, growth_curves, log_slope, measure_ceilings
from gbfunc.lab.bench.cases import Case, Scale
from gbfunc.lab.bench.report import machine_name, run_bench

if TYPE_CHECKING:
    from gbfunc.lab.bench.wire import Pace
    from gbfunc.lab.bench.wire import Row as WireRow

_ROUNDS = 7
_GROWTH = {"growth_weights": ("weights", "weights"), "growth_features": ("features", "features H")}


@dataclass(frozen=True)
class Bench:
    """Measure training steps and generation side by side: time, memory, growth."""

    quick: FlagCreatePairsOff[bool] = False
    """Fewer and smaller cases: under a minute."""

    cases: Annotated[tuple[str, ...] | None, arg(metavar="NAME ...", help_behavior_hint="(default: all)")] = None
    """Only these: small_mlp, mlp_2048, mlp_4096, generation, gpt, resnet18, remat, checkpoint, growth_weights,
    growth_features."""

    device: str = "cpu"
    """Where to run: cpu, or cuda for larger sizes in bfloat16."""

    threads: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: torch's)")] = None
    """Threads of the CPU."""

    out: Path = Path("bench")
    """Folder for bench.json and figures; such files are replaced."""

    distributed: FlagCreatePairsOff[bool] = False
    """Measure instead what training on several ranks sends, and how long a step takes on slow links (as root, with
    iproute2; else modelled), beside DDP, FSDP2 and torchGB's scheme. Cases: mlp, gpt."""

    ranks: tuple[int, ...] = (2, 4)
    """Numbers of ranks, with --distributed."""

    links: tuple[Literal["loopback", "100mbit", "10mbit"], ...] = ("loopback", "100mbit", "10mbit")
    """Links between ranks, with --distributed."""

    def run(self) -> None:
        """Run the cases, print one table, write the results."""
        if self.distributed:
            run_wire("quick" if self.quick else "full", self.cases, self.ranks, self.links, self.out)
            return
        setting = self._setting()
        scale = "quick" if self.quick else "cuda" if setting.device.type == "cuda" else "full"
        benches = choose_benches(scale, self.cases)
        results = measure(benches, setting, make_folder(self.out), visit=0.02 if self.quick else 0.1)
        print_results(results)

    def _setting(self) -> Setting:
        device = find_device(self.device)
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"--device must be cpu or cuda, got {self.device}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"--threads must be at least 1, got {self.threads}")
        amp = torch.bfloat16 if device.type == "cuda" else None
        return Setting(device, amp, self.threads or torch.get_num_threads())


def measure(
    benches: Mapping[str, bench.Bench], setting: Setting, folder: Path, *, rounds: int = _ROUNDS, visit: float
) -> dict[str, Any]:
    """Run benches one after the other, and write `bench.json` and the figures of growth.

    Args:
        benches: the cases of each, by its name.
        setting: where.
        folder: where to write.
        rounds: timings of each variant.
        visit: seconds of each timing, about.

    Returns:
        What `bench.json` holds.
    """
    from gbfunc.plots import cost_curves

    torch.set_num_threads(setting.threads)
    about = describe(setting, measure_ceilings(setting.device, rounds=rounds))
    rows: list[Row] = []
    slopes: dict[str, dict[str, float]] = {}
    for i, (name, cases) in enumerate(benches.items(), 1):
        print(f"{name} ({i} of {len(benches)})", file=sys.stderr, flush=True)
        found = run_bench(cases, setting, rounds=rounds, visit=visit)
        rows += found
        if name in _GROWTH:
            by, label = _GROWTH[name]
            curves = growth_curves(found, by)
            slopes[name] = {variant: log_slope(points) for variant, points in curves.items()}
            write_figure(folder / f"{name}.png", cost_curves(curves, label))
        # After each bench: what is measured is kept, should a later one fail.
        results = about | {"slopes": slopes, "rows": [row._asdict() for row in rows]}
        write_metrics(folder / "bench.json", results)
    return results


def print_results(results: Mapping[str, Any]) -> None:
    """All rows as one table on standard output."""
    r = results
    ceilings = r["ceilings"]
    table = Table()
    for column in ("case", "variant"):
        table.add_column(column, no_wrap=True)
    for column in ("step", "x dense", "x naive", "peak MB"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column()
    previous = ""
    for row in r["rows"]:
        if row["case"] != previous and previous:
            table.add_section()
        table.add_row("" if row["case"] == previous else row["case"], row["variant"], *_cells(row, ceilings))
        previous = row["case"]
    console = wide_console()
    console.print(table)
    console.print(
        f"{r['machine']}, {r['threads']} threads, torch {r['torch']}, {r['dtype']}; matrix product "
        f"{ceilings['gflops']:.0f} GFLOP/s, copy {ceilings['gb_s']:.1f} GB/s",
        style="dim",
    )
    for name, slopes in r["slopes"].items():
        by_variant = ", ".join(f"{variant} {slope:.2f}" for variant, slope in slopes.items())
        console.print(f"{name}, exponent of the step's time: {by_variant}", style="dim")


def _cells(row: Mapping[str, Any], ceilings: Mapping[str, float]) -> list[str]:
    ratios = ["" if (x := row[f"ratio_to_{other}"]) is None else f"{x:.3g}" for other in ("dense", "naive")]
    peak = "out of memory" if row["peak_mb"] is None else f"{row['peak_mb']:,.0f}"
    notes = []
    if row["counted_mb"] is not None:
        notes.append(f"counted {row['counted_mb']:,.0f} MB, weights {row['weights_mb']:,.0f} MB")
    if row["gflops"] is not None:
        share = row["gflops"] / ceilings["gflops"]
        notes.append(f"{row['gflops']:.1f} GFLOP/s ({share:.0%}), {row['gb_s']:.2f} GB/s, {_times_weights(row)}")
    if row["repeats"] < _ROUNDS:
        notes.append(f"{row['repeats']} repeats")
    return [f"{row['step_ms']:,.2f} ms", *ratios, peak, "; ".join(notes)]


def _times_weights(row: Mapping[str, Any]) -> str:
    return "" if row["peak_mb"] is None else f"peak {row['peak_mb'] / row['weights_mb']:.1f}x the weights"


def run_wire(
    scale: Scale, names: tuple[str, ...] | None, ranks: Sequence[int], links: Sequence[str], folder: Path
) -> None:
    """Measure, print one table, write `wire.json` and a figure for each case.

    Raises:
        ValueError: for a case that there is not, or a number of ranks below 2.
        OSError: if a rank fails or takes too long.
    """
    from gbfunc.lab.bench.wire import PACES, choose_cases

    cases = choose_cases(scale, names)
    if not ranks or min(ranks) < 2:
        raise ValueError(f"--ranks must be 2 or more, got {' '.join(map(str, ranks)) or 'none'}")
    with _ending_well():
        print_wire(measure_wire(scale, cases, ranks, links, make_folder(folder), PACES[scale]))


def measure_wire(
    scale: Scale, cases: Mapping[str, Case], ranks: Sequence[int], links: Sequence[str], folder: Path, pace: Pace
) -> dict[str, Any]:
    """Measure every case on every number of ranks and link, and write the results.

    Args:
        scale: where the cases are from.
        cases: the cases by name.
        ranks: numbers of ranks.
        links: names of `LINKS`; the loopback is measured always, as slow links are modelled from it.
        folder: where to write.
        pace: how long.

    Returns:
        What `wire.json` holds.
    """
    from gbfunc.lab.bench.links import can_make_links
    from gbfunc.lab.bench.wire import expected_seconds, measure_ranks, one_rank_ratios, rows_of
    from gbfunc.plots import grouped_bars

    orders: list[tuple[Scale, str]] = [(scale, name) for name in cases]
    slow = [link for link in links if link != "loopback"]
    measured = bool(slow) and can_make_links()
    about = {"machine": machine_name(torch.device("cpu")), "threads": 1, "torch": torch.__version__}
    rows: list[WireRow] = []
    print("1 rank", file=sys.stderr, flush=True)
    alone = {case.name: one_rank_ratios(case, rounds=pace.steps) for case in cases.values()}
    results: dict[str, Any] = {}
    for n in ranks:
        print(f"{n} ranks", file=sys.stderr, flush=True)
        found = measure_ranks(orders, n, ["loopback"], pace)
        if measured:
            wait = expected_seconds(found, slow, pace)
            print(f"{n} ranks on {' and '.join(slow)}, about {wait:,.0f} s", file=sys.stderr, flush=True)
            found |= measure_ranks(orders, n, slow, pace)
        rows += [row for case in cases.values() for link in links for row in rows_of(found, case.name, n, link)]
        results = about | {"one_rank": alone, "rows": [row._asdict() for row in rows]}
        write_metrics(folder / "wire.json", results)
    for name, case in cases.items():
        write_figure(folder / f"wire_{name}.png", grouped_bars(_panels([r for r in rows if r.case == case.name])))
    return results


def _panels(rows: Sequence[WireRow]) -> dict[str, tuple[str, Mapping[str, Mapping[str, float]]]]:
    """Bytes by number of ranks, then time by link for each number of ranks."""
    ranks = list(dict.fromkeys(row.ranks for row in rows))
    sent = {f"{n} ranks": {r.variant: r.counted_bytes for r in rows if r.ranks == n} for n in ranks}
    panels: dict[str, tuple[str, Mapping[str, Mapping[str, float]]]] = {
        f"{rows[0].case}: bytes": ("bytes that a rank sends per step", sent)
    }
    for n in ranks:
        links = dict.fromkeys(row.link for row in rows if row.ranks == n)
        times = {k: {r.variant: r.step_ms for r in rows if (r.ranks, r.link) == (n, k)} for k in links}
        panels[f"time, {n} ranks"] = ("time of a step (ms)", times)
    return panels


def print_wire(results: Mapping[str, Any]) -> None:
    """All rows as one table on standard output."""
    table = Table()
    for column in ("case", "ranks", "link", "variant"):
        table.add_column(column, no_wrap=True)
    for column in ("step", "x DDP", "modelled", "counted kB", "x DDP", "wire kB", "x DDP"):
        table.add_column(column, justify="right", no_wrap=True)
    previous: tuple[str, ...] = ()
    for row in results["rows"]:
        place = (row["case"], str(row["ranks"]), row["link"])
        if previous and place != previous:
            table.add_section()
        table.add_row(*(place if place != previous else ("", "", "")), row["variant"], *_wire_cells(row))
        previous = place
    console = wide_console()
    console.print(table)
    console.print(
        f"{results['machine']}, gloo, one thread per rank, torch {results['torch']}; kB are 1,000 bytes that a rank "
        "sends per step: counted from the collectives' tensors, on the wire by its interface, headers included",
        style="dim",
    )
    for case, ratios in results["one_rank"].items():
        by_placement = ", ".join(f"{placement} {ratio:.3f}" for placement, ratio in ratios.items())
        console.print(f"{case}, step on a mesh of one rank over one without: {by_placement}", style="dim")


def _wire_cells(row: Mapping[str, Any]) -> list[str]:
    def cell(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    step = f"{row['step_ms']:,.1f} ms"
    return [
        step if row["timing"] == "measured" else f"({step})",
        cell(row["ratio_to_ddp"], ".3g"),
        cell(row["modelled_ms"], ",.1f"),
        f"{row['counted_bytes'] / 1e3:,.1f}",
        cell(row["bytes_to_ddp"], ".3g"),
        "" if row["wire_bytes"] is None else f"{row['wire_bytes'] / 1e3:,.1f}",
        cell(row["wire_to_ddp"], ".3g"),
    ]


@contextmanager
def _ending_well() -> Iterator[None]:
    """Have a termination end this command by an exception, so that ranks and namespaces are cleared away."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
