"""`gbfunc train --from-birth`: the network that a genome file grows is taught, beside one from random weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from safetensors.torch import save_model
from torch import nn

from gbfunc.cli.options import BirthOptions
from gbfunc.cli.output import reporter, write_figure, write_history, write_metrics
from gbfunc.lab.birth import GROWN, LESSONS, Taught, in_the_size_of, lessons, teach
from gbfunc.tasks import Metric, Recipe, Task, find_task
from gbfunc.tasks.training import total_steps

TAUGHT_FILE = "net.safetensors"
"""What holds the taught weights."""


def learn_from_birth(
    options: BirthOptions,
    grown: nn.Module,
    task: Task,
    recipe: Recipe,
    seed: int,
    rates: Sequence[float],
    out: Path | None,
) -> None:
    """Teach what the genome grows its own task and that of the options, at the best of `rates` (parts of `dense_lr`).

    Write the results, print them.
    """
    tasks = [task]
    if options.other is not None:
        other = find_task(options.other, options.other_data_dir, {})
        tasks.append(replace(in_the_size_of(other, task.interface), pnet=task.pnet).to(next(grown.parameters()).device))
    learned = {}
    for one in tasks:
        plain = lessons(one, recipe)
        report = partial(reporter, total_steps=total_steps(one, plain))
        learned[one.name] = teach(grown, one, plain, seed, rates=rates, report=report)
    if out is not None:
        from gbfunc.plots import birth_curves

        save_model(learned[task.name][GROWN].net, str(out / TAUGHT_FILE))
        rows = {name: {start: taught.rows for start, taught in starts.items()} for name, starts in learned.items()}
        flat = {f"{name}: {start}": of for name, starts in rows.items() for start, of in starts.items()}
        write_history(out / "history.csv", flat)
        write_figure(out / "birth.png", birth_curves(rows, task.metric.name, task.metric.unit))
        lr = {name: {start: taught.lr for start, taught in starts.items()} for name, starts in learned.items()}
        facts = {"genome": str(options.from_birth), "batch_size": recipe.batch_size, "seed": seed, "lr": lr}
        write_metrics(out / "metrics.json", {"task": task.name, "metric": task.metric.name, **facts, "runs": rows})
    for name, starts in learned.items():
        Console().print(birth_table(f"{name}: test {task.metric.label} after so many steps", starts, task.metric))


def birth_table(title: str, starts: Mapping[str, Taught], metric: Metric) -> Table:
    """A row for each start, a column for each step after which it was measured."""
    names = [_column(row) for row in next(iter(starts.values())).rows]
    table = Table("weights", *(Column(name, justify="right") for name in (*names, "rate")), title=title)
    for start, taught in starts.items():
        table.add_row(start, *(metric.show(row[metric.name]) for row in taught.rows), f"{taught.lr:.1e}")
    return table


def _column(row: Mapping[str, float]) -> str:
    passes = row["epoch"]
    if not row["step"]:
        return "birth"
    whole = float(passes).is_integer() and row["step"] not in LESSONS
    return f"{row['step']:,}" + (f" (epoch {passes:g})" if whole else "")
