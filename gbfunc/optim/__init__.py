"""Torch's optimizers as pure pairs `(init, update)`, and torch's schedules as pure functions of the step."""

from gbfunc.optim.adapter import torch_optimizer
from gbfunc.optim.interface import Optimizer, OptState
from gbfunc.optim.schedule import torch_schedule

__all__ = ["OptState", "Optimizer", "torch_optimizer", "torch_schedule"]
