"""Lazy weights: tensors that stand in for a dense weight and apply it without keeping it.

`factored_weight` applies its factors, `remat_weight` forms the weight per use and again in backward. Both
go into the parameter dict of `torch.func.functional_call` in place of the dense tensor; an operation that
neither can apply sees the dense weight, and is counted.
"""

from gbfunc.factored.cost import lazy_pays
from gbfunc.factored.lazy import LazyWeight
from gbfunc.factored.probe import ProbeWeight, probe_weight
from gbfunc.factored.remat import RematWeight, remat_weight
from gbfunc.factored.weight import FactoredWeight, factored_weight, stack_rows

__all__ = [
    "FactoredWeight",
    "LazyWeight",
    "ProbeWeight",
    "RematWeight",
    "factored_weight",
    "lazy_pays",
    "probe_weight",
    "remat_weight",
    "stack_rows",
]
