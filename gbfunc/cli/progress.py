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
    """What a training loop tells about itself, in means over the present epoch and steps a second."""

    def step(self, steps: int, loss: float, accuracy: float, speed: float) -> None:
        """`steps` steps are done, in all."""
        ...

    def epoch(self, epoch: int, loss: float, val_accuracy: float, speed: float) -> None:
        """An epoch is done."""
        ...


class _Bar:
    """A line that is redrawn."""

    def __init__(self, progress: Progress, label: str, epochs: int, total_steps: int) -> None:
        self._progress = progress
        self._epochs = epochs
        self._task = progress.add_task(label, total=total_steps, epoch=f"epoch 1/{epochs}", status="", val="")

    def step(self, steps: int, loss: float, accuracy: float, speed: float) -> None:
        status = f"loss {loss:.4f}  accuracy {accuracy:.1%}  {speed:,.0f} steps/s"
        self._progress.update(self._task, completed=steps, status=status)

    def epoch(self, epoch: int, loss: float, val_accuracy: float, speed: float) -> None:
        done = f"epoch {min(epoch + 1, self._epochs)}/{self._epochs}"
        self._progress.update(self._task, epoch=done, val=f"val {val_accuracy:.1%}")


class _Lines:
    """A plain line now and then."""

    def __init__(self, label: str, epochs: int) -> None:
        self._label = label
        self._epochs = epochs
        self._every = -(-epochs // _PLAIN_LINES)

    def step(self, steps: int, loss: float, accuracy: float, speed: float) -> None:
        pass

    def epoch(self, epoch: int, loss: float, val_accuracy: float, speed: float) -> None:
        if epoch % self._every == 0 or epoch == self._epochs:
            print(
                f"{self._label}: epoch {epoch}/{self._epochs}, loss {loss:.4f}, "
                f"validation accuracy {val_accuracy:.2%}, {speed:,.0f} steps/s",
                file=sys.stderr,
                flush=True,
            )


@contextmanager
def reporter(label: str, epochs: int, total_steps: int) -> Iterator[Reporter]:
    """A reporter for one training run.

    Args:
        label: names the run.
        epochs: of the run.
        total_steps: of the run.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(label, epochs)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[epoch]}  {task.fields[status]}  {task.fields[val]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield _Bar(progress, label, epochs, total_steps)
