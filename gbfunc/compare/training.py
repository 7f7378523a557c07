"""The training that all methods share: the same batches, steps and schedule; Adam for the neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

import gbfunc as gb
from gbfunc.compare.base import Problem
from gbfunc.tasks import Net, epoch_batches, loss_fn, steps_per_epoch

Batch = tuple[Tensor, Tensor]


def total_steps(problem: Problem) -> int:
    """Steps of a training."""
    return problem.recipe.epochs * steps_per_epoch(problem.task.train, problem.recipe.batch_size)


def one_cycle(problem: Problem, lr: float) -> Callable[[int], float]:
    """Learning rate by step: up to `lr` in the recipe's warm-up, then down to nearly nothing."""
    steps, warmup = total_steps(problem), problem.recipe.warmup
    return gb.torch_schedule(torch.optim.lr_scheduler.OneCycleLR, lr, steps, pct_start=warmup)


def run_steps(problem: Problem, step: Callable[[int, Batch], None], seed: int) -> None:
    """Call `step(number, batch)` for every batch of all epochs, in the order that `seed` gives."""
    generator, done = torch.Generator().manual_seed(seed), 0
    for _ in range(problem.recipe.epochs):
        for batch in epoch_batches(problem.task.train, problem.recipe.batch_size, generator, problem.recipe.noise):
            step(done, batch)
            done += 1


def train_net(
    problem: Problem,
    leaves: Iterable[Tensor],
    net: Net,
    lr: float,
    seed: int,
    after: Callable[[int], None] = lambda done: None,
) -> None:
    """Train leaves in place by Adam with its default moments.

    Args:
        problem: data and length.
        leaves: what is trained.
        net: the network that reads them.
        lr: peak of the learning rate.
        seed: of the order of the examples.
        after: called with the number of each step when it is done.
    """
    schedule = one_cycle(problem, lr)
    optimizer = torch.optim.Adam(leaves, lr=lr, fused=True)

    def step(done: int, batch: Batch) -> None:
        optimizer.param_groups[0]["lr"] = schedule(done)
        loss, _ = loss_fn(net, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after(done)

    run_steps(problem, step, seed)
