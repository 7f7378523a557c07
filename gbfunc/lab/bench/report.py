"""The rows of `bench.json`, and the growth that they show."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from gbfunc.lab.bench.cases import Bench, Case
from gbfunc.lab.bench.measure import Ceilings, Timing, time_together
from gbfunc.lab.bench.memory import Memory, measure_memory
from gbfunc.lab.bench.variants import Setting, build

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
        peak_mb: peak memory of the steps in a process of its own, in 10^6 bytes, None where the process was ended.
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
