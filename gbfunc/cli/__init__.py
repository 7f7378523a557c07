"""The command line: `gbfunc demo`, `plan`, `train`, `eval`, `predict`, `sample`, `export`, `compare`, and more.

Modules of this folder raise `ValueError`, `OSError` or `ImportError` for errors that the user can correct:
contradictory options, missing or damaged files, missing packages. `main` reports these errors in one line.
"""

import os
import re
import signal
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import FrameType

__all__ = ["main"]


class Stopped(BaseException):
    """Ends the command after a signal: (signal, message). A BaseException, which `except Exception` does not catch."""


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None], *signums: int) -> Iterator[None]:
    """Let `handler` handle signals in a context. Python allows this in the main thread; elsewhere, change nothing."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {signum: signal.signal(signum, handler) for signum in signums if is_main}
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)


def printable(text: str) -> str:
    """Replace control characters, which a terminal would interpret, by Python's escape sequences."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _end(signum: int, frame: FrameType | None) -> None:
    os.write(2, b"gbfunc: interrupted\n" if signum == signal.SIGINT else b"gbfunc: stopped by SIGTERM\n")
    os._exit(128 + signum)


def _stop(signum: int, frame: FrameType | None) -> None:
    raise Stopped(signum, "stopped by SIGTERM")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments `argv` name (default: `sys.argv[1:]`), and return the exit code.

    An error that the user can correct is printed in one line on standard error, and the exit code is 2. After the
    signal number N, the exit code is 128 + N. `--help` and `--version` raise SystemExit.
    """
    heard = {signum for signum in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(signum) != signal.SIG_IGN}
    try:
        # During imports, a signal ends the process at once: an exception could leave a package half imported.
        with handling(_end, *heard):
            from gbfunc.cli.parser import parse

            command = parse(sys.argv[1:] if argv is None else argv)
            command.load()
        # Then signals raise exceptions, so that context managers close files and processes.
        with handling(_stop, signal.SIGTERM), warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: print(f"gbfunc: warning: {message}", file=sys.stderr)
            command.run()
    except (KeyboardInterrupt, Stopped) as stopped:
        signum, words = stopped.args if isinstance(stopped, Stopped) else (signal.SIGINT, "interrupted")
        print(f"gbfunc: {words}", file=sys.stderr)
        return 128 + signum
    except BrokenPipeError:
        # The program that reads the output (`| head`) has ended. Discard buffered output, which would raise at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, ImportError, FloatingPointError, MemoryError, RuntimeError) as error:
        # torch raises RuntimeError if the memory is full. Any other RuntimeError is a bug: show its traceback.
        if isinstance(error, RuntimeError) and not re.search("out of memory|can't allocate memory", str(error)):
            raise
        words = str(error)
        if isinstance(error, OSError) and error.strerror:
            words = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
        print(f"gbfunc: error: {printable(' '.join(words.split()))}{_place(error)}", file=sys.stderr)
        return 2
    return 0


def _place(error: BaseException | None) -> str:
    """Return where the user's own code raised the error: ` (file.py:12, in forward)`; "" if gbfunc raised it."""
    ours, standard = Path(__file__).parents[1], Path(sysconfig.get_path("stdlib"))
    while error is not None:
        for frame, line in reversed([*walk_tb(error.__traceback__)]):
            code, path = frame.f_code, Path(frame.f_code.co_filename)
            if ours in path.parents:
                break
            library = standard in path.parents or {"site-packages", "dist-packages"} & {*path.parts}
            if not library and not code.co_filename.startswith("<"):
                return f" ({path.name}:{line}, in {code.co_name})"
        error = error.__cause__
    return ""
