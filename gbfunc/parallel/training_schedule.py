"""Schedules of one training step, for `simulate`: data and pipeline parallel; weights stored, sharded or generated.

The first eight are the puzzles of S. Rush's LLM Training Puzzles (2023), and keep some entries as long as the published
solutions do. Entries are named `activation[layer, microbatch]` (the input of a layer), `dactivation[...]` (its
gradient), `weight[layer]`, `dweight[layer]` and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from gbfunc.parallel.pipeline_order import Action, PipelineOrder, pipeline_order, stage_ranks, stages_of
from gbfunc.parallel.placement import Placement
from gbfunc.parallel.schedule import Event, Kind, Schedule

WeightSource = Literal["stored", "generated", "remat"]
PerLayer = float | Sequence[float]
ScheduleKind = PipelineOrder | Literal["basic", "accumulation", "ddp", "sharded", "fsdp", "pipeline", "pipeline_fsdp"]


class RankLayout(NamedTuple):
    """The ranks and options of a step."""

    sizes: Mapping[str, int]  # Ranks along data, pipeline, gnets and tensor
    placement: Placement = "replicated"  # Of the genome
    schedule: str | None = None  # Of the pipeline, None without one
    microbatches: int = 1
    remat: str = "none"

    def __str__(self) -> str:
        """Options of `gbfunc train`, without the defaults."""
        split = self.sizes["gnets"] > 1
        sizes = {axis: n for axis, n in self.sizes.items() if n > 1 or (axis == "data" and split)} or {"data": 1}
        options = {
            "--mesh": ",".join(f"{axis}={n}" for axis, n in sizes.items()),
            "--placement": self.placement if split else "",
            "--pipeline": self.schedule,
            "--microbatches": self.microbatches if self.microbatches > 1 else "",
            "--remat": self.remat if self.remat != "none" else "",
        }
        return " ".join(f"{option} {value}" for option, value in options.items() if value)

    @property
    def order(self) -> str:
        """The order of microbatches; without a pipeline the order of 1F1B on one rank."""
        return self.schedule or "1f1b"

    @property
    def stages(self) -> list[list[int]]:
        """The stages of every rank of the pipeline."""
        return stages_of(self.order, self.sizes["pipeline"])


class ScheduleCosts(NamedTuple):
    """Durations of events and sizes, in any units; the defaults come from the puzzles.

    A cost per layer is one number, or a sequence. Durations and activations belong to one microbatch. `activation` is
    the size of a layer's input, so a sequence of it has one entry more. `update` and `all_reduce` belong to the whole
    genome if weights are generated, otherwise to the weight of a layer.
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
        raise ValueError(f"expected weights 'stored', 'generated' or 'remat', got {weights!r}")
    sizes = {"layers": layers, "ranks": ranks, "microbatches": microbatches}
    if min(sizes.values()) < 1:
        raise ValueError(f"expected sizes of at least 1, got {sizes}")
    recipe, costs = RECIPES[kind], costs or ScheduleCosts()
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
    for name, cost in costs._asdict().items():
        n = layers + (name == "activation")
        if isinstance(cost, Sequence) and len(cost) != n:
            raise ValueError(f"expected one number or {n} for {name} of {layers} layers, got {len(cost)}")
    programs = (_program(rank, stages, sizes, recipe, weights, costs) for rank in range(ranks))
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
        parts = len(group) if sharded else 1
        stored = {f"{name}[{n}]": _at(size, n) / parts for n in own for name, size in kept.items()}
    known = {*stored}

    def emit(kind: Kind, layer: int | None, i: int | None, reads: Iterable[str] = (), **rest: Any) -> None:
        duration = _at(getattr(costs, kind, 0.0), layer or 0)
        duration *= together if kind == "forward" or kind.startswith("backward") else 1
        # The first summand of a gradient reads nothing.
        events.append(Event(kind, duration, layer, i, tuple(n for n in reads if n in known), **rest))
        known.update(rest.get("stores", ()))

    def activation(layer: int, i: int, d: str = "") -> dict[str, float]:
        return {f"{d}activation[{layer}, {i}]": _at(costs.activation, layer) * together}

    def message(kind: Literal["send", "receive"], stage: int, entry: Mapping[str, float], i: int) -> None:
        if 0 <= stage < len(stages) and stages[stage] != place:
            rest: Any = {"stores": entry} if kind == "receive" else {"reads": entry}
            emit(kind, None, i, peer=rank - place + stages[stage], tag=next(iter(entry)), **rest)

    def generate_backward(layer: int, i: int | None) -> None:
        reads = (f"dweight[{layer}]", "dgenome", *(() if remat else (f"weight[{layer}]",)))
        emit("generate_backward", layer, i, reads, stores={"dgenome": costs.genome})

    def compute(op: str, layer: int, i: int, mine: bool) -> None:
        x, y, dx, dy = (activation(n, i, d) for d in ("", "d") for n in (layer, layer + 1))
        weight, gradient, size = f"weight[{layer}]", f"dweight[{layer}]", _at(costs.weight, layer)
        if op != "W" and sharded:
            emit("all_gather", layer, None, stores={weight: size}, ranks=group, tag=weight)
        elif op != "W" and weights != "stored" and (remat or weight not in known):
            emit("generate", layer, i, stores={weight: size})
        if mine and op == "F":
            emit("forward", layer, i, (weight, *x), stores=y | ({} if layer else x))
        elif mine:
            kind: Kind = "backward" if op == "B" else "backward_input" if op == "I" else "backward_weight"
            made = {} if op == "I" else {gradient: size * (1 if recipe.sums or remat else i + 1)}
            reads = (*x, *dy, *(() if op == "W" else (weight,)), *(() if remat else made))
            emit(kind, layer, i, reads, stores=made if op == "W" else dx | made)
        if op in "BW" and sharded and recipe.scatters:
            # A pipeline frees activations before, other ranks after.
            reads = (gradient, weight, *(() if everywhere else (*x, *dy))) if mine else ()
            part = {gradient: size / len(group)}
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


def _at(cost: PerLayer, layer: int) -> float:
    return cost[layer] if isinstance(cost, Sequence) else cost
