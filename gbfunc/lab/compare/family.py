"""Smaller nets of a task's own family: between the same inputs and outputs."""

from __future__ import annotations

import math
from collections.abc import Callable

from gbfunc.lab.compare.base import Unfit
from gbfunc.tasks import Task
from gbfunc.tasks.pnets import PNet, find_pnet

Sizes = tuple[int, ...]

_PARTS = 256
"""Widths are tried in these parts of the p-net's."""


def largest(fits: Callable[[int], bool], limit: int = 1 << 20) -> int:
    """The largest n up to `limit` for which a monotone `fits` holds, 0 if none does.

    >>> largest(lambda n: n * n <= 30)
    5
    """
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def perceptron_sizes(task: Task) -> Sizes:
    """Layer sizes of the task's p-net.

    Raises:
        Unfit: if it is no multilayer perceptron.
    """
    if task.pnet.name != "mlp":
        raise Unfit(f"it is for multilayer perceptrons, and the p-net is {task.pnet.name}")
    return (math.prod(task.interface.inputs), *task.pnet.config["hidden"], task.interface.outputs)


def narrow_sizes(task: Task, fits: Callable[[Sizes], bool]) -> list[Sizes]:
    """Layer sizes of the perceptrons that fill a budget: no hidden layer, one and two equal ones, as wide as fits.

    Args:
        task: its inputs and outputs are kept.
        fits: whether a net of such sizes is within the budget.

    Raises:
        Unfit: if none fits, or if the p-net is no multilayer perceptron.
    """
    n_in, *_, n_out = perceptron_sizes(task)
    shapes: list[Callable[[int], Sizes]] = [lambda h: (n_in, h, n_out), lambda h: (n_in, h, h, n_out)]
    found = [shape(width) for shape in shapes if (width := largest(lambda h, shape=shape: fits(shape(h))))]
    if fits((n_in, n_out)):
        found.append((n_in, n_out))
    if not found:
        raise Unfit(f"no net between {n_in} inputs and {n_out} outputs is as small as that")
    return found


def narrow_pnets(task: Task, fits: Callable[[PNet], bool]) -> list[PNet]:
    """The nets of the p-net's family that fill a budget: perceptrons as `narrow_sizes` has them, others by width.

    Args:
        task: its p-net and interface.
        fits: whether such a net is within the budget.

    Raises:
        Unfit: if none fits, or if the family has no widths to change.
    """
    if task.pnet.name == "mlp":

        def perceptron(sizes: Sizes) -> PNet:
            return find_pnet("mlp", task.interface, {**task.pnet.config, "hidden": sizes[1:-1]})

        return [perceptron(sizes) for sizes in narrow_sizes(task, lambda sizes: fits(perceptron(sizes)))]
    scaled = task.pnet.scaled
    if scaled is None:
        raise Unfit(f"the p-net {task.pnet.name} has no smaller one of its kind")
    part = largest(lambda n: fits(scaled(n / _PARTS)), 4 * _PARTS)
    if not part:
        raise Unfit(f"no {task.pnet.name} is as small as that")
    return [scaled(part / _PARTS)]
