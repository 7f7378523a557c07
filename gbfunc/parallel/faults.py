"""When a collective fails: one clear error, which names the rank that is missing as far as it can be known."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_ROLL_CALL = 3.0
"""Seconds in which the ranks that are left answer after a failure: a dead rank's neighbours notice first."""

_HANG_UP = 7919
"""Tag of a message that nobody sends."""

_SIGNS = ("gloo", "Gloo", "NCCL", "ProcessGroup", "Connection", "Timed out", "timed out", "Socket", "store", "Store")


class CollectiveError(ConnectionError):
    """A collective failed or timed out: another rank has died, or is stuck. The mesh cannot be used after."""


class Faults:
    """Turns the failure of a collective into a `CollectiveError`.

    The ranks that are left sign a list in the store that they met at; those that do not are named. Nothing is sent as
    long as all goes well.

    Attributes:
        groups: process groups to hang up on after a failure, so that ranks that wait for this one fail as well.
    """

    def __init__(self, rank: int, world: int, timeout: float, store: Any) -> None:
        self.rank, self.world, self.timeout = rank, world, timeout
        self.groups: Sequence[Any] = ()
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
            for group in self.groups:
                _hang_up(group)
            first = (str(error).splitlines() or [""])[0].split(". ")[0]
            raise CollectiveError(
                f"rank {self.rank} of {self.world}: {what} failed or timed out (limit {self.timeout:g} s): "
                f"another rank died or is stuck: {self._missing()} ({first})"
            ) from error

    def _missing(self) -> str:
        """Who does not answer, in words."""
        if self._store is None:
            return "which one is unknown"
        absent = [r for r in range(self.world) if r != self.rank]
        try:
            self._store.set(f"alive/{self.rank}", "yes")
            end = time.monotonic() + min(_ROLL_CALL, self.timeout)
            while absent and time.monotonic() < end:
                absent = [r for r in absent if not self._store.check([f"alive/{r}"])]
                time.sleep(0.05)
        except RuntimeError:
            if 0 in absent:
                return "rank 0, which kept the store, no longer answers"
            # It has answered, and ended its own roll call.
        if not absent:
            return "all ranks still answer"
        return f"rank {', '.join(map(str, absent))}" + (" does" if len(absent) == 1 else " do") + " not answer"


def _hang_up(group: Any) -> None:
    """Close this rank's connections of a group.

    A rank may wait for rows that this one, having failed, will never send; it would notice only at its own timeout. A
    receive that times out closes all of gloo's connections; one from a rank that is dead fails before.
    """
    if dist.get_backend(group) != "gloo":
        return
    for other in range(dist.get_world_size(group)):
        if other != dist.get_rank(group):
            with suppress(RuntimeError):
                work: Any = dist.irecv(torch.empty(1), dist.get_global_rank(group, other), group, _HANG_UP)
                work.wait(timedelta(milliseconds=1))
