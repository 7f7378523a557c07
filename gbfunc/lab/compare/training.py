"""The training that all methods share: the same batches, steps and schedule; Adam for the neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

import gbfunc as gb
from gbfunc.lab.compare.base import Problem
from gbfunc.tasks import Batch, Net, endless_batches, steps_per_epoch


def total_steps(problem: Problem) -> int:
    """Steps of a training."""
    recipe = problem.recipe
    return recipe.steps or recipe.epochs * steps_per_epoch(problem.task.train, recipe.batch_size)


def one_cycle(problem: Problem, lr: float) -> Callable[[int], float]:
    """Learning rate by step: up to `lr` in the recipe's warm-up, then down to nearly nothing."""
    steps, warmup = total_steps(problem), problem.recipe.warmup
    return gb.torch_schedule(torch.optim.lr_scheduler.OneCycleLR, lr, steps, pct_start=warmup)


def numbered_batches(problem: Problem, seed: int) -> Iterator[tuple[int, Batch]]:
    """The number of each step and its batch, in the order that `seed` gives."""
    recipe, generator = problem.recipe, torch.Generator().manual_seed(seed)
    batches = endless_batches(problem.task.train, recipe.batch_size, generator, recipe.augment)
    return zip(range(total_steps(problem)), batches, strict=False)


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
    schedule, leaves, clip_norm = one_cycle(problem, lr), list(leaves), problem.recipe.clip_norm
    optimizer = torch.optim.Adam(leaves, lr=lr, fused=True)
    for done, batch in numbered_batches(problem, seed):
        optimizer.param_groups[0]["lr"] = schedule(done)
        loss, _ = problem.task.loss(net, batch)
        optimizer.zero_grad()
        loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(leaves, clip_norm)
        optimizer.step()
        after(done)
