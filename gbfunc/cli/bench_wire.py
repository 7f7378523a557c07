"""`gbfunc bench --distributed`: what goes over the wire, and how long ranks wait for it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from gbfunc.lab.bench.cases import Case, Scale
    from gbfunc.lab.bench.wire import Pace, Row

_WIDTH = 150


def run_wire(
    scale: Scale, names: tuple[str, ...] | None, ranks: Sequence[int], links: Sequence[str], folder: Path
) -> None:
    """Measure, print one table, write `wire.json` and a figure for each case.

    Raises:
        ValueError: for a case that there is not, or a number of ranks below 2.
        OSError: if a rank fails or takes too long.
    """
    from gbfunc.cli.output import make_folder
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
    from gbfunc.cli.output import write_figure, write_metrics
    from gbfunc.lab.bench.links import can_make_links
    from gbfunc.lab.bench.rank import one_rank_ratios
    from gbfunc.lab.bench.report import machine_name
    from gbfunc.lab.bench.wire import expected_seconds, measure_ranks, rows_of
    from gbfunc.plots import grouped_bars

    orders: list[tuple[Scale, str]] = [(scale, name) for name in cases]
    slow = [link for link in links if link != "loopback"]
    measured = bool(slow) and can_make_links()
    about = {"machine": machine_name(torch.device("cpu")), "threads": 1, "torch": torch.__version__}
    rows: list[Row] = []
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


def _panels(rows: Sequence[Row]) -> dict[str, tuple[str, Mapping[str, Mapping[str, float]]]]:
    """Bytes by number of ranks, then time by link for each number of ranks."""
    ranks = list(dict.fromkeys(row.ranks for row in rows))
    sent = {f"{n} ranks": {r.variant: r.counted_bytes for r in rows if r.ranks == n} for n in ranks}
    panels: dict[str, tuple[str, Mapping[str, Mapping[str, float]]]] = {
        f"{rows[0].case}: bytes": ("bytes that a rank sends in a step", sent)
    }
    for n in ranks:
        links = dict.fromkeys(row.link for row in rows if row.ranks == n)
        times = {k: {r.variant: r.step_ms for r in rows if (r.ranks, r.link) == (n, k)} for k in links}
        panels[f"time, {n} ranks"] = ("time of a step (ms)", times)
    return panels


def print_wire(results: Mapping[str, Any]) -> None:
    """All rows as one table on standard output."""
    from rich.console import Console
    from rich.table import Table

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
        table.add_row(*(place if place != previous else ("", "", "")), row["variant"], *_cells(row))
        previous = place
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(table)
    console.print(
        f"{results['machine']}, gloo, one thread a rank, torch {results['torch']}; kB are 1,000 bytes that a rank "
        "sends in a step: counted from the collectives' tensors, on the wire by its interface, headers included",
        style="dim",
    )
    for case, ratios in results["one_rank"].items():
        by_placement = ", ".join(f"{placement} {ratio:.3f}" for placement, ratio in ratios.items())
        console.print(f"{case}, step on a mesh of one rank over one without: {by_placement}", style="dim")


def _cells(row: Mapping[str, Any]) -> list[str]:
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
