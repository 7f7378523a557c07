"""The training loop of the command line and of `gbfunc.lab`: `fit` runs a `Trainer`, and validates in between."""

from __future__ import annotations

import csv
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from inspect import signature
from itertools import islice
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.extras import import_extra
from gbfunc.formats import AUTO, Stored, as_stored
from gbfunc.parallel import Mesh, Placement
from gbfunc.tasks.base import Net, Recipe, Task, linear_decay
from gbfunc.tasks.data import steps_per_epoch
from gbfunc.train.gradients.loss import loss_and_aux
from gbfunc.train.step import TrainStep
from gbfunc.trees import BUFFERS, flat_genome, flatten_tree, like_genome, tree_map, unflatten_tree
from gbfunc.types import GenomeLike

OnLog = Callable[[int, Mapping[str, float]], None]
"""Called with the number of finished training steps, and metrics by name."""

Report = Callable[[int, str, str | None], None]
"""Called with the number of finished steps, a text of the latest metrics, and a text of the validation (or None)."""


class Trainer(NamedTuple):
    """The first state and the functions with which `fit` trains a genome or a dense network."""

    state: Any  # the state before the first step
    # Maps a state and a batch to the next state, the loss, and other metrics of the batch.
    step: Callable[[Any, Any], tuple[Any, Tensor, dict[str, Tensor]]]
    net: Callable[[Any], Net]  # returns the network of a state
    train_step: TrainStep | None = None  # the step from `gb.make_train_step`; None for a dense network


class Fit(NamedTuple):
    """The result of a training."""

    state: Any  # the last state
    # A row per validation: `epoch` (passes over the data), `step`, columns of `Task.counts`, `train_` metrics (means
    # over the steps since the previous row), `val_` metrics, and `seconds` since the start.
    history: list[dict[str, float]]
    seconds: float  # duration of the training, including validation
    steps: int  # total number of training steps
    step_seconds: float  # duration of the training steps and their batches, without validation


class Position(NamedTuple):
    """The progress of a training. A checkpoint saves the progress in addition to the training's state."""

    steps: int  # number of finished training steps
    order: Tensor  # state of the random generator (order of examples, noise) at the start of this pass over the data
    sums: dict[str, float]  # sums of each training metric over the steps since the last row of the history
    history: list[dict[str, float]]  # the rows of `Fit.history` up to now
    seconds: float  # duration up to now
    step_seconds: float  # duration of the training steps and their batches up to now, without validation

    @property
    def measured(self) -> int:
        return int(self.history[-1]["step"]) if self.history else 0


def total_steps(task: Task, recipe: Recipe) -> int:
    """Return the number of steps of a whole training, which is also the length of the learning rate's schedule."""
    return recipe.steps or recipe.epochs * steps_per_epoch(task.train, recipe.batch_size)


