"""What a command shows: progress on standard error, files (each replaced in one step), tables on standard output."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from gbfunc.files import replace_file
from gbfunc.tasks import Metric, Task
from gbfunc.tasks.training import LOGS, OnLog, Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, float]

_PLAIN_LINES = 5
_WIDTH = 150
"""Width of a table that is written to a file."""


@contextmanager
def open_folder(path: Path | None, option: str = "--out") -> Iterator[Path]:
    """Open the folder that an option names, or a temporary one; new folders that stay empty are removed at the end."""
    if path is None:
        with TemporaryDirectory(prefix="gbfunc-") as folder:
            yield Path(folder)
        return
    new = [one for one in (path, *path.parents) if not one.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(one for one in (path, *path.parents) if one.exists())
        raise NotADirectoryError(f"{option} {path}: {file} is a file, expected a folder") from None
    try:
        yield path
    finally:
        with suppress(OSError):
            for folder in new:
                folder.rmdir()


def write_metrics(path: Path, metrics: Mapping[str, object]) -> None:
    replace_file(path, (json.dumps(metrics, indent=2) + "\n").encode())


def write_history(path: Path, runs: Mapping[str, Sequence[Row]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, ["run", *max(next(iter(runs.values())), key=len)], lineterminator="\n")
    writer.writeheader()
    for run, rows in runs.items():
        writer.writerows({"run": run, **row} for row in rows)
    replace_file(path, text.getvalue().encode())


def write_figure(path: Path, figure: Figure) -> None:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    replace_file(path, content.getvalue())


def write_run(folder: Path, metrics: Mapping[str, object], runs: Mapping[str, Sequence[Row]], task: Task) -> None:
    from gbfunc.plots import learning_curve, return_curve

    write_history(folder / "history.csv", runs)
    if task.metric.name == "mean_return":
        figure = return_curve(runs, str(metrics["env"]), task.facts(())["threshold"])
    else:
        figure = learning_curve(runs, task.metric.name, task.metric.unit)
    write_figure(folder / "learning_curve.png", figure)
    # Last: where it stands, the others do too.
    write_metrics(folder / "metrics.json", metrics)


def print_table(
    columns: Sequence[str | Column], rows: Iterable[Sequence[str]], *, title: str = "", notes: Iterable[str] = ()
) -> None:
    numbers = (Column(name, justify="right", no_wrap=True) if isinstance(name, str) else name for name in columns[1:])
    table = Table(columns[0], *numbers, title=title)
    for row in rows:
        table.add_row(*row) if row else table.add_section()
    console = Console()
    console = console if console.is_terminal else Console(width=_WIDTH)
    console.print(table)
    for note in notes:
        console.print(note, style="dim")


def print_metrics(metrics: Mapping[str, Any], task: Task) -> None:
    m = metrics
    rows: list[Sequence[str]] = [
        ("parameters", f"{m['genome_params']:,}", f"{m['pnet_params']:,}", f"{m['ratio_params']:.1f}"),
        ("bytes", f"{m['genome_bytes']:,}", f"{m['dense_bytes']:,}", f"{m['ratio_bytes']:.1f}"),
    ]
    for split, name in (("val", "validation"), ("test", "test")):
        rows += [(f"{name} {x.label}", x.show(m[f"{split}_{x.name}"])) for x in task.metrics]
    for name in task.facts(()):
        if m[name] is not None or "seconds" in m:
            shown = f"{m[name]:,}" if isinstance(m[name], int | float) else str(m[name] or "-")
            rows.append((name.replace("_", " "), shown))
    if "seconds" in m:
        rows.append(("training", f"{m['steps']:,} steps", f"{m['seconds']:.1f} s"))
    if "ranks" in m:
        unit = "tokens" if "tokens_per_second" in m else "samples"
        speed, peak = f"{m[f'{unit}_per_second']:,.0f} {unit}/s", f"{m['peak_memory_bytes'] / 2**20:,.0f} MiB"
        rows.append(("training speed, memory", speed, peak))
    if "model_flops_per_second" in m:
        share = f"{m['peak_flops_share']:.1%} of peak" if "peak_flops_share" in m else ""
        rows.append(("training, p-net", f"{m['model_flops_per_second'] / 1e9:,.2f} GFLOP/s", share))
    if m.get("ranks", 1) > 1:
        rows.append((f"{m['ranks']} ranks", m["placement"], f"{m['bytes_sent_per_step']:,.0f} bytes/step sent"))
        for axis, sent in m["bytes_sent_per_step_by_axis"].items():
            rows.append((f"  axis {axis}", f"{m['mesh'][axis]} ranks" if axis in m["mesh"] else "", f"{sent:,.0f}"))
    if "pipeline_bubble" in m:
        schedule = f"{m['pipeline']}, {m['microbatches']} microbatches"
        rows.append(("pipeline, simulated", schedule, f"{m['pipeline_bubble']:.1%} bubble"))
    print_table(("", f"{m['task']}: {m.get('network', 'genome')}", "dense p-net", "ratio"), rows)


def tell(line: str) -> None:
    print(f"gbfunc: {line}", file=sys.stderr, flush=True)


class Best:
    """Keeps the best genome by validation in a file."""

    def __init__(self, path: Path, metric: Metric, write: Callable[[Any, Path], None]) -> None:
        self._path, self._metric, self._write = path, metric, write
        self._first: int | None = None

    def __call__(self, state: Any, history: Sequence[Row]) -> None:
        if self._first is None:
            # A training that goes on elsewhere has no file of the rows before.
            self._first = 0 if self._path.exists() else len(history) - 1
        if self._best(history) is history[-1]:
            self._write(state, self._path)

    def step(self, history: Sequence[Row]) -> int:
        return int(self._best(history)["step"])

    def _best(self, history: Sequence[Row]) -> Row:
        def value(row: Row) -> float:
            found = self._metric.sign * row[f"val_{self._metric.name}"]
            return -math.inf if math.isnan(found) else found

        # The first of the best rows; one that is not a number is the worst.
        return max(history[self._first or 0 :], key=value)


@contextmanager
def open_logs(
    names: Sequence[str], folder: Path | None, settings: Mapping[str, Any], rate: Callable[[int], float]
) -> Iterator[tuple[Callable[[], None], OnLog | None]]:
    """Open logs by their names: a function that begins them all, and one hook for them (None without a name)."""
    logs: list[OnLog] = []
    with ExitStack() as stack:

        def begin() -> None:
            logs.extend(stack.enter_context(LOGS[name](folder or Path(), settings)) for name in dict.fromkeys(names))

        def log(step: int, metrics: Row) -> None:
            for one in logs:
                one(step, {**metrics, "lr": rate(step - 1)} if "train_loss" in metrics else metrics)

        yield begin, log if names else None


@contextmanager
def reporter(label: str, total_steps: int, *, silent: bool = False, split: str = "validation") -> Iterator[Report]:
    """Show a training on standard error: a bar in a terminal, otherwise a line now and then."""
    console = Console(stderr=True)
    text = TextColumn("step {task.completed:,.0f}/{task.total:,.0f}  {task.fields[status]}  {task.fields[val]}")
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), text, TimeRemainingColumn())
    is_bar, following = console.is_terminal and not silent, 0
    with Progress(*columns, console=console, disable=not is_bar) as progress:
        bar = progress.add_task(label, total=total_steps, status="", val="")

        def report(steps: int, status: str, validation: str | None) -> None:
            nonlocal following
            shown: dict[str, Any] = {} if validation is None else {"val": f"{split} {validation}"}
            progress.update(bar, completed=steps, status=status, **shown)
            if shown and not is_bar and not silent and (steps >= following or steps >= total_steps):
                following = steps + total_steps // _PLAIN_LINES
                words = f"{label}: step {steps:,}/{total_steps:,}, {status}, {shown['val']}"
                print(words, file=sys.stderr, flush=True)

        yield report
