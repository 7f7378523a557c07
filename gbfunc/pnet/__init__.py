"""The p-net: its parts (`describe`), and the p-net as a pure function (`pure`)."""

from gbfunc.pnet.describe import (
    ParameterInfo,
    buffers_of,
    check_pnet,
    copy_of,
    copy_with,
    eval_mode_warning,
    keep_statistics,
    named_tensors,
    parameter_infos,
    skeleton_of,
    with_weights,
    without_sparse,
)
from gbfunc.pnet.pure import PureNet

__all__ = [
    "ParameterInfo",
    "PureNet",
    "buffers_of",
    "check_pnet",
    "copy_of",
    "copy_with",
    "eval_mode_warning",
    "keep_statistics",
    "named_tensors",
    "parameter_infos",
    "skeleton_of",
    "with_weights",
    "without_sparse",
]
