"""A discrete-event simulator of training steps: when ranks compute, what they store, and how long they wait.

Run `python notebooks/results/schedules.py`. The script prints steps and memory of the puzzles.

The rules and the first eight schedules come from S. Rush's LLM Training Puzzles (2023). The schedules keep some entries
as long as the published solutions do. Ranks wait for each other in collectives and for messages only. A collective
starts when the last of its ranks arrives. An entry is stored from the end of the event that makes the entry to the end
of the last event that reads it. Memory is the sum of the stored entries when an event starts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

from gbfunc.parallel.pipeline_order import stage_ranks, torch_orders

Computation = Literal["forward", "backward", "backward_input", "backward_weight", "generate", "generate_backward"]
Kind = Computation | Literal["loss", "update", "all_reduce", "all_gather", "reduce_scatter", "send", "receive"]
WeightSource = Literal["stored", "generated", "remat"]
PipelineOrder = Literal["gpipe", "1f1b", "interleaved", "zbv"]
ScheduleKind = PipelineOrder | Literal["basic", "accumulation", "ddp", "sharded", "fsdp", "pipeline", "pipeline_fsdp"]


class Action(NamedTuple):
    """Forward (F), backward (B), or its halves: gradients of the inputs (I) and of the weights (W) of a stage."""

    op: str
    stage: int
    microbatch: int


def pipeline_order(order: PipelineOrder, rank: int, ranks: int, microbatches: int) -> list[Action]:
    """The actions of a rank, in order.

    Raises:
        ValueError: for sizes that the order does not have, or a schedule that this torch lacks.
    """
    if order in ("interleaved", "zbv"):
        return [Action(*action) for action in torch_orders(order, ranks, microbatches)[rank]]
    # Written out, since old torch does not report them: first forwards, then a forward and a backward in turn.
    forwards, backwards = ([Action(op, rank, i) for i in range(microbatches)] for op in ("F", "B"))
    warm_up = microbatches if order == "gpipe" else min(microbatches, ranks - 1 - rank)
    turns = (action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair)
    return [*forwards[:warm_up], *turns, *backwards[microbatches - warm_up :]]


class Event(NamedTuple):
    """One event of a rank.

    Entries are named `activation[layer, microbatch]` (the input of a layer), `dactivation[...]` (its gradient),
    `weight[layer]`, `dweight[layer]` and so on.
    """

    kind: Kind
    duration: float = 0.0
    layer: int | None = None
    microbatch: int | None = None
    reads: tuple[str, ...] = ()  # Names of entries
    stores: Mapping[str, float] = MappingProxyType({})  # Sizes of the entries that it makes; an equal name is replaced
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
        return max((span.start for spans in self.ranks for span in spans), default=0.0)

    @property
    def duration(self) -> float:
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

    @property
    def peaks(self) -> tuple[float, ...]:
        return tuple(max((span.memory for span in spans), default=0.0) for spans in self.ranks)

    @property
    def peak_memory(self) -> float:
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
        ValueError: if ranks wait for ever, or if an event reads an entry that is not stored.
    """
    stored, left = [dict(entries) for entries in schedule.stored], [deque(events) for events in schedule.events]
    memory, clock = [float(sum(entries.values())) for entries in stored], [0.0] * len(left)
    frees = [deque(_dead(events, entries)) for events, entries in zip(left, stored, strict=True)]
    spans: list[list[Span]] = [[] for _ in left]
    arrivals: dict[tuple[int | None, int | None, str], float] = {}  # By sender, receiver and tag

    def do(rank: int, start: float) -> None:
        event, entries = left[rank].popleft(), stored[rank]
        if missing := [name for name in event.reads if name not in entries]:
            raise ValueError(f"rank {rank} reads {missing[0]} in {event.kind}, but stores {sorted(entries)}")
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
        raise ValueError(f"deadlock: {'; '.join(stuck[:8])}; {len(left) - len(stuck)} ranks have ended")
    return Timeline(tuple(map(tuple, spans)))