def genome_trainer(
    plan: gb.Plan,
    pnet: nn.Module,
    task: Task,
    recipe: Recipe,
    seed: int,
    mesh: Mesh | None = None,
    placement: Placement | Literal["auto"] = "auto",
    rounding: Stored | None = None,
    genome_bytes: int | None = None,
    metadata: Any = None,
    **options: Any,
) -> Trainer:
    """Make a trainer of a genome. With `rounding`, training uses the genome as rounded in a file of this dtype.

    `rounding="auto"` needs the size `genome_bytes` and the `metadata` of the file. On a mesh, each rank takes its share
    of every batch, and all ranks must take every step. `options`, such as `pipeline`, go to `make_train_step`.
    """
    steps = total_steps(task, recipe)
    direct = None if recipe.direct_lr is None else {"lr": recipe.schedule(recipe, recipe.direct_lr, steps)}
    lr = recipe.schedule(recipe, recipe.lr, steps)
    optimizer = gb.torch_optimizer(recipe.optimizer, lr=lr, direct=direct, **recipe.optimizer_options)
    if rounding == AUTO:
        options |= {"genome_bytes": genome_bytes, "metadata": metadata, "total_steps": steps}
    options = {"amp": recipe.amp} | options
    options |= dict(donate=True, clip_norm=recipe.clip_norm, on_nonfinite="raise", mesh=mesh, placement=placement)
    if (mesh is None or mesh.world == 1) and any(p.is_cuda for p in pnet.parameters()):
        # A CUDA graph cannot raise an error for a non-finite loss, so `fit` checks the mean loss at each validation.
        options |= {"cuda_graph": "auto", "on_nonfinite": "skip"}
    train_step = gb.make_train_step(plan, pnet, task.loss, optimizer, rounding=rounding, **options)

    def step(state: gb.TrainState, batch: Any) -> tuple[gb.TrainState, Tensor, dict[str, Tensor]]:
        state, info = train_step(state, batch if mesh is None else mesh.shard_batch(batch))
        return state, info.loss, info.aux

    def net(state: gb.TrainState) -> nn.Module:
        genome = train_step.gather(state)
        if (stored := train_step.rounding(genome)) is not None:
            near, _ = as_stored(plan, flat_genome(genome) | flatten_tree(genome.buffers, BUFFERS), stored)
            genome = like_genome(near, genome)._replace(buffers=unflatten_tree(near, genome.buffers, BUFFERS))
        return gb.materialize(plan, genome, pnet).eval()

    return Trainer(train_step.init(seed=seed), step, net, train_step)


def dense_trainer(net: nn.Module, task: Task, recipe: Recipe) -> Trainer:
    """Make a trainer of a network's weights, with the recipe's schedule and the peak learning rate `dense_lr`."""
    trainer = leaf_trainer(net.parameters(), lambda *inputs: net.train()(*inputs), task, recipe)
    return trainer._replace(net=lambda _: net.eval())


def leaf_trainer(leaves: Iterable[Tensor], net: Net, task: Task, recipe: Recipe) -> Trainer:
    """Make a trainer of `leaves`, trained tensors of `net`, which steps change in place. Peak rate: `dense_lr`."""
    leaves, schedule = list(leaves), recipe.schedule(recipe, recipe.dense_lr, total_steps(task, recipe))
    fused = {"fused": True} if "fused" in signature(recipe.optimizer).parameters else {}
    kind: Any = recipe.optimizer
    optimizer = kind(leaves, lr=recipe.dense_lr, **fused, **recipe.optimizer_options)

    def step(done: int, batch: Any) -> tuple[int, Tensor, dict[str, Tensor]]:
        optimizer.param_groups[0]["lr"] = schedule(done)
        with torch.autocast(leaves[0].device.type, recipe.amp, enabled=recipe.amp is not None):
            loss, aux = loss_and_aux(task.loss(net, batch))
        optimizer.zero_grad()
        loss.backward()
        if recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(leaves, recipe.clip_norm)
        optimizer.step()
        return done + 1, loss.detach(), aux

    return Trainer(0, step, lambda _: net)


