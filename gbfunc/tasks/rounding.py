"""A short training after another, with the genome rounded as its file will hold it: `--finetune`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import gbfunc as gb
from gbfunc.tasks.training import Fit, Trainer

RATE = 0.03
"""Peak learning rate, as a part of the recipe's: higher ones move whole blocks of codes in every step."""


def slowed(recipe: Any, steps: int) -> Any:
    """The recipe of the short training."""
    direct_lr = None if recipe.direct_lr is None else RATE * recipe.direct_lr
    return replace(recipe, steps=steps, lr=RATE * recipe.lr, direct_lr=direct_lr)


def going_on(trainer: Trainer, state: gb.TrainState) -> Trainer:
    """The trainer, which starts from the genome of a state."""
    genome: Mapping[str, Any] = {name: getattr(state, name) for name in gb.Genome._fields}
    return trainer._replace(state=trainer.state._replace(**genome))


def joined(first: Fit, second: Fit) -> Fit:
    """Two trainings, one after the other, as one."""
    before = first.history[-1]
    shift = {name: before[name] for name in ("epoch", "step", "seconds")}
    rows = [row | {name: row[name] + value for name, value in shift.items()} for row in second.history]
    times = (getattr(first, name) + getattr(second, name) for name in ("seconds", "steps", "step_seconds"))
    return Fit(second.state, [*first.history, *rows], *times)
