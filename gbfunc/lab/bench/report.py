"""Measures the times and the peak memory in `bench.json`, and a device's speed for `gbfunc plan`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
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
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import gbfunc as gb
from gbfunc.lab.bench.cases import Bench, Case, Setting, Step, build, features
from gbfunc.parallel import Mesh, sum_ranks
from gbfunc.parallel.planner import DeviceSpec
from gbfunc.tasks.pnets.mlp import mlp

Key = TypeVar("Key")


class Timing(NamedTuple):
    """The time of one function."""

    seconds: float  # Seconds per call, the median over the rounds
    first: float  # Seconds of the first call, compilation included


def time_together(
    functions: Mapping[Key, Callable[[], Any]], device: torch.device, *, rounds: int, visit: float = 0.1
) -> dict[Key, Timing]:
    """Time functions in alternation, so that changes of the machine's speed affect all functions equally.

    First, each function is called three times (twice if two calls take 20 s), because a compiled function may compile
    twice. Then each round times 1 to 50 calls of every function, which take about `visit` seconds. If a round times
    more than one call of a function, an untimed call precedes them, to bring the function's data into the caches.
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
        while len(seconds) < 3 and (sum(seconds) < 20 or len(seconds) == 1):
            seconds.append(timed(function))
    times: dict[Key, list[float]] = {key: [] for key in functions}
    for _ in range(rounds):
        for key, function in functions.items():
            calls = max(1, min(50, round(visit / max(min(warm_ups[key]), 1e-6))))
            if calls > 1:
                function()
            times[key].append(timed(function, calls))
    return {key: Timing(statistics.median(t), warm_ups[key][0]) for key, t in times.items()}


def _kernels(step: Step) -> tuple[float, float]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    events: Any = profile.events()
    times = [e.device_time_total for e in events if e.device_type.name == "CUDA"]
    return len(times) / 3, sum(times) / 3 / 1e6


def measure_memory(case: Case, variant: str, setting: Setting) -> int | None:
    """Return the peak memory in bytes of a variant's steps in a new process, or None if memory runs out."""
    # Use a fork server, whose memory is small: a fork of this process would start with this process's peak.
    context = multiprocessing.get_context("forkserver")
    # Import the compiler once, in the server. Otherwise optimizers would import it in each process.
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
    """Return the peak memory in bytes that the steps of a case add to this process, which must be new.

    First run a step of a tiny case, which loads libraries and compilers, so that their memory is not counted.
    """
    cuda = device.type == "cuda"
    with contextlib.suppress(OSError, AttributeError):  # The C library may not be glibc
        # Fix glibc's M_MMAP_THRESHOLD (-3), so that freed arrays are not counted. Otherwise glibc would raise the
        # threshold when a large array is freed, and keep later arrays of up to 32 MiB in its heap.
        ctypes.CDLL(None).mallopt(-3, 2**17)
    make(_tiny(case))()
    gc.freeze()  # Keep the libraries' million objects out of later collections, which would take longer than steps.
    before = torch.cuda.max_memory_allocated(device) if cuda else peak_resident()
    step = make(case)
    gc.collect()
    # Reset the peak. Systems without a reset also count the memory for building the variant.
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            # The number 5 resets the peak resident set size (https://docs.kernel.org/filesystems/proc.html, 3.3).
            Path("/proc/self/clear_refs").write_text("5")
    for _ in range(3):
        step()
    return (torch.cuda.max_memory_allocated(device) if cuda else peak_resident()) - before


def peak_resident() -> int:
    """Return the peak memory of this process in bytes since its start or the last reset, or 0 if unknown."""
    with contextlib.suppress(OSError):
        # Do not use `ru_maxrss` on Linux, because it is never below the peak of the parent process.
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    import resource  # Imported here, because Windows has no such module

    # The unit of `ru_maxrss` is bytes on macOS, and kilobytes elsewhere.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _tiny(case: Case) -> Case:
    net = partial(nn.Linear, 32, 32, bias=False) if case.generation else partial(mlp, (32, 32, 10), 0)
    small = {k: x and {"hypernet": x["hypernet"]} for k, x in (("periodic", case.periodic), ("relu", case.relu))}
    return replace(case, net=net, batch=partial(features, (8, 32), 10), **small)


Row = dict[str, Any]
"""The measurements of one variant of a case in `bench.json`; None means not measured."""


