"""gbfunc beside what else one would do, at equal bytes: what `gbfunc compare` runs.

Every method gets the same budget (`Problem`): so many bytes, or those of the file of a periodic genome of so many
parameters. It is given the same data and number of steps, and chooses its settings on the validation split, by
successive halving whose steps are reported; the test split is looked at once, by the network as it is read back.

A p-net that is trained from scratch is compared with other ways to a small network, a pretrained one with other
adapters of it (`methods_for`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gbfunc.lab.compare.adapters import ADAPTERS, FULL
from gbfunc.lab.compare.base import BudgetTooSmall, Method, Problem, Settings, Stored, Trained, is_pretrained
from gbfunc.lab.compare.dense import Dense, Quantised
from gbfunc.lab.compare.genome import GenomeOf, reference_bytes, size_within
from gbfunc.lab.compare.nnc import Coded
from gbfunc.lab.compare.pruned import Pruned
from gbfunc.lab.compare.published import PUBLISHED, Published
from gbfunc.lab.compare.rows import (
    Choice,
    Results,
    Row,
    choose,
    measure,
    of_problem,
    read_results,
    run_missing,
    to_json,
)
from gbfunc.lab.compare.subspace import LowRankTraining, RandomSubspace, seeded_networks
from gbfunc.tasks import Task

__all__ = [
    "METHODS",
    "NAMED",
    "PRETRAINED_METHODS",
    "PUBLISHED",
    "REFERENCES",
    "Choice",
    "Method",
    "Problem",
    "Published",
    "Results",
    "Row",
    "Settings",
    "BudgetTooSmall",
    "Trained",
    "choose",
    "is_pretrained",
    "measure",
    "methods_for",
    "of_problem",
    "read_results",
    "reference_problem",
    "reference_bytes",
    "run_missing",
    "size_within",
    "to_json",
]

_RATES = (3e-3, 1e-2, 3e-2)

METHODS: Mapping[str, Method] = {
    "periodic": GenomeOf("periodic", (2e-2, 4e-2, 8e-2)),
    "periodic_int7": GenomeOf("periodic", (2e-2, 4e-2, 8e-2), "int7"),
    "periodic_auto": GenomeOf("periodic", (2e-2, 4e-2, 8e-2), "auto"),
    "smaller_dense": Dense(),
    "low_rank": LowRankTraining(),
    "random_subspace": RandomSubspace(),
    "seeded_networks": RandomSubspace(seeded_networks, (1e-2, 3e-2, 1e-1)),
    "seeded_factors": RandomSubspace(seeded_networks, (1e-2, 3e-2, 1e-1), ranks=(2, 8)),
    "pruned": Pruned(),
    "int8": Quantised(8),
    "int4": Quantised(4),
    "gnet": GenomeOf("gnet", _RATES),
    "stochastic": GenomeOf("stochastic", _RATES),
    "low_rank_genome": GenomeOf("low_rank", _RATES),
    "xox": GenomeOf("xox", _RATES),
}
"""Every way to a small network by its name."""

NAMED: Mapping[str, Method] = {"nnc": Coded()}
"""More of them, which need a package of their own: run where they are named."""

PRETRAINED_METHODS: Mapping[str, Method] = {
    "genome": GenomeOf("bilinear"),
    "genome_int7": GenomeOf("bilinear", codes="int7"),
    "genome_auto": GenomeOf("bilinear", codes="auto"),
    **ADAPTERS,
}
"""Every way to change a pretrained network in few bytes by its name."""

REFERENCES: Mapping[str, Method] = {"full_fine_tuning": FULL}
"""What adapters are measured against, whatever its size."""

_TWIN = "_float16"


def methods_for(task: Task, dtype: torch.dtype) -> Mapping[str, Method]:
    """The methods that fit a task's p-net.

    Adapters are there twice where the dtype is float32: as it is, and stored in float16 under a name that says so,
    within the same bytes.
    """
    if not is_pretrained(task):
        return METHODS
    if dtype != torch.float32:
        return PRETRAINED_METHODS
    plain = {name: m for name, m in PRETRAINED_METHODS.items() if not (isinstance(m, GenomeOf) and m.codes)}
    twins = {f"{name}{_TWIN}": Stored(method, torch.float16) for name, method in plain.items()}
    return {**PRETRAINED_METHODS, **twins}


def reference_problem(problem: Problem) -> Problem:
    """A problem for the methods of `REFERENCES`: its budget is the file of all weights, dense."""
    budget = FULL.file_bytes(problem.task, problem.dtype)
    return problem._replace(size=budget // problem.dtype.itemsize, budget=budget)
