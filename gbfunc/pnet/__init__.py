"""The p-net: its parts (`describe`), a pure function (`pure`), in a loss function (`grown`), and its `reads`."""

from gbfunc.pnet.describe import (
    ParameterInfo,
    buffers_of,
    check_pnet,
    copy_of,
    eval_mode_warning,
    keep_statistics,
    parameter_infos,
    skeleton_of,
    with_weights,
    without_sparse,
)
from gbfunc.pnet.grown import GrownNet, RunnableNet
from gbfunc.pnet.pure import PureNet, StopForward
from gbfunc.pnet.reads import watch_first_call

__all__ = [
    "GrownNet",
    "ParameterInfo",
    "PureNet",
    "RunnableNet",
    "StopForward",
    "buffers_of",
    "copy_of",
    "check_pnet",
    "eval_mode_warning",
    "keep_statistics",
    "parameter_infos",
    "skeleton_of",
    "watch_first_call",
    "with_weights",
    "without_sparse",
]
