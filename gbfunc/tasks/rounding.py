"""A short training after another, with the genome rounded as its file will hold it: `--finetune`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

import gbfunc as gb
from gbfunc.tasks.base import Task, linear_decay
from gbfunc.tasks.training import Fit, Trainer
from gbfunc.trees import tree_map

RATE = 0.03
"""First learning rate, as a part of the recipe's peak: higher ones move whole blocks of codes in every step."""


def slowed(recipe: Any, steps: int) -> Any:
    """Return the recipe of the short training, whose rate goes on falling."""
    direct_lr = None if recipe.direct_lr is None else RATE * recipe.direct_lr
    slow = {"lr": RATE * recipe.lr, "direct_lr": direct_lr, "schedule": linear_decay, "warmup": 0.0}
    return replace(recipe, steps=steps, **slow)


def going_on(trainer: Trainer, state: gb.TrainState) -> Trainer:
    """Start a trainer from a copy of the genome of a state, into which its steps may write."""
    genome: Any = tree_map(torch.clone, {name: getattr(state, name) for name in gb.Genome._fields})
    return trainer._replace(state=trainer.state._replace(**genome))


def better(task: Task, before: Mapping[str, float], fit: Fit) -> bool:
    """Whether a training ended at least as well, on validation data, as it began."""
    name, sign = task.metric.name, task.metric.sign
    return sign * fit.history[-1][f"val_{name}"] >= sign * before[name]


def joined(first: Fit, second: Fit) -> Fit:
    """Join two trainings, one after the other."""
    before = first.history[-1]
    shift = {name: before[name] for name in ("epoch", "step", "seconds")}
    rows = [row | {name: row[name] + value for name, value in shift.items()} for row in second.history]
    times = (getattr(first, name) + getattr(second, name) for name in ("seconds", "steps", "step_seconds"))
    return Fit(second.state, [*first.history, *rows], *times)
