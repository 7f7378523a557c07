"""`gbfunc train --from-birth`: the network that a genome file grows is taught, beside one from random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from safetensors.torch import save_model

from gbfunc.cli.commands import Train
from gbfunc.cli.genomes import read_genome
from gbfunc.cli.job import asked_recipe
from gbfunc.cli.output import open_folder, print_table, reporter, write_figure, write_history, write_metrics
from gbfunc.cli.ranks import find_device
from gbfunc.lab.birth import GROWN, LESSONS, RATES, in_the_size_of, lessons, teach
from gbfunc.tasks import find_task
from gbfunc.tasks.training import total_steps

TAUGHT_FILE = "net.safetensors"
"""The file with the taught weights."""


def learn_from_birth(options: Train) -> None:
    """Teach what a genome grows its own task and another one, at the best rate; write the results, print them."""
    birth, out, seed = options.birth, options.output.out, options.data.seed
    assert birth.from_birth is not None
    plan, task, grown = read_genome(birth.from_birth, options.data)
    recipe = task.recipe(plan.genome_params)
    recipe = asked_recipe(replace(recipe, lr=recipe.dense_lr, epochs=1, steps=None), options.training)
    recipe = replace(recipe, dense_lr=recipe.lr)
    device = find_device(options.training.device)
    tasks, grown = [task.to(device)], grown.to(device)
    if birth.other is not None:
        other = find_task(birth.other, birth.other_data_dir, {})
        tasks.append(replace(in_the_size_of(other, task.interface), pnet=task.pnet).to(device))
    with open_folder(out) as folder:
        learned = {}
        for one in tasks:
            plain, rates = lessons(one, recipe), RATES if options.training.lr is None else (1.0,)
            report = partial(reporter, total_steps=total_steps(one, plain))
            learned[one.name] = teach(grown, one, plain, seed, rates=rates, report=report)
        if out is not None:
            from gbfunc.plots import birth_curves

            save_model(learned[task.name][GROWN].net, str(folder / TAUGHT_FILE))
            rows = {name: {start: taught.rows for start, taught in starts.items()} for name, starts in learned.items()}
            flat = {f"{name}: {start}": some for name, starts in rows.items() for start, some in starts.items()}
            write_history(folder / "history.csv", flat)
            write_figure(folder / "birth.png", birth_curves(rows, task.metric.name, task.metric.unit))
            lr = {name: {start: taught.lr for start, taught in starts.items()} for name, starts in learned.items()}
            facts = {"genome": str(birth.from_birth), "batch_size": recipe.batch_size, "seed": seed, "lr": lr}
            facts |= {"task": task.name, "metric": task.metric.name, "runs": rows}
            write_metrics(folder / "metrics.json", facts)
    metric = task.metric
    for name, starts in learned.items():
        columns = ("weights", *map(_column, next(iter(starts.values())).rows), "rate")
        shown = [
            (start, *(metric.show(row[metric.name]) for row in taught.rows), f"{taught.lr:.1e}")
            for start, taught in starts.items()
        ]
        print_table(columns, shown, title=f"{name}: test {metric.label} after so many steps")


def _column(row: Mapping[str, float]) -> str:
    if not row["step"]:
        return "birth"
    whole = float(row["epoch"]).is_integer() and row["step"] not in LESSONS
    return f"{row['step']:,}" + (f" (epoch {row['epoch']:g})" if whole else "")
