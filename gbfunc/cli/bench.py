"""`gbfunc bench`: what generation costs here, against the dense p-net and the naive implementation."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from tyro.conf import FlagCreatePairsOff, arg

from gbfunc.cli.job import find_device

if TYPE_CHECKING:
    from gbfunc import bench
    from gbfunc.lab.bench import Row, Setting

_ROUNDS = 7
_WIDTH = 150
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
            from gbfunc.cli.bench_wire import run_wire

            run_wire("quick" if self.quick else "full", self.cases, self.ranks, self.links, self.out)
            return
        from gbfunc.cli.output import make_folder
        from gbfunc.lab.bench import choose_benches

        setting = self._setting()
        scale = "quick" if self.quick else "cuda" if setting.device.type == "cuda" else "full"
        benches = choose_benches(scale, self.cases)
        results = measure(benches, setting, make_folder(self.out), visit=0.02 if self.quick else 0.1)
        print_results(results)

    def _setting(self) -> Setting:
        from gbfunc.lab.bench import Setting

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
    from gbfunc.cli.output import write_figure, write_metrics
    from gbfunc.lab.bench import describe, growth_curves, log_slope, measure_ceilings, run_bench
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
    from rich.console import Console
    from rich.table import Table

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
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
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
