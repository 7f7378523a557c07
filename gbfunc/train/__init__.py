"""The training step: a pure function of (state, batch), and the state's `init`."""

from gbfunc.train.make import make_train_step
from gbfunc.train.step import StepInfo, TrainState, TrainStep

__all__ = ["StepInfo", "TrainState", "TrainStep", "make_train_step"]
