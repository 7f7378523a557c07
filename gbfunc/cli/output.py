"""What a command shows: progress on standard error, files (each replaced in one step), tables on standard output."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from gbfunc.files import replace_file
from gbfunc.tasks import Metric, Recipe, Task
from gbfunc.tasks.logs import LOGS, OnLog
from gbfunc.tasks.training import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PLAIN_LINES = 5
_WIDTH = 150
"""Of a table that is written to a file."""


@contextmanager
def open_folder(path: Path, option: str = "--out") -> Iterator[Path]:
    """The folder that an option names; folders made for it are removed at the end where they hold no file, but a lock.

    A path that cannot be one is refused (`OSError`) before hours of training.
    """
    new = [one for one in (path, *path.parents) if not one.exists()]
    try:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            file = next(one for one in (path, *path.parents) if one.exists())
            raise NotADirectoryError(f"{option} {path}: {file} is a file, expected a folder") from None
        yield path
    finally:
        inside = sorted(new[0].rglob("*"), reverse=True) if new else []
        locks = [one for one in inside if one.name == ".lock"]
        if all(one.is_dir() or one in locks for one in inside):
            for lock in locks:
                lock.unlink(missing_ok=True)
        for folder in [one for one in inside if one.is_dir()] + new:
            with suppress(OSError):
                folder.rmdir()


def write_metrics(path: Path, metrics: Mapping[str, object]) -> None:
    """One JSON object."""
    replace_file(path, (json.dumps(metrics, indent=2) + "\n").encode())


def write_history(path: Path, runs: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """A row per validation as CSV; the first column names the run."""
    text = io.StringIO()
    fields = ["run", *max(next(iter(runs.values())), key=len)]
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    writer.writeheader()
    for run, rows in runs.items():
        writer.writerows({"run": run, **row} for row in rows)
    replace_file(path, text.getvalue().encode())


def read_history(path: Path) -> list[dict[str, float]]:
    """The rows of one run, as `write_history` wrote them; none where there is no such file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        rows = [{k: float(x) for k, x in row.items() if k != "run"} for row in csv.DictReader(file)]
    return [{k: int(x) if x.is_integer() else x for k, x in row.items()} for row in rows]


def write_figure(path: Path, figure: Figure) -> None:
    """A PNG."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    replace_file(path, content.getvalue())


def write_run(
    folder: Path, metrics: Mapping[str, object], runs: Mapping[str, Sequence[Mapping[str, float]]], task: Task
) -> None:
    """`metrics.json`, `history.csv` and `learning_curve.png`, which shows the task's metric."""
    from gbfunc.plots import learning_curve, return_curve

    write_history(folder / "history.csv", runs)
    if task.metric.name == "mean_return":
        figure = return_curve(runs, str(metrics["env"]), task.facts(())["threshold"])
    else:
        figure = learning_curve(runs, task.metric.name, task.metric.unit)
    write_figure(folder / "learning_curve.png", figure)
    # Last: where it stands, the others do too.
    write_metrics(folder / "metrics.json", metrics)


def print_metrics(metrics: Mapping[str, Any], task: Task) -> None:
    """One genome's sizes and metrics on standard output."""
    m = metrics
    table = _table("", f"{m['task']}: {m.get('network', 'genome')}", "dense p-net", "ratio")
    table.add_row("parameters", f"{m['genome_params']:,}", f"{m['pnet_params']:,}", f"{m['ratio_params']:.1f}")
    table.add_row("bytes", f"{m['genome_bytes']:,}", f"{m['dense_bytes']:,}", f"{m['ratio_bytes']:.1f}")
    for split, name in (("val", "validation"), ("test", "test")):
        for metric in task.metrics:
            table.add_row(f"{name} {metric.label}", metric.show(m[f"{split}_{metric.name}"]))
    for name in task.facts(()):
        if m[name] is not None or "seconds" in m:
            table.add_row(name.replace("_", " "), _plain(m[name]))
    if "seconds" in m:
        table.add_row("training", f"{m['steps']:,} steps", f"{m['seconds']:.1f} s")
    if "ranks" in m:
        _add_speed(table, m)
    if m.get("ranks", 1) > 1:
        _add_ranks(table, m)
    Console().print(table)


def _add_speed(table: Table, m: Mapping[str, Any]) -> None:
    """How fast a training was, and in how much memory."""
    unit = "tokens" if "tokens_per_second" in m else "samples"
    speed, peak = f"{m[f'{unit}_per_second']:,.0f} {unit}/s", f"{m['peak_memory_bytes'] / 2**20:,.0f} MiB"
    table.add_row("training speed, memory", speed, peak)
    if "model_flops_per_second" in m:
        share = f"{m['peak_flops_share']:.1%} of peak" if "peak_flops_share" in m else ""
        table.add_row("training, p-net", f"{m['model_flops_per_second'] / 1e9:,.2f} GFLOP/s", share)


def _add_ranks(table: Table, m: Mapping[str, Any]) -> None:
    """What ranks sent, and how long they waited for each other in a pipeline."""
    table.add_row(f"{m['ranks']} ranks", m["placement"], f"{m['bytes_sent_per_step']:,.0f} bytes/step sent")
    for axis, sent in m["bytes_sent_per_step_by_axis"].items():
        size = f"{m['mesh'][axis]} ranks" if axis in m["mesh"] else ""
        table.add_row(f"  axis {axis}", size, f"{sent:,.0f}")
    if "pipeline_bubble" in m:
        schedule = f"{m['pipeline']}, {m['microbatches']} microbatches"
        table.add_row("pipeline, simulated", schedule, f"{m['pipeline_bubble']:.1%} bubble")


