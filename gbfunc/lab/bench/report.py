"""Time of functions side by side, what the machine could do at best, and the rows of `bench.json`."""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from gbfunc.lab.bench.cases import Bench, Case
from gbfunc.lab.bench.memory import Memory, measure_memory
from gbfunc.lab.bench.variants import Setting, build

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


_MEGA = 1e6
# Operations on each weight for each feature, forward and backward. Rectifier: add, compare, multiply and add forward;
# twice add, compare and add backward. Periodic: products of 2 H columns, one forward and two backward.
_FLOPS = {"relu": 10, "periodic": 12}
# A float32 weight is written once, its gradient read once.
_BYTES = 8


class Row(NamedTuple):
    """One variant of a case.

    Attributes:
        case: the case.
        variant: the variant.
        step_ms: median time of a step (of one generation, forward and backward).
        ratio_to_dense: that time over the dense p-net's, None where it was not measured.
        ratio_to_naive: that time over the naive implementation's.
        peak_mb: peak memory of the steps in another process, in 10^6 bytes, None where the process was ended.
        counted_mb: most memory of weight-sized tensors alive at once in a step, counted, where the case asks for it.
        weights: weights of the matrices that are generated, or trained themselves.
        weights_mb: their memory as float32.
        features: size of the g-nets.
        gflops: operations of the generation, by the formula above, over its time; None for training steps.
        gb_s: bytes that it cannot but move, over its time.
        repeats: timings of which `step_ms` is the median.
    """

    case: str
    variant: str
    step_ms: float
    ratio_to_dense: float | None
    ratio_to_naive: float | None
    peak_mb: float | None
    counted_mb: float | None
    weights: int
    weights_mb: float
    features: int
    gflops: float | None
    gb_s: float | None
    repeats: int


def run_bench(bench: Bench, setting: Setting, *, rounds: int, visit: float) -> list[Row]:
    """Time all variants of all cases of a bench in this process, side by side; then measure the memory of each.

    Args:
        bench: its cases.
        setting: where.
        rounds: timings of each variant.
        visit: seconds of each timing, about.
    """
    torch.set_num_threads(setting.threads)
    built = {(case.name, v): build(case, v, setting) for case in bench for v in case.variants}
    times = time_together({key: b.step for key, b in built.items()}, setting.device, rounds=rounds, visit=visit)
    sizes = {key: (b.weights, b.features) for key, b in built.items()}
    del built
    return [
        _row(case, v, times, sizes[case.name, v], measure_memory(case, v, setting))
        for case in bench
        for v in case.variants
    ]


def _row(
    case: Case,
    variant: str,
    times: Mapping[tuple[str, str], Timing],
    sizes: tuple[int, int],
    memory: Memory | None,
) -> Row:
    weights, features = sizes
    seconds, repeats = times[case.name, variant]

    def ratio(other: str) -> float | None:
        timing = times.get((case.name, other))
        return None if timing is None else seconds / timing.seconds

    kind = "periodic" if variant.startswith("periodic") else "relu"
    alone = case.kind == "generation"
    return Row(
        case=case.name,
        variant=variant,
        step_ms=seconds * 1e3,
        ratio_to_dense=ratio("dense"),
        ratio_to_naive=ratio("naive"),
        peak_mb=None if memory is None else memory.peak / _MEGA,
        counted_mb=None if memory is None or memory.counted is None else memory.counted / _MEGA,
        weights=weights,
        weights_mb=4 * weights / _MEGA,
        features=features,
        gflops=_FLOPS[kind] * features * weights / seconds / 1e9 if alone else None,
        gb_s=_BYTES * weights / seconds / 1e9 if alone else None,
        repeats=repeats,
    )


def growth_curves(rows: Sequence[Row], by: str) -> dict[str, list[tuple[float, float]]]:
    """Step times against `"weights"` or `"features"`: `{variant: [(weights, ms), ...]}`, of variants that have any."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if getattr(row, by):
            curves.setdefault(row.variant, []).append((getattr(row, by), row.step_ms))
    return curves


def log_slope(points: Sequence[tuple[float, float]]) -> float:
    """Exponent p of the power law y = c x^p through points (x, y), by least squares of their logarithms.

    Raises:
        ValueError: for fewer than two different x, or a coordinate that is not positive.
    """
    if len({x for x, _ in points}) < 2 or min(min(point) for point in points) <= 0:
        raise ValueError(f"expected points of two or more different x, all positive, got {list(points)}")
    xs, ys = ([math.log(value) for value in axis] for axis in zip(*points, strict=True))
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread


def machine_name(device: torch.device) -> str:
    """The accelerator's or the processor's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def describe(setting: Setting, ceilings: Ceilings) -> dict[str, object]:
    """What must be known of a run beside its rows."""
    return {
        "machine": machine_name(setting.device),
        "device": setting.device.type,
        "dtype": str(setting.amp or torch.float32).removeprefix("torch."),
        "threads": setting.threads,
        "torch": torch.__version__,
        "ceilings": ceilings._asdict(),
    }
