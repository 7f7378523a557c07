"""gbfunc beside what else one would do, at equal bytes: what `gbfunc compare` runs.

Every method gets the same budget (`Problem`): so many bytes, or those of the file of a periodic genome of so many
parameters. It is given the same data and number of steps, and chooses its settings on the validation split; the test
split is looked at once, by the network as it is read back from its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

from gbfunc.lab.compare.base import BudgetTooSmall, Method, Problem, Settings, Trained
from gbfunc.lab.compare.dense import Dense, DenseQuantised, LowRankTraining
from gbfunc.lab.compare.genome import GenomeOf, reference_bytes, size_within
from gbfunc.lab.compare.pruned import Pruned
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
from gbfunc.lab.compare.subspace import RandomSubspace

__all__ = [
    "METHODS",
    "Choice",
    "Method",
    "Problem",
    "Results",
    "Row",
    "Settings",
    "BudgetTooSmall",
    "Trained",
    "choose",
    "measure",
    "of_problem",
    "read_results",
    "reference_bytes",
    "run_missing",
    "size_within",
    "to_json",
]

_RATES = (3e-3, 1e-2, 3e-2)

METHODS: Mapping[str, Method] = {
    "periodic": GenomeOf("periodic", (2e-2, 4e-2, 8e-2)),
    "smaller_dense": Dense(),
    "low_rank": LowRankTraining(),
    "random_subspace": RandomSubspace(),
    "pruned": Pruned(),
    "int8": DenseQuantised(8),
    "int4": DenseQuantised(4),
    "gnet": GenomeOf("gnet", _RATES),
    "stochastic": GenomeOf("stochastic", _RATES),
    "low_rank_genome": GenomeOf("low_rank", _RATES),
    "xox": GenomeOf("xox", _RATES),
}
"""Every method by its name."""
