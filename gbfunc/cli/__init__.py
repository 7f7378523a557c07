"""The command line: `gbfunc demo`, `plan`, `train`, `eval`, `predict`, `sample`, `export`, `compare`, and more.

What the user could mend (options that do not fit, files that are missing or damaged, packages that are not installed)
is raised in every module of this room as `ValueError`, `OSError` or `ImportError`, and reported in one line by `main`,
as is a network that does not fit into memory.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

from gbfunc import startup
from gbfunc.cli.signals import Stopped, sigterm_raises
from gbfunc.startup import interrupts_raise

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name, by default those of the process.

    Returns:
        Exit code: 0; 2 after a user's error, reported in one line on standard error; 128 + the number
        of the signal that ended it.

    Raises:
        SystemExit: from the parser, for `--help` and `--version` (0), and for options that it refuses (2).
    """
    try:
        # What is imported from here on may take seconds, and be interrupted.
        from gbfunc.cli.parser import parse

        interrupts_raise()
        command = startup.COMMAND if argv is None else None
        with sigterm_raises():
            (command or parse(sys.argv[1:] if argv is None else argv)).run()
    except KeyboardInterrupt:
        print("gbfunc: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has had enough; what is still buffered must not raise at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Stopped as stopped:
        print(f"gbfunc: {stopped}", file=sys.stderr)
        return 128 + stopped.signum
    except (ValueError, OSError, ImportError, FloatingPointError, MemoryError, RuntimeError) as error:
        # torch has an error of its own for a GPU's memory alone.
        if isinstance(error, RuntimeError) and not re.search("out of memory|can't allocate memory", str(error)):
            raise
        # One line, whatever the message holds.
        print(f"gbfunc: error: {' '.join(str(error).split())}{_place(error)}", file=sys.stderr)
        return 2
    return 0


def _place(error: BaseException | None) -> str:
    """Where code of the user's (a task, a p-net) raised an error or its cause, ` (file.py:12, in forward)`, or nothing.

    That is the innermost frame beside those of libraries, if it is none of this package.
    """
    import sysconfig
    from pathlib import Path
    from traceback import walk_tb

    ours, standard = Path(__file__).parents[1], Path(sysconfig.get_path("stdlib"))
    while error is not None:
        for frame, line in reversed(list(walk_tb(error.__traceback__))):
            code = frame.f_code
            path = Path(code.co_filename)
            if ours in path.parents:
                break
            library = standard in path.parents or {"site-packages", "dist-packages"} & {*path.parts}
            if not library and not code.co_filename.startswith("<"):
                return f" ({path.name}:{line}, in {code.co_name})"
        error = error.__cause__
    return ""
