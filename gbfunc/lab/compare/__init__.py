"""Compares gbfunc with other methods of compression at equal numbers of bytes; `gbfunc compare` runs the comparison.

All methods get the same data, the same budget of bytes (see `Problem`) and the same number of training steps. Settings
are chosen on the validation split. Then each seed's network is read from its file, and evaluated on the test split.
"""

from collections.abc import Mapping

from gbfunc.lab.compare.adapters import ADAPTERS, FULL
from gbfunc.lab.compare.base import Dense, Method, Problem
from gbfunc.lab.compare.genome import GenomeOf

_RATES, _PERIODIC = (3e-3, 1e-2, 3e-2), (2e-2, 4e-2, 8e-2)

METHODS: Mapping[str, Method] = {
    "periodic": GenomeOf("periodic", _PERIODIC),
    "periodic_int7": GenomeOf("periodic", _PERIODIC, "int7"),
    "periodic_auto": GenomeOf("periodic", _PERIODIC, "auto"),
    "smaller_dense": Dense(),
    "gnet": GenomeOf("gnet", _RATES),
    "stochastic": GenomeOf("stochastic", _RATES),
    "low_rank_genome": GenomeOf("low_rank", _RATES),
    "xox": GenomeOf("xox", _RATES),
}
"""{name: method} for networks without pretrained weights"""

PRETRAINED_METHODS: Mapping[str, Method] = {
    "genome": GenomeOf("bilinear"),
    "genome_int7": GenomeOf("bilinear", stored="int7"),
    "genome_auto": GenomeOf("bilinear", stored="auto"),
    **ADAPTERS,
}
"""{name: method} for a pretrained network, whose changes are stored in few bytes"""

REFERENCES: Mapping[str, Method] = {"full_fine_tuning": FULL}
"""{name: method} of methods without a limit on bytes, with which adapters are compared"""


def reference_problem(problem: Problem) -> Problem:
    """Return the problem for the methods of `REFERENCES`. The budget is the size of a file with all weights."""
    budget = FULL.length(problem.task.build(0).to("meta"), {}, problem.dtype)
    return problem._replace(size=budget // problem.dtype.itemsize, budget=budget)
