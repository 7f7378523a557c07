"""What Ctrl-C and SIGTERM do: they end imports at once, a command with a line, a training after a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], None]


class Stopped(BaseException):
    """A signal, `signum`, ends the command; no handler of errors catches this exception."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


@contextmanager
def _handled(handler: Handler, *signums: int) -> Iterator[None]:
    main = threading.current_thread() is threading.main_thread()  # No other may.
    before = {signum: signal.signal(signum, handler) for signum in signums if main}
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)


def ending() -> AbstractContextManager[None]:
    """Let both signals end the process with one line: an import that raised could leave a library half loaded."""

    def end(signum: int, frame: FrameType | None) -> None:
        os.write(2, b"gbfunc: interrupted\n" if signum == signal.SIGINT else b"gbfunc: stopped by SIGTERM\n")
        os._exit(128 + signum)

    both = (signal.SIGINT, signal.SIGTERM)
    return _handled(end, *(signum for signum in both if signal.getsignal(signum) != signal.SIG_IGN))


def stopping() -> AbstractContextManager[None]:
    """Let SIGTERM raise `Stopped`, so that contexts end what a command has started."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Stopped(signum, "stopped by SIGTERM")

    return _handled(stop, signal.SIGTERM)


def listening(signals: list[int]) -> AbstractContextManager[None]:
    """Note both signals instead of ending at once; a second SIGINT raises `KeyboardInterrupt`."""

    def note(signum: int, frame: FrameType | None) -> None:
        # Launchers pass a Ctrl-C on as SIGTERM, beside the SIGINT of the terminal: only a second Ctrl-C is impatience.
        if signum == signal.SIGINT and signum in signals:
            raise KeyboardInterrupt
        signals.append(signum)

    return _handled(note, signal.SIGINT, signal.SIGTERM)
