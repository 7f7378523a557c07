"""Real data and p-nets to train on it. A new task is one file and one entry in `TASKS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from gbfunc.tasks.base import (
    Net,
    Recipe,
    Split,
    Task,
    accuracy,
    epoch_batches,
    hold_out,
    loss_fn,
    steps_per_epoch,
)
from gbfunc.tasks.digits import digits
from gbfunc.tasks.mlp import mlp, mlp_sizes
from gbfunc.tasks.mnist import mnist

__all__ = [
    "TASKS",
    "Net",
    "Recipe",
    "Split",
    "Task",
    "accuracy",
    "epoch_batches",
    "hold_out",
    "loss_fn",
    "mlp",
    "mlp_sizes",
    "steps_per_epoch",
]

TASKS: Mapping[str, Callable[..., Task]] = MappingProxyType({"digits": digits, "mnist": mnist})
"""Every task by its name, as its factory `(data_dir=None, sizes=None) -> Task`."""
