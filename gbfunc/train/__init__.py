"""Training: the step, a pure function of (state, batch); loss and gradient; optimizers and schedules."""

from gbfunc.train.alignment import UpdateAlignment, update_alignment
from gbfunc.train.allocation import allocate_steps
from gbfunc.train.distillation import distillation
from gbfunc.train.gradients import LossFn
from gbfunc.train.make import make_train_step
from gbfunc.train.optimizers import Optimizer, OptState, torch_optimizer
from gbfunc.train.options import StepOptions
from gbfunc.train.param_groups import ROLES, torch_schedule
from gbfunc.train.population import Population, population
from gbfunc.train.step import StepInfo, TrainState, TrainStep

__all__ = [
    "ROLES",
    "LossFn",
    "OptState",
    "Optimizer",
    "Population",
    "StepOptions",
    "StepInfo",
    "TrainState",
    "TrainStep",
    "UpdateAlignment",
    "allocate_steps",
    "distillation",
    "make_train_step",
    "population",
    "torch_optimizer",
    "torch_schedule",
    "update_alignment",
]
