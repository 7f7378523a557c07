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
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
_NOTHING: Mapping[str, float] = MappingProxyType({})


class ScheduleError(ValueError):
    """A schedule that cannot run: ranks wait for each other for ever, or an entry is freed that is not stored."""


class Event(NamedTuple):
    """One event of a rank.

    Attributes:
        kind: what is done.
        duration: how long the rank is busy with it.
        layer: of the p-net; for drawing and messages.
        microbatch: likewise.
        loads: entries with their sizes that are stored when it starts, such as the microbatch that it reads.
        stores: entries that it has stored when it ends; an entry of the same name is replaced.
        frees: entries that it has freed when it ends.
        ranks: who takes part in a collective, in ascending order.
        peer: whom a message goes to or comes from.
        tag: what is sent or reduced; the tags of the ends of a message are equal, and those of a collective's ranks.
        transit: how long a message is under way after its sender is free again.
    """

    kind: Kind
    duration: float = 0.0
    layer: int | None = None
    microbatch: int | None = None
    loads: Mapping[str, float] = _NOTHING
    stores: Mapping[str, float] = _NOTHING
    frees: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    peer: int | None = None
    tag: str = ""
    transit: float = 0.0

    def __str__(self) -> str:
        """The event as errors name it: `receive of activation[2, 0] from rank 0`."""
        if self.kind in COLLECTIVES:
            return f"{self.kind} of {self.tag} on ranks {list(self.ranks)}"
        if self.peer is not None:
            return f"{self.kind} of {self.tag} {'to' if self.kind == 'send' else 'from'} rank {self.peer}"
        places = (("layer", self.layer), ("microbatch", self.microbatch))
        return " ".join([self.kind, *(f"{name} {i}" for name, i in places if i is not None)])


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
    def idle(self) -> tuple[float, ...]:
        """How long each rank is in no event until all have ended."""
        duration = self.duration
        return tuple(duration - sum(span.event.duration for span in spans) for spans in self.ranks)

    @property
    def bubble(self) -> float:
        """Part of the ranks' time, from 0 to 1, in which they wait."""
        return sum(self.idle) / (len(self.ranks) * self.duration) if self.duration else 0.0


def simulate(schedule: Schedule) -> Timeline:
    """Run a schedule.

    Raises:
        ScheduleError: if ranks wait for ever (for a message that nobody sends, or in collectives on which they
            disagree), if a message is never received, or if an entry is freed that is not stored.
    """
    run = _Run(schedule)
    while run.ready:
        run.advance(run.ready.popleft())
    run.check()
    return Timeline(tuple(tuple(spans) for spans in run.spans))


class _Run:
    """A schedule while it runs: the clock, stored entries and next event of each rank."""

    def __init__(self, schedule: Schedule) -> None:
        n_ranks = len(schedule.events)
        if len(schedule.stored) != n_ranks:
            raise ScheduleError(f"expected stored entries of {n_ranks} ranks, got those of {len(schedule.stored)}")
        self.events = schedule.events
        self.stored = [dict(entries) for entries in schedule.stored]
        self.memory = [float(sum(entries.values())) for entries in self.stored]
        self.clock = [0.0] * n_ranks
        self.next = [0] * n_ranks
        self.spans: list[list[Span]] = [[] for _ in range(n_ranks)]
        self.ready = deque(range(n_ranks))
        # When each message that is not yet received arrives, by sender, receiver and tag.
        self.arrivals: dict[tuple[int, int, str], float] = {}
        # Who waits in a collective, by its ranks.
        self.waiting: dict[tuple[int, ...], set[int]] = {}

    def upcoming(self, rank: int) -> Event | None:
        """The next event of a rank; none at its end."""
        events = self.events[rank]
        return events[self.next[rank]] if self.next[rank] < len(events) else None

    def advance(self, rank: int) -> None:
        """Let a rank run until it waits for another."""
        while event := self.upcoming(rank):
            start = self.clock[rank]
            if event.kind in COLLECTIVES:
                self.join(rank, event)
                return
            if event.kind == "receive":
                arrival = self.arrivals.pop((_peer(event), rank, event.tag), None)
                if arrival is None:
                    return
                start = max(start, arrival)
            self.do(rank, event, start)
            if event.kind == "send":
                self.send(rank, event)

    def send(self, rank: int, event: Event) -> None:
        """Put a message on its way, and wake the rank that waits for it."""
        peer = _peer(event)
        message = (rank, peer, event.tag)
        if message in self.arrivals:
            raise ScheduleError(f"rank {rank} sends {event.tag} to rank {peer} again before it is received")
        self.arrivals[message] = self.clock[rank] + event.transit
        if peer < len(self.events):
            self.ready.append(peer)

    def join(self, rank: int, event: Event) -> None:
        """Wait in a collective; the last of its ranks starts it for all."""
        if rank not in event.ranks:
            raise ScheduleError(f"rank {rank} is not among the ranks of its {event}")
        waiting = self.waiting.setdefault(event.ranks, set())
        waiting.add(rank)
        if len(waiting) < len(event.ranks):
            return
        joined = {r: e for r in event.ranks if (e := self.upcoming(r))}
        for other, theirs in joined.items():
            if (theirs.kind, theirs.tag) != (event.kind, event.tag):
                raise ScheduleError(f"ranks disagree: rank {rank} is in {event}, rank {other} in {theirs}")
        del self.waiting[event.ranks]
        start = max(self.clock[r] for r in event.ranks)
        for r, e in joined.items():
            self.do(r, e, start)
        self.ready.extend(event.ranks)

    def do(self, rank: int, event: Event, start: float) -> None:
        """Carry out an event: its time, and what it stores and frees."""
        self.store(rank, event.loads)
        self.clock[rank] = end = start + event.duration
        self.spans[rank].append(Span(rank, event, start, end, self.memory[rank]))
        self.store(rank, event.stores)
        for name in event.frees:
            if name not in self.stored[rank]:
                raise ScheduleError(f"rank {rank} frees {name} after {event}, but stores {sorted(self.stored[rank])}")
            self.memory[rank] -= self.stored[rank].pop(name)
        self.next[rank] += 1

    def store(self, rank: int, entries: Mapping[str, float]) -> None:
        """Add or replace entries."""
        for name, size in entries.items():
            self.memory[rank] += size - self.stored[rank].get(name, 0.0)
            self.stored[rank][name] = size

    def check(self) -> None:
        """Raise unless all ranks have ended and all messages are received."""
        stuck = {rank: event for rank in range(len(self.events)) if (event := self.upcoming(rank))}
        if stuck:
            waits = "; ".join(f"rank {rank} waits in {event}" for rank, event in list(stuck.items())[:8])
            more = f"; and {len(stuck) - 8} more" if len(stuck) > 8 else ""
            raise ScheduleError(f"deadlock: {waits}{more}; {len(self.events) - len(stuck)} ranks have ended")
        if self.arrivals:
            sender, receiver, tag = min(self.arrivals)
            raise ScheduleError(f"rank {sender} sends {tag} to rank {receiver}, which never receives it")


def _peer(event: Event) -> int:
    """The other end of a message."""
    if event.peer is None:
        raise ScheduleError(f"expected the peer of a {event.kind} of {event.tag}, got none")
    return event.peer
