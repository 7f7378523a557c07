"""When a collective fails: one clear error, which names the missing rank as far as it can be known."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch.distributed as dist

_LIVENESS_SECONDS = 3.0  # For the ranks that are left to answer after a failure: a dead one's neighbours notice first
_GLOO = re.compile(r"\[(enforce fail at )?[^\]\s]*\bgloo[/\\][^\]\s]*:\d+\]|^Application timeout caused pair closure")
"""Gloo's errors are RuntimeErrors with a position in its source: `[.../gloo/transport/tcp/pair.cc:537] Read error`,
`[enforce fail at .../gloo/allreduce.cc:80] size > 0`; one message has none, of every operation after a timeout."""


class CollectiveError(ConnectionError):
    """A collective failed or timed out: another rank has died, or is stuck. The mesh cannot be used after."""


class Faults:
    """Turns the failure of a collective into a `CollectiveError`, naming the ranks that sign no list in the store."""

    def __init__(self, rank: int, world: int, timeout: float, store: Any) -> None:
        self.rank, self.world, self.timeout = rank, world, timeout
        self._store = store

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Raises `CollectiveError` if a collective inside fails; other errors pass unchanged."""
        try:
            yield
        except RuntimeError as error:
            # Errors of the backend (gloo, nccl, the ranks' store) only.
            if not (isinstance(error, dist.DistError) or _GLOO.search(str(error))):
                raise
            first = (str(error).splitlines() or [""])[0].split(". ")[0]
            raise CollectiveError(
                f"rank {self.rank} of {self.world}: {what} failed or timed out (limit {self.timeout:g} s): "
                f"another rank died or is stuck: {self._missing} ({first})"
            ) from error

    @cached_property
    def _missing(self) -> str:
        if self._store is None:
            return "which one is unknown"
        absent = [r for r in range(self.world) if r != self.rank]
        try:
            self._store.set(f"alive/{self.rank}", "yes")
            end = time.monotonic() + min(_LIVENESS_SECONDS, self.timeout)
            while absent and time.monotonic() < end:
                absent = [r for r in absent if not self._store.check([f"alive/{r}"])]
                time.sleep(0.05)
        except RuntimeError:
            if 0 in absent:
                return "rank 0, which kept the store, no longer answers"
            # It has answered, and its liveness check has ended.
        if not absent:
            return "all ranks still answer"
        return f"rank {', '.join(map(str, absent))} {'does' if len(absent) == 1 else 'do'} not answer"
