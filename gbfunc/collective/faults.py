"""When a collective fails: one clear error, which names the rank that is missing as far as it can be known."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

_ROLL_CALL = 3.0
"""Seconds in which the ranks that are left answer after a failure: a dead rank's neighbours notice first."""

_SIGNS = ("gloo", "Gloo", "NCCL", "ProcessGroup", "Connection", "Timed out", "timed out", "Socket", "store", "Store")


class CollectiveError(ConnectionError):
    """A collective failed or timed out: another rank has died, or is stuck."""


class Faults:
    """Turns the failure of a collective into a `CollectiveError`.

    The ranks that are left sign a list in the store that they met at; those that do not are named. Nothing is sent as
    long as all goes well.
    """

    def __init__(self, rank: int, world: int, timeout: float, store: Any) -> None:
        self.rank, self.world, self.timeout = rank, world, timeout
        self._store = store

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Raise `CollectiveError` where a collective inside fails, anything else as it is."""
        try:
            yield
        except CollectiveError:
            raise
        except RuntimeError as error:
            # torch.distributed has classes for some of its errors; gloo's are plain, so their words must do.
            backend = isinstance(error, dist.DistError) or any(sign in str(error) for sign in _SIGNS)
            if not backend:
                raise
            first = (str(error).splitlines() or [""])[0].split(". ")[0]
            raise CollectiveError(
                f"rank {self.rank} of {self.world}: {what} failed or timed out (limit {self.timeout:g} s): "
                f"another rank died or is stuck: {self._missing()} ({first})"
            ) from error

    def _missing(self) -> str:
        """Who does not answer, in words."""
        if self._store is None:
            return "which one is unknown"
        try:
            self._store.set(f"alive/{self.rank}", "yes")
            absent = [r for r in range(self.world) if r != self.rank]
            end = time.monotonic() + min(_ROLL_CALL, self.timeout)
            while absent and time.monotonic() < end:
                absent = [r for r in absent if not self._store.check([f"alive/{r}"])]
                time.sleep(0.05)
        except RuntimeError:
            return "rank 0, which kept the store, no longer answers"
        if not absent:
            return "all ranks still answer"
        return f"rank {', '.join(map(str, absent))}" + (" does" if len(absent) == 1 else " do") + " not answer"
