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
    """Memory of a variant in bytes.

    Attributes:
        peak: most memory of the process during its steps, beyond what it had before the variant was built.
        counted: most bytes of large tensors alive at once in a step (see `Case.counted`), None if not asked for.
    """

    peak: int
    counted: int | None


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
    _return_freed_memory()
    tiny = build(_tiny(case), variant, setting)
    tiny.step()
    del tiny
    gc.freeze()  # a collection that looked at the libraries' million objects would take longer than the steps
    meter = _Meter(setting.device)
    built = build(case, variant, setting)
    gc.collect()
    meter.restart()
    for _ in range(_STEPS):
        built.step()
    peak = meter.peak()
    if not case.counted:
        return Memory(peak, None)
    with LiveBytes(case.counted) as live:
        built.step()
    return Memory(peak, live.peak)


class _Meter:
    """Peak memory beyond what there was at first: the device's counters, or the process's resident pages."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._now()
        self.restart()

    def _now(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else peak_resident()

    def restart(self) -> None:
        """Forget the peak until now."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            _reset_peak_resident()

    def peak(self) -> int:
        """Peak since `restart`, beyond the first reading, in bytes."""
        on_cuda = self._device.type == "cuda"
        return (torch.cuda.max_memory_allocated(self._device) if on_cuda else peak_resident()) - self._before


def peak_resident() -> int:
    """Most bytes of this process that were in memory at once, since its start or the last reset."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Kilobytes, but for macOS.
    return peak if sys.platform == "darwin" else peak * 1024


def _reset_peak_resident() -> None:
    """Make the present size the peak; where that cannot be done, building a variant counts as its steps do."""
    try:
        # https://docs.kernel.org/filesystems/proc.html, section 3.3: 5 resets the peak resident set size.
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _return_freed_memory() -> None:
    """Have the C library give freed arrays back to the system at once, so that peaks show what is alive.

    By default glibc learns from each array that is freed, and keeps later ones of up to 32 MiB in its heap.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def _tiny(case: Case) -> Case:
    """A case of the same kind that needs no memory."""
    genes = {name: g and g._replace(include=()) for name, g in (("periodic", case.periodic), ("relu", case.relu))}
    if case.kind == "generation":
        return replace(case, net=partial(nn.Linear, 32, 32, bias=False), **genes)
    batch = partial(features, (8, 32), 10)
    return replace(case, net=partial(mlp, (32, 32, 10), 0), batch=batch, **genes)
