"""Schedules of one training step, for `simulate`: data and pipeline parallel; weights stored, sharded or generated.

The first eight are the puzzles of S. Rush's LLM Training Puzzles (2023), solved as there, which also says what each
keeps longer than it must.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from gbfunc.parallel.pipeline_order import stage_ranks
from gbfunc.parallel.rank_program import Job, Program, Recipe, ScheduleCosts, WeightSource
from gbfunc.parallel.schedule import Schedule

ScheduleKind = Literal[
    "basic",
    "accumulation",
    "ddp",
    "sharded",
    "fsdp",
    "pipeline",
    "gpipe",
    "pipeline_fsdp",
    "1f1b",
    "interleaved",
    "zbv",
]
RECIPES: Mapping[ScheduleKind, Recipe] = {
    "basic": Recipe("once"),
    "accumulation": Recipe("each"),
    "ddp": Recipe("once", True, keeps_ends=True),
    "sharded": Recipe("once", True, "stage", keeps_ends=True),
    "fsdp": Recipe("once", True, "stage", scatters=True),
    "pipeline": Recipe("once", keeps_ends=True),
    "gpipe": Recipe("gpipe", sums=False, keeps_ends=True),
    "pipeline_fsdp": Recipe("once", True, "all", scatters=True, keeps_ends=True),
    "1f1b": Recipe("1f1b"),
    "interleaved": Recipe("interleaved"),
    "zbv": Recipe("zbv"),
}


def make_schedule(
    kind: ScheduleKind,
    *,
    layers: int,
    ranks: int = 1,
    microbatches: int = 1,
    replicas: int = 1,
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
            `pipeline_order`.
            `"pipeline_fsdp"`: a stage per layer, `ranks / layers` ranks for each of them, which have one microbatch
            each; weights are sharded over all ranks.
        layers: of the p-net; a multiple of the stages.
        ranks: of a pipeline, or of data parallelism.
        microbatches: of one step, where they are not given by the ranks.
        replicas: of a whole pipeline, each with its microbatches; rank `r` of replica `d` is `d * ranks + r`.
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
    sizes = {"layers": layers, "ranks": ranks, "microbatches": microbatches, "replicas": replicas, "virtual": virtual}
    if min(sizes.values()) < 1:
        raise ValueError(f"expected sizes of at least 1, got {sizes}")
    recipe = RECIPES[kind]
    pipeline_ranks, replicas = _pipeline_sizes(kind, layers, ranks, microbatches, replicas)
    order = recipe.order if recipe.order not in ("once", "each") else "1f1b"
    virtual = {"interleaved": virtual, "zbv": 2}.get(kind, 1)
    stages = stage_ranks(order, pipeline_ranks, virtual)
    if layers % len(stages):
        raise ValueError(f"{kind!r} expects layers in multiples of its {len(stages)} stages, got {layers}")
    costs = costs or ScheduleCosts()
    _check_costs(costs, layers)
    job = Job(recipe, weights, costs, layers, microbatches, stages, pipeline_ranks, replicas, virtual)
    programs = [Program(job, rank) for rank in range(pipeline_ranks * replicas)]
    for program in programs:
        program.run()
    return Schedule([program.events for program in programs], [program.stored for program in programs])


def _check_costs(costs: ScheduleCosts, layers: int) -> None:
    """Raise where a cost per layer is not one for each."""
    for name, cost in costs._asdict().items():
        expected = layers + (name == "activation")
        if isinstance(cost, Sequence) and len(cost) != expected:
            raise ValueError(f"expected one number or {expected} for {name} of {layers} layers, got {len(cost)}")


def _pipeline_sizes(kind: ScheduleKind, layers: int, ranks: int, microbatches: int, replicas: int) -> tuple[int, int]:
    """Ranks of a pipeline, and how many pipelines there are."""
    if kind in ("basic", "accumulation") and ranks != 1:
        raise ValueError(f"{kind!r} expects 1 rank, got {ranks}; copies of it are its replicas")
    recipe = RECIPES[kind]
    if not recipe.data_parallel:
        return ranks, replicas
    if microbatches != 1 or replicas != 1:
        raise ValueError(f"{kind!r} expects one microbatch per rank, got {microbatches=} and {replicas=}")
    stages = layers if recipe.gathers == "all" else 1
    if ranks % stages:
        raise ValueError(f"{kind!r} expects ranks in multiples of its {stages} layers, got {ranks}")
    return stages, ranks // stages
