"""The order in which a rank of a pipeline works on stages and microbatches, as `torch.distributed.pipelining` has it.

Stages are numbered along the p-net. A rank has one of them, or several: in a loop (rank r has stages r, R + r,
2 R + r, ...), or in the shape of a V (stages r and 2 R - 1 - r).
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

PipelineOrder = Literal["gpipe", "1f1b", "interleaved", "zbv"]


class Action(NamedTuple):
    """Forward (F), backward (B), or its halves: gradients of the inputs (I) and of the weights (W) of a stage."""

    op: Literal["F", "B", "I", "W"]
    stage: int
    microbatch: int


def stage_ranks(order: PipelineOrder, ranks: int, virtual: int = 1) -> tuple[int, ...]:
    """The rank of each stage, where every rank has `virtual` of them."""
    if order == "zbv":
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(range(ranks)) * virtual


def pipeline_order(
    order: PipelineOrder, rank: int, ranks: int, microbatches: int, virtual: int = 1
) -> tuple[Action, ...]:
    """What a rank does, in order.

    Args:
        order: `"gpipe"` (Huang et al. 2019), `"1f1b"` (Narayanan et al. 2019), `"interleaved"` (Narayanan et al. 2021)
            or `"zbv"`, the zero-bubble schedule in the shape of a V (Qi et al. 2024).
        rank: whose actions.
        ranks: of the pipeline.
        microbatches: of one step.
        virtual: stages per rank; 2 for `"zbv"`, 1 for the first two.

    Raises:
        ValueError: if the order is none of these, or if it cannot have such sizes.
    """
    stages = {"gpipe": (1,), "1f1b": (1,), "zbv": (2,), "interleaved": (virtual,)}
    if order not in stages:
        raise ValueError(f"expected a pipeline order of {sorted(stages)}, got {order!r}")
    if virtual < 1 or virtual not in stages[order]:
        raise ValueError(f"pipeline order {order!r} expects {stages[order][0]} stages per rank, got {virtual}")
    if order == "gpipe":
        return _gpipe(rank, microbatches)
    if order == "zbv":
        return _zbv(rank, ranks, microbatches)
    return _1f1b(rank, ranks, microbatches) if order == "1f1b" else _interleaved(rank, ranks, microbatches, virtual)


def _gpipe(rank: int, microbatches: int) -> tuple[Action, ...]:
    """All forwards, then all backwards."""
    return tuple(Action(op, rank, i) for op in ("F", "B") for i in range(microbatches))


def _1f1b(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    """As many forwards as there are stages after this one, then forwards and backwards in turn."""
    forwards = [Action("F", rank, i) for i in range(microbatches)]
    backwards = [Action("B", rank, i) for i in range(microbatches)]
    return _in_turn(forwards, backwards, warm_up=ranks - 1 - rank)


def _interleaved(rank: int, ranks: int, microbatches: int, virtual: int) -> tuple[Action, ...]:
    """1F1B in rounds of some `ranks` microbatches, each of which passes through all stages of the rank."""
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds:
        raise ValueError(f"interleaved expects microbatches in {rounds} equal rounds, got {microbatches}")
    size = microbatches // rounds
    stages = range(rank, ranks * virtual, ranks)

    def passes(op: Literal["F", "B"], stages: range) -> list[Action]:
        starts = range(0, microbatches, size)
        return [Action(op, stage, i) for start in starts for stage in stages for i in range(start, start + size)]

    forwards, backwards = passes("F", stages), passes("B", stages[::-1])
    return _in_turn(forwards, backwards, warm_up=(virtual - 1) * size + 2 * (ranks - 1 - rank))


def _in_turn(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    """Some forwards to warm up, then one forward and one backward in turn, then the other backwards."""
    first, steady = forwards[:warm_up], forwards[warm_up:]
    pairs = (action for pair in zip(steady, backwards, strict=False) for action in pair)
    return (*first, *pairs, *backwards[len(steady) :])


def _zbv(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    """Figure 6 of Qi et al. 2024, for at least 2 R - 1 microbatches, of which those that do not exist are left out."""
    down, up = rank, 2 * ranks - 1 - rank
    full = max(2 * ranks - 1, microbatches)
    actions: list[Action] = []
    done: Counter[tuple[str, int]] = Counter()

    def do(times: int, *steps: tuple[Literal["F", "I", "W"], int]) -> None:
        for op, stage in steps * times:
            actions.append(Action(op, stage, done[op, stage]))
            done[op, stage] += 1

    do(2 * (ranks - rank) - 1, ("F", down))
    do(rank, ("F", up), ("F", down))
    do(ranks - rank, ("F", up), ("I", up), ("W", up))
    while done["F", up] < full:
        do(int(done["F", down] < full), ("F", down))
        do(1, ("I", down), ("W", down), ("F", up), ("I", up), ("W", up))
    do(rank, ("I", down), ("I", up))
    do(ranks - rank, ("I", down), ("W", down))
    for stage in (up, down):
        do(done["I", stage] - done["W", stage], ("W", stage))
    return tuple(action for action in actions if action.microbatch < microbatches)
