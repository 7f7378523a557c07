"""Training: the step, a pure function of (state, batch); loss and gradient; optimizers and schedules."""

from gbfunc.train.loss import Lazy, LossFn, Remat
from gbfunc.train.make import make_train_step
from gbfunc.train.objective import LossAndGrads, Objective
from gbfunc.train.optimizers import Optimizer, OptState, torch_optimizer
from gbfunc.train.schedules import torch_schedule
from gbfunc.train.seeding import seeded
from gbfunc.train.step import StepInfo, TrainState, TrainStep

__all__ = [
    "Lazy",
    "LossAndGrads",
    "LossFn",
    "Objective",
    "OptState",
    "Optimizer",
    "Remat",
    "StepInfo",
    "TrainState",
    "TrainStep",
    "make_train_step",
    "seeded",
    "torch_optimizer",
    "torch_schedule",
]
