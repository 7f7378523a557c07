"""Ctrl-C and SIGTERM during a training: it ends after a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(BaseException):
    """A signal ends the command; no handler of errors takes it for one.

    Attributes:
        signum: the signal.
    """

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Have SIGTERM raise `Stopped`, so that what a command has started is ended by its context."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Stopped(signum, "stopped by SIGTERM")

    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread may.
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def listening(signals: list[int]) -> Iterator[None]:
    """Note SIGINT and SIGTERM instead of ending at once; a second SIGINT does."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread may.
        return

    def note(signum: int, frame: FrameType | None) -> None:
        # Launchers pass a Ctrl-C on as SIGTERM, beside the SIGINT of the terminal: only a second Ctrl-C is impatience.
        if signum == signal.SIGINT and signum in signals:
            raise KeyboardInterrupt
        signals.append(signum)

    before = {signum: signal.signal(signum, note) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
