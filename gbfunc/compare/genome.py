"""gbfunc's own types: the file of the genome, its plan included."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import gbfunc as gb
from gbfunc.compare.base import Problem, Settings, TooSmall, Trained, grid
from gbfunc.compare.store import pack, unpack
from gbfunc.compare.training import Batch, one_cycle, run_steps
from gbfunc.hypernets import HYPERNETS
from gbfunc.plan import genome_file_bytes
from gbfunc.tasks import Net, Task, loss_fn
from gbfunc.trees import flat_genome
from gbfunc.types import GenomeLike

_FILE = "genome.safetensors"


def plan_for(task: Task, hypernet: str, size: int, **target: Any) -> gb.Plan:
    """A plan by the task's recipe.

    Args:
        task: its p-net and recipe.
        hypernet: the type of g-net, a key of `HYPERNETS`.
        size: parameters for which the recipe is asked.
        target: the size target of `make_plan`.

    Raises:
        TooSmall: if no genome of the task is as small as that.
    """
    recipe = task.recipe(size)
    try:
        # Of one seed: the initial scales are in the file, and their digits must not move its length.
        return gb.make_plan(
            task.build(0), HYPERNETS[hypernet](), rules=recipe.rules, encodings=recipe.encodings, **target
        )
    except ValueError as error:
        raise TooSmall(str(error)) from error


def reference_bytes(task: Task, size: int) -> int:
    """What `gbfunc train --genome-params SIZE` writes: the bytes that every method may use."""
    return genome_file_bytes(plan_for(task, "periodic", size, genome_params=size))


@dataclass(frozen=True)
class GenomeOf:
    """A genome of one type of g-net.

    Attributes:
        hypernet: the type, a key of `HYPERNETS`.
        rates: learning rates to choose from.
    """

    hypernet: str
    rates: tuple[float, ...]

    def candidates(self, problem: Problem) -> list[Settings]:
        """Learning rates."""
        plan = self._plan(problem)
        return grid(params=(plan.genome_params,), lr=self.rates)

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """Adam with the recipe's moments on the genome."""
        plan, pnet = self._plan(problem), problem.task.build(seed)
        betas = problem.task.recipe(plan.genome_params).betas
        optimizer = gb.torch_optimizer(torch.optim.Adam, lr=one_cycle(problem, settings["lr"]), betas=betas)
        train_step = gb.make_train_step(plan, pnet, loss_fn, optimizer, donate=True, on_nonfinite="raise")
        state = train_step.init(seed=seed)

        def step(done: int, batch: Batch) -> None:
            nonlocal state
            state, _ = train_step(state, batch)

        run_steps(problem, step, seed)
        return Trained(_encode(plan, state, problem.dtype), plan.genome_params)

    def load(self, data: bytes, task: Task) -> Net:
        """The p-net with its generated weights."""
        plan, genome = _decode(data)
        return gb.materialize(plan, genome, task.build(0)).eval()

    def _plan(self, problem: Problem) -> gb.Plan:
        task, size, itemsize = problem.task, problem.size, problem.dtype.itemsize
        own = {"genome_params": size} if self.hypernet == "periodic" else {"genome_bytes": problem.budget}
        plan = plan_for(task, self.hypernet, size, **own)
        if problem.dtype == torch.float32:
            return plan
        # Narrower numbers leave room for more of them.
        header = genome_file_bytes(plan) - plan.dtype.itemsize * plan.genome_params
        target = (problem.budget - header) // itemsize
        plan = plan_for(task, self.hypernet, size, genome_params=target)
        while len(_encode(plan, gb.init_genome(plan, task.build(0), 0), problem.dtype)) > problem.budget:
            target -= 8
            plan = plan_for(task, self.hypernet, size, genome_params=target)
        return plan


def _encode(plan: gb.Plan, genome: GenomeLike, dtype: torch.dtype) -> bytes:
    """The genome's own file; for numbers that it does not know, the same tensors and plan in a file of theirs."""
    if dtype != torch.float32:
        flat = flat_genome(genome.gnets, genome.direct) | {f"buffers/{k}": b for k, b in genome.buffers.items()}
        return pack(flat, dtype, {"plan": plan.to_json()})
    with TemporaryDirectory(prefix="gbfunc-") as folder:
        gb.save(path := Path(folder) / _FILE, plan, genome)
        return path.read_bytes()


def _decode(data: bytes) -> tuple[gb.Plan, gb.Genome]:
    tensors, about = unpack(data)
    if "format" in about:
        with TemporaryDirectory(prefix="gbfunc-") as folder:
            (path := Path(folder) / _FILE).write_bytes(data)
            return gb.load(path)
    plan = gb.Plan.from_json(about["plan"])
    gnets = {e.name: {k: tensors[f"gnets/{e.name}/{k}"] for k in e.shapes} for e in plan.ensembles}
    direct, buffers = (
        {t.name: tensors[f"{part}/{t.name}"] for t in named}
        for part, named in (("direct", plan.direct), ("buffers", plan.buffers))
    )
    return plan, gb.Genome(gnets, direct, buffers)
