"""gbfunc's types of g-net: the file of the genome, its plan included."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import gbfunc as gb
from gbfunc.lab.compare.base import BudgetTooSmall, Problem, Settings, Trained, grid, is_pretrained
from gbfunc.plan import StoredDtype, genome_file_bytes
from gbfunc.tasks import Net, Task
from gbfunc.tasks.rounding import going_on, slowed
from gbfunc.tasks.training import fit, genome_trainer

_FILE = "genome.safetensors"

_ROUNDED = 6
"""One step in so many, the last ones, is with the genome rounded to the codes that are stored."""


def plan_for(task: Task, hypernet: str, **target: Any) -> gb.Plan:
    """A plan as the task has it.

    Args:
        task: its p-net and recipe.
        hypernet: the type of g-net, a key of `HYPERNETS`; the p-net's options stand where its type is that.
        target: the size target of `make_plan`.

    Raises:
        BudgetTooSmall: if no genome of the task is as small as that.
    """
    try:
        # Of one seed: the initial scales are in the file, and their digits must not move its length.
        return task.plan(task.build(0), hypernet, **target)
    except ValueError as error:
        raise BudgetTooSmall(str(error)) from error


def reference_bytes(task: Task, size: int) -> int:
    """What `gb.save` writes of a periodic genome of so many parameters: the bytes that every method may use."""
    return genome_file_bytes(plan_for(task, "periodic", genome_params=size))


def size_within(task: Task, budget: int) -> int:
    """Parameters of the periodic genome of the task that fills so many bytes.

    Raises:
        BudgetTooSmall: if no genome of the task is as small as that.
    """
    return plan_for(task, "periodic", genome_bytes=budget).genome_params


@dataclass(frozen=True)
class GenomeOf:
    """A genome of one type of g-net."""

    hypernet: str  # the type, a key of `HYPERNETS`
    rates: tuple[float, ...] = ()  # learning rates to choose from; none: the recipe's for that size, and twice that
    codes: str | None = None  # what it is stored as in place of the problem's dtype: "int2" to "int8"

    def candidates(self, problem: Problem) -> list[Settings]:
        """Learning rates."""
        params = self._plan(problem).genome_params
        usual = problem.task.recipe(params).lr
        return grid(params=(params,), lr=self.rates or (usual, 2 * usual))

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """Adam with the recipe's moments on the genome; of codes, the last steps with the genome rounded."""
        plan, pnet = self._plan(problem), problem.task.build(seed)
        known, lr = problem.task.recipe(plan.genome_params), settings["lr"]
        direct_lr = None if known.direct_lr is None else known.direct_lr / known.lr * lr
        recipe = replace(problem.recipe, lr=lr, direct_lr=direct_lr, betas=known.betas)
        last = 0 if self.codes is None else max(1, problem.steps // _ROUNDED)
        before = recipe if not last else replace(recipe, steps=max(1, problem.steps - last))
        trainer = genome_trainer(plan, pnet, problem.task, before, seed)
        state = fit(trainer, problem.task, before, seed, validate=False).state
        if last:
            recipe = slowed(recipe, last)
            trainer = genome_trainer(plan, pnet, problem.task, recipe, seed, rounding=self.codes)
            state = fit(going_on(trainer, state), problem.task, recipe, seed, validate=False).state
        with TemporaryDirectory(prefix="gbfunc-") as folder:
            gb.save(path := Path(folder) / _FILE, plan, state, self._dtype(problem))
            return Trained(path.read_bytes(), plan.genome_params)

    def load(self, data: bytes, task: Task) -> Net:
        """The p-net with its generated weights."""
        with TemporaryDirectory(prefix="gbfunc-") as folder:
            (path := Path(folder) / _FILE).write_bytes(data)
            plan, genome = gb.load(path)
        return gb.materialize(plan, genome, task.build(0)).eval()

    def _dtype(self, problem: Problem) -> StoredDtype:
        return problem.dtype if self.codes is None else self.codes

    def _plan(self, problem: Problem) -> gb.Plan:
        dtype = self._dtype(problem)
        if self.hypernet == "periodic" and dtype == torch.float32 and not is_pretrained(problem.task):
            # The very genome whose file the budget is, where it was not given in bytes.
            with suppress(BudgetTooSmall):
                plan = plan_for(problem.task, self.hypernet, genome_params=problem.size)
                if genome_file_bytes(plan) == problem.budget:
                    return plan
        return plan_for(problem.task, self.hypernet, genome_bytes=problem.budget, stored=dtype)
