"""Time of functions side by side, peak memory in another process, and the rows of `bench.json`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from gbfunc.lab.bench.cases import Bench, Case, Setting, Step, build, features
from gbfunc.tasks.pnets.mlp import mlp

Key = TypeVar("Key")

_MOST_STEPS = 50
# A function this slow is timed a few times only, so that one naive case does not take minutes.
_SLOW_SECONDS, _SLOW_ROUNDS = 2.0, 2
_WARM_UP_SECONDS = 20.0


class Timing(NamedTuple):
    """Time of one function."""

    seconds: float  # of one call, the median over the rounds
    first: float  # seconds of the first call, with whatever it compiles
    repeats: int  # rounds that it took part in


def time_together(
    functions: Mapping[Key, Callable[[], Any]], device: torch.device, *, rounds: int, visit: float = 0.1
) -> dict[Key, Timing]:
    """Time functions side by side: round after round, each is visited once, so that all meet the machine's same moods.

    Each is called three times before (a compiled one may compile twice), or less if that takes very long. A visit is
    one call, or as many as fill `visit` (s) after one that is not timed and brings its data back into the caches.
    Functions that take seconds leave after two rounds.
    """
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def timed(function: Callable[[], Any], calls: int = 1) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        wait()
        return (time.perf_counter() - start) / calls

    warm_ups: dict[Key, list[float]] = {}
    for key, function in functions.items():
        seconds = warm_ups[key] = [timed(function)]
        while len(seconds) < 3 and (sum(seconds) < _WARM_UP_SECONDS or len(seconds) == 1):
            seconds.append(timed(function))
    times: dict[Key, list[float]] = {key: [] for key in functions}
    for i in range(rounds):
        for key, function in functions.items():
            once = min(warm_ups[key])
            if once > _SLOW_SECONDS and i >= _SLOW_ROUNDS:
                continue
            calls = max(1, min(_MOST_STEPS, round(visit / max(once, 1e-6))))
            if calls > 1:
                function()
            times[key].append(timed(function, calls))
    return {key: Timing(statistics.median(t), warm_ups[key][0], len(t)) for key, t in times.items()}


def _kernels(step: Step) -> tuple[float, float]:
    """Kernels of a step, and the seconds that they take."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(_STEPS):
            step()
        torch.cuda.synchronize()
    events: Any = profile.events()
    times = [e.device_time_total for e in events if e.device_type.name == "CUDA"]
    return len(times) / _STEPS, sum(times) / _STEPS / 1e6


_STEPS = 3
# malloc.h of glibc
_M_MMAP_THRESHOLD, _MAPPED_BYTES = -3, 2**17


def measure_memory(case: Case, variant: str, setting: Setting) -> int | None:
    """Measure the peak memory (B) of some steps of a variant in a new process, which never outlives this call.

    None if the system ends the process, as it does when memory runs out.
    """
    # A server that starts before all else: a child of this process would begin with this one's peak.
    context = multiprocessing.get_context("forkserver")
    # Optimizers import the compiler.
    context.set_forkserver_preload([__name__, "torch._dynamo"])
    with ProcessPoolExecutor(1, context) as pool:
        try:
            return pool.submit(_variant_memory, case, variant, setting).result()
        except BrokenProcessPool:
            return None


def _variant_memory(case: Case, variant: str, setting: Setting) -> int:
    torch.set_num_threads(setting.threads)
    return steps_memory(case, lambda case: build(case, variant, setting)[0], setting.device)


def steps_memory(case: Case, make: Callable[[Case], Step], device: torch.device) -> int:
    """Measure the peak memory (B) that the steps of a case add to this process, which has done little else.

    Steps of a tiny case go first, so that libraries and compilers are there already.
    """
    cuda = device.type == "cuda"
    with contextlib.suppress(OSError, AttributeError):  # another C library
        # Otherwise glibc learns from each array that is freed, and keeps later ones of up to 32 MiB in its heap.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
    make(_tiny(case))()
    gc.freeze()  # a collection that looked at the libraries' million objects would take longer than the steps
    before = torch.cuda.max_memory_allocated(device) if cuda else peak_resident()
    step = make(case)
    gc.collect()
    # Where the peak cannot be reset, building a variant counts as its steps do.
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            # https://docs.kernel.org/filesystems/proc.html, section 3.3: 5 resets the peak resident set size.
            Path("/proc/self/clear_refs").write_text("5")
    for _ in range(_STEPS):
        step()
    return (torch.cuda.max_memory_allocated(device) if cuda else peak_resident()) - before


