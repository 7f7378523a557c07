"""What a method of compression is: it fits something trainable into a number of bytes, and reads it back from them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from gbfunc.tasks import Net, Recipe, Task

Settings: TypeAlias = dict[str, Any]
"""What validation data choose: learning rate, widths, ...; JSON."""


class Problem(NamedTuple):
    """What every method is given alike.

    Attributes:
        task: data and p-net.
        size: parameters of the periodic genome that fills the budget.
        budget: most bytes of everything that is needed to run.
        dtype: of the numbers that are stored, where a method has no format of its own.
        recipe: batch size, augmentation, warm-up and length of every training; its rates are the genome's own.
    """

    task: Task
    size: int
    budget: int
    dtype: torch.dtype
    recipe: Recipe


class Trained(NamedTuple):
    """What training gave.

    Attributes:
        data: everything that is needed to run, beside the code.
        params: trained numbers in it.
    """

    data: bytes
    params: int


class Unfit(ValueError):
    """The method can make nothing of this task that is as small as the budget."""


class Method(Protocol):
    """A way to a network in few bytes. A new one is one file and one entry in `METHODS`."""

    def candidates(self, problem: Problem) -> list[Settings]:
        """The settings among which validation data choose, each within the budget.

        Raises:
            Unfit: if nothing fits.
        """
        ...

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """Train with such settings; the data take at most the budget's bytes.

        Args:
            problem: task, budget and length of the training.
            settings: one of the candidates.
            seed: of all that is random.
        """
        ...

    def load(self, data: bytes, task: Task) -> Net:
        """The network, from nothing but the data and the task's code."""
        ...


def grid(**axes: Any) -> list[Settings]:
    """Every combination of settings, the last axis fastest.

    >>> grid(width=(1, 2), lr=(0.1,))
    [{'width': 1, 'lr': 0.1}, {'width': 2, 'lr': 0.1}]
    """
    combinations: list[Settings] = [{}]
    for name, values in axes.items():
        combinations = [{**c, name: value} for c in combinations for value in values]
    return combinations
