"""The training loop of every command: any trainer, a task's data, one line of history an epoch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.cli.progress import reporter
from gbfunc.tasks import Net, Recipe, Task, accuracy, epoch_batches, loss_fn, steps_per_epoch

Batch = tuple[Tensor, Tensor]
_SECONDS_BETWEEN_REPORTS = 0.2


class Trainer(NamedTuple):
    """Something that learns.

    Attributes:
        state: where it starts.
        step: a state and a batch to the next state, the loss and the accuracy (0 to 1) of the batch.
        net: the network that a state stands for.
    """

    state: Any
    step: Callable[[Any, Batch], tuple[Any, Tensor, Tensor]]
    net: Callable[[Any], Net]


class Fit(NamedTuple):
    """What training gave.

    Attributes:
        state: the last state.
        history: a row an epoch: `epoch`, `step`, `train_loss` (nats) and `train_accuracy` (means over the
            epoch), `val_accuracy` (after it), `seconds` since the start.
        seconds: of training, validation included.
        steps: done in all.
    """

    state: Any
    history: list[dict[str, float]]
    seconds: float
    steps: int


def total_steps(task: Task, recipe: Recipe) -> int:
    """Steps of a whole training run: the length of its schedule."""
    return recipe.epochs * steps_per_epoch(task.train, recipe.batch_size)


def one_cycle(recipe: Recipe, lr: float, steps: int) -> Callable[[int], float]:
    """Learning rate by step: up to `lr` in the recipe's warm-up, then down to nearly nothing."""
    return gb.torch_schedule(
        torch.optim.lr_scheduler.OneCycleLR,
        lr,
        steps,
        total_steps=steps,
        pct_start=recipe.warmup,
        cycle_momentum=False,
    )


def genome_trainer(plan: gb.Plan, pnet: nn.Module, recipe: Recipe, steps: int, seed: int) -> Trainer:
    """Train the genome of `plan` with Adam; `steps` is the length of the schedule."""
    optimizer = gb.torch_optimizer(torch.optim.Adam, lr=one_cycle(recipe, recipe.lr, steps), betas=recipe.betas)
    train_step = gb.make_train_step(plan, pnet, loss_fn, optimizer, donate=True, on_nonfinite="raise")

    def step(state: gb.TrainState, batch: Batch) -> tuple[gb.TrainState, Tensor, Tensor]:
        state, info = train_step(state, batch)
        return state, info.loss, info.aux["accuracy"]

    return Trainer(train_step.init(seed=seed), step, lambda state: gb.materialize(plan, state, pnet))


def dense_trainer(net: nn.Module, recipe: Recipe, steps: int) -> Trainer:
    """Train `net` itself with Adam, on the same schedule as the genome; the yardstick."""
    schedule = one_cycle(recipe, recipe.dense_lr, steps)
    optimizer = torch.optim.Adam(net.parameters(), lr=recipe.dense_lr, betas=recipe.betas, fused=True)

    def step(done: int, batch: Batch) -> tuple[int, Tensor, Tensor]:
        optimizer.param_groups[0]["lr"] = schedule(done)
        loss, aux = loss_fn(net, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return done + 1, loss.detach(), aux["accuracy"]

    return Trainer(0, step, lambda _: net)


def fit(trainer: Trainer, task: Task, recipe: Recipe, *, label: str, seed: int) -> Fit:
    """Train for the recipe's epochs, measuring validation accuracy after each.

    Args:
        trainer: what to train.
        task: its data, on the trainer's device.
        recipe: batch size and epochs.
        label: names the run in reports.
        seed: of the order of the examples.
    """
    per_epoch = steps_per_epoch(task.train, recipe.batch_size)
    generator = torch.Generator().manual_seed(seed)
    state, history = trainer.state, []
    start = reported = time.perf_counter()
    with reporter(label, recipe.epochs, recipe.epochs * per_epoch) as report:
        for epoch in range(1, recipe.epochs + 1):
            # Summed as tensors: reading a number each step would make a GPU wait.
            sums = torch.zeros(2, dtype=torch.float64, device=task.train.y.device)
            batches = epoch_batches(task.train, recipe.batch_size, generator, recipe.noise)
            for i, batch in enumerate(batches, 1):
                state, loss, hits = trainer.step(state, batch)
                sums += torch.stack((loss, hits))
                now = time.perf_counter()
                if now - reported > _SECONDS_BETWEEN_REPORTS:
                    reported, steps = now, (epoch - 1) * per_epoch + i
                    mean_loss, mean_hits = (sums / i).tolist()
                    report.step(steps, mean_loss, mean_hits, steps / (now - start))
            mean_loss, mean_hits = (sums / per_epoch).tolist()
            val_accuracy, seconds = accuracy(trainer.net(state), task.val), time.perf_counter() - start
            steps = epoch * per_epoch
            history.append(
                {
                    "epoch": epoch,
                    "step": steps,
                    "train_loss": mean_loss,
                    "train_accuracy": mean_hits,
                    "val_accuracy": val_accuracy,
                    "seconds": round(seconds, 3),
                }
            )
            report.step(steps, mean_loss, mean_hits, steps / seconds)
            report.epoch(epoch, mean_loss, val_accuracy, steps / seconds)
    return Fit(state, history, time.perf_counter() - start, recipe.epochs * per_epoch)
