"""The methods that train a genome, with one type of g-net each. The network's file is a genome file, with the plan."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gbfunc as gb
from gbfunc.formats import AUTO, genome_file_bytes, stored_name
from gbfunc.formats.layout import stored_leaves
from gbfunc.lab.compare import base
from gbfunc.lab.compare.base import BudgetTooSmall, Problem, Settings, Trained, grid
from gbfunc.tasks import Net, Task
from gbfunc.tasks.training import fit, genome_trainer, going_on, slowed
from gbfunc.trees import GNET


def plan_for(task: Task, hypernet: str, **target: Any) -> gb.Plan:
    try:
        # Always plan with the seed 0, because the file stores initial scales as text, whose length depends on the seed.
        return task.plan(task.build(0), hypernet, **target)
    except ValueError as error:
        raise BudgetTooSmall(str(error)) from error


def reference_bytes(task: Task, size: int) -> int:
    """Return the budget of all methods in bytes: the size of the file of a periodic genome of `size` parameters."""
    return genome_file_bytes(plan_for(task, "periodic", genome_params=size))


def size_within(task: Task, budget: int) -> int:
    """Count a periodic genome's parameters that fill a budget, for 1/2 or 1/4 of the p-net's width if none fits."""
    make = task.pnet.scaled
    for pnet in (task.pnet, *(make(factor) for factor in (1 / 2, 1 / 4) if make)):
        with suppress(BudgetTooSmall):
            return plan_for(task.with_pnet(pnet), "periodic", genome_bytes=budget, stored="float32").genome_params
    # No genome fits. Plan again for the full width, to raise the error that gives the reason.
    return plan_for(task, "periodic", genome_bytes=budget, stored="float32").genome_params


@dataclass(frozen=True)
class GenomeOf:
    """The method that trains a genome with one type of g-net."""

    hypernet: str  # The type, a key of `HYPERNETS`
    rates: tuple[float, ...] = ()  # Learning rates to choose from; () means the recipe's rate and twice the rate
    stored: str | None = None  # Dtype of the file, "int2" to "int8" or "auto"; None means the problem's dtype

    def candidates(self, problem: Problem) -> list[Settings]:
        """Return settings: p-nets of several widths, each with several learning rates.

        A p-net of half the width is also tried if, at full width, no genome fits or direct parameters take over a third
        of the budget; a quarter, if so at half the width. If the budget has a bit or more per parameter, twice the
        width is tried, and the full width only if its genome has at most half as many parameters as the p-net.
        """
        found: list[Settings] = []
        full, pnets = True, base.of_widths(problem, (1, 1 / 2, 1 / 4))
        for factor, pnet in pnets.items():
            if factor < 1 and not full:
                continue
            full, about = True, base.about_pnet(pnet, problem.task)
            with suppress(BudgetTooSmall):
                task, plan = self._plan(problem, about)
                # With "auto", the bits are known only after training: assume int8 for direct parameters.
                dtype = "int8" if self.stored == AUTO else stored_name(self.stored or problem.dtype)
                direct = {k: x for k, x in stored_leaves(plan.leaves, dtype).items() if not k.startswith(GNET)}
                full = sum(x.nbytes for x in direct.values()) > problem.budget / 3
                if factor == 1 and max(pnets) > 1 and 2 * plan.genome_params > plan.pnet_params:
                    continue
                usual = task.recipe(plan.genome_params).lr
                found += [about | of for of in grid(params=(plan.genome_params,), lr=self.rates or (usual, 2 * usual))]
        if not found:
            self._plan(problem, {})
        return found

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """Train by Adam with the recipe's betas. If `stored` is intN, the last sixth of the steps rounds the genome."""
        about = {key: settings[key] for key in settings.keys() & {"pnet"}}
        task, plan = self._plan(problem, about)
        pnet, known, lr = task.build(seed), task.recipe(plan.genome_params), settings["lr"]
        direct_lr = None if known.direct_lr is None else known.direct_lr / known.lr * lr
        recipe = replace(problem.recipe, lr=lr, direct_lr=direct_lr, betas=known.betas)
        stored: Any = self.stored or problem.dtype
        last = max(1, problem.steps // 6) if isinstance(stored, str) and stored != AUTO else 0
        before = replace(recipe, steps=max(1, problem.steps - last)) if last else recipe
        rounding, n_bytes = AUTO if stored == AUTO else None, problem.budget
        trainer = genome_trainer(
            plan, pnet, task, before, seed, rounding=rounding, genome_bytes=n_bytes, metadata=about or None
        )
        state = fit(trainer, task, before, seed, validate=False).state
        if stored == AUTO and trainer.train_step is not None:
            stored = trainer.train_step.stored(state)
        if last:
            recipe = slowed(recipe, last)
            trainer = genome_trainer(plan, pnet, task, recipe, seed, rounding=stored)
            state = fit(going_on(trainer, state), task, recipe, seed, validate=False).state
        with TemporaryDirectory(prefix="gbfunc-") as folder:
            gb.save(path := Path(folder, "genome"), plan, state, stored, about or None)
            return Trained(path.read_bytes(), plan.genome_params)

    def load(self, data: bytes, task: Task) -> Net:
        with TemporaryDirectory(prefix="gbfunc-") as folder:
            (path := Path(folder, "genome")).write_bytes(data)
            plan, genome = gb.load(path)
            pnet = base.pnet_about(gb.load_metadata(path) or {}, task)
        return gb.materialize(plan, genome, pnet.build(0)).eval()

    def _plan(self, problem: Problem, about: Mapping[str, Any]) -> tuple[Task, gb.Plan]:
        dtype, task = self.stored or problem.dtype, problem.task.with_pnet(base.pnet_about(about, problem.task))
        # In the file, metadata take at most 48 bytes more than their JSON.
        left = problem.budget - (48 + len(json.dumps(about)) if about else 0)
        return task, plan_for(task, self.hypernet, genome_bytes=left, stored=dtype)
