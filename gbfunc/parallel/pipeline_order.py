"""The orders in which ranks of a pipeline compute stages and microbatches, from `torch.distributed.pipelining`.

Stages are numbered along the p-net. With R ranks, rank r has stage r in the orders `gpipe` and `1f1b`, stages r and
R + r in the order `interleaved`, and stages r and 2 R - 1 - r in the order `zbv`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

SCHEDULES: Mapping[str, str] = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
}
"""{order of the microbatches in a pipeline: class in `torch.distributed.pipelining`}

Sources: Huang et al., 2019 (GPipe); Narayanan et al., 2019 (1F1B) and 2021 (interleaved); Qi et al., 2024 (zero-bubble
in the shape of a V).
"""


def schedule_class(order: str) -> Any:
    """Return torch's schedule class for an order; raise ValueError if torch is too old to have the class."""
    from torch.distributed import pipelining

    kind = getattr(pipelining, SCHEDULES[order], None)
    if kind is None or "scale_grads" not in inspect.signature(kind).parameters:
        raise ValueError(f"pipeline={order!r} needs {SCHEDULES[order]} of torch >= 2.7, got torch {torch.__version__}")
    return kind


def stage_ranks(order: str, ranks: int) -> tuple[int, ...]:
    own = tuple(range(ranks))
    return {"interleaved": own + own, "zbv": own + own[::-1]}.get(order, own)


def stages_of(order: str, ranks: int) -> list[list[int]]:
    places = stage_ranks(order, ranks)
    return [[s for s, place in enumerate(places) if place == rank] for rank in range(ranks)]


@lru_cache(maxsize=64)
def torch_orders(order: str, ranks: int, microbatches: int) -> list[list[tuple[str, int, int]]]:
    """Return for every rank a list of (operation, stage, microbatch), for the orders `"interleaved"` and `"zbv"`.

    Operations are forward (F), backward (B), and the halves of backward: gradients of inputs (I) and of weights (W).
    """

    class Order(schedule_class(order)):
        def _prepare_schedule_with_comms(self, *_: Any, **__: Any) -> None:
            """Skip torch's planning of messages between ranks, which is not needed and takes most of the time."""

    n = 2 * ranks
    about = {"num_stages": n, "group_size": ranks, "group_rank": 0, "submod": None}
    mine = stages_of(order, ranks)[0]
    stages: Any = [SimpleNamespace(stage_index=s, is_first=s == 0, is_last=s == n - 1, **about) for s in mine]
    found = Order(stages, microbatches).pipeline_order
    # The pattern matches only operations, not idle times and messages.
    matches = [[re.fullmatch(r"(\d+)([FBIW])(\d+)", str(a)) for a in found[rank]] for rank in range(ranks)]
    return [[(m[2], int(m[1]), int(m[3])) for m in rank if m] for rank in matches]


@lru_cache(maxsize=4096)
def in_flight(order: str, rank: int, ranks: int, microbatches: int) -> tuple[tuple[float, ...], ...]:
    """Return [peak of memory in a step][stage of the rank]: how many microbatches have activations in memory."""
    if order in ("gpipe", "1f1b"):
        return ((microbatches if order == "gpipe" else min(microbatches, ranks - rank),),)
    actions, seen = torch_orders(order, ranks, microbatches)[rank], set[tuple[int, ...]]()
    live = dict.fromkeys(sorted({stage for _, stage, _ in actions}), 0)
    for op, stage, _ in actions:
        live[stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[op]
        seen.add(tuple(live.values()))
    # Torch's zero-bubble schedule stores 21 % of the activations until the end of the step, because its backward for
    # inputs retains the graph (measured: torch 2.13, blocks of a GPT, 4 to 16 microbatches).
    late = 0.21 if order == "zbv" else 0.0
    return tuple(tuple(n + late * (microbatches - n) for n in a) for a in seen)
