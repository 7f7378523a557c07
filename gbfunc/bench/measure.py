"""Time of functions side by side, and what the machine could do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

Key = TypeVar("Key")

_VISIT_SECONDS = 0.1
_MOST_STEPS = 50
# A function this slow is timed a few times only, so that one naive case does not take minutes.
_SLOW_SECONDS = 2.0
_SLOW_ROUNDS = 2
_GEMM_WIDTH = 2048
_COPY_BYTES = 2**28


class Timing(NamedTuple):
    """Time of one function.

    Attributes:
        seconds: of one call, the median over the rounds.
        repeats: rounds that it took part in.
    """

    seconds: float
    repeats: int


class Ceilings(NamedTuple):
    """What the machine reaches in the two things that generation is made of.

    Attributes:
        gflops: of a square matrix product, a multiplication and an addition each counted.
        gb_s: bytes read and written by a copy that no cache holds, per 10^-9 second.
    """

    gflops: float
    gb_s: float


def synchronise(device: torch.device) -> None:
    """Wait until all work on a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_calls(function: Callable[[], Any], calls: int, device: torch.device) -> float:
    """Seconds a call, over some calls in a row."""
    synchronise(device)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    synchronise(device)
    return (time.perf_counter() - start) / calls


def time_together(
    functions: Mapping[Key, Callable[[], Any]], device: torch.device, *, rounds: int
) -> dict[Key, Timing]:
    """Time functions side by side: round after round, each is visited once, so that all meet the machine's same moods.

    Each is called twice before. A visit is one call, or as many as fill a tenth of a second after one that is not timed
    and brings its data back into the caches.

    Args:
        functions: what to time.
        device: where they run.
        rounds: rounds; functions that take seconds leave after two.
    """
    calls = {}
    for key, function in functions.items():
        first = time_calls(function, 1, device)
        seconds = first if first > 10 * _SLOW_SECONDS else time_calls(function, 1, device)
        calls[key] = 0 if seconds > _SLOW_SECONDS else max(1, min(_MOST_STEPS, round(_VISIT_SECONDS / seconds)))
    found: dict[Key, list[float]] = {key: [] for key in functions}
    for i in range(rounds):
        for key, function in functions.items():
            if calls[key] == 0 and i >= _SLOW_ROUNDS:
                continue
            if calls[key] > 1:
                function()
            found[key].append(time_calls(function, max(1, calls[key]), device))
    return {key: Timing(statistics.median(seconds), len(seconds)) for key, seconds in found.items()}


def measure_ceilings(device: torch.device, *, rounds: int) -> Ceilings:
    """A matrix product and a copy in float32, the precision that weights are generated in."""
    a, b = (torch.randn(_GEMM_WIDTH, _GEMM_WIDTH, device=device) for _ in range(2))
    out = torch.empty_like(a)
    source = torch.ones(_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    functions = {"gemm": lambda: torch.mm(a, b, out=out), "copy": lambda: target.copy_(source)}
    times = time_together(functions, device, rounds=rounds)
    flops, moved = 2 * _GEMM_WIDTH**3, 2 * _COPY_BYTES
    return Ceilings(flops / times["gemm"].seconds / 1e9, moved / times["copy"].seconds / 1e9)
