"""Options that commands share, as typed dataclasses: their docstrings are the `--help` text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from tyro.conf import arg

TaskName = Literal["digits", "mnist"]
HypernetName = Literal["periodic", "gnet", "stochastic", "low_rank", "xox"]

_RECIPE = "(default: the task's recipe)"


@dataclass(frozen=True)
class DataOptions:
    """Which data."""

    task: TaskName = "digits"
    """Real data to learn: scikit-learn's 1,797 handwritten digits of 8x8 pixels, or MNIST."""

    data_dir: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: none)")] = None
    """Folder with MNIST's four IDX .gz files; digits needs none."""


@dataclass(frozen=True)
class ModelOptions(DataOptions):
    """Which p-net, and how large a genome."""

    sizes: Annotated[
        tuple[int, ...] | None,
        arg(
            metavar="INT INT ...",
            help_behavior_hint="(default: 64 1100 10 for digits, 784 800 10 for mnist)",
        ),
    ] = None
    """Layer sizes of the p-net, inputs first."""

    hypernet: HypernetName = "periodic"
    """Type of the g-nets that generate the weights."""

    genome_params: Annotated[
        int | None,
        arg(
            metavar="INT",
            help_behavior_hint="(default without --compression: 450 for digits, 1973 for mnist)",
        ),
    ] = None
    """Largest genome, in parameters, everything counted."""

    compression: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: none)")] = None
    """The same as a ratio: parameters of the p-net / parameters of the genome."""

    seed: int = 0
    """Seed of the initial weights, the order of the examples and any noise."""


@dataclass(frozen=True)
class TrainingOptions(ModelOptions):
    """How to train, and where to write."""

    epochs: Annotated[int | None, arg(metavar="INT", help_behavior_hint=_RECIPE)] = None
    """Passes over the training examples."""

    batch_size: Annotated[int | None, arg(metavar="INT", help_behavior_hint=_RECIPE)] = None
    """Examples a step."""

    lr: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint=_RECIPE)] = None
    """Peak learning rate of the genome."""

    device: str = "cpu"
    """Where to train: cpu, cuda, cuda:1, ..."""

    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: nothing is kept)")] = None
    """Folder for metrics.json, history.csv, genome.safetensors and figures; such files are replaced."""


def find_device(name: str) -> torch.device:
    """The device called `name`.

    Raises:
        ValueError: if there is none, or if it cannot be used here.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {name!r} cannot be used: {reason}") from error
    return device
