"""The order in which a rank of a pipeline works on stages and microbatches, as `torch.distributed.pipelining` has it.

Stages are numbered along the p-net. A rank has one of them, or several: in a loop (rank r has stages r, R + r,
2 R + r, ...), or in the shape of a V (stages r and 2 R - 1 - r).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import lru_cache
from operator import le
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal, NamedTuple, cast

import torch

PipelineOrder = Literal["gpipe", "1f1b", "interleaved", "zbv"]

SCHEDULES: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "gpipe": ("ScheduleGPipe", 1),
        "1f1b": ("Schedule1F1B", 1),
        "interleaved": ("ScheduleInterleaved1F1B", 2),
        "zbv": ("ScheduleZBVZeroBubble", 2),
    }
)
"""Torch's class of each order, and its stages per rank; `pipeline_order` knows interleaved ones of any number too.

Sources: Huang et al., 2019 (GPipe); Narayanan et al., 2019 (1F1B) and 2021 (interleaved); Qi et al., 2024 (zero-bubble
in the shape of a V).
"""

_FREED_LATE = 0.21
"""Part of what a stage keeps of a microbatch that torch's zero-bubble schedule frees at the end of the step only: its
backward for inputs retains the graph (torch 2.13, blocks of a GPT, 4 to 16 microbatches)."""


class Action(NamedTuple):
    """Forward (F), backward (B), or its halves: gradients of the inputs (I) and of the weights (W) of a stage."""

    op: Literal["F", "B", "I", "W"]
    stage: int
    microbatch: int


def schedule_class(order: str) -> Any:
    """Torch's class of an order; ValueError where this torch has none that leaves gradients unscaled."""
    from torch.distributed import pipelining

    name, _ = SCHEDULES[order]
    kind = getattr(pipelining, name, None)
    if kind is None or "scale_grads" not in inspect.signature(kind).parameters:
        raise ValueError(f"torch {torch.__version__} has no {name} that this pipeline can use: 2.7 has")
    return kind


def stage_ranks(order: str, ranks: int, virtual: int = 1) -> tuple[int, ...]:
    """The rank of each stage, where every rank has `virtual` of them."""
    return (*range(ranks), *reversed(range(ranks))) if order == "zbv" else tuple(range(ranks)) * virtual


def pipeline_order(
    order: PipelineOrder, rank: int, ranks: int, microbatches: int, virtual: int = 1
) -> tuple[Action, ...]:
    """The actions of a rank, which has `virtual` stages (2 for `"zbv"`, 1 for `"gpipe"` and `"1f1b"`), in order.

    Raises:
        ValueError: for another order, sizes that it cannot have, or a schedule that this torch lacks.
    """
    if order not in SCHEDULES:
        raise ValueError(f"expected a pipeline order of {sorted(SCHEDULES)}, got {order!r}")
    each = max(virtual, 1) if order == "interleaved" else SCHEDULES[order][1]
    if virtual != each:
        raise ValueError(f"pipeline order {order!r} expects {each} stages per rank, got {virtual}")
    if order in ("interleaved", "zbv"):
        return _torch_orders(order, ranks, microbatches, virtual)[rank]
    # Written out, as old torch does not report them: forwards alone, then a forward and a backward in turn.
    forwards, backwards = ([Action(op, rank, i) for i in range(microbatches)] for op in ("F", "B"))
    warm_up = microbatches if order == "gpipe" else min(microbatches, ranks - 1 - rank)
    turns = (action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair)
    return (*forwards[:warm_up], *turns, *backwards[microbatches - warm_up :])


@lru_cache(maxsize=64)
def _torch_orders(order: PipelineOrder, ranks: int, microbatches: int, virtual: int) -> list[tuple[Action, ...]]:
    class Order(schedule_class(order)):
        def _prepare_schedule_with_comms(self, *_: Any, **__: Any) -> None:
            """Leave messages out, which take most of the time."""

    n = ranks * virtual
    about = {"num_stages": n, "group_size": ranks, "group_rank": 0, "submod": None}
    mine = [s for s, rank in enumerate(stage_ranks(order, ranks, virtual)) if rank == 0]
    stages: Any = [SimpleNamespace(stage_index=s, is_first=s == 0, is_last=s == n - 1, **about) for s in mine]
    found = Order(stages, microbatches).pipeline_order
    # What is no computation, idle slots among it, reads otherwise.
    matches = [[re.fullmatch(r"(\d+)([FBIW])(\d+)", str(a)) for a in found[rank]] for rank in range(ranks)]
    return [tuple(Action(cast(Any, m[2]), int(m[1]), int(m[3])) for m in of if m) for of in matches]


@lru_cache(maxsize=4096)
def in_flight(order: Any, rank: int, ranks: int, microbatches: int, virtual: int) -> tuple[tuple[float, ...], ...]:
    """Microbatches of each of a rank's stages whose activations are kept at once: all that are not below others."""
    if order in ("gpipe", "1f1b"):
        return ((microbatches if order == "gpipe" else min(microbatches, ranks - rank),),)
    actions, seen = pipeline_order(order, rank, ranks, microbatches, virtual), set[tuple[int, ...]]()
    live = dict.fromkeys(sorted({action.stage for action in actions}), 0)
    for op, stage, _ in actions:
        live[stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[op]
        seen.add(tuple(live.values()))
    most = [a for a in seen if not any(a != b and all(map(le, a, b)) for b in seen)]
    late = _FREED_LATE if order == "zbv" else 0.0
    return tuple(tuple(n + late * (microbatches - n) for n in a) for a in most)