def fit(
    trainer: Trainer,
    task: Task,
    recipe: Recipe,
    seed: int,
    *,
    checkpoints: Any = None,
    report: Report = lambda steps, status, validation: None,
    validate: bool = True,
    on_log: OnLog | None = None,
    log_every: int = 10,
    on_validation: Callable[[Any, list[dict[str, float]]], None] = lambda state, history: None,
) -> Fit:
    """Train for the recipe's number of steps, with validations in between unless `validate` is False.

    `seed` determines the order of examples. `checkpoints` has three methods. `resume(state)` returns the state to start
    from, and its `Position` (None in a new training). `due(steps)` returns whether to save a checkpoint. `save(state,
    steps, position, wait=False)` may raise an error to stop after a signal. Interruptions do not change the result.

    `on_log` gets the `train_` metrics of every `log_every`-th step and the `val_` metrics of each validation. `report`
    gets texts to display. `on_validation` gets the state and the history, whose last row has the validation's results.
    """
    total, a_pass = total_steps(task, recipe), steps_per_epoch(task.train, recipe.batch_size)
    every = recipe.measure_every or a_pass
    ends = {total, *(range(every, total, every) if isinstance(every, int) else every)}
    generator = torch.Generator().manual_seed(seed)
    state, at = checkpoints.resume(trainer.state) if checkpoints else (trainer.state, None)
    at = at or Position(0, generator.get_state(), {}, [], 0.0, 0.0)
    order, history, stepping, done, taken = at.order, [*at.history], at.step_seconds, at.measured, at.steps
    generator.set_state(order)
    batches = task.batches(task.train, recipe, generator, lambda: trainer.net(state))
    if taken:
        # Draw the finished batches of the current pass again, so that the generator continues as if uninterrupted.
        deque(islice(batches, (taken - 1) % a_pass + 1), 0)
    # Sum the metrics as tensors, because reading their values in each step would make a GPU wait.
    sums = {name: torch.tensor(x, dtype=torch.float64) for name, x in at.sums.items()}
    reported = stretch = time.perf_counter()
    start = reported - at.seconds

    def place(steps: int, now: float) -> Position:
        totals = {name: float(x) for name, x in sums.items()}
        return Position(steps, order, totals, history, now - start, stepping + now - stretch)

    # A checkpoint is saved before the validation of its step, so a resumed training starts with that validation.
    for steps in range(taken + (taken == done), total + 1):
        count = steps - done
        if steps > taken:
            if (steps - 1) % a_pass == 0:
                order = generator.get_state()
            if (batch := next(batches, None)) is None:
                words = f"expected {total} batches of the task {task.name}, got {steps - 1}"
                raise ValueError(f"{words}: make its batches endless, or train fewer steps")
            state, loss, metrics = trainer.step(state, batch)
            found = _as_metrics(loss, metrics)
            if sums and sums.keys() != found.keys():
                got = f"got {sorted(sums)}, then {sorted(found)}"
                raise ValueError(f"the loss of the task {task.name} must return the same metrics in all steps, {got}")
            sums = {name: x + sums.get(name, 0.0) for name, x in found.items()}
            if on_log is not None and steps % log_every == 0:
                on_log(steps, {f"train_{name}": float(x) for name, x in found.items()})
            now = time.perf_counter()
            if now - reported > 0.2:
                reported = now
                report(steps, _status(sums, count, steps / (now - start)), None)
            if checkpoints and checkpoints.due(steps):
                checkpoints.save(state, steps, place(steps, now))
        if steps not in ends:
            continue
        means = {f"train_{name}": float(value) / count for name, value in sums.items()}
        if not isfinite(means["train_loss"]):
            raise FloatingPointError(f"the loss must be finite, got another before step {steps}: lower the rate")
        stepping += time.perf_counter() - stretch
        measured = task.measured(trainer.net(state), task.val) if validate else {}
        row = {f"val_{name}": value for name, value in measured.items()}
        seconds, passes = time.perf_counter() - start, steps / a_pass
        known = {"epoch": int(passes) if passes.is_integer() else round(passes, 3), "step": steps, **task.counts(steps)}
        history.append(known | means | row | {"seconds": round(seconds, 3)})
        if validate:
            if on_log is not None:
                on_log(steps, row)
            on_validation(state, history)
            validation = f"{task.metric.label} {task.metric.show(measured[task.metric.name])}"
            report(steps, _status(sums, count, steps / seconds), validation)
        done, sums, stretch = steps, {}, time.perf_counter()
    now = stretch = time.perf_counter()
    if checkpoints and at.measured < total:
        checkpoints.save(state, total, place(total, now), wait=True)
    return Fit(state, history, now - start, total, stepping)


