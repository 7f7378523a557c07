"""A discrete-event simulator of training schedules: when ranks compute, what they store, and how long they wait.

The rules come from S. Rush's LLM Training Puzzles (2023). Ranks wait for each other in collectives and for messages
only. A collective starts when the last of its ranks arrives. An entry is stored from the end of the event that makes
the entry to the end of the last event that reads it. Memory is the sum of the stored entries when an event starts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

Computation = Literal["forward", "backward", "backward_input", "backward_weight", "generate", "generate_backward"]
Kind = Computation | Literal["loss", "update", "all_reduce", "all_gather", "reduce_scatter", "send", "receive"]
_NOTHING: Mapping[str, float] = MappingProxyType({})


class ScheduleError(ValueError):
    """A schedule that cannot run."""


class Event(NamedTuple):
    """One event of a rank."""

    kind: Kind
    duration: float = 0.0
    layer: int | None = None
    microbatch: int | None = None
    reads: tuple[str, ...] = ()  # Names of entries
    stores: Mapping[str, float] = _NOTHING  # Sizes of the entries that it makes; an equal name is replaced
    ranks: tuple[int, ...] = ()  # Members of a collective, in ascending order
    peer: int | None = None  # The other end of a message
    tag: str = ""  # Of a message or collective, equal on all of its ranks


class Schedule(NamedTuple):
    """The events of every rank, and the sizes of the entries that each rank stores before and after the events."""

    events: list[list[Event]]
    stored: list[dict[str, float]]


class Span(NamedTuple):
    """An event that took place on a rank, and the memory of the rank at its start."""

    rank: int
    event: Event
    start: float
    end: float
    memory: float


class Timeline(NamedTuple):
    """The spans of every rank, in order of time."""

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
        """Peak memory of every rank."""
        return tuple(max((span.memory for span in spans), default=0.0) for spans in self.ranks)

    @property
    def peak_memory(self) -> float:
        """Peak memory of the fullest rank."""
        return max(self.peaks, default=0.0)

    @property
    def bubble(self) -> float:
        """Part of the ranks' time, from 0 to 1, in which they wait."""
        total = len(self.ranks) * self.duration
        busy = sum(span.event.duration for spans in self.ranks for span in spans)
        return max(0.0, 1 - busy / total) if total else 0.0


def simulate(schedule: Schedule) -> Timeline:
    """Runs a schedule.

    Raises:
        ScheduleError: if ranks wait for ever, or if an event reads an entry that is not stored.
    """
    stored, left = [dict(entries) for entries in schedule.stored], [deque(events) for events in schedule.events]
    memory, clock = [float(sum(entries.values())) for entries in stored], [0.0] * len(left)
    frees = [deque(_dead(events, entries)) for events, entries in zip(left, stored, strict=True)]
    spans: list[list[Span]] = [[] for _ in left]
    arrivals: dict[tuple[int | None, int | None, str], float] = {}  # By sender, receiver and tag

    def do(rank: int, start: float) -> None:
        event, entries = left[rank].popleft(), stored[rank]
        if missing := [name for name in event.reads if name not in entries]:
            raise ScheduleError(f"rank {rank} reads {missing[0]} in {event.kind}, but stores {sorted(entries)}")
        clock[rank] = start + event.duration
        spans[rank].append(Span(rank, event, start, clock[rank], memory[rank]))
        for name, size in event.stores.items():
            memory[rank] += size - entries.get(name, 0.0)
            entries[name] = size
        memory[rank] -= sum(entries.pop(name) for name in frees[rank].popleft())

    ready = deque(range(len(left)))
    while ready:
        rank = ready.popleft()
        while left[rank]:
            event, message = left[rank][0], (left[rank][0].peer, rank, left[rank][0].tag)
            same = {(left[r][0].kind, left[r][0].tag, left[r][0].ranks) if left[r] else None for r in event.ranks}
            if len(same) > 1 or (event.kind == "receive" and message not in arrivals):
                break  # The last rank to arrive continues for all.
            together = event.ranks or (rank,)
            arrival = arrivals.pop(message) if event.kind == "receive" else 0.0
            start = max(arrival, *(clock[r] for r in together))
            for r in together:
                do(r, start)
            if event.kind == "send":
                arrivals[rank, event.peer, event.tag] = clock[rank]
                ready.append(event.peer or 0)
            ready.extend(r for r in together if r != rank)
    if stuck := [f"rank {rank} waits in {e[0].kind} of {e[0].tag}" for rank, e in enumerate(left) if e]:
        raise ScheduleError(f"deadlock: {'; '.join(stuck[:8])}; {len(left) - len(stuck)} ranks have ended")
    return Timeline(tuple(map(tuple, spans)))


def _dead(events: Sequence[Event], kept: Iterable[str]) -> list[set[str]]:
    """The entries that no later event reads, after each event that uses them."""
    live, dead = set(kept), list[set[str]]()
    for event in reversed(events):
        dead.append({*event.reads, *event.stores} - live)
        live = (live - {*event.stores}) | {*event.reads} | {*kept}
    return dead[::-1]
