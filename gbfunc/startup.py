"""What must happen before torch is imported, where Python runs for the command line: this module comes first.

OpenMP's threads spin at the end of every operation, which makes the steps of a small p-net take five to ten times as
long where another program has a core. How they wait is read once, when torch's library is loaded; scripts set
`OMP_WAIT_POLICY=passive` in their environment, or call `torch.set_num_threads(1)`.

Ctrl-C and SIGTERM during the imports end the process with one line and exit status 130 or 143, until `gbfunc.cli.main`
takes over.

Arguments are parsed here already: help, and what is wrong with them, need not wait seconds for torch.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import MutableMapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

_SPAWNED = "--multiprocessing-fork"
"""An argument of processes that `multiprocessing` starts, whose `sys.argv` is that of the process before."""

_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def is_command_line(argv: Sequence[str], original: Sequence[str]) -> bool:
    """Whether Python was started as `gbfunc ...` or `python -m gbfunc ...`, from `sys.argv` and `sys.orig_argv`."""
    return Path(next(iter(argv), "")).stem == "gbfunc" or ("-m", "gbfunc") in pairwise(original)


def wait_passively(environ: MutableMapping[str, str], argv: Sequence[str]) -> None:
    """Have OpenMP's threads sleep while they wait, unless the user said how; the bench measures torch as it comes."""
    if "bench" not in argv and not any(name in environ for name in _WAITING):
        environ["OMP_WAIT_POLICY"] = "passive"


def _end(signum: int, frame: FrameType | None) -> None:
    os.write(2, b"gbfunc: interrupted\n" if signum == signal.SIGINT else b"gbfunc: stopped by SIGTERM\n")
    os._exit(128 + signum)


def _replace_handler(signum: int, old: Any, new: Any) -> None:
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signum) == old:
        signal.signal(signum, new)


def interrupts_end() -> None:
    """Let Ctrl-C and SIGTERM end the process with one line, unless something else handles them."""
    _replace_handler(signal.SIGINT, signal.default_int_handler, _end)
    _replace_handler(signal.SIGTERM, signal.SIG_DFL, _end)


def interrupts_raise() -> None:
    """Undo `interrupts_end`: Ctrl-C raises `KeyboardInterrupt` again."""
    _replace_handler(signal.SIGINT, _end, signal.default_int_handler)


def parse_arguments(argv: Sequence[str]) -> Any:
    """The command that the arguments ask for; ends the process where they ask for help or are wrong.

    None after any other error, which `gbfunc.cli.main` meets again and reports.
    """
    with contextlib.suppress(Exception):
        # By its name: the library, to which this file belongs, imports nothing of the command line.
        return importlib.import_module("gbfunc.cli.parser").parse(argv)
    return None


COMMAND: Any = None
"""The command of this process, where Python runs for the command line."""

if is_command_line(sys.argv, sys.orig_argv):
    wait_passively(os.environ, sys.orig_argv)
    interrupts_end()
    if _SPAWNED not in sys.orig_argv:
        COMMAND = parse_arguments(sys.argv[1:])
