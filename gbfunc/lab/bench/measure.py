"""Time of functions side by side, and what the machine could do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

Key = TypeVar("Key")

_MOST_STEPS = 50
# A function this slow is timed a few times only, so that one naive case does not take minutes.
_SLOW_SECONDS = 2.0
_SLOW_ROUNDS = 2
_WARM_UP_SECONDS = 20.0
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
    functions: Mapping[Key, Callable[[], Any]], device: torch.device, *, rounds: int, visit: float = 0.1
) -> dict[Key, Timing]:
    """Time functions side by side: round after round, each is visited once, so that all meet the machine's same moods.

    Each is called three times before (a compiled one may compile twice), or less if that takes very long. A visit is
    one call, or as many as fill its time after one that is not timed and brings its data back into the caches.

    Args:
        functions: what to time.
        device: where they run.
        rounds: rounds; functions that take seconds leave after two.
        visit: seconds of a visit, about.
    """
    calls = {key: _calls(_warm_up(function, device), visit) for key, function in functions.items()}
    found: dict[Key, list[float]] = {key: [] for key in functions}
    for i in range(rounds):
        for key, function in functions.items():
            if calls[key] == 0 and i >= _SLOW_ROUNDS:
                continue
            if calls[key] > 1:
                function()
            found[key].append(time_calls(function, max(1, calls[key]), device))
    return {key: Timing(statistics.median(seconds), len(seconds)) for key, seconds in found.items()}


def _warm_up(function: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the shortest of the first calls."""
    seconds = [time_calls(function, 1, device)]
    while len(seconds) < 3 and (sum(seconds) < _WARM_UP_SECONDS or len(seconds) == 1):
        seconds.append(time_calls(function, 1, device))
    return min(seconds)


def _calls(seconds: float, visit: float) -> int:
    """Calls in a visit of a function that takes so long; 0 for one that takes seconds."""
    return 0 if seconds > _SLOW_SECONDS else max(1, min(_MOST_STEPS, round(visit / max(seconds, 1e-6))))


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
