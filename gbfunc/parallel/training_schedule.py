"""Schedules of one training step, for `simulate`: data and pipeline parallel; weights stored, sharded or generated.

The first eight are the puzzles of S. Rush's LLM Training Puzzles (2023), with the entries that the published solutions
keep longer than they must. Entries are named `activation[layer, microbatch]` (the input of a layer),
`dactivation[...]` (its gradient), `weight[layer]`, `dweight[layer]` and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from gbfunc.parallel.pipeline_order import SCHEDULES, Action, PipelineOrder, pipeline_order, stage_ranks
from gbfunc.parallel.schedule import Event, Kind, Schedule

WeightSource = Literal["stored", "generated", "remat"]
PerLayer = float | Sequence[float]
ScheduleKind = PipelineOrder | Literal["basic", "accumulation", "ddp", "sharded", "fsdp", "pipeline", "pipeline_fsdp"]


class ScheduleCosts(NamedTuple):
    """Durations, by kind of event, and sizes, in any units; the defaults are those of the puzzles, and gbfunc's own.

    A cost per layer is one number for all layers, or a sequence. Durations and activations are those of one microbatch;
    `activation` is the size of a layer's input, so a sequence of it has one entry more. Where weights are generated,
    `update` and `all_reduce` are those of the whole genome, otherwise those of a layer's weight.
    """

    forward: PerLayer = 1.0
    backward: PerLayer = 1.0
    backward_input: PerLayer = 0.5
    backward_weight: PerLayer = 0.5
    generate: PerLayer = 0.1
    generate_backward: PerLayer = 0.2
    update: PerLayer = 0.5
    all_reduce: PerLayer = 0.3
    all_gather: PerLayer = 0.3
    reduce_scatter: PerLayer = 0.3
    send: float = 0.2
    receive: float = 0.2
    activation: PerLayer = 256 * 512
    weight: PerLayer = 512 * 512
    optimizer: PerLayer = 512 * 512
    genome: float = 512 * 512 / 32
    genome_optimizer: float = 512 * 512 / 32


class Recipe(NamedTuple):
    """The differences between schedules."""

    order: PipelineOrder = "1f1b"  # Of the microbatches; on one rank one by one
    together: bool = False  # All microbatches pass at once
    data_parallel: bool = False  # Each rank has one microbatch, next to its stage of a pipeline
    # Sharded weights are gathered by the ranks of their stage, or by all ranks, which store a part of every layer
    gathers: Literal["stage", "all"] | None = None
    scatters: bool = False  # Gradients are reduced and scattered at once, instead of all-reduced at the end
    sums: bool = True  # Microbatches add to one gradient of a layer, instead of storing one each
    # The last output of a stage, and the gradient of its first input, stay stored after their use
    keeps_ends: bool = False


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
    """The events of one training step on each rank.

    Args:
        kind: `"basic"`: one rank, all microbatches at once. `"accumulation"`: one rank, the microbatches one by one.
            `"ddp"`, `"sharded"` (weights and optimizer sharded, whole gradients), `"fsdp"` (gradients sharded too):
            each rank has one microbatch and all layers. `"pipeline"`: each rank has one stage, through which all
            microbatches pass at once. `"gpipe"`, `"1f1b"`, `"interleaved"`, `"zbv"`: one by one, in the order of
            `pipeline_order`. `"pipeline_fsdp"`: a stage per layer, `ranks / layers` ranks for each of them, which have
            one microbatch each; weights are sharded over all ranks.
        layers: a multiple of the stages.
        ranks: of a pipeline, or of data parallelism.
        microbatches: of one step, where they are not given by the ranks.
        weights: `"stored"` with their optimizer's state; `"generated"` from a genome, which every rank stores, at their
            first use, and kept until the genome's gradient is taken at the end; `"remat"`: generated for each
            forward and again for each backward, and freed after it. No generated weight or gradient of one is sent.
        costs: durations and sizes.

    Raises:
        ValueError: if there is no such kind, or it cannot have such sizes.
    """
    if kind not in RECIPES:
        raise ValueError(f"expected a schedule of {sorted(RECIPES)}, got {kind!r}")
    if weights not in get_args(WeightSource):
        raise ValueError(f"expected weights 'stored', 'generated' or 'remat', got {weights!r}")
    sizes = {"layers": layers, "ranks": ranks, "microbatches": microbatches}
    if min(sizes.values()) < 1:
        raise ValueError(f"expected sizes of at least 1, got {sizes}")
    recipe, costs = RECIPES[kind], costs or ScheduleCosts()
    depth = (layers if recipe.gathers == "all" else 1) if recipe.data_parallel else ranks
    stages = stage_ranks(recipe.order, depth, SCHEDULES[recipe.order][1])
    together = microbatches if recipe.together else 1
    for expected, fits in {
        "1 rank": ranks == 1 or kind not in ("basic", "accumulation"),
        "one microbatch per rank": microbatches == 1 or not recipe.data_parallel,
        f"ranks in multiples of its {depth} layers": ranks % depth == 0,
        f"layers in multiples of its {len(stages)} stages": layers % len(stages) == 0,
    }.items():
        if not fits:
            raise ValueError(f"{kind!r} expects {expected}, got {sizes}")
    for name, cost in costs._asdict().items():
        n = layers + (name == "activation")
        if isinstance(cost, Sequence) and len(cost) != n:
            raise ValueError(f"expected one number or {n} for {name} of {layers} layers, got {len(cost)}")
    programs = [_Program(rank, ranks, recipe, weights, costs, layers, stages, together) for rank in range(ranks)]
    for program in programs:
        program.run(
            pipeline_order(recipe.order, program.place, depth, microbatches // together, SCHEDULES[recipe.order][1])
        )
    return Schedule([program.events for program in programs], [program.stored for program in programs])


@dataclass
class _Program:
    """The events of one rank; `stages` has the place in the pipeline of each stage's ranks."""

    rank: int
    ranks: int
    recipe: Recipe
    weights: WeightSource
    costs: ScheduleCosts
    layers: int
    stages: Sequence[int]
    together: int

    def __post_init__(self) -> None:
        depth, self.each = max(self.stages) + 1, self.layers // len(self.stages)
        self.place, self.world = self.rank % depth, tuple(range(self.ranks))
        self.sharded = self.recipe.gathers is not None and self.weights == "stored"
        self.everywhere = self.sharded and self.recipe.gathers == "all"
        self.group = self.world if self.everywhere else self.world[self.place :: depth]
        own = [n for n in range(self.layers) if self.everywhere or self.stages[n // self.each] == self.place]
        self.kept, self.events, self.ends = own, list[Event](), list[str]()
        self.stored = {"genome": self.costs.genome, "genome optimizer": self.costs.genome_optimizer}
        if self.weights == "stored":
            kinds = {"shard" if self.sharded else "weight": self.costs.weight, "optimizer": self.costs.optimizer}
            parts = len(self.group) if self.sharded else 1
            self.stored = {f"{kind}[{n}]": _at(size, n) / parts for n in own for kind, size in kinds.items()}
        self.known = {*self.stored}

    def run(self, actions: Sequence[Action]) -> None:
        if self.everywhere:  # All ranks help to gather and reduce every layer, between their messages.
            stages = range(len(self.stages))
            actions = [*(Action("F", s, 0) for s in stages), *(Action("B", s, 0) for s in reversed(stages))]
        for op, stage, i in actions:
            mine, layers = self.stages[stage] == self.place, range(stage * self.each, (stage + 1) * self.each)
            # A stage goes from one end to the other, forward or back.
            start, end, ahead, d = layers[0], layers[-1] + 1, 1, ""
            if op != "F":
                start, end, ahead, d = end, start, -1, "d"
            messages = mine and op != "W"
            if messages and op != "F" and stage == len(self.stages) - 1:
                self.emit("loss", None, i, reads=self.activation(start, i), stores=self.activation(start, i, d))
            elif messages:
                self.message("receive", stage - ahead, self.activation(start, i, d), i)
            for layer in layers if op == "F" else reversed(layers):
                if op != "W":
                    self.acquire(layer, i)
                if mine:
                    self.compute(op, layer, i)
                if op in "BW":
                    self.reduce(layer, i, mine)
            if messages:
                self.message("send", stage + ahead, self.activation(end, i, d), i)
                self.ends += self.activation(end, i, d) if self.recipe.keeps_ends else ()
        for layer in self.kept[::-1] if self.weights == "generated" else ():
            self.generate_backward(layer)
        # Ends that are kept are read once more, by the last events.
        updates = {n: f"dweight[{n}]" for n in self.kept} if self.weights == "stored" else {None: "dgenome"}
        group = self.world if self.weights != "stored" else () if self.recipe.scatters else self.group
        for layer, name in updates.items():
            if len(group) > 1:
                self.emit("all_reduce", layer, reads=(name,), ranks=group, tag=name)
            self.emit("update", layer, reads=(name, *self.ends))

    def acquire(self, layer: int, i: int) -> None:
        """Gather or generate a layer's whole weight, unless it is stored."""
        name = f"weight[{layer}]"
        weight = {name: _at(self.costs.weight, layer)}
        if self.sharded:
            self.emit("all_gather", layer, stores=weight, ranks=self.group, tag=name)
        elif self.weights == "remat" or name not in self.known:
            self.emit("generate", layer, i, stores=weight)

    def compute(self, op: str, layer: int, i: int) -> None:
        x, y, dx, dy = (self.activation(n, i, d) for d in ("", "d") for n in (layer, layer + 1))
        weight, name = () if op == "W" else (f"weight[{layer}]",), f"dweight[{layer}]"
        if op == "F":
            self.emit("forward", layer, i, reads=(*weight, *x), stores=y | ({} if layer else x))
            return
        kinds: dict[str, Kind] = {"B": "backward", "I": "backward_input", "W": "backward_weight"}
        summands = 1 if self.recipe.sums or self.weights == "remat" else i + 1
        gradient = {} if op == "I" else {name: _at(self.costs.weight, layer) * summands}
        added = () if self.weights == "remat" else gradient
        self.emit(kinds[op], layer, i, (*weight, *x, *dy, *added), stores=gradient if op == "W" else dx | gradient)

    def reduce(self, layer: int, i: int, mine: bool) -> None:
        """Scatter a layer's gradient over the ranks, or take the gradient of the genome, where that is done at once."""
        name = f"dweight[{layer}]"
        if self.sharded and self.recipe.scatters:
            part = {name: _at(self.costs.weight, layer) / len(self.group)}
            # A pipeline frees activations before, other ranks after.
            late = () if self.everywhere else (*self.activation(layer, i), *self.activation(layer + 1, i, "d"))
            reads = (name, f"weight[{layer}]", *late) if mine else ()
            self.emit("reduce_scatter", layer, i, reads, stores=part, ranks=self.group, tag=name)
        elif self.weights == "remat":
            self.generate_backward(layer, i)

    def generate_backward(self, layer: int, i: int | None = None) -> None:
        """Add to the genome's gradient the part of a layer's gradient."""
        weight = () if self.weights == "remat" else (f"weight[{layer}]",)
        reads, stores = (f"dweight[{layer}]", *weight, "dgenome"), {"dgenome": self.costs.genome}
        self.emit("generate_backward", layer, i, reads, stores=stores)

    def activation(self, layer: int, i: int, d: str = "") -> dict[str, float]:
        """A layer's input, or its gradient."""
        return {f"{d}activation[{layer}, {i}]": _at(self.costs.activation, layer) * self.together}

    def message(self, kind: Literal["send", "receive"], stage: int, entry: Mapping[str, float], i: int) -> None:
        """Send an entry to another rank's stage or receive it from there, unless it stays here."""
        if 0 <= stage < len(self.stages) and self.stages[stage] != self.place:
            rest: Any = {"stores": entry} if kind == "receive" else {"reads": entry}
            peer = self.rank - self.place + self.stages[stage]
            self.emit(kind, None, i, peer=peer, tag=next(iter(entry)), **rest)

    def emit(
        self, kind: Kind, layer: int | None = None, i: int | None = None, reads: Iterable[str] = (), **rest: Any
    ) -> None:
        duration = _at(getattr(self.costs, kind, 0.0), layer or 0)
        duration *= self.together if kind == "forward" or kind.startswith("backward") else 1
        # A sum reads what is there before the first summand too: nothing.
        self.events.append(Event(kind, duration, layer, i, tuple(n for n in reads if n in self.known), **rest))
        self.known |= {*rest.get("stores", ())}


def _at(cost: PerLayer, layer: int) -> float:
    return cost[layer] if isinstance(cost, Sequence) else cost
