"""Layouts of ranks, and what each stage of a pipeline has of a p-net's blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import le
from typing import Any, NamedTuple

from gbfunc.parallel.dry_run import Cell
from gbfunc.parallel.pipeline_order import pipeline_order, stage_ranks

_FREED_LATE = 0.21
"""Part of what a stage keeps of a microbatch that torch's zero-bubble schedule frees at the end of the step only: its
backward for inputs retains the graph (torch 2.13, blocks of a GPT, 4 to 16 microbatches)."""


class RankLayout(NamedTuple):
    """Where and how a step runs.

    Attributes:
        sizes: ranks along data, pipeline, gnets and tensor.
        placement: of the genome.
        schedule: of the pipeline, None without one.
        microbatches: of a step.
        remat: what is made again.
    """

    sizes: Mapping[str, int]
    placement: str
    schedule: str | None
    microbatches: int
    remat: str

    def __str__(self) -> str:
        """In words."""
        axes = " x ".join(f"{name} {n}" for name, n in self.sizes.items() if n > 1) or "one rank"
        words = [axes, self.placement if self.sizes["gnets"] > 1 else "", self.schedule or ""]
        words += [f"{self.microbatches} microbatches" if self.microbatches > 1 else ""]
        return ", ".join([w for w in words if w] + (["remat layer"] if self.remat == "layer" else []))


class Footprint(NamedTuple):
    """What a layout stores and sends, and what its stages take.

    Attributes:
        memory: bytes of the fullest rank, by part.
        sent: most bytes of a rank in a step, by axis.
        stages: stages of every rank of a pipeline.
        cells: of each stage, its costs for a microbatch.
        generation: of each stage, operations that make its weights and their gradients.
        weights: of each stage, their bytes.
        hidden: bytes of the activations between stages, for a microbatch.
    """

    memory: Mapping[str, float]
    sent: Mapping[str, float]
    stages: Sequence[Sequence[int]]
    cells: Sequence[Cell]
    generation: Sequence[float]
    weights: Sequence[float]
    hidden: float


class Made(NamedTuple):
    """One generated parameter on a rank.

    Attributes:
        cells: where it is used.
        bytes: of its weight or factors, where these are kept.
        graph: kept for backward through its generation: as many numbers again as the factors have.
        passing: bytes of the weight and its factors where they are made for each use: the peak of several.
        operations: of generation and its backward.
        passing_bytes: the sum of several.
    """

    cells: frozenset[int]
    bytes: float
    graph: float
    passing: float
    operations: float
    passing_bytes: float = 0.0


def total_of(cells: Sequence[Cell]) -> Cell:
    """Costs of several cells together."""
    values = {name: [getattr(cell, name) for cell in cells] for name in vars(Cell())}
    return Cell(**{name: max(x) if name == "largest" else sum(x) for name, x in values.items()})


def between(a: Cell, b: Cell, part: float) -> Cell:
    """Costs on the line from one cell (0) to another (1)."""
    return Cell(**{name: x + part * (getattr(b, name) - x) for name, x in vars(a).items()})


def together(made: Sequence[Made]) -> Made:
    """Several parameters as one."""
    _, kept, graph, passing, *rest = zip(*made, strict=True) if made else [()] * 6
    cells = frozenset().union(*(w.cells for w in made))
    return Made(cells, sum(kept), sum(graph), max(passing, default=0.0), *map(sum, rest))


@lru_cache(maxsize=4096)
def in_flight(order: Any, rank: int, ranks: int, microbatches: int, virtual: int) -> tuple[tuple[float, ...], ...]:
    """Microbatches of each of a rank's stages whose activations are kept at once: all that are not below others."""
    if order in ("gpipe", "1f1b"):
        return ((microbatches if order == "gpipe" else min(microbatches, ranks - rank),),)
    mine = [s for s, r in enumerate(stage_ranks(order, ranks, virtual)) if r == rank]
    live, seen = dict.fromkeys(mine, 0), set()
    for op, stage, _ in pipeline_order(order, rank, ranks, microbatches, virtual):
        live[stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[op]
        seen.add(tuple(live.values()))
    most = [a for a in seen if not any(a != b and all(map(le, a, b)) for b in seen)]
    late = _FREED_LATE if order == "zbv" else 0.0
    return tuple(tuple(n + late * (microbatches - n) for n in a) for a in most)
