"""Peak memory of one variant, in another process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from gbfunc.lab.bench.cases import Case, features
from gbfunc.lab.bench.live import LiveBytes
from gbfunc.lab.bench.variants import Setting, build
from gbfunc.tasks.pnets.mlp import mlp

_STEPS = 3
# malloc.h of glibc
_M_MMAP_THRESHOLD = -3
_MAPPED_BYTES = 2**17


class Memory(NamedTuple):
    """Memory of a variant in bytes."""

    peak: int  # most of the process during its steps, beyond what it had before the variant was built
    counted: int | None  # most of large tensors alive at once in a step (see `Case.counted`), None if not asked for


def measure_memory(case: Case, variant: str, setting: Setting) -> Memory | None:
    """Run some steps of a variant in a new process; None if the system ends it, as it does when memory runs out."""
    # A server that starts before all else: a child of this process would begin with this one's peak.
    context = multiprocessing.get_context("forkserver")
    # Optimizers import the compiler.
    context.set_forkserver_preload([__name__, "torch._dynamo"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(run_steps, case, variant, setting).result()
        except BrokenProcessPool:
            return None


def run_steps(case: Case, variant: str, setting: Setting) -> Memory:
    """What the new process does: a tiny case first, so that libraries and compilers are there already."""
    torch.set_num_threads(setting.threads)
    with contextlib.suppress(OSError, AttributeError):  # another C library
        # Else glibc learns from each array that is freed, and keeps later ones of up to 32 MiB in its heap.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
    build(_tiny(case), variant, setting).step()
    gc.freeze()  # a collection that looked at the libraries' million objects would take longer than the steps
    before = _peak(setting.device)
    built = build(case, variant, setting)
    gc.collect()
    _reset_peak(setting.device)
    for _ in range(_STEPS):
        built.step()
    peak = _peak(setting.device) - before
    if not case.counted:
        return Memory(peak, None)
    with LiveBytes(case.counted) as live:
        built.step()
    return Memory(peak, live.peak)


def _peak(device: torch.device) -> int:
    """Most memory since the last reset: by the device's counters, or the process's resident pages."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident()


def _reset_peak(device: torch.device) -> None:
    """Make the present size the peak; where that cannot be done, building a variant counts as its steps do."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        # https://docs.kernel.org/filesystems/proc.html, section 3.3: 5 resets the peak resident set size.
        Path("/proc/self/clear_refs").write_text("5")


def peak_resident() -> int:
    """Most bytes of this process that were in memory at once, since its start or the last reset."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Kilobytes, but for macOS.
    return peak if sys.platform == "darwin" else peak * 1024


def _tiny(case: Case) -> Case:
    """A case of the same kind that needs no memory."""
    genes = {name: g and g._replace(include=()) for name, g in (("periodic", case.periodic), ("relu", case.relu))}
    alone = case.kind == "generation"
    net = partial(nn.Linear, 32, 32, bias=False) if alone else partial(mlp, (32, 32, 10), 0)
    return replace(case, net=net, batch=partial(features, (8, 32), 10), **genes)
