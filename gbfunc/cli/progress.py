"""Progress of training on standard error: a bar on a terminal, else a few plain lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_PLAIN_LINES = 5


class Reporter(Protocol):
    """What a training loop tells about itself."""

    def step(self, steps: int, status: str) -> None:
        """`steps` steps are done, in all; what is known of the latest."""
        ...

    def row(self, steps: int, status: str, validation: str) -> None:
        """Validation after `steps` steps."""
        ...


class _Bar:
    """A line that is redrawn."""

    def __init__(self, progress: Progress, label: str, total_steps: int) -> None:
        self._progress = progress
        self._task = progress.add_task(label, total=total_steps, status="", val="")

    def step(self, steps: int, status: str) -> None:
        self._progress.update(self._task, completed=steps, status=status)

    def row(self, steps: int, status: str, validation: str) -> None:
        self._progress.update(self._task, completed=steps, status=status, val=f"val {validation}")


class _Lines:
    """A plain line now and then."""

    def __init__(self, label: str, total_steps: int) -> None:
        self._label = label
        self._total = total_steps
        self._next = 0

    def step(self, steps: int, status: str) -> None:
        pass

    def row(self, steps: int, status: str, validation: str) -> None:
        if steps < self._next and steps < self._total:
            return
        self._next = steps + self._total // _PLAIN_LINES
        line = f"{self._label}: step {steps:,}/{self._total:,}, {status}, validation {validation}"
        print(line, file=sys.stderr, flush=True)


class _Silence:
    """Nothing."""

    def step(self, steps: int, status: str) -> None:
        pass

    def row(self, steps: int, status: str, validation: str) -> None:
        pass


@contextmanager
def reporter(label: str, total_steps: int, *, silent: bool = False) -> Iterator[Reporter]:
    """A reporter for one training run.

    Args:
        label: names the run.
        total_steps: of the run.
        silent: tell nothing.
    """
    if silent:
        yield _Silence()
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(label, total_steps)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("step {task.completed:,.0f}/{task.total:,.0f}  {task.fields[status]}  {task.fields[val]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield _Bar(progress, label, total_steps)
