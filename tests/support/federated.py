"""A small problem of federated learning: digits, four clients, and a server."""

import runpy
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Context, Message  # pyright: ignore[reportMissingImports]
from flwr.clientapp import ClientApp  # pyright: ignore[reportMissingImports]
from flwr.serverapp import strategy as strategies  # pyright: ignore[reportMissingImports]
from torch import nn

import gbfunc as gb
from gbfunc.federated import GenomeStrategy, LocalGrid, client_app, partition
from gbfunc.tasks import Task, find_task
from gbfunc.tasks.data import Split
from tests.support.ranks import ROOT

HOSTILE = runpy.run_path(str(ROOT / "notebooks/results/hostile.py"))
N, ALL = 4, {"fraction_train": 1.0, "fraction_evaluate": 0.0, "min_available_nodes": 4}


class Problem(NamedTuple):
    task: Task
    pnet: nn.Module
    plan: gb.Plan
    genome: gb.Genome
    examples: Callable[[Context], Split]


@cache
def the_problem() -> Problem:
    task = find_task("digits", None, {})
    task = task.with_pnet(task.pnet.scaled(0.05))  # pyright: ignore[reportOptionalCall]
    pnet = task.build(0)
    plan = task.plan(pnet, genome_params=400)
    parts = [torch.from_numpy(part) for part in partition(task.train.y, N, alpha=0.5)]

    def examples(context: Context) -> Split:
        part = parts[context.node_config["partition-id"]]
        return Split(task.train.x[part], task.train.y[part])

    return Problem(task, pnet, plan, gb.init_genome(plan, pnet, 0), examples)


@cache
def the_app() -> ClientApp:
    problem = the_problem()
    return client_app(problem.plan, problem.pnet, problem.task.loss, problem.examples, steps=3, batch_size=16)


def grid_of(app: Callable[..., Message]) -> LocalGrid:
    return LocalGrid(app, [{"partition-id": i} for i in range(N)])


def server(problem: Problem, strategy: Any = None, **options: Any) -> GenomeStrategy:
    given: dict[str, Any] = {"lr": 1e-2, "up": "float32", "down": "float32", "seed": 0} | options
    return GenomeStrategy(strategy or strategies.FedAvg(**ALL), problem.plan, problem.genome, **given)


def trained(strategy: GenomeStrategy, app: Callable[..., Message], rounds: int = 1) -> np.ndarray:
    with grid_of(app) as grid:
        strategy.train(grid, rounds)
    return strategy.wire.vector(strategy.genome)
