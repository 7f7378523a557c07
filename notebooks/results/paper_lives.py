"""Trainings of `paper.py`: of genomes, and of networks after birth. Interrupted trainings continue when run again.

A network without a genome is trained with a plan in which every parameter is direct. Therefore one training loop and
one kind of checkpoint are enough for both.

Suffixes: N networks, P weights of a network, R rows and C columns of a weight.
"""

from __future__ import annotations

import copy
import json
import math
import signal
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.cli import handling
from gbfunc.cli.checkpoints import Checkpoints
from gbfunc.cli.options import AUTO, CheckpointOptions
from gbfunc.plots import LINES, MARKERS, PALETTE
from gbfunc.tasks import Task, accuracy
from gbfunc.tasks.base import SCHEDULES, Recipe
from gbfunc.tasks.data import steps_per_epoch
from gbfunc.tasks.training import fit as fit_task
from gbfunc.tasks.training import genome_trainer, total_steps

Rows = list[dict[str, float]]
"""Measurements from birth on: `step`, `epoch`, and accuracies (0 to 1) on `validation` and `test` images."""

FIRST = (1, 10, 100)
"""Steps after birth at which a network is measured by default, in addition to birth and the end of every epoch."""


class Life(NamedTuple):
    """The training of a network after birth: measurements, learning rate and the trained network."""

    rows: Rows
    rate: float
    net: nn.Module

    def at(self, step: float) -> float:
        """Return the test accuracy (%) of the last measurement at or before a step."""
        return 100 * [row["test"] for row in self.rows if row["step"] <= step][-1]

    def epochs_until(self, accuracy: float) -> float:
        """Return the epochs until a test accuracy (%), interpolated linearly; infinity if it is not reached."""
        before = None
        for row in self.rows:
            if (reached := 100 * row["test"]) >= accuracy:
                if before is None:
                    return 0.0
                part = (accuracy - 100 * before["test"]) / (reached - 100 * before["test"])
                return before["epoch"] + part * (row["epoch"] - before["epoch"])
            before = row
        return math.inf


def with_test(task: Task) -> Task:
    """Return a task whose validations also measure the accuracy on test images. No choice depends on this accuracy."""
    both = lambda net, _: {"accuracy": accuracy(net, task.val), "test": accuracy(net, task.test)}  # noqa: E731
    return replace(task, evaluate=both)


def train(
    folder: Path,
    plan: gb.Plan,
    pnet: nn.Module,
    task: Task,
    recipe: Recipe,
    seed: int,
    on_validation: Callable[[Any, Rows], None] = lambda state, history: None,
) -> tuple[nn.Module, Rows]:
    """Train a genome, continue its training, or read the finished training.

    Returns the grown network and the rows of the validations.
    """
    trainer = genome_trainer(plan, pnet, task, recipe, seed)
    assert trainer.train_step is not None
    settings = {"task": task.name, "images": len(task.train), "seed": seed, "batch_size": recipe.batch_size}
    source = folder if any(folder.glob("step-*")) else None
    options = CheckpointOptions(out=folder, checkpoint_every=200, resume=AUTO)
    kept = Checkpoints(trainer.train_step, total_steps(task, recipe), settings, source, options, 1)
    try:
        with (
            gb.Checkpointer(folder, trainer.train_step, keep=1) as kept.writer,
            handling(kept.receive, signal.SIGINT, signal.SIGTERM),
        ):
            done = fit_task(trainer, task, recipe, seed, checkpoints=kept, on_validation=on_validation)
    except ValueError as error:
        if source is None:
            raise
        raise ValueError(f"{folder} holds another training ({error}): choose another --out") from error
    return cast(nn.Module, trainer.net(done.state)), done.history


def train_weights(
    folder: Path, start: nn.Module, task: Task, recipe: Recipe, seed: int, **options: Any
) -> tuple[nn.Module, Rows]:
    """Train a copy of a network without a genome, at the recipe's `dense_lr`."""
    net = copy.deepcopy(start).train()
    weights = replace(recipe, lr=recipe.dense_lr, direct_lr=None)
    return train(folder, gb.make_plan(net, exclude=[""]), net, task, weights, seed, **options)


def live(
    folder: Path,
    start: nn.Module,
    task: Task,
    recipe: Recipe,
    seed: int,
    epochs: int,
    rates: Sequence[float],
    first: Sequence[int] = FIRST,
    **options: Any,
) -> Life:
    """Train a copy of `start` at a constant rate on unchanged images, and measure it from birth on.

    `rates` are parts of the recipe's `dense_lr`. The rate with the best mean of all validations is chosen.
    """
    both, a_pass = with_test(task), steps_per_epoch(task.train, recipe.batch_size)
    marks = tuple(sorted({*first, *range(a_pass, epochs * a_pass, a_pass)} - {0}))
    still = replace(
        recipe, schedule=SCHEDULES["constant"], augment=None, epochs=epochs, steps=None, measure_every=marks
    )
    born = both.measured(start.eval(), task.val)
    lives = []
    for rate in rates:
        slower = replace(still, dense_lr=rate * recipe.dense_lr)
        net, history = train_weights(folder / f"rate-{slower.dense_lr:.0e}", start, both, slower, seed, **options)
        rows = [{"step": 0, "epoch": 0.0, "validation": born["accuracy"], "test": born["test"]}]
        for row in history:
            found = {"validation": row["val_accuracy"], "test": row["val_test"]}
            rows.append({"step": row["step"], "epoch": row["step"] / a_pass} | found)
        lives.append(Life(rows, slower.dense_lr, net))
    return max(lives, key=lambda life: statistics.mean(row["validation"] for row in life.rows))


