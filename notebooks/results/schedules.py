"""Simulate training steps of many ranks: when ranks compute, what they store, and how long they wait.

Run `python notebooks/results/schedules.py`. The script prints the steps and the memory of eight puzzles.

The rules and the schedules of the puzzles come from S. Rush's LLM Training Puzzles (2023). An *event* is a computation,
a collective, a send or a receive of a rank. An *entry* is a tensor that a rank stores. Ranks wait for each other only
in collectives and for messages. A collective starts when the last of its ranks arrives. An entry is stored from the end
of the event that makes the entry to the end of the last event that reads it. Some entries are kept longer, as in the
published solutions. The memory of a rank is the sum of the stored entries when an event starts.
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
    """A forward (F) or backward (B) of a stage, or one half of a backward.

    I computes the gradients of the inputs, W the gradients of the weights.
    """

    op: str
    stage: int
    microbatch: int


def pipeline_order(order: PipelineOrder, rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Return the actions of a rank, in order.

    Raises:
        ValueError: for sizes that the order does not support, or an order that this version of torch does not have.
    """
    if order in ("interleaved", "zbv"):
        return [Action(*action) for action in torch_orders(order, ranks, microbatches)[rank]]
    # Old versions of torch do not report these two orders. Forwards come first, then forwards and backwards alternate.
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
    stores: Mapping[str, float] = MappingProxyType({})  # Sizes of the entries that the event stores or replaces
    ranks: tuple[int, ...] = ()  # Members of a collective, in ascending order
    peer: int | None = None  # The rank that sends or receives the message
    tag: str = ""  # Name of a message or collective, equal on all of its ranks


class Schedule(NamedTuple):
    """The events of every rank, and the sizes of the entries that each rank stores during the whole step."""

    events: list[list[Event]]
    stored: list[dict[str, float]]


class Span(NamedTuple):
    """An event with its start, its end and the memory of the rank at its start."""

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
        """Return the part of the ranks' time, from 0 to 1, that ranks spend waiting."""
        total = len(self.ranks) * self.duration
        busy = sum(span.event.duration for spans in self.ranks for span in spans)
        return max(0.0, 1 - busy / total) if total else 0.0


def simulate(schedule: Schedule) -> Timeline:
    """Run a schedule.

    Raises:
        ValueError: if ranks wait forever, or if an event reads an entry that is not stored.
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
                break  # The last rank that arrives runs the collective for all its ranks.
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
    """Return, for each event, the entries that no later event reads."""
    live, dead = set(kept), list[set[str]]()
    for event in reversed(events):
        dead.append({*event.reads, *event.stores} - live)
        live = (live - {*event.stores}) | {*event.reads} | {*kept}
    return dead[::-1]


class ScheduleCosts(NamedTuple):
    """Durations of events and sizes of entries, in any units. The defaults come from the puzzles.

    Durations and activations are for one layer and one microbatch, weights for one layer. If weights are generated,
    `update` and `all_reduce` are for the whole genome, otherwise for the weight of one layer.
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
    """The settings in which schedules differ."""

    order: PipelineOrder = "1f1b"  # Order of the microbatches
    together: bool = False  # All microbatches pass at once
    data_parallel: bool = False  # Each rank has one microbatch, also within a stage of a pipeline
    gathers: Literal["stage", "all"] | None = None  # Ranks that store and gather sharded weights
    scatters: bool = False  # Gradients are reduced and scattered at once, instead of all-reduced at the end
    sums: bool = True  # The gradients of a layer are added to one entry, instead of one entry per microbatch
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
    """Make the events of one training step on each rank.

    Args:
        kind: the schedule. `"basic"`: one rank computes all microbatches at once. `"accumulation"`: one rank computes
            the microbatches one by one. `"ddp"`, `"sharded"` (weights and optimizer sharded, gradients not sharded),
            `"fsdp"` (gradients sharded as well): each rank has one microbatch and all layers. `"pipeline"`: each rank
            has one stage, through which all microbatches pass at once. `"gpipe"`, `"1f1b"`, `"interleaved"`, `"zbv"`:
            microbatches pass one by one, in the order of `pipeline_order`. `"pipeline_fsdp"`: a stage per layer, with
            `ranks / layers` ranks of one microbatch each. Weights are sharded over all ranks.
        layers: number of layers, a multiple of the number of stages.
        ranks: ranks of a pipeline, or of data parallelism.
        microbatches: microbatches of a step; 1 for data parallelism.
        weights: `"stored"`: weights and the optimizer's state are stored. `"generated"`: weights are generated at their
            first use from a genome that every rank stores, and are kept. `"remat"`: weights are generated for each
            forward and each backward. Generated weights and their gradients are not sent.
        costs: durations and sizes.

    Raises:
        ValueError: for an unknown kind, or sizes that the kind does not support.
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
    """Return the events and entries of a rank. `stages` has the position in the pipeline of each stage."""
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
        # The first microbatch has no stored gradient to add to, so it does not read the entry.
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
            # In a pipeline, activations are freed before the reduce-scatter, otherwise after it.
            reads = (gradient, weight, *(() if everywhere else (*x, *dy))) if mine else ()
            part = {gradient: costs.weight / len(group)}
            emit("reduce_scatter", layer, i, reads, stores=part, ranks=group, tag=gradient)
        elif op in "BW" and remat:
            generate_backward(layer, i)

    if everywhere:  # Between their messages, all ranks take part in gathering and reducing every layer.
        forward = [Action("F", s, 0) for s in range(len(stages))]
        actions = [*forward, *(action._replace(op="B") for action in reversed(forward))]
    for op, stage, i in actions:
        # A forward goes through the stage's layers from first to last, a backward from last to first.
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
        # The update reads the kept ends, so that they stay stored until then.
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
"""Sizes of the eight puzzles, with the published numbers of steps and memory."""


if __name__ == "__main__":
    print(f"{'schedule':<16}{'steps':>8}{'memory':>12}   published")
    for kind, (sizes, published) in PUZZLES.items():
        timeline = simulate(make_schedule(kind, **sizes))
        print(f"{kind:<16}{timeline.steps:>8.1f}{timeline.peak_memory:>12,.0f}   {published}")
