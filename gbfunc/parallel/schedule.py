"""A discrete-event simulator of training schedules: when each rank does what, what it stores, how long it waits.

A schedule is a sequence of events for each rank. An event takes time, and stores and frees named entries; ranks wait
for each other in collectives and for messages, and nowhere else. The rules are those of S. Rush's LLM Training Puzzles
(2023): a collective starts when the last of its ranks arrives, memory is the sum of all stored entries, sampled when
an event starts, and the steps of a schedule are the start of its last event. Units are the caller's: seconds and
bytes, or those of the puzzles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

Kind = Literal[
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "loss",
    "update",
    "generate",
    "generate_backward",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "send",
    "receive",
]
_NOTHING: Mapping[str, float] = MappingProxyType({})


class ScheduleError(ValueError):
    """A schedule that cannot run: ranks wait for each other for ever, or an entry is freed that is not stored."""


class Event(NamedTuple):
    """One event of a rank."""

    kind: Kind  # What is done
    duration: float = 0.0  # How long the rank is busy with it
    layer: int | None = None  # Of the p-net; for drawing and messages
    microbatch: int | None = None  # Likewise
    # Entries with their sizes that are stored when it starts, such as the microbatch that it reads
    loads: Mapping[str, float] = _NOTHING
    # Entries that it has stored when it ends; an entry of the same name is replaced
    stores: Mapping[str, float] = _NOTHING
    frees: tuple[str, ...] = ()  # Entries that it has freed when it ends
    ranks: tuple[int, ...] = ()  # Who takes part in a collective, in ascending order
    peer: int | None = None  # Whom a message goes to or comes from
    # What is sent or reduced; the tags of the ends of a message are equal, and those of a collective's ranks
    tag: str = ""


class Schedule(NamedTuple):
    """What each rank does, in order, and the entries with their sizes that it stores from the beginning."""

    events: Sequence[Sequence[Event]]
    stored: Sequence[Mapping[str, float]]


class Span(NamedTuple):
    """An event that took place on a rank, and what the rank stored when it started."""

    rank: int
    event: Event
    start: float
    end: float
    memory: float


class Timeline(NamedTuple):
    """What a schedule took: for each rank its events in order of time."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def steps(self) -> float:
        """Start of the last event."""
        return max((span.start for spans in self.ranks for span in spans), default=0.0)

    @property
    def duration(self) -> float:
        """End of the last event."""
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

    @property
    def peaks(self) -> tuple[float, ...]:
        """Peak memory of each rank, sampled when its events start."""
        return tuple(max((span.memory for span in spans), default=0.0) for spans in self.ranks)

    @property
    def peak_memory(self) -> float:
        """Peak memory of the rank that stores most."""
        return max(self.peaks, default=0.0)

    @property
    def bubble(self) -> float:
        """Part of the ranks' time, from 0 to 1, in which they wait."""
        total = len(self.ranks) * self.duration
        busy = sum(span.event.duration for spans in self.ranks for span in spans)
        return max(0.0, 1 - busy / total) if total else 0.0


def simulate(schedule: Schedule) -> Timeline:
    """Run a schedule.

    Raises:
        ScheduleError: if ranks wait for ever (for a message that nobody sends, or in collectives on which they
            disagree), or if an entry is freed that is not stored.
    """
    n = len(schedule.events)
    clock, memory = [0.0] * n, [float(sum(entries.values())) for entries in schedule.stored]
    stored = [dict(entries) for entries in schedule.stored]
    left = [deque(events) for events in schedule.events]
    spans: list[list[Span]] = [[] for _ in range(n)]
    arrivals: dict[tuple[int | None, int | None, str], float] = {}  # by sender, receiver and tag

    def store(rank: int, entries: Mapping[str, float]) -> None:
        for name, size in entries.items():
            memory[rank] += size - stored[rank].get(name, 0.0)
            stored[rank][name] = size

    def do(rank: int, start: float) -> None:
        event = left[rank].popleft()
        store(rank, event.loads)
        clock[rank] = start + event.duration
        spans[rank].append(Span(rank, event, start, clock[rank], memory[rank]))
        store(rank, event.stores)
        for name in event.frees:
            if name not in stored[rank]:
                raise ScheduleError(f"rank {rank} frees {name} after {event.kind}, but stores {sorted(stored[rank])}")
            memory[rank] -= stored[rank].pop(name)

    ready = deque(range(n))
    while ready:
        rank = ready.popleft()
        while left[rank]:
            event = left[rank][0]
            together, start, message = event.ranks or (rank,), clock[rank], (event.peer, rank, event.tag)
            same = {(left[r][0].kind, left[r][0].tag, left[r][0].ranks) if left[r] else None for r in event.ranks}
            if len(same) > 1 or (event.kind == "receive" and message not in arrivals):
                break  # Whoever comes last goes on for all.
            if event.kind == "receive":
                start = max(start, arrivals.pop(message))
            start = max(start, *(clock[r] for r in together))
            for r in together:
                do(r, start)
            if event.kind == "send":
                arrivals[rank, event.peer, event.tag] = clock[rank]
                ready.append(event.peer or 0)
            ready.extend(r for r in event.ranks if r != rank)
    stuck = [f"rank {rank} waits in {e[0].kind} of {e[0].tag}" for rank, e in enumerate(left) if e]
    if stuck:
        raise ScheduleError(f"deadlock: {'; '.join(stuck[:8])}; {n - len(stuck)} ranks have ended")
    return Timeline(tuple(map(tuple, spans)))