def lives(
    folder: Path,
    starts: Mapping[str, Callable[[int], nn.Module]],
    task: Task,
    recipe: Recipe,
    seeds: Iterable[int],
    epochs: int,
    rates: Sequence[float],
    first: Sequence[int] = FIRST,
) -> dict[str, list[Life]]:
    """Train networks with several kinds of initial weights, one training per seed.

    For each kind of initial weights, the learning rate is chosen with the first seed and used for all seeds.
    """
    found: dict[str, list[Life]] = {}
    for name, start in starts.items():
        found[name], chosen = [], rates
        for seed in seeds:
            to = folder / f"{name}-{seed}".replace(" ", "-")
            life = live(to, start(seed), task, recipe, seed, epochs, chosen, first)
            found[name].append(life)
            chosen = (life.rate / recipe.dense_lr,)
    return found


def shown(values: Iterable[float], digits: int = 2, unit: str = " %") -> str:
    """Format the mean and standard deviation over seeds. An infinite value stands for a goal that is never reached."""
    values = [*values]
    if any(map(math.isinf, values)):
        return f"not in {sum(map(math.isinf, values))} of {len(values)}" if len(values) > 1 else "never"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}{unit}"


def report(
    out: Path, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]], figure: Figure, data: Any
) -> None:
    """Print a table in Markdown, and write the numbers and the figure to files."""
    for row in (columns, ["---"] * len(columns), *rows):
        print(f"| {' | '.join(row)} |")
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    figure.savefig(out / f"{name}.png", dpi=110)
    print(f"\n{out / name}.png", flush=True)


def as_data(found: Mapping[str, Sequence[Life]]) -> dict[str, Any]:
    """Return the learning rate and the measurements of each training, as data for JSON."""
    return {name: [{"rate": life.rate, "rows": life.rows} for life in of] for name, of in found.items()}


def axes_of(columns: int = 1, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    """Make a figure with some plots in a row."""
    figure = Figure(figsize=(0.6 + 4.4 * columns, height), layout="constrained")
    (row,) = figure.subplots(1, columns, squeeze=False)
    for axes in row:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, [*row]


def draw_lives(axes: Axes, found: Mapping[str, Sequence[Life]], title: str = "", *, log: bool = True) -> None:
    """Draw the test accuracy after birth: the mean over seeds, and a band of one standard deviation."""
    for i, (name, of) in enumerate(found.items()):
        test = 100 * torch.tensor([[row["test"] for row in life.rows] for life in of], dtype=torch.float64)
        mean, std = test.mean(0), test.std(0, correction=int(len(of) > 1))
        x = [row["step" if log else "epoch"] for row in of[0].rows]
        style = {"color": PALETTE[i % 7], "linestyle": LINES[i % 4], "marker": MARKERS[i % 8], "markersize": 3.5}
        axes.plot(x, mean, label=name, **style)
        axes.fill_between(x, mean - std, mean + std, color=style["color"], alpha=0.15, linewidth=0)
    if log:
        axes.set_xscale("symlog", linthresh=1)
        axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}" if step else "birth")
    axes.set(xlabel=f"{'steps' if log else 'epochs'} of learning after birth", ylabel="test accuracy (%)", title=title)
    axes.legend(frameon=False, fontsize=8)


def classical_mds(points_NP: Tensor) -> tuple[Tensor, Tensor]:
    """Scale points by classical multidimensional scaling (Torgerson).

    Returns coordinates [N, N] and the share of the variance of each axis.
    """
    centred_NP = (points_NP - points_NP.mean(0)).double()
    values, vectors = torch.linalg.eigh(centred_NP @ centred_NP.T)
    values, vectors = values.flip(0).clamp_min(0), vectors.flip(1)
    return vectors * values.sqrt(), values / values.sum()


def read_by(weight_RC: Tensor) -> Tensor:
    """Return $W^T W$ [C * C], scaled to norm 1.

    The result depends neither on the order of the units nor on the scale of $W$.
    """
    moments_CC = weight_RC.T @ weight_RC
    return (moments_CC / moments_CC.norm()).flatten()


def dimension(weight_RC: Tensor) -> float:
    """Return the participation ratio of the squared singular values, a measure of the dimension of the row space."""
    squares = torch.linalg.svdvals(weight_RC.double()).square()
    return float(squares.sum().square() / squares.square().sum())


def smoothness(weight_RC: Tensor) -> float:
    """Return the correlation of the weights of neighbouring pixels in the rows of a square image."""
    side = math.isqrt(weight_RC.shape[1])
    images = weight_RC.reshape(len(weight_RC), side, side)
    pairs = torch.stack([images[:, :, 1:].flatten(), images[:, :, :-1].flatten()])
    return float(torch.corrcoef(pairs)[0, 1])
