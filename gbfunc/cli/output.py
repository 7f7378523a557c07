"""Files that commands write, each replaced in one step, and the tables they print."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from gbfunc.files import replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gbfunc.tasks import Metric


def make_folder(path: Path) -> Path:
    """Make a folder for results, so that a path that cannot be one is known before hours of training.

    Raises:
        OSError: if it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(f"--out {path} is a file, expected a folder") from None
    return path


def write_metrics(path: Path, metrics: Mapping[str, object]) -> None:
    """One JSON object."""
    replace_file(path, (json.dumps(metrics, indent=2) + "\n").encode())


def write_history(path: Path, runs: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """A row an epoch as CSV; the first column names the run."""
    text = io.StringIO()
    fields = ["run", *next(iter(runs.values()))[0]]
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    writer.writeheader()
    for run, rows in runs.items():
        writer.writerows({"run": run, **row} for row in rows)
    replace_file(path, text.getvalue().encode())


def write_figure(path: Path, figure: Figure) -> None:
    """A PNG."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    replace_file(path, content.getvalue())


def write_run(
    folder: Path, metrics: Mapping[str, object], runs: Mapping[str, Sequence[Mapping[str, float]]], metric: Metric
) -> None:
    """`metrics.json`, `history.csv` and `learning_curve.png`, which shows one metric."""
    from gbfunc.plots import learning_curve

    write_history(folder / "history.csv", runs)
    write_figure(folder / "learning_curve.png", learning_curve(runs, metric.name, metric.unit))
    # Last: where it stands, the others do too.
    write_metrics(folder / "metrics.json", metrics)


def print_metrics(metrics: Mapping[str, Any], measured: Sequence[Metric]) -> None:
    """One genome's figures of merit on standard output."""
    m = metrics
    table = _table("", f"{m['task']}: {m.get('network', 'genome')}", "dense p-net", "ratio")
    table.add_row("parameters", f"{m['genome_params']:,}", f"{m['pnet_params']:,}", f"{m['ratio_params']:.1f}")
    table.add_row("bytes", f"{m['genome_bytes']:,}", f"{m['dense_bytes']:,}", f"{m['ratio_bytes']:.1f}")
    for split, name in (("val", "validation"), ("test", "test")):
        for metric in measured:
            table.add_row(f"{name} {metric.label}", metric.show(m[f"{split}_{metric.name}"]))
    if "seconds" in m:
        table.add_row("training", f"{m['steps']:,} steps", f"{m['seconds']:.1f} s")
    if "ranks" in m:
        speed, peak = f"{m['samples_per_second']:,.0f} samples/s", f"{m['peak_memory_bytes'] / 2**20:,.0f} MiB"
        table.add_row("training speed, memory", speed, peak)
    if m.get("ranks", 1) > 1:
        sent = f"{m['bytes_sent_per_step']:,.0f} bytes/step sent"
        table.add_row(f"{m['ranks']} ranks", m["placement"], sent)
    Console().print(table)


def print_comparison(metrics: Mapping[str, Any], metric: Metric) -> None:
    """The genome beside both dense nets on standard output."""
    m = metrics
    table = _table("network", "parameters", "ratio", "bytes on disk", f"test {metric.label}")
    rows = (
        (f"{m['pnet_label']}, dense", "dense", m["pnet_params"], m["dense_bytes"]),
        (f"{m['pnet_label']}, generated", "", m["genome_params"], m["genome_bytes"]),
        (f"{m['small_dense_label']}, dense", "small_dense", m["small_dense_params"], m["small_dense_bytes"]),
    )
    for network, prefix, params, n_bytes in rows:
        ratio = m["pnet_params"] / params
        found = m[f"{prefix}_test_{metric.name}" if prefix else f"test_{metric.name}"]
        table.add_row(network, f"{params:,}", f"{ratio:.1f}x", f"{n_bytes:,}", metric.show(found))
    console = Console()
    console.print(table)
    console.print("Bytes: the genome's whole file; dense nets in float32, without a file's header.", style="dim")


def _table(first: str, *columns: str) -> Table:
    """An empty table: the first column is text, the others are numbers."""
    table = Table(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table
