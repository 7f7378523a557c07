"""Train a generated network after birth, and compare it with its shuffled weights and with random weights.

Run `python notebooks/results/birth.py genome.safetensors`.

Options: `--data-dir`, `--other TASK` with `--other-data-dir` (a second task with the same number of classes), `--lr`,
`--epochs` or `--steps`, `--seed`, `--out`. Without `--lr`, the learning rate of each network is chosen on validation
data. The script writes `metrics.json`, `birth.png` and the trained weights of the generated network
(`net.safetensors`), and prints a JSON row for each network.

An animal is born with the abilities that its genome holds, and learns the rest (Zador, 2019; Shuvaev et al., 2024). The
script therefore judges a genome by two measurements: the accuracy of the network at birth, and the accuracy after 1
step, 10 steps, 100 steps and an epoch of training on the genome's task or on another task.
"""

import argparse
import copy
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from safetensors.torch import save_model
from torch import nn

import gbfunc as gb
from gbfunc.cli.genomes import read_genome
from gbfunc.cli.options import DataOptions
from gbfunc.plots import LINES, MARKERS, PALETTE, Runs
from gbfunc.tasks import find_task
from gbfunc.tasks.base import SCHEDULES, Recipe, Task
from gbfunc.tasks.data import Split, steps_per_epoch
from gbfunc.tasks.pnets import Interface
from gbfunc.tasks.training import Report, dense_trainer, fit

LESSONS = (1, 10, 100)
"""Steps after which a network is measured. It is also measured at birth, after an epoch and at the end."""

GROWN, SHUFFLED, RANDOM = "grown", "shuffled", "random"

RATES = (1.0, 0.3, 0.1, 0.03, 0.01)
"""Learning rates to choose from, as parts of the recipe's rate, which can undo innate abilities in a few steps."""

Progress = Callable[..., AbstractContextManager[Report]]
"""`progress(label, split=)` is a context manager that shows the progress of a training, measured on a split."""


def lessons(task: Task, recipe: Recipe) -> Recipe:
    """Return a recipe for training weights after birth, with a constant rate and no augmentation.

    The network is measured after the steps in `LESSONS`, after the first epoch and at the end.
    """
    marks = tuple(sorted({*LESSONS, steps_per_epoch(task.train, recipe.batch_size)}))
    return replace(recipe, schedule=SCHEDULES["constant"], augment=None, measure_every=marks)


class Taught(NamedTuple):
    """The training of a network after birth."""

    rows: list[dict[str, float]]  # `step`, `epoch`, `train_loss` and the metrics of the test data, from birth on
    lr: float  # the learning rate, chosen on validation data
    net: nn.Module  # the network after the training


def teach(
    grown: nn.Module,
    task: Task,
    recipe: Recipe,
    seed: int,
    *,
    names: Sequence[str] = (),
    rates: Sequence[float] = RATES,
    report: Progress = lambda label, split: nullcontext(lambda *progress: None),
) -> dict[str, Taught]:
    """Train three networks with Adam on the same batches: the grown network, its shuffled weights, and random weights.

    The learning rates tried are parts of the recipe's `dense_lr`. For each network, the rate with the best mean of all
    validations of the training is chosen. `lessons` makes the recipe. The module `grown` is not changed. Without
    `names`, the names of the generated weights, no shuffled network is trained.
    """
    control = {SHUFFLED: gb.shuffled(grown, seed, names=names)} if names else {}
    starts = {GROWN: grown, **control, RANDOM: task.build(seed).to(next(grown.parameters()).device)}
    metric, tested = task.metric, replace(task, val=task.test)

    def taught(name: str, start: nn.Module) -> Taught:
        def trained(rate: float, task: Task, label: str, split: str) -> Any:
            net, slower = copy.deepcopy(start), replace(recipe, dense_lr=rate * recipe.dense_lr)
            with report(f"{name}, {label}rate {slower.dense_lr:.1e}", split=split) as progress:
                return net, fit(dense_trainer(net, task, slower), task, slower, seed, report=progress).history

        def all_along(rate: float) -> float:
            _, rows = trained(rate, task, "choosing, ", "validation")
            return metric.sign * sum(row[f"val_{metric.name}"] for row in rows)

        best = max(rates, key=all_along) if len(rates) > 1 else rates[0]
        born = {"step": 0, "epoch": 0.0, **task.measured(start.eval(), tested.val)}
        net, history = trained(best, tested, "", "test")
        rows = [{k.removeprefix("val_"): v for k, v in row.items() if k != "seconds"} for row in history]
        return Taught([born, *rows], best * recipe.dense_lr, net)

    return {name: taught(name, start) for name, start in starts.items()}


