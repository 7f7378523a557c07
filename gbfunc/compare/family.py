"""Smaller nets of a task's own family: the perceptrons between the same inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable

from gbfunc.compare.base import TooSmall
from gbfunc.tasks import Task

Sizes = tuple[int, ...]


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


def narrow_sizes(task: Task, fits: Callable[[Sizes], bool]) -> list[Sizes]:
    """Layer sizes of the nets that fill a budget: no hidden layer, one and two equal ones, as wide as fits.

    Args:
        task: its inputs and outputs are kept.
        fits: whether a net of such sizes is within the budget.

    Raises:
        TooSmall: if none fits.
    """
    n_in, n_out = task.sizes[0], task.sizes[-1]
    shapes: list[Callable[[int], Sizes]] = [lambda h: (n_in, h, n_out), lambda h: (n_in, h, h, n_out)]
    found = [shape(width) for shape in shapes if (width := largest(lambda h, shape=shape: fits(shape(h))))]
    if fits((n_in, n_out)):
        found.append((n_in, n_out))
    if not found:
        raise TooSmall(f"no net between {n_in} inputs and {n_out} outputs is as small as that")
    return found
