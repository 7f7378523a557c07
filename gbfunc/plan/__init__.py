"""The static plan. The modules `slots` and `spec` define a plan, `ensembles` the g-nets that one call evaluates."""

from gbfunc.plan.build import make_plan
from gbfunc.plan.ensembles import Ensemble
from gbfunc.plan.serial import register
from gbfunc.plan.slots import Slot, TensorPlan
from gbfunc.plan.spec import Plan
from gbfunc.types import DTYPES

__all__ = ["DTYPES", "Ensemble", "Plan", "Slot", "TensorPlan", "make_plan", "register"]