def _dead(events: Sequence[Event], kept: Iterable[str]) -> list[set[str]]:
    """The entries that no later event reads, after each event that uses them."""
    live, dead = set(kept), list[set[str]]()
    for event in reversed(events):
        dead.append({*event.reads, *event.stores} - live)
        live = (live - {*event.stores}) | {*event.reads} | {*kept}
    return dead[::-1]


class ScheduleCosts(NamedTuple):
    """Durations of events and sizes, in any units; the defaults come from the puzzles.

    Durations and activations belong to a layer and a microbatch, weights to a layer. `update` and `all_reduce` belong
    to the whole genome if weights are generated, otherwise to the weight of a layer.
    """

    forward: float = 1.0
    backward: float = 1.0
    backward_input: float = 0.5
    backward_weight: float = 0.5
    generate: float = 0.1
    generate_backward: float = 0.2
    update: float = 0.5
    all_reduce: float = 0.3
    all_gather: float = 0.3
    reduce_scatter: float = 0.3
    send: float = 0.2
    receive: float = 0.2
    activation: float = 256 * 512
    weight: float = 512 * 512
    optimizer: float = 512 * 512
    genome: float = 512 * 512 / 32
    genome_optimizer: float = 512 * 512 / 32


class Recipe(NamedTuple):
    """The differences between schedules."""

    order: PipelineOrder = "1f1b"  # Of the microbatches; one by one on one rank
    together: bool = False  # All microbatches pass at once
    data_parallel: bool = False  # Each rank has one microbatch, next to its stage of a pipeline
    gathers: Literal["stage", "all"] | None = None  # Ranks that store and gather sharded weights
    scatters: bool = False  # Gradients are reduced and scattered at once, instead of all-reduced at the end
    sums: bool = True  # Microbatches add to one gradient of a layer, instead of storing one each
    keeps_ends: bool = False  # The last output of a stage and the gradient of its first input stay stored


RECIPES: Mapping[ScheduleKind, Recipe] = {
    "basic": Recipe(together=True),
    "accumulation": Recipe(),
    "ddp": Recipe(data_parallel=True, keeps_ends=True),
    "sharded": Recipe(data_parallel=True, gathers="stage", keeps_ends=True),
    "fsdp": Recipe(data_parallel=True, gathers="stage", scatters=True),
    "pipeline": Recipe(together=True, keeps_ends=True),
    "gpipe": Recipe("gpipe", sums=False, keeps_ends=True),
    "pipeline_fsdp": Recipe(data_parallel=True, gathers="all", scatters=True, keeps_ends=True),
    "1f1b": Recipe(),
    "interleaved": Recipe("interleaved"),
    "zbv": Recipe("zbv"),
}


def make_schedule(
    kind: ScheduleKind,
    *,
    layers: int,
    ranks: int = 1,
    microbatches: int = 1,
    weights: WeightSource = "stored",
    costs: ScheduleCosts | None = None,
) -> Schedule:
    """Makes the events of one training step on each rank.

    Args:
        kind: `"basic"`: one rank, all microbatches at once. `"accumulation"`: one rank, the microbatches one by one.
            `"ddp"`, `"sharded"` (weights and optimizer sharded, whole gradients), `"fsdp"` (also sharded gradients):
            each rank has one microbatch and all layers. `"pipeline"`: each rank has one stage, through which all
            microbatches pass at once. `"gpipe"`, `"1f1b"`, `"interleaved"`, `"zbv"`: one by one, in the order of
            `pipeline_order`. `"pipeline_fsdp"`: a stage per layer with `ranks / layers` ranks of one microbatch each;
            weights are sharded over all ranks.
        layers: a multiple of the stages.
        ranks: ranks of a pipeline, or of data parallelism.
        microbatches: microbatches of a step; 1 for data parallelism.
        weights: `"stored"` with the optimizer's state; `"generated"` at the first use from a genome that every rank
            stores, and kept; or `"remat"`, generated for each forward and each backward. Generated weights and their
            gradients are not sent.
        costs: durations and sizes.

    Raises:
        ValueError: for an unknown kind, or sizes that the kind does not have.
    """
    if kind not in RECIPES:
        raise ValueError(f"expected a schedule of {sorted(RECIPES)}, got {kind!r}")
    if weights not in get_args(WeightSource):
        raise ValueError(f"expected weights of {get_args(WeightSource)}, got {weights!r}")
    sizes = {"layers": layers, "ranks": ranks, "microbatches": microbatches}
    if min(sizes.values()) < 1:
        raise ValueError(f"expected sizes of at least 1, got {sizes}")
    recipe = RECIPES[kind]
    depth = (layers if recipe.gathers == "all" else 1) if recipe.data_parallel else ranks
    stages = stage_ranks(recipe.order, depth)
    for expected, fits in {
        "1 rank": ranks == 1 or kind not in ("basic", "accumulation"),
        "one microbatch per rank": microbatches == 1 or not recipe.data_parallel,
        f"ranks in multiples of its {depth} layers": ranks % depth == 0,
        f"layers in multiples of its {len(stages)} stages": layers % len(stages) == 0,
    }.items():
        if not fits:
            raise ValueError(f"{kind!r} expects {expected}, got {sizes}")
    programs = (_program(rank, stages, sizes, recipe, weights, costs or ScheduleCosts()) for rank in range(ranks))
    return Schedule(*map(list, zip(*programs, strict=True)))