def run_bench(bench: Bench, setting: Setting, *, rounds: int, visit: float, memory: bool = True) -> list[Row]:
    """Time all variants of a bench in alternation in this process, then measure the memory of each variant."""
    torch.set_num_threads(setting.threads)
    pairs = {(case.name, variant): case for case in bench for variant in case.variants}
    built = {(name, variant): build(case, variant, setting) for (name, variant), case in pairs.items()}
    times = time_together({key: b[0] for key, b in built.items()}, setting.device, rounds=rounds, visit=visit)
    on_cuda = setting.device.type == "cuda"
    kernels = {key: _kernels(b[0]) if on_cuda else (None, None) for key, b in built.items()}
    # Free the networks: the processes that measure memory need room.
    sizes = {key: b[1:] for key, b in built.items()}
    del built
    rows = []
    for (name, variant), case in pairs.items():
        (seconds, first), (weights, features) = times[name, variant], sizes[name, variant]
        launches, busy = kernels[name, variant]
        dense, naive = (times.get((name, other)) for other in ("dense", "naive"))
        peak = measure_memory(case, variant, setting) if memory else None
        row: Row = {
            "case": name,
            "variant": variant,
            "step_ms": seconds * 1e3,  # Median time of a step, or of one generation, forward and backward
            "first_ms": first * 1e3,  # Time of the first step, compilation included
            "ratio_to_dense": dense and seconds / dense.seconds,
            "ratio_to_naive": naive and seconds / naive.seconds,
            "launches": launches,  # Kernels per step on a GPU
            "busy": busy and busy / seconds,  # Fraction of the time in which a GPU computes
            "peak_mb": peak and peak / 1e6,  # Peak memory of the steps in another process, in 10^6 bytes
            "weights": weights,  # Number of weights that are generated or, if dense, trained
            "features": features,
        }
        rows.append(row)
    return rows


def over_runs(runs: Sequence[Sequence[Row]]) -> list[Row]:
    """Merge the runs of a bench: medians of times and ratios, and the first run's values of everything else."""
    rows = []
    for same in zip(*runs, strict=True):
        timed = [k for k in ("step_ms", "ratio_to_dense", "ratio_to_naive") if same[0][k] is not None]
        row = same[0] | {k: statistics.median(run[k] for run in same) for k in timed}
        rows.append(row | {"ratios_to_dense": [run["ratio_to_dense"] for run in same]})
    return rows


def describe(device: torch.device, threads: int) -> dict[str, object]:
    """Describe a machine: the accelerator or processor, the number of threads, and torch's version."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif (info := Path("/proc/cpuinfo")).exists():
        models = (line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line)
        name = next(models, name)
    return {"machine": name, "threads": threads, "torch": torch.__version__}


_SENT_BYTES, _ROUNDS = 2**25, 5


def calibrate(device: torch.device) -> tuple[DeviceSpec, bool]:
    """Measure this rank's device for `gbfunc plan`. Return the result, and whether this process should print it.

    The link is timed by an all-reduce of the ranks of `torchrun`, or else of two processes on the loopback device.
    """
    first = True
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and "RANK" in os.environ:
        with gb.mesh(device=device) as mesh:
            link, latency, first = *_measure_link(mesh), mesh.rank == 0
    else:
        with TemporaryDirectory(prefix="gbfunc-") as folder:
            spawn(_measure_loopback, (folder,), nprocs=2)
            link, latency = torch.load(Path(folder, "0"))
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DeviceSpec(*_measure_ceilings(device), link, float(memory), latency, _measure_overhead(device)), first


def _measure_ceilings(device: torch.device) -> tuple[float, float]:
    a, b, out = (torch.randn(2048, 2048, device=device) for _ in range(3))
    source, target = (torch.ones(2**26, device=device) for _ in range(2))
    functions = {"product": lambda: torch.mm(a, b, out=out), "copy": lambda: target.copy_(source)}
    times = time_together(functions, device, rounds=_ROUNDS)
    return 2 * 2048**3 / times["product"].seconds, 2 * source.nbytes / times["copy"].seconds


def _measure_overhead(device: torch.device) -> float:
    from torch.fx.experimental.proxy_tensor import make_fx

    net = nn.Sequential(*(m for _ in range(100) for m in (nn.Linear(8, 8), nn.GELU()))).to(device)
    x, weights = torch.ones(4, 8, device=device), list(net.parameters())

    def step(x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(net(x).sum(), weights)

    operators = sum(node.op == "call_function" for node in make_fx(step)(x).graph.nodes)
    return time_together({"step": lambda: step(x)}, device, rounds=_ROUNDS)["step"].seconds / operators


def _measure_link(mesh: Mesh) -> tuple[float, float]:
    seconds = []
    for n in (1, _SENT_BYTES // 4):
        x, times = torch.zeros(n, device=mesh.device), []
        # All ranks must call equally often, so the number of calls must not depend on measured times.
        for _ in range(_ROUNDS + 1):
            mesh.barrier()
            start = time.perf_counter()
            sum_ranks(mesh, x)
            if mesh.device.type == "cuda":
                torch.cuda.synchronize(mesh.device)
            times.append(time.perf_counter() - start)
        seconds.append(statistics.median(times[1:]))
    small, large = seconds
    return 2 * (mesh.world - 1) / mesh.world * _SENT_BYTES / max(large - small, 1e-9), small


def _measure_loopback(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    with gb.mesh(timeout=120.0, init_method=f"file://{folder}/store") as mesh:
        torch.save(_measure_link(mesh), Path(folder, str(rank)))