def _as_metrics(loss: Tensor, metrics: Any) -> dict[str, Tensor]:
    metrics = {} if metrics is None else metrics
    if isinstance(metrics, Mapping) and "loss" not in metrics:
        with suppress(TypeError, ValueError, RuntimeError):
            named = {"loss": loss, **metrics}
            return {name: torch.as_tensor(value).detach().double().reshape(()) for name, value in named.items()}
    expected = "a task's loss must return a pair (loss, dict of numbers without the name 'loss')"
    raise ValueError(f"{expected}, got {metrics!r:.200}")


def _status(sums: dict[str, Tensor], count: int, speed: float) -> str:
    metrics = "  ".join(f"{name} {float(value) / count:.4f}" for name, value in sums.items())
    return f"{metrics}  {speed:,.1f} steps/s"


RATE = 0.03
"""First learning rate when a quantized genome is fine-tuned, as a fraction of the recipe's peak learning rate."""


def slowed(recipe: Recipe, steps: int) -> Recipe:
    """Return a recipe for `steps` additional steps, in which learning rates fall linearly from 3 % of the peak to 0."""
    direct_lr = None if recipe.direct_lr is None else RATE * recipe.direct_lr
    return replace(recipe, steps=steps, lr=RATE * recipe.lr, direct_lr=direct_lr, schedule=linear_decay, warmup=0.0)


def going_on(trainer: Trainer, state: GenomeLike) -> Trainer:
    """Return a trainer that starts from a copy of a state's genome, because training steps change tensors in place."""
    genome: Any = tree_map(torch.clone, {name: getattr(state, name) for name in gb.Genome._fields})
    return trainer._replace(state=trainer.state._replace(**genome))


def joined(first: Fit, second: Fit) -> Fit:
    """Join the results of two trainings, the second of which continues the first."""
    before = first.history[-1]
    shift = {name: before[name] for name in ("epoch", "step", "seconds")}
    rows = [row | {name: row[name] + value for name, value in shift.items()} for row in second.history]
    times = (getattr(first, name) + getattr(second, name) for name in ("seconds", "steps", "step_seconds"))
    return Fit(second.state, [*first.history, *rows], *times)


@contextmanager
def csv_log(folder: Path, settings: Mapping[str, Any] = MappingProxyType({})) -> Iterator[OnLog]:
    """Yield a function that appends rows `step, metric, value` to `folder/log.csv`. `settings` are not logged."""
    with (folder / "log.csv").open("a", buffering=1, newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not file.tell():
            writer.writerow(["step", "metric", "value"])
        yield lambda step, metrics: writer.writerows([step, name, value] for name, value in metrics.items())


@contextmanager
def tensorboard_log(folder: Path, settings: Mapping[str, Any] = MappingProxyType({})) -> Iterator[OnLog]:
    """Yield a function that logs for TensorBoard, in a new folder in `folder/tensorboard`. Log `settings` first."""
    import_extra("tensorboard", "--log tensorboard", "gbfunc[tensorboard]")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard" / f"{datetime.now():%Y%m%d-%H%M%S}")) as writer:
        table = ["| option | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in settings.items())]
        writer.add_text("settings", "\n".join(table))

        def log(step: int, metrics: Mapping[str, float]) -> None:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)

        yield log


@contextmanager
def wandb_log(folder: Path, settings: Mapping[str, Any] = MappingProxyType({})) -> Iterator[OnLog]:
    """Yield a function that logs to Weights & Biases, in the project $WANDB_PROJECT, with local files in `folder`."""
    wandb = import_extra("wandb", "--log wandb", "gbfunc[wandb]")
    with wandb.init(dir=str(folder), config=dict(settings)) as run:
        yield lambda step, metrics: run.log(dict(metrics), step=step)


LOGS: Mapping[str, Callable[[Path, Mapping[str, Any]], AbstractContextManager[OnLog]]] = MappingProxyType(
    {"csv": csv_log, "tensorboard": tensorboard_log, "wandb": wandb_log}
)
"""{name of a log: function of a folder and the settings of the training, which opens the log}"""
