"""The bubble of a pipeline, measured on ranks that wait in the place of computing, and simulated.

Ranks that share cores do not compute side by side. So each block's forward and backward wait for a fixed time: what is
measured is the order of the schedule and the overhead of sending, not how fast blocks compute.

Each rank is a process that runs this module: `python -m gbfunc.lab.bench.bubble ORDER`.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.lab.bench.dense_parallel import Group
from gbfunc.lab.bench.links import run_module
from gbfunc.lab.bench.variants import genome_step
from gbfunc.parallel import ScheduleCosts, make_schedule, simulate

_TIMEOUT = 120.0
_WIDTH = 8


class Bubble(NamedTuple):
    """Part of the ranks' time in which they do not compute, from 0 to 1.

    Attributes:
        measured: from the time of a step, the median over steps, and what blocks of all ranks took in it.
        simulated: with the same times of a block, and nothing else that takes time.
        step_seconds: of the median step.
        forward: seconds of a block on a microbatch, as measured.
        backward: likewise.
    """

    measured: float
    simulated: float
    step_seconds: float
    forward: float
    backward: float


class Waited(NamedTuple):
    """Seconds of every forward or backward of the blocks of this process, as they took place."""

    forward: list[float]
    backward: list[float]


WAITED = Waited([], [])


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        if not x.is_meta:
            WAITED.forward.append(_sleep(forward))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        WAITED.backward.append(_sleep(ctx.seconds))
        return grads[0], None, None


def _sleep(seconds: float) -> float:
    start = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - start


class WaitingBlock(nn.Module):
    """A small layer whose forward and backward take given times."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH)
        self.seconds = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        """[B, E] -> [B, E]."""
        out: Any = _Wait.apply(self.layer(x), *self.seconds)
        return out


def measure_bubble(
    schedule: Literal["gpipe", "1f1b"],
    *,
    ranks: int = 4,
    microbatches: int = 8,
    forward: float = 0.1,
    backward: float = 0.2,
    steps: int = 3,
) -> Bubble:
    """Train blocks that wait on as many new processes, one block each.

    Args:
        schedule: the pipeline's.
        ranks: number of processes, and of blocks.
        microbatches: of a step.
        forward: seconds that a block waits for each microbatch.
        backward: likewise.
        steps: that are measured, after a first one.

    Raises:
        OSError: if a rank fails or takes too long.
    """
    order = {"schedule": schedule, "ranks": ranks, "microbatches": microbatches, "steps": steps}
    reports = run_module("gbfunc.lab.bench.bubble", order | {"seconds": [forward, backward]}, ranks, _TIMEOUT)
    by_step = [max(of_ranks) for of_ranks in zip(*(report["steps"] for report in reports), strict=True)]
    seconds = statistics.median(by_step)
    forward, backward = (statistics.fmean(report[name] for report in reports) for name in ("forward", "backward"))
    return Bubble(
        measured=1 - microbatches * (forward + backward) / seconds,
        simulated=simulated_bubble(schedule, ranks, microbatches, forward, backward),
        step_seconds=seconds,
        forward=forward,
        backward=backward,
    )


def simulated_bubble(
    schedule: Literal["gpipe", "1f1b"], ranks: int, microbatches: int, forward: float, backward: float
) -> float:
    """What the simulator says where nothing but blocks takes time."""
    nothing = ScheduleCosts._make([0.0] * len(ScheduleCosts._fields))
    costs = nothing._replace(forward=forward, backward=backward)
    return simulate(make_schedule(schedule, layers=ranks, ranks=ranks, microbatches=microbatches, costs=costs)).bubble


def run_rank(order: Mapping[str, Any]) -> None:
    """Measure this rank's steps, and write what they took beside those of the other ranks."""
    signal.alarm(int(_TIMEOUT) + 5)  # Whoever started this may be gone.
    torch.set_num_threads(1)
    folder, rank, ranks, microbatches = Path(order["folder"]), order["rank"], order["ranks"], order["microbatches"]
    group = Group(rank, ranks, folder / "store")
    with group.joined(_TIMEOUT):
        torch.manual_seed(0)
        pnet = nn.Sequential(*(WaitingBlock(*order["seconds"]) for _ in range(ranks)))
        plan = gb.make_plan(pnet, gb.periodic(2))
        batch = torch.ones(microbatches, _WIDTH), torch.zeros(microbatches, dtype=torch.int64)
        options = {"mesh": gb.mesh(pipeline=ranks), "pipeline": order["schedule"], "microbatches": microbatches}
        step = genome_step(plan, pnet, batch, 1e-8, **options)
        float(step())
        for seconds in WAITED:
            seconds.clear()
        times = []
        for _ in range(order["steps"]):
            group.meet()
            start = time.perf_counter()
            float(step())
            times.append(time.perf_counter() - start)
    report = {name: statistics.fmean(seconds) for name, seconds in WAITED._asdict().items()}
    (folder / f"{rank}.json").write_text(json.dumps(report | {"steps": times}))


if __name__ == "__main__":
    # As this module runs under another name here, its blocks' times would be kept in another list.
    from gbfunc.lab.bench import bubble

    bubble.run_rank(json.loads(sys.argv[1]))
    os._exit(0)  # As in `gbfunc.lab.bench.wire`.
