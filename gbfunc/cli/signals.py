"""SIGTERM ends a command with a line; during a training that keeps checkpoints Ctrl-C and SIGTERM end it after one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(BaseException):
    """A signal, `signum`, ends the command; no handler of errors takes it for one."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Have SIGTERM raise `Stopped`, so that what a command has started is ended by its context."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Stopped(signum, "stopped by SIGTERM")

    with _handled(stop, signal.SIGTERM):
        yield


@contextmanager
def listening(signals: list[int]) -> Iterator[None]:
    """Note SIGINT and SIGTERM instead of ending at once; a second SIGINT does."""

    def note(signum: int, frame: FrameType | None) -> None:
        # Launchers pass a Ctrl-C on as SIGTERM, beside the SIGINT of the terminal: only a second Ctrl-C is impatience.
        if signum == signal.SIGINT and signum in signals:
            raise KeyboardInterrupt
        signals.append(signum)

    with _handled(note, signal.SIGINT, signal.SIGTERM):
        yield


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None], *signums: int) -> Iterator[None]:
    main = threading.current_thread() is threading.main_thread()  # No other may.
    before = {signum: signal.signal(signum, handler) for signum in signums if main}
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)
