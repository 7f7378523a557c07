"""How this process was started; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path


def is_command_line(argv: Sequence[str], original: Sequence[str]) -> bool:
    """Whether Python was started as `gbfunc ...` or `python -m gbfunc ...`, from `sys.argv` and `sys.orig_argv`."""
    started = Path(next(iter(argv), "")).stem == "gbfunc" or ("-m", "gbfunc") in pairwise(original)
    # A process that `multiprocessing` starts has the arguments of the process before.
    return started and "--multiprocessing-fork" not in original
