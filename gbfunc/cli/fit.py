"""The training loop of every command: any trainer, a task's data, a row of history a validation."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.cli.checkpoints import Checkpoints, Position
from gbfunc.cli.progress import reporter
from gbfunc.parallel import Placement
from gbfunc.tasks import Batch, Net, Recipe, Task, endless_batches, steps_per_epoch

if TYPE_CHECKING:
    from gbfunc.cli.job import Job

_SECONDS_BETWEEN_REPORTS = 0.2


class Trainer(NamedTuple):
    """Something that learns.

    Attributes:
        state: where it starts.
        step: a state and a batch to the next state, the loss and other figures of the batch.
        net: the network that a state stands for, as it is in use.
        train_step: what takes the steps of a genome; None for other things.
    """

    state: Any
    step: Callable[[Any, Batch], tuple[Any, Tensor, dict[str, Tensor]]]
    net: Callable[[Any], Net]
    train_step: gb.TrainStep | None = None


class Fit(NamedTuple):
    """What training gave.

    Attributes:
        state: the last state.
        history: a row a validation: `epoch` (passes over the data), `step`, `train_loss` (nats) and other
            `train_` figures (means since the last row), `val_` metrics, `seconds` since the start.
        seconds: of training, validation included.
        steps: done in all.
    """

    state: Any
    history: list[dict[str, float]]
    seconds: float
    steps: int


def total_steps(task: Task, recipe: Recipe) -> int:
    """Steps of a whole training run: the length of its schedule."""
    return recipe.steps or recipe.epochs * steps_per_epoch(task.train, recipe.batch_size)


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


def genome_trainer(
    job: Job, steps: int, seed: int, mesh: gb.Mesh | None = None, placement: Placement | Literal["auto"] = "auto"
) -> Trainer:
    """Train the genome of a job with Adam; `steps` is the length of the schedule.

    With a mesh of many ranks, each takes its share of every batch, and all must take every step.
    """
    recipe, plan = job.recipe, job.plan
    direct = None if recipe.direct_lr is None else {"lr": one_cycle(recipe, recipe.direct_lr, steps)}
    lr = one_cycle(recipe, recipe.lr, steps)
    optimizer = gb.torch_optimizer(torch.optim.Adam, lr=lr, betas=recipe.betas, direct=direct)
    train_step = gb.make_train_step(
        plan,
        job.pnet,
        job.task.loss,
        optimizer,
        donate=True,
        clip_norm=recipe.clip_norm,
        on_nonfinite="raise",
        mesh=mesh,
        placement=placement,
    )

    def step(state: gb.TrainState, batch: Batch) -> tuple[gb.TrainState, Tensor, dict[str, Tensor]]:
        state, info = train_step(state, batch if mesh is None else mesh.shard_batch(batch))
        return state, info.loss, info.aux

    def net(state: gb.TrainState) -> nn.Module:
        return gb.materialize(plan, train_step.gather(state), job.pnet).eval()

    return Trainer(train_step.init(seed=seed), step, net, train_step)


def dense_trainer(net: nn.Module, task: Task, recipe: Recipe, steps: int) -> Trainer:
    """Train `net` itself with Adam, on the same schedule as the genome; the yardstick."""
    schedule = one_cycle(recipe, recipe.dense_lr, steps)
    optimizer = torch.optim.Adam(net.parameters(), lr=recipe.dense_lr, betas=recipe.betas, fused=True)

    def step(done: int, batch: Batch) -> tuple[int, Tensor, dict[str, Tensor]]:
        net.train()
        optimizer.param_groups[0]["lr"] = schedule(done)
        loss, aux = task.loss(net, batch)
        optimizer.zero_grad()
        loss.backward()
        if recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), recipe.clip_norm)
        optimizer.step()
        return done + 1, loss.detach(), aux

    return Trainer(0, step, lambda _: net.eval())


def fit(
    trainer: Trainer, task: Task, recipe: Recipe, *, label: str, seed: int, checkpoints: Checkpoints | None = None
) -> Fit:
    """Train as long as the recipe says, measuring on validation data now and then.

    Args:
        trainer: what to train.
        task: its data, on the trainer's device.
        recipe: batch size, length, how often to measure.
        label: names the run in reports.
        seed: of the order of the examples.
        checkpoints: where to go on from, and when to save; training then is the same as without an interruption.

    Raises:
        Stopped: by a signal, after a checkpoint.
    """
    total, a_pass = total_steps(task, recipe), steps_per_epoch(task.train, recipe.batch_size)
    every = recipe.measure_every or a_pass
    generator = torch.Generator().manual_seed(seed)
    state, at = checkpoints.resume(trainer.state) if checkpoints else (trainer.state, None)
    done, more, order, figures_before, history, spent = at or Position(0, 0, generator.get_state(), {}, [], 0.0)
    finished = done == total
    generator.set_state(order)
    batches = endless_batches(task.train, recipe.batch_size, generator, recipe.augment)
    if done + more:
        # What was taken of the pass in hand is drawn again: order and augmentation go on as they would have.
        for _ in islice(batches, (done + more - 1) % a_pass + 1):
            pass
    # Summed as tensors: reading a number each step would make a GPU wait.
    sums = {name: torch.tensor(value, dtype=torch.float64) for name, value in figures_before.items()}
    reported = time.perf_counter()
    start = reported - spent
    # Of many ranks, one speaks.
    silent = trainer.train_step is not None and trainer.train_step.mesh.rank > 0
    with reporter(label, total, silent=silent) as report:
        while done < total:
            here = min(every, total - done)
            for i in range(more + 1, here + 1):
                steps = done + i
                if (steps - 1) % a_pass == 0:
                    order = generator.get_state()
                state, loss, figures = trainer.step(state, next(batches))
                for name, value in {"loss": loss, **figures}.items():
                    sums[name] = sums.get(name, 0.0) + value.double()
                now = time.perf_counter()
                if now - reported > _SECONDS_BETWEEN_REPORTS:
                    reported = now
                    report.step(steps, _status(sums, i, steps / (now - start)))
                if checkpoints and checkpoints.due(steps):
                    numbers = {name: float(value) for name, value in sums.items()}
                    checkpoints.save(state, steps, Position(done, i, order, numbers, history, now - start))
            done += here
            measured = task.evaluate(trainer.net(state), task.val)
            seconds = time.perf_counter() - start
            passes = done / a_pass
            history.append(
                {
                    "epoch": int(passes) if passes.is_integer() else round(passes, 3),
                    "step": done,
                    **{f"train_{name}": float(value) / here for name, value in sums.items()},
                    **{f"val_{name}": value for name, value in measured.items()},
                    "seconds": round(seconds, 3),
                }
            )
            validation = f"{task.metric.label} {task.metric.show(measured[task.metric.name])}"
            report.row(done, _status(sums, here, done / seconds), validation)
            sums, more = {}, 0
    seconds = time.perf_counter() - start
    if checkpoints and not finished:
        checkpoints.save(state, total, Position(total, 0, order, {}, history, seconds), wait=True)
    return Fit(state, history, seconds, total)


def _status(sums: dict[str, Tensor], count: int, speed: float) -> str:
    """Means of the figures of a stretch of training, and steps a second."""
    figures = "  ".join(f"{name} {float(value) / count:.4f}" for name, value in sums.items())
    return f"{figures}  {speed:,.1f} steps/s"
