"""Where the numbers of a training go while it runs: one hook, `on_log(step, metrics)`, and what can stand behind it.

Any loop can call one: `with tensorboard_log(folder) as on_log: ... on_log(step, {"train_loss": float(info.loss)})`.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gbfunc.extras import import_extra

OnLog = Callable[[int, Mapping[str, float]], None]
"""Takes the steps that are done, and numbers by name."""


@contextmanager
def csv_log(folder: Path, settings: Mapping[str, Any] = MappingProxyType({})) -> Iterator[OnLog]:
    """A row `step, metric, value` for each number, in `folder/log.csv`, behind those that it holds."""

    def log(step: int, metrics: Mapping[str, float]) -> None:
        with (folder / "log.csv").open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            if not file.tell():
                writer.writerow(["step", "metric", "value"])
            writer.writerows([step, name, value] for name, value in metrics.items())

    yield log


@contextmanager
def tensorboard_log(folder: Path, settings: Mapping[str, Any] = MappingProxyType({})) -> Iterator[OnLog]:
    """Scalars for TensorBoard, and the settings as a text, in a folder of this run below `folder/tensorboard`."""
    import_extra("tensorboard", "--log tensorboard", "gbfunc[tensorboard]")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard" / f"{datetime.now():%Y%m%d-%H%M%S}")) as writer:
        if settings:
            table = "\n".join(["| option | value |", "|---|---|", *(f"| {k} | {v} |" for k, v in settings.items())])
            writer.add_text("settings", table)

        def log(step: int, metrics: Mapping[str, float]) -> None:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)

        yield log


@contextmanager
def wandb_log(folder: Path, settings: Mapping[str, Any] = MappingProxyType({})) -> Iterator[OnLog]:
    """A run of Weights & Biases, in the project that `WANDB_PROJECT` names or `gbfunc`; its files go into `folder`."""
    wandb = import_extra("wandb", "--log wandb", "gbfunc[wandb]")
    project = os.environ.get("WANDB_PROJECT", "gbfunc")
    with wandb.init(project=project, dir=str(folder), config=dict(settings)) as run:
        yield lambda step, metrics: run.log(dict(metrics), step=step)


LOGS: Mapping[str, Callable[[Path, Mapping[str, Any]], AbstractContextManager[OnLog]]] = MappingProxyType(
    {"csv": csv_log, "tensorboard": tensorboard_log, "wandb": wandb_log}
)
"""Every log by its name; each takes a folder and the settings of the training."""