def _plain(value: object) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int | float) else str(value)


def print_reasons(recipe: Recipe, codes: str | None = None) -> None:
    """What a task chose of a recipe, and why, on standard error: a line each; `codes` is why the dtype is auto."""
    reasons = dict(recipe.reasons) | ({} if codes is None else {"dtype auto": codes})
    for name, why in reasons.items():
        value = getattr(recipe, name, None)
        shown = f" {value:.3g}" if isinstance(value, int | float) else ""
        print(f"gbfunc: {name}{shown}: {why}", file=sys.stderr)


def print_comparison(metrics: Mapping[str, Any], metric: Metric) -> None:
    """The genome beside both dense nets on standard output."""
    m = metrics
    table = _table("network", "parameters", "ratio", "bytes on disk", f"test {metric.label}")
    for network, prefix, params, n_bytes in (
        (f"{m['pnet_label']}, dense", "dense_", m["pnet_params"], m["dense_bytes"]),
        (f"{m['pnet_label']}, generated", "", m["genome_params"], m["genome_bytes"]),
        (f"{m['small_dense_label']}, dense", "small_dense_", m["small_dense_params"], m["small_dense_bytes"]),
    ):
        ratio, shown = f"{m['pnet_params'] / params:.1f}x", metric.show(m[f"{prefix}test_{metric.name}"])
        table.add_row(network, f"{params:,}", ratio, f"{n_bytes:,}", shown)
    console = Console()
    console.print(table)
    console.print("Bytes: the genome's whole file; dense nets in float32, without a file's header.", style="dim")


def _table(first: str, *columns: str) -> Table:
    """An empty table: the first column is text, the others are numbers."""
    return Table(first, *(Column(column, justify="right") for column in columns))


def wide_console() -> Console:
    """A console of the terminal's width, or wide enough for all columns."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


class Best:
    """Keeps the best genome by validation in a file."""

    def __init__(self, path: Path, metric: Metric, write: Callable[[Any, Path], None]) -> None:
        self._path, self._metric, self._write = path, metric, write
        self._first: int | None = None

    def __call__(self, state: Any, history: Sequence[Mapping[str, float]]) -> None:
        """Save the state, where the last row of the history is the best; on many ranks, all call."""
        if self._first is None:
            # A training that goes on elsewhere has no file of the rows before.
            self._first = 0 if self._path.exists() else len(history) - 1
        if self._best(history) is history[-1]:
            self._write(state, self._path)

    def step(self, history: Sequence[Mapping[str, float]]) -> int:
        """The step of the genome in the file."""
        return int(self._best(history)["step"])

    def _best(self, history: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
        """The first of the best rows; one that is not a number is the worst."""
        name, sign = f"val_{self._metric.name}", self._metric.sign

        def value(row: Mapping[str, float]) -> float:
            return -math.inf if math.isnan(row[name]) else sign * row[name]

        return max(history[self._first or 0 :], key=value)


@contextmanager
def open_logs(
    names: Sequence[str], folder: Path | None, settings: Mapping[str, Any], rate: Callable[[int], float]
) -> Iterator[tuple[Callable[[], None], OnLog | None]]:
    """What begins all logs of some names, and one hook for them, which gets the learning rate too; None without a name.

    Before they begin they write nothing.
    """
    if names and folder is None:
        raise ValueError(f"--log {' '.join(names)} needs --out, the folder that it writes to")
    logs: list[OnLog] = []
    with ExitStack() as stack:

        def begin() -> None:
            logs.extend(stack.enter_context(LOGS[name](folder or Path(), settings)) for name in dict.fromkeys(names))

        def log(step: int, metrics: Mapping[str, float]) -> None:
            for one in logs:
                one(step, {**metrics, "lr": rate(step - 1)} if "train_loss" in metrics else metrics)

        yield begin, log if names else None


@contextmanager
def reporter(label: str, total_steps: int, *, silent: bool = False, split: str = "validation") -> Iterator[Report]:
    """What shows one training run of `total_steps` on standard error: a bar in a terminal, else a line now and then.

    `split` says on which data it is measured.
    """
    console = Console(stderr=True)
    if silent:
        yield lambda steps, status, validation: None
    elif not console.is_terminal:
        following = 0

        def line(steps: int, status: str, validation: str | None) -> None:
            nonlocal following
            if validation is not None and (steps >= following or steps >= total_steps):
                following = steps + total_steps // _PLAIN_LINES
                text = f"{label}: step {steps:,}/{total_steps:,}, {status}, {split} {validation}"
                print(text, file=sys.stderr, flush=True)

        yield line
    else:
        text = TextColumn("step {task.completed:,.0f}/{task.total:,.0f}  {task.fields[status]}  {task.fields[val]}")
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), text, TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task(label, total=total_steps, status="", val="")

            def redraw(steps: int, status: str, validation: str | None) -> None:
                shown: dict[str, Any] = {} if validation is None else {"val": f"{split} {validation}"}
                progress.update(bar, completed=steps, status=status, **shown)

            yield redraw
