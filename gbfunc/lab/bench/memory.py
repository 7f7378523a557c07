"""Peak memory of one variant, in another process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from gbfunc.lab.bench.cases import Case, features
from gbfunc.lab.bench.variants import Setting, Step, build
from gbfunc.tasks.pnets.mlp import mlp

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
    return steps_memory(case, lambda case: build(case, variant, setting).step, setting.device)


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
    small = [genes and genes._replace(options={}) for genes in (case.periodic, case.relu)]
    return replace(case, net=net, batch=partial(features, (8, 32), 10), periodic=small[0], relu=small[1])
