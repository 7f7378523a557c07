"""Output of commands: progress on standard error, files (replaced atomically), and tables on standard output."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Column, Table

from gbfunc.cli import printable
from gbfunc.files import fcntl, replace_file
from gbfunc.tasks import Metric, Task
from gbfunc.tasks.training import LOGS, OnLog, Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, float]


@contextmanager
def open_folder(path: Path | None, option: str = "--out", *, locked: bool = False) -> Iterator[Path]:
    """Create the folder `path`, or a temporary folder if `path` is None. At exit, remove new folders that are empty.

    `locked` locks the folder: ValueError if another training has locked it. Errors name the option `option`.
    """
    if path is None:
        with TemporaryDirectory(prefix="gbfunc-") as folder:
            yield Path(folder)
        return
    new = [one for one in (path, *path.parents) if not one.exists()]
    with ExitStack() as stack:
        try:
            path.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=path).close()
            if locked and fcntl is not None:
                stack.callback(os.close, descriptor := os.open(path, os.O_RDONLY))
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{option} {path}: another training writes there, choose another folder") from None
        except OSError as error:
            reason = f"a folder for writing, got {path} ({error.strerror}): choose another"
            raise ValueError(f"{option} must be {reason}") from None
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


def write_figure(path: Path, draw: Callable[[], Figure]) -> None:
    """Draw a figure and write it to a file. An error only causes a warning, because the results are already written."""
    content = io.BytesIO()
    try:
        draw().savefig(content, format="png", dpi=150)
        replace_file(path, content.getvalue())
    except Exception as error:
        tell(f"warning: {path.name} could not be written: {error}")


@contextmanager
def written(
    folder: Path, out: Path | None, task: Task, metrics: Mapping[str, Any], runs: Mapping[str, Sequence[Row]]
) -> Iterator[None]:
    """Write `metrics` and the histories `runs`. At exit, plot the learning curves and print a command to try next."""
    write_history(folder / "history.csv", runs)
    write_metrics(folder / "metrics.json", metrics)
    yield
    if out is None:
        return
    from gbfunc.plots import learning_curve

    def draw() -> Figure:
        facts = task.facts(())
        return learning_curve(runs, task.metric.name, task.metric.unit, facts.get("threshold"), facts.get("env", ""))

    write_figure(folder / "learning_curve.png", draw)
    print(f"{out}: {', '.join(sorted(path.name for path in out.iterdir() if path.is_file()))}")
    command = "sample" if task.interface.tokens else "eval"
    for name in ("task", "pnet", "env", "data_dir"):
        said = str(metrics["config"].get(name, ""))
        # The genome's file contains no code and no data, so the suggested command must name them.
        if said and (name == "data_dir" or ":" in said.removeprefix("hf:")):
            command += f" --{name.replace('_', '-')} {said}"
    print(f"try next: gbfunc {command} --genome {out / 'genome.safetensors'}, or gbfunc export --help")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, captions: Iterable[str] = ()) -> None:
    table = Table(*(Column(name, justify="right" if i else "left", no_wrap=True) for i, name in enumerate(columns)))
    for row in rows:
        table.add_row(*row) if row else table.add_section()
    console = Console(width=None if Console().is_terminal else 150)
    console.print(table)
    for caption in captions:
        console.print(caption, style="dim", markup=False, highlight=False)


def print_metrics(metrics: Mapping[str, Any], task: Task) -> None:
    m = metrics
    rows: list[Sequence[str]] = [
        ("parameters", f"{m['genome_params']:,}", f"{m['pnet_params']:,}", f"{m['ratio_params']:.1f}"),
        ("bytes", f"{m['genome_bytes']:,}", f"{m['dense_bytes']:,}", f"{m['ratio_bytes']:.1f}"),
    ]
    for split, name in (("val", "validation"), ("teacher_val", "teacher: validation"), ("test", "test")):
        rows += [(f"{name} {x.label}", x.show(m[k])) for x in task.metrics if (k := f"{split}_{x.name}") in m]
    for name in task.facts(()):
        if m[name] is not None or "seconds" in m:
            shown = f"{m[name]:,}" if isinstance(m[name], int | float) else str(m[name] or "-")
            rows.append((name.replace("_", " "), shown))
    print_table(("", f"{m['task']}: {m.get('network', 'genome')}", "dense p-net", "ratio"), rows, captions=_course(m))


def _course(m: Mapping[str, Any]) -> Iterator[str]:
    if "seconds" in m:
        yield f"training: {m['steps']:,} steps in {m['seconds']:.1f} s"
    if "ranks" not in m:
        return
    unit = "tokens" if "tokens_per_second" in m else "samples"
    memory = f"{m['peak_memory_bytes'] / 2**20:,.0f} MiB of memory at most"
    yield f"training speed: {m[f'{unit}_per_second']:,.0f} {unit}/s, {memory}"
    if "model_flops_per_second" in m:
        share = f", {m['peak_flops_share']:.1%} of peak" if "peak_flops_share" in m else ""
        yield f"training, p-net: {m['model_flops_per_second'] / 1e9:,.2f} GFLOP/s{share}"
    if m["ranks"] > 1:
        yield f"training on {m['ranks']} ranks: {m['placement']}, {m['bytes_sent_per_step']:,.0f} bytes sent per step"
        for axis, sent in m["bytes_sent_per_step_by_axis"].items():
            yield f"  axis {axis}: {m['mesh'].get(axis, 'all')} ranks, {sent:,.0f} bytes"


def tell(line: str) -> None:
    print(f"gbfunc: {printable(line)}", file=sys.stderr, flush=True)


@dataclass
class Best:
    """Writes the genome to a file if its validation metric is the best so far. Call after every validation."""

    path: Path
    metric: Metric
    write: Callable[[Any, Path], None]
    # First row of the history to compare. A resumed training without a file skips earlier rows: their genomes are lost.
    first: int | None = None

    def __call__(self, state: Any, history: Sequence[Row]) -> None:
        if self.first is None:
            self.first = 0 if self.path.exists() else len(history) - 1
        if self.row(history) is history[-1]:
            self.write(state, self.path)

    def row(self, history: Sequence[Row]) -> Row:
        values = [self.metric.sign * row[f"val_{self.metric.name}"] for row in history[self.first or 0 :]]
        best = max(range(len(values)), key=lambda i: -math.inf if math.isnan(values[i]) else values[i])
        return history[(self.first or 0) + best]


@contextmanager
def open_logs(
    names: Sequence[str], folder: Path | None, settings: Mapping[str, Any], rate: Callable[[int], float]
) -> Iterator[tuple[Callable[[], None], OnLog | None]]:
    """Yield `begin`, which opens the logs `names`, and `log`, which writes metrics to all logs (None without names)."""
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
    """Yield a function that shows a training's progress on standard error: a bar in a terminal, or about five lines."""
    console = Console(stderr=True)
    is_bar, following = console.is_terminal and not silent, 0
    columns = ("{task.description}", MofNCompleteColumn(), TimeRemainingColumn(), "{task.fields[val]}")
    with Progress(*columns, "{task.fields[status]}", console=console, disable=not is_bar) as progress:
        bar = progress.add_task(label, total=total_steps, status="", val="")

        def report(steps: int, status: str, validation: str | None) -> None:
            nonlocal following
            shown: dict[str, Any] = {} if validation is None else {"val": f"{split} {validation}"}
            progress.update(bar, completed=steps, status=status, **shown)
            if shown and not is_bar and not silent and (steps >= following or steps >= total_steps):
                following = steps + total_steps // 5
                words = f"{label}: step {steps:,}/{total_steps:,}, {status}, {shown['val']}"
                print(words, file=sys.stderr, flush=True)

        yield report