def _program(
    rank: int,
    stages: Sequence[int],
    sizes: Mapping[str, int],
    recipe: Recipe,
    weights: WeightSource,
    costs: ScheduleCosts,
) -> tuple[list[Event], dict[str, float]]:
    """The events and entries of a rank; `stages` has the stages' places in the pipeline."""
    layers, ranks, microbatches = sizes.values()
    together = microbatches if recipe.together else 1
    depth, each, world = max(stages) + 1, layers // len(stages), tuple(range(ranks))
    place, sharded = rank % depth, recipe.gathers is not None and weights == "stored"
    everywhere, remat = sharded and recipe.gathers == "all", weights == "remat"
    group = world if everywhere else world[place::depth]
    own = [n for n in range(layers) if everywhere or stages[n // each] == place]
    actions = pipeline_order(recipe.order, place, depth, microbatches // together)
    events, ends = list[Event](), list[str]()
    stored = {"genome": costs.genome, "genome optimizer": costs.genome_optimizer}
    if weights == "stored":
        kept = {"shard" if sharded else "weight": costs.weight, "optimizer": costs.optimizer}
        stored = {f"{k}[{n}]": size / (len(group) if sharded else 1) for n in own for k, size in kept.items()}
    known = {*stored}

    def emit(kind: Kind, layer: int | None, i: int | None, reads: Iterable[str] = (), **rest: Any) -> None:
        duration = getattr(costs, kind, 0.0)
        duration *= together if kind == "forward" or kind.startswith("backward") else 1
        # The first summand of a gradient reads nothing.
        events.append(Event(kind, duration, layer, i, tuple(n for n in reads if n in known), **rest))
        known.update(rest.get("stores", ()))

    def activation(layer: int, i: int, d: str = "") -> dict[str, float]:
        return {f"{d}activation[{layer}, {i}]": costs.activation * together}

    def message(kind: Literal["send", "receive"], stage: int, entry: Mapping[str, float], i: int) -> None:
        if 0 <= stage < len(stages) and stages[stage] != place:
            rest: Any = {"stores": entry} if kind == "receive" else {"reads": entry}
            emit(kind, None, i, peer=rank - place + stages[stage], tag=next(iter(entry)), **rest)

    def generate_backward(layer: int, i: int | None) -> None:
        reads = (f"dweight[{layer}]", "dgenome", *(() if remat else (f"weight[{layer}]",)))
        emit("generate_backward", layer, i, reads, stores={"dgenome": costs.genome})

    def compute(op: str, layer: int, i: int, mine: bool) -> None:
        x, y, dx, dy = (activation(n, i, d) for d in ("", "d") for n in (layer, layer + 1))
        weight, gradient = f"weight[{layer}]", f"dweight[{layer}]"
        if op != "W" and sharded:
            emit("all_gather", layer, None, stores={weight: costs.weight}, ranks=group, tag=weight)
        elif op != "W" and weights != "stored" and (remat or weight not in known):
            emit("generate", layer, i, stores={weight: costs.weight})
        if mine and op == "F":
            emit("forward", layer, i, (weight, *x), stores=y | ({} if layer else x))
        elif mine:
            kind: Kind = "backward" if op == "B" else "backward_input" if op == "I" else "backward_weight"
            made = {} if op == "I" else {gradient: costs.weight * (1 if recipe.sums or remat else i + 1)}
            reads = (*x, *dy, *(() if op == "W" else (weight,)), *(() if remat else made))
            emit(kind, layer, i, reads, stores=made if op == "W" else dx | made)
        if op in "BW" and sharded and recipe.scatters:
            # A pipeline frees activations before, other ranks after.
            reads = (gradient, weight, *(() if everywhere else (*x, *dy))) if mine else ()
            part = {gradient: costs.weight / len(group)}
            emit("reduce_scatter", layer, i, reads, stores=part, ranks=group, tag=gradient)
        elif op in "BW" and remat:
            generate_backward(layer, i)

    if everywhere:  # All ranks help to gather and reduce every layer, between their messages.
        forward = [Action("F", s, 0) for s in range(len(stages))]
        actions = [*forward, *(action._replace(op="B") for action in reversed(forward))]
    for op, stage, i in actions:
        # A stage goes from one end to the other, forward or back.
        mine, start, end, ahead, d = stages[stage] == place, stage * each, (stage + 1) * each, 1, ""
        span = range(start, end)
        if op != "F":
            start, end, ahead, d, span = end, start, -1, "d", span[::-1]
        messages = mine and op != "W"
        if messages and op != "F" and stage == len(stages) - 1:
            emit("loss", None, i, activation(start, i), stores=activation(start, i, d))
        elif messages:
            message("receive", stage - ahead, activation(start, i, d), i)
        for layer in span:
            compute(op, layer, i, mine)
        if messages:
            message("send", stage + ahead, activation(end, i, d), i)
            ends += activation(end, i, d) if recipe.keeps_ends else ()
    for layer in own[::-1] if weights == "generated" else ():
        generate_backward(layer, None)
    updates = {n: f"dweight[{n}]" for n in own} if weights == "stored" else {None: "dgenome"}
    group = world if weights != "stored" else () if recipe.scatters else group
    for layer, name in updates.items():
        if len(group) > 1:
            emit("all_reduce", layer, None, (name,), ranks=group, tag=name)
        # Ends that are kept are read once more.
        emit("update", layer, None, (name, *ends))
    return events, stored


PUZZLES: Mapping[ScheduleKind, tuple[Mapping[str, Any], str]] = {
    "basic": ({"layers": 2, "microbatches": 4}, "17 / 2.6M"),
    "accumulation": ({"layers": 2, "microbatches": 4}, "17 / 2.0M"),
    "ddp": ({"layers": 2, "ranks": 4}, "5 / 1.8M"),
    "sharded": ({"layers": 6, "ranks": 4}, "20 / 2.8M"),
    "fsdp": ({"layers": 6, "ranks": 4}, "20 / 2.3M"),
    "pipeline": ({"layers": 8, "ranks": 4, "microbatches": 4}, "66 / 3.3M"),
    "gpipe": ({"layers": 8, "ranks": 4, "microbatches": 4}, "33 / 4.1M"),
    "pipeline_fsdp": ({"layers": 4, "ranks": 16}, "15 / 1.0M"),
}
"""Sizes of the eight puzzles, with the published steps and memory."""


if __name__ == "__main__":
    print(f"{'schedule':<16}{'steps':>8}{'memory':>12}   published")
    for kind, (sizes, published) in PUZZLES.items():
        timeline = simulate(make_schedule(kind, **sizes))
        print(f"{kind:<16}{timeline.steps:>8.1f}{timeline.peak_memory:>12,.0f}   {published}")
