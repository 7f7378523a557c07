"""Schedules of one training step, for `simulate`: data and pipeline parallel; weights stored, sharded or generated.

The first eight are the puzzles of S. Rush's LLM Training Puzzles (2023), solved as there, which also says what each
keeps longer than it must. Entries are named `activation[layer, microbatch]` (the input of a layer),
`dactivation[...]` (its gradient), `weight[layer]`, `dweight[layer]` and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from gbfunc.parallel.pipeline_order import SCHEDULES, Action, PipelineOrder, pipeline_order, stage_ranks
from gbfunc.parallel.schedule import Event, Kind, Schedule

WeightSource = Literal["stored", "generated", "remat"]
PerLayer = float | Sequence[float]
ScheduleKind = PipelineOrder | Literal["basic", "accumulation", "ddp", "sharded", "fsdp", "pipeline", "pipeline_fsdp"]


class ScheduleCosts(NamedTuple):
    """Durations, by kind of event, and sizes, in any units; the defaults are those of the puzzles, and gbfunc's own.

    What a layer takes is one number for all layers, or one for each. A duration or an activation is that of one
    microbatch; `activation` is the size of a layer's input, so there is one more of it than layers. Where weights are
    generated, `update` and `all_reduce` are of the whole genome and its gradient, else of a layer's.
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
    """In what schedules differ."""

    order: PipelineOrder = "1f1b"  # Of microbatches, on one rank one by one
    together: bool = False  # Whether all microbatches pass at once
    data_parallel: bool = False  # Whether the ranks have a microbatch each, and are not just the stages of a pipeline
    # Where weights are sharded, which layers a rank helps to gather when they are needed: those of its stage, or all,
    # as each is sharded over the ranks of all stages
    gathers: Literal["stage", "all"] | None = None
    scatters: bool = False  # Whether gradients are reduced and scattered at once, not all-reduced in the end
    # Whether a layer has one gradient, to which each microbatch adds, and not one for each microbatch
    sums: bool = True
    # Whether the output of the last layer of a stage, and the gradient of the input of its first, stay stored when they
    # are no longer needed
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
    virtual: int = 2,
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
        layers: of the p-net; a multiple of the stages.
        ranks: of a pipeline, or of data parallelism.
        microbatches: of one step, where they are not given by the ranks.
        virtual: stages per rank of `"interleaved"`.
        weights: `"stored"` with their optimizer's state; `"generated"` from a genome, which every rank stores, at their
            first use, and kept until the genome's gradient is taken at the end; `"remat"`: generated for each
            forward and again for each backward, and freed after it. No generated weight or gradient of one is sent.
        costs: durations and sizes.

    Raises:
        ValueError: if there is no such kind, or it cannot have such sizes.
    """
    if kind not in RECIPES:
        raise ValueError(f"expected a schedule of {sorted(RECIPES)}, got {kind!r}")
    if weights not in ("stored", "generated", "remat"):
        raise ValueError(f"expected weights 'stored', 'generated' or 'remat', got {weights!r}")
    sizes = {"layers": layers, "ranks": ranks, "microbatches": microbatches, "virtual": virtual}
    if min(sizes.values()) < 1:
        raise ValueError(f"expected sizes of at least 1, got {sizes}")
    recipe, depth, costs = RECIPES[kind], ranks, costs or ScheduleCosts()
    if kind in ("basic", "accumulation") and ranks != 1:
        raise ValueError(f"{kind!r} expects 1 rank, got {ranks}")
    if recipe.data_parallel:
        depth = layers if recipe.gathers == "all" else 1
        if microbatches != 1:
            raise ValueError(f"{kind!r} expects one microbatch per rank, got {microbatches=}")
        if ranks % depth:
            raise ValueError(f"{kind!r} expects ranks in multiples of its {depth} layers, got {ranks}")
    virtual = virtual if kind == "interleaved" else SCHEDULES[recipe.order][1]
    stages = stage_ranks(recipe.order, depth, virtual)
    if layers % len(stages):
        raise ValueError(f"{kind!r} expects layers in multiples of its {len(stages)} stages, got {layers}")
    for name, cost in costs._asdict().items():
        expected = layers + (name == "activation")
        if isinstance(cost, Sequence) and len(cost) != expected:
            raise ValueError(f"expected one number or {expected} for {name} of {layers} layers, got {len(cost)}")
    together, programs = microbatches if recipe.together else 1, list[_Program]()
    for rank in range(ranks):
        program = _Program(recipe, weights, costs, layers // len(stages), together, stages, rank, ranks)
        actions = pipeline_order(recipe.order, program.place, depth, microbatches // together, virtual)
        if recipe.gathers == "all" and weights == "stored":
            # All ranks take part in gathering and reducing every layer, between their messages.
            actions = [Action("F", s, 0) for s in range(depth)] + [Action("B", s, 0) for s in reversed(range(depth))]
        program.run(actions)
        programs.append(program)
    return Schedule([program.events for program in programs], [program.stored for program in programs])


@dataclass
class _Program:
    """The events of one rank, and what it stores from the beginning.

    `each` layers make a stage, `together` microbatches pass at once, and `stages` has the place in the pipeline of the
    ranks of each stage.
    """

    recipe: Recipe
    source: WeightSource
    costs: ScheduleCosts
    each: int
    together: int
    stages: tuple[int, ...]
    rank: int
    ranks: int

    def __post_init__(self) -> None:
        depth = max(self.stages) + 1
        self.place, self.layers = self.rank % depth, self.each * len(self.stages)
        self.generated = self.source != "stored"
        self.sharded = self.recipe.gathers is not None and not self.generated
        self.world = tuple(range(self.ranks))
        # Those that have the same layers, or, where every rank stores a part of every layer, all.
        every = self.sharded and self.recipe.gathers == "all"
        self.group = self.world if every else self.world[self.place :: depth]
        self.made: set[int] = set()
        mine = [n for stage, place in enumerate(self.stages) if place == self.place for n in self.of(stage)]
        # Names of each layer's gradients.
        self.gradients: dict[int, dict[str, None]] = {n: {} for n in mine}
        self.events: list[Event] = []
        if self.generated:
            self.stored = {"genome": self.costs.genome, "genome optimizer": self.costs.genome_optimizer}
        else:
            kinds = {"shard" if self.sharded else "weight": self.costs.weight, "optimizer": self.costs.optimizer}
            parts = len(self.group) if self.sharded else 1
            kept = range(self.layers) if every else mine
            self.stored = {f"{kind}[{n}]": _at(size, n) / parts for n in kept for kind, size in kinds.items()}

    def of(self, stage: int) -> range:
        """Layers of a stage."""
        return range(stage * self.each, (stage + 1) * self.each)

    def run(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self.do(*action)
        if self.source == "generated":
            for layer in reversed(self.gradients):
                self.generate_backward(layer, also=(f"weight[{layer}]",))
        if self.generated:
            if len(self.world) > 1:
                self.emit("all_reduce", ranks=self.world, tag="dgenome")
            self.emit("update", frees=("dgenome",))
            return
        for layer, gradients in sorted(self.gradients.items()):
            if len(self.group) > 1 and not self.recipe.scatters:
                self.emit("all_reduce", layer, ranks=self.group, tag=f"dweight[{layer}]")
            self.emit("update", layer, frees=tuple(gradients))

    def do(self, op: str, stage: int, i: int) -> None:
        """An action, with the messages before and after it; of another rank's layers weights are just gathered."""
        mine, layers, forward = self.stages[stage] == self.place, self.of(stage), op == "F"
        ends, ahead, d = (layers[0], layers[-1] + 1), 1, ""
        if not forward:
            ends, ahead, d = (layers[-1] + 1, layers[0]), -1, "d"
        messages = mine and op != "W"
        if messages and not forward and ends[0] == self.layers:
            frees = () if self.recipe.keeps_ends else tuple(self.activation(self.layers, i))
            self.emit("loss", None, i, stores=self.activation(self.layers, i, d), frees=frees)
        elif messages:
            self.message("receive", stage - ahead, self.activation(ends[0], i, d), i)
        for layer in layers if forward else reversed(layers):
            if op != "W":
                self.acquire(layer, i, mine)
            if mine and forward:
                loads, stores = self.activation(0, i) if layer == 0 else {}, self.activation(layer + 1, i)
                self.emit("forward", layer, i, loads=loads, stores=stores, frees=self.passing(layer))
            elif mine:
                self.layer_backward(layer, i, op)
            elif not forward:
                self.reduce_scatter(layer, i)
        if messages:
            self.message("send", stage + ahead, self.activation(ends[1], i, d), i)

    def layer_backward(self, layer: int, i: int, op: str) -> None:
        """Backward of a layer, or a half of it, and what is done with the gradient of its weight."""
        stores, frees = dict[str, float](), tuple[str, ...]()
        if op in "BI":
            stores |= self.activation(layer, i, "d") if layer or self.recipe.keeps_ends else {}
            frees += self.passing(layer)
        if op in "BW":
            gradient = f"dweight[{layer}]" if self.recipe.sums else f"dweight[{layer}, {i}]"
            self.gradients[layer][gradient] = None
            stores[gradient] = _at(self.costs.weight, layer)
            frees += (*self.activation(layer, i), *self.activation(layer + 1, i, "d"))
        scatters = self.sharded and self.recipe.scatters
        # A pipelined one frees what it can before its gradient is reduced.
        late = frees if scatters and self.recipe.gathers != "all" else self.passing(layer) if scatters else ()
        kinds: dict[str, Kind] = {"B": "backward", "I": "backward_input", "W": "backward_weight"}
        self.emit(kinds[op], layer, i, stores=stores, frees=tuple(name for name in frees if name not in late))
        if scatters:
            self.reduce_scatter(layer, i, late)
        elif self.source == "remat" and op != "I":
            self.generate_backward(layer, i)

    def reduce_scatter(self, layer: int, i: int, frees: tuple[str, ...] = ()) -> None:
        """Sum a layer's gradient over the ranks, each of which keeps its part."""
        name = f"dweight[{layer}]"
        self.gradients.setdefault(layer, {})[name] = None
        part = {name: _at(self.costs.weight, layer) / len(self.group)}
        self.emit("reduce_scatter", layer, i, stores=part, frees=frees, ranks=self.group, tag=name)

    def generate_backward(self, layer: int, i: int | None = None, also: tuple[str, ...] = ()) -> None:
        """Add to the genome's gradient what a layer's gradient gives."""
        frees = (*self.gradients[layer], *also)
        self.gradients[layer] = {}
        self.emit("generate_backward", layer, i, stores={"dgenome": self.costs.genome}, frees=frees)

    def acquire(self, layer: int, i: int, keep: bool) -> None:
        """Have a layer's whole weight ready; or just help others to have it."""
        name = f"weight[{layer}]"
        weight = {name: _at(self.costs.weight, layer)}
        if self.sharded:
            self.emit("all_gather", layer, stores=weight, frees=() if keep else (name,), ranks=self.group, tag=name)
        elif self.generated and layer not in self.made:
            self.made |= {layer} if self.source == "generated" else set()
            self.emit("generate", layer, i, stores=weight)

    def passing(self, layer: int) -> tuple[str, ...]:
        """The whole weight where it is there only while the layer is worked on."""
        return (f"weight[{layer}]",) if self.sharded or self.source == "remat" else ()

    def activation(self, layer: int, i: int, gradient: str = "") -> dict[str, float]:
        """A layer's input, or its gradient."""
        return {f"{gradient}activation[{layer}, {i}]": _at(self.costs.activation, layer) * self.together}

    def message(self, kind: Literal["send", "receive"], stage: int, entry: Mapping[str, float], i: int) -> None:
        """Send an entry to another rank's stage or receive it from there, unless it stays here."""
        if 0 <= stage < len(self.stages) and self.stages[stage] != self.place:
            peer, frees = self.rank - self.place + self.stages[stage], () if self.recipe.keeps_ends else tuple(entry)
            rest: Any = {"stores": entry} if kind == "receive" else {"frees": frees}
            self.emit(kind, None, i, peer=peer, tag=next(iter(entry)), **rest)

    def emit(self, kind: Kind, layer: int | None = None, i: int | None = None, **rest: Any) -> None:
        duration = _at(getattr(self.costs, kind, 0.0), layer or 0)
        duration *= self.together if kind == "forward" or kind.startswith("backward") else 1
        self.events.append(Event(kind, duration, layer, i, **rest))


def _at(cost: PerLayer, layer: int) -> float:
    return cost[layer] if isinstance(cost, Sequence) else cost
