"""Loss and gradient of a genome on one batch."""

from gbfunc.gradients.loss import Lazy, LossFn, Remat
from gbfunc.gradients.objective import Found, Objective
from gbfunc.gradients.seeding import seeded

__all__ = ["Found", "Lazy", "LossFn", "Objective", "Remat", "seeded"]
