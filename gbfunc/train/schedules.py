"""A torch scheduler as a table: a pure function of the step."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch.optim import lr_scheduler


def torch_schedule(
    scheduler_cls: type[lr_scheduler.LRScheduler], lr: float, steps: int, **options: Any
) -> Callable[[int], float]:
    """Run a torch scheduler once and keep its learning rates; the last one holds past the end.

    Only the learning rate is scheduled, not momentum. OneCycleLR (Smith and Topin, 2018) gets `max_lr=lr` and
    `total_steps=steps`, CyclicLR `base_lr=lr`, unless `options` say otherwise; every other class starts from an
    optimizer with learning rate `lr` (https://docs.pytorch.org/docs/stable/optim.html#how-to-adjust-learning-rate).

    Args:
        scheduler_cls: a class of `torch.optim.lr_scheduler`.
        lr: learning rate.
        steps: length of the table, steps 0 to `steps - 1`.
        options: options of the class.

    Raises:
        TypeError: if `scheduler_cls` is no scheduler class.
        ValueError: for options out of range, or a schedule that is no function of the step alone.

    >>> schedule = torch_schedule(lr_scheduler.StepLR, 0.1, steps=5, step_size=2, gamma=0.5)
    >>> [schedule(step) for step in (0, 1, 2, 3, 4, 99)]
    [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]
    """
    if not isinstance(scheduler_cls, type) or not issubclass(scheduler_cls, lr_scheduler.LRScheduler):
        raise TypeError(f"scheduler_cls must be a subclass of LRScheduler, got {scheduler_cls!r}")
    if issubclass(scheduler_cls, lr_scheduler.ReduceLROnPlateau):
        raise ValueError("ReduceLROnPlateau follows a measured loss: it is no function of the step")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be an int >= 1, got {steps!r}")
    if not 0 <= lr or not isfinite(lr):
        raise ValueError(f"lr must be finite and >= 0, got {lr}")
    if options.get("cycle_momentum"):
        raise ValueError("cycle_momentum must be False: only the learning rate is scheduled")
    if issubclass(scheduler_cls, lr_scheduler.OneCycleLR):
        length = {} if options.keys() & {"epochs", "steps_per_epoch"} else {"total_steps": steps}
        options = {"max_lr": lr, **length, "cycle_momentum": False} | options
    elif issubclass(scheduler_cls, lr_scheduler.CyclicLR):
        options = {"base_lr": lr, "cycle_momentum": False} | options
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
    try:
        scheduler = scheduler_cls(optimizer, **options)
        table = [float(scheduler.get_last_lr()[0])]
        for _ in range(steps - 1):
            optimizer.step()
            scheduler.step()
            table.append(float(scheduler.get_last_lr()[0]))
    except (TypeError, ArithmeticError, NotImplementedError) as error:
        reason = str(error) or type(error).__name__
        raise ValueError(f"{scheduler_cls.__name__} refuses its options: {reason}") from error

    def schedule(step: int) -> float:
        if step < 0:
            raise ValueError(f"step must be >= 0, got {step}")
        return table[min(step, len(table) - 1)]

    return schedule
