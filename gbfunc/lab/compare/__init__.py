"""gbfunc beside what else one would do, at equal bytes: what `gbfunc compare` runs.

Every method gets the same budget (`Problem`), data and steps, and chooses its settings on the validation split. The
network that is read back from the file sees the test split once.
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
"""Every way to a small network by its name."""

PRETRAINED_METHODS: Mapping[str, Method] = {
    "genome": GenomeOf("bilinear"),
    "genome_int7": GenomeOf("bilinear", stored="int7"),
    "genome_auto": GenomeOf("bilinear", stored="auto"),
    **ADAPTERS,
}
"""Every way to change a pretrained network in few bytes by its name."""

REFERENCES: Mapping[str, Method] = {"full_fine_tuning": FULL}
"""References of adapters, of any size."""


def reference_problem(problem: Problem) -> Problem:
    """Change a problem for the methods of `REFERENCES`: the budget becomes a file of all weights."""
    net = problem.task.build(0).to("meta")
    budget = FULL.length(net, {}, problem.dtype)
    return problem._replace(size=budget // problem.dtype.itemsize, budget=budget)
