"""The bubble of a pipeline, measured on ranks that wait in the place of computing, and simulated.

Ranks that share cores do not compute side by side. So each block's forward and backward wait for a fixed time: what is
measured is the order of the schedule and the overhead of sending, not how fast blocks compute.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.lab.bench.variants import genome_step
from gbfunc.parallel import ScheduleCosts, make_schedule, simulate
from tests.support.ranks import PATIENCE, run_ranks

_WIDTH = 8
_STEPS = 3


class Bubble(NamedTuple):
    """Part of the ranks' time in which they do not compute, from 0 to 1.

    Attributes:
        measured: from the time of a step, the median over steps, and what blocks of all ranks took in it.
        simulated: with the same times of a block, and nothing else that takes time.
        forward: seconds of a block on a microbatch, as measured.
        backward: likewise.
    """

    measured: float
    simulated: float
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
    ranks: int = 4,
    microbatches: int = 8,
    forward: float = 0.1,
    backward: float = 0.2,
) -> Bubble:
    """Train blocks that wait so many seconds for each microbatch on as many ranks, one block each."""
    arguments = {"schedule": schedule, "ranks": ranks, "microbatches": microbatches, "seconds": [forward, backward]}
    reports = run_ranks(ranks, "bubble:run", arguments=arguments, timeout=120)
    seconds = statistics.median(max(of_ranks) for of_ranks in zip(*(r["steps"] for r in reports), strict=True))
    forward, backward = (statistics.fmean(report[name] for report in reports) for name in ("forward", "backward"))
    simulated = simulated_bubble(schedule, ranks, microbatches, forward, backward)
    return Bubble(1 - microbatches * (forward + backward) / seconds, simulated, forward, backward)


def simulated_bubble(
    schedule: Literal["gpipe", "1f1b"], ranks: int, microbatches: int, forward: float, backward: float
) -> float:
    """What the simulator says where nothing but blocks takes time."""
    nothing = ScheduleCosts._make([0.0] * len(ScheduleCosts._fields))
    costs = nothing._replace(forward=forward, backward=backward)
    return simulate(make_schedule(schedule, layers=ranks, ranks=ranks, microbatches=microbatches, costs=costs)).bubble


def run(init_method: str, schedule: str, ranks: int, microbatches: int, seconds: list[float]) -> dict[str, Any]:
    """What this rank's steps took."""
    with gb.mesh(pipeline=ranks, init_method=init_method, timeout=60 * PATIENCE) as mesh:
        torch.manual_seed(0)
        pnet = nn.Sequential(*(WaitingBlock(*seconds) for _ in range(ranks)))
        batch = torch.ones(microbatches, _WIDTH), torch.zeros(microbatches, dtype=torch.int64)
        options: dict[str, Any] = {"mesh": mesh, "pipeline": schedule, "microbatches": microbatches}
        step = genome_step(gb.make_plan(pnet, gb.periodic(2)), pnet, batch, 1e-8, **options)
        float(step())
        for waited in WAITED:
            waited.clear()
        times = []
        for _ in range(_STEPS):
            mesh.barrier()
            start = time.perf_counter()
            float(step())
            times.append(time.perf_counter() - start)
    return {name: statistics.fmean(waited) for name, waited in WAITED._asdict().items()} | {"steps": times}