def in_the_size_of(task: Task, interface: Interface) -> Task:
    """Return a task with images resized to the inputs of another task's networks.

    Smaller images are averages of pixels, larger images are interpolated. The resized images are normalised again by
    the mean and standard deviation of the training images.

    Raises:
        ValueError: if the tasks have different channels or numbers of classes, or inputs that are not images.
    """
    ours, theirs = task.interface, interface
    if len(ours.inputs) != 3 or ours.inputs[0] != theirs.inputs[:1][0] or ours.outputs != theirs.outputs:
        network = f"a network for inputs {theirs.inputs} and {theirs.outputs} classes cannot learn the task {task.name}"
        raise ValueError(f"{network}, which has inputs {ours.inputs} and {ours.outputs} classes")
    if ours.inputs == theirs.inputs:
        return task

    def resized(split: Any) -> torch.Tensor:
        return F.interpolate(split.x, theirs.inputs[1:], mode="bilinear", antialias=True)

    std, mean = torch.std_mean(resized(task.train))
    splits = {name: getattr(task, name) for name in ("train", "val", "test")}
    made = {name: Split((resized(split) - mean) / std, split.y) for name, split in splits.items()}
    return replace(task, interface=interface, **made)


def birth_curves(runs: Mapping[str, Runs], metric: str = "accuracy", unit: str = "%") -> Figure:
    """Draw a metric against training steps, with one plot per task and a logarithmic scale of steps.

    `runs` has the rows of each training by task and by kind of initial weights. A row has `step` and the metric. The
    first row is at step 0. With the unit `"%"`, the values between 0 and 1 are multiplied by 100.
    """
    figure = Figure(figsize=(0.6 + 4.0 * len(runs), 3.4), layout="constrained")
    (row,) = figure.subplots(1, len(runs), squeeze=False)
    factor = 100 if unit == "%" else 1
    for axes, (task, starts) in zip(row, runs.items(), strict=True):
        for (start, rows), color, line, marker in zip(starts.items(), PALETTE, LINES, MARKERS, strict=False):
            steps, values = [row["step"] for row in rows], [factor * row[metric] for row in rows]
            axes.plot(steps, values, label=start, color=color, linestyle=line, marker=marker, markersize=4)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xscale("symlog", linthresh=1)
        axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}" if step else "birth")
        axes.set(title=task, xlabel="training steps after birth", ylabel=f"{metric.replace('_', ' ')} ({unit})")
    row[0].legend(frameon=False, loc="lower right")
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("genome", type=Path)
    for name in ("data-dir", "other-data-dir"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--other")
    parser.add_argument("--lr", type=float)
    for name, value in (("epochs", 1), ("steps", None), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, default=Path("taught"))
    options = parser.parse_args(argv)
    plan, task, grown = read_genome(options.genome, DataOptions("", options.data_dir))
    recipe = replace(task.recipe(plan.genome_params), epochs=options.epochs, steps=options.steps)
    recipe = replace(recipe, dense_lr=options.lr or recipe.dense_lr)
    tasks = [task]
    if options.other is not None:
        other = find_task(options.other, options.other_data_dir, {})
        tasks.append(replace(in_the_size_of(other, task.interface), pnet=task.pnet))
    rates, learned = RATES if options.lr is None else (1.0,), {}
    for one in tasks:
        names = [t.name for t in plan.generated]
        learned[one.name] = teach(grown, one, lessons(one, recipe), options.seed, names=names, rates=rates)
    options.out.mkdir(parents=True, exist_ok=True)
    save_model(learned[task.name][GROWN].net, str(options.out / "net.safetensors"))
    runs = {name: {start: taught.rows for start, taught in starts.items()} for name, starts in learned.items()}
    lr = {name: {start: taught.lr for start, taught in starts.items()} for name, starts in learned.items()}
    (options.out / "metrics.json").write_text(json.dumps({"runs": runs, "lr": lr}, indent=2))
    birth_curves(runs, task.metric.name, task.metric.unit).savefig(options.out / "birth.png", dpi=150)
    for name, starts in runs.items():
        for start, rows in starts.items():
            reached = {f"{row['step']:.0f}": row[task.metric.name] for row in rows}
            print(json.dumps({"task": name, "weights": start, "lr": lr[name][start], task.metric.name: reached}))


if __name__ == "__main__":
    main()