def peak_resident() -> int:
    """Return the peak memory of this process in bytes, since its start or the last reset; 0 where nothing tells it."""
    with contextlib.suppress(OSError):
        # Not `ru_maxrss`, where Linux has this: that is never less than the peak of the process that started this one.
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    try:
        import resource
    except ImportError:  # Windows
        return 0
    # Bytes on macOS, kilobytes elsewhere.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _tiny(case: Case) -> Case:
    net = partial(nn.Linear, 32, 32, bias=False) if case.generation else partial(mlp, (32, 32, 10), 0)
    small = {k: x and {"hypernet": x["hypernet"]} for k, x in (("periodic", case.periodic), ("relu", case.relu))}
    return replace(case, net=net, batch=partial(features, (8, 32), 10), **small)


_TIMED = ("step_ms", "ratio_to_dense", "ratio_to_naive")
Row = dict[str, Any]
"""One variant of a case in `bench.json`; None is not measured."""


def run_bench(bench: Bench, setting: Setting, *, rounds: int, visit: float, memory: bool = True) -> list[Row]:
    """Time all variants of a bench side by side in this process, then measure the memory of each."""
    torch.set_num_threads(setting.threads)
    pairs = {(case.name, variant): case for case in bench for variant in case.variants}
    built = {(name, variant): build(case, variant, setting) for (name, variant), case in pairs.items()}
    times = time_together({key: b[0] for key, b in built.items()}, setting.device, rounds=rounds, visit=visit)
    on_cuda = setting.device.type == "cuda"
    kernels = {key: _kernels(b[0]) if on_cuda else (None, None) for key, b in built.items()}
    # The networks themselves must not be in memory when other processes need it.
    sizes = {key: b[1:] for key, b in built.items()}
    del built
    rows = []
    for (name, variant), case in pairs.items():
        (seconds, first, repeats), (weights, features) = times[name, variant], sizes[name, variant]
        launches, busy = kernels[name, variant]
        dense, naive = (times.get((name, other)) for other in ("dense", "naive"))
        peak = measure_memory(case, variant, setting) if memory else None
        row: Row = {
            "case": name,
            "variant": variant,
            "step_ms": seconds * 1e3,  # median time of a step (of one generation, forward and backward)
            "first_ms": first * 1e3,  # time of the first step, with whatever it compiles
            "ratio_to_dense": dense and seconds / dense.seconds,
            "ratio_to_naive": naive and seconds / naive.seconds,
            "launches": launches,  # of kernels on a GPU, in a step
            "busy": busy and busy / seconds,  # part of the time in which a GPU computes
            "peak_mb": peak and peak / 1e6,  # of the steps in another process, in 10^6 bytes
            "weights": weights,  # of the matrices that are generated, or trained themselves
            "features": features,
            "repeats": repeats,  # timings of which `step_ms` is the median
        }
        rows.append(row)
    return rows


def over_runs(runs: Sequence[Sequence[Row]]) -> list[Row]:
    """Merge several runs of a bench: medians of times and ratios, the rest as in the first run."""
    rows = []
    for same in zip(*runs, strict=True):
        timed = [k for k in _TIMED if same[0][k] is not None]
        row = same[0] | {k: statistics.median(run[k] for run in same) for k in timed}
        rows.append(row | {"ratios_to_dense": [run["ratio_to_dense"] for run in same]})
    return rows


def describe(device: torch.device, threads: int) -> dict[str, object]:
    """Describe a machine: the accelerator or processor, threads, torch."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif (info := Path("/proc/cpuinfo")).exists():
        models = (line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line)
        name = next(models, name)
    return {"machine": name, "threads": threads, "torch": torch.__version__}
