"""From options to a task, a recipe, a p-net and a plan; from a genome file to a network and its metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from torch import nn

import gbfunc as gb
from gbfunc.cli.fit import Fit
from gbfunc.cli.options import DataOptions, ModelOptions, TrainingOptions, find_device
from gbfunc.cli.output import make_folder
from gbfunc.hypernets import HYPERNETS
from gbfunc.tasks import TASKS, Recipe, Task, accuracy, mlp_sizes


class Job(NamedTuple):
    """What a command works on.

    Attributes:
        task: data and p-net, on the device to train on.
        recipe: settings, with the user's own in place.
        pnet: the p-net with its initial weights.
        plan: which of its tensors are generated, and how.
    """

    task: Task
    recipe: Recipe
    pnet: nn.Module
    plan: gb.Plan


def load_task(options: DataOptions, sizes: tuple[int, ...] | None) -> Task:
    """The task that the options name.

    Raises:
        ValueError: if its data is damaged, or if the sizes do not fit it.
        FileNotFoundError: if its data is missing.
    """
    return TASKS[options.task](data_dir=options.data_dir, sizes=sizes)


def make_job(options: ModelOptions) -> Job:
    """Load the data and plan the genome.

    Raises:
        ValueError: if the options do not fit each other or the task.
        FileNotFoundError: if the data is missing.
    """
    if not 0 <= options.seed < 2**63:
        raise ValueError(f"--seed must be at least 0 and below 2**63, got {options.seed}")
    task = load_task(options, options.sizes)
    if isinstance(options, TrainingOptions):
        task = task.to(find_device(options.device))
    pnet = task.build(options.seed).to(task.train.x.device)
    genome_params, compression = options.genome_params, options.compression
    if compression is not None and not 0 < compression < float("inf"):
        raise ValueError(f"--compression must be a positive number, got {compression}")
    if genome_params is None and compression is None:
        genome_params = task.genome_params
    n_pnet = sum(p.numel() for p in pnet.parameters())
    # Both given is for the plan to refuse.
    recipe = task.recipe(genome_params or n_pnet / (compression or 1))
    plan = gb.make_plan(
        pnet,
        HYPERNETS[options.hypernet](),
        genome_params=genome_params,
        compression=compression,
        rules=recipe.rules,
        encodings=recipe.encodings,
    )
    if isinstance(options, TrainingOptions):
        own = {"epochs": options.epochs, "batch_size": options.batch_size, "lr": options.lr}
        recipe = replace(recipe, **{name: value for name, value in own.items() if value is not None})
        check_recipe(recipe)
    return Job(task, recipe, pnet, plan)


def check_recipe(recipe: Recipe) -> None:
    """Raise `ValueError` for settings that no training can use; `fit` checks the batch size."""
    if recipe.epochs < 1:
        raise ValueError(f"--epochs must be at least 1, got {recipe.epochs}")
    if not 0 < recipe.lr < float("inf"):
        raise ValueError(f"--lr must be a positive number, got {recipe.lr}")


@contextmanager
def results_folder(out: Path | None) -> Iterator[Path]:
    """The folder for results, made if need be; one that is removed afterwards where `out` is None."""
    if out is not None:
        yield make_folder(out)
        return
    with TemporaryDirectory(prefix="gbfunc-") as folder:
        yield Path(folder)


def read_genome(path: Path, options: DataOptions, task: Task | None = None) -> tuple[gb.Plan, Task, nn.Module]:
    """Rebuild the p-net that a genome file describes, with its generated weights.

    Args:
        path: the file.
        options: which data.
        task: the data, where it is loaded already.

    Returns:
        Its plan, its task, and the network on the task's device.

    Raises:
        ValueError: if the file is damaged, or if its p-net does not fit the task.
        FileNotFoundError: if there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such genome file: {path}")
    plan, genome = gb.load(path)
    if task is None:
        task = load_task(options, mlp_sizes({t.name: t.shape for t in plan.tensors}))
    net = gb.materialize(plan, genome, task.build(0)).eval()
    return plan, task, net.to(task.train.x.device)


def genome_metrics(
    options: ModelOptions, plan: gb.Plan, path: Path, net: nn.Module, task: Task, result: Fit
) -> dict[str, object]:
    """What `metrics.json` says: sizes of the whole model, accuracies of what the genome file holds."""
    genome_bytes = path.stat().st_size
    return {
        "task": task.name,
        "hypernet": options.hypernet,
        "sizes": list(task.sizes),
        "pnet_params": plan.pnet_params,
        "genome_params": plan.genome_params,
        "ratio_params": plan.pnet_params / plan.genome_params,
        "dense_bytes": plan.dense_bytes,
        "genome_bytes": genome_bytes,
        "ratio_bytes": plan.dense_bytes / genome_bytes,
        "test_accuracy": accuracy(net, task.test),
        "val_accuracy": accuracy(net, task.val),
        "train_loss": result.history[-1]["train_loss"],
        "seconds": result.seconds,
        "steps": result.steps,
        "seed": options.seed,
    }
