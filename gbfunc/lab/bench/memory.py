"""Peak memory of one variant, in another process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from gbfunc.lab.bench.cases import Case, features
from gbfunc.lab.bench.variants import Setting, Step, build
from gbfunc.tasks.pnets.mlp import mlp

_STEPS = 3
_JOIN_TIMEOUT = 10.0
"""Seconds in which a process that has measured may free what its libraries share with others, such as semaphores."""
# malloc.h of glibc
_M_MMAP_THRESHOLD = -3
_MAPPED_BYTES = 2**17


class LiveBytes(TorchDispatchMode):
    """Follows the memory of the results of all operations while it is active, until that memory is freed.

    Tensors whose memory has `at_least` so many bytes count. Views share memory, which counts once; the memory of older
    tensors counts from their first view on.

    Attributes:
        peak: most bytes alive after any operation.
        peak_tensors: most tensors' memories alive after any operation.
    """

    def __init__(self, at_least: int) -> None:
        super().__init__()
        self.peak = self.peak_tensors = 0
        self._at_least = at_least
        # By address, which weak references keep from being used again.
        self._seen: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count."""
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            # Absent tensors of a pipeline have a size, and no memory.
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() >= self._at_least and tensor.data_ptr():
                storage = tensor.untyped_storage()
                self._seen.setdefault(storage._cdata, StorageWeakRef(storage))
        kept = {k: torch.UntypedStorage._new_with_weak_ptr(seen.cdata) for k, seen in self._seen.items()}
        self._seen = {k: seen for k, seen in self._seen.items() if kept[k] is not None}
        alive = [storage.nbytes() for storage in kept.values() if storage is not None]
        self.peak, self.peak_tensors = max(self.peak, sum(alive)), max(self.peak_tensors, len(alive))
        return result


class Memory(NamedTuple):
    """Memory of a variant in bytes."""

    peak: int  # most of the process during its steps, beyond what it had before the variant was built
    counted: int | None  # most of large tensors alive at once in a step (see `Case.counted`), None if not asked for


def measure_memory(case: Case, variant: str, setting: Setting) -> Memory | None:
    """Run some steps of a variant in a new process; None if the system ends it, as it does when memory runs out.

    The process never outlives this call.
    """
    # A server that starts before all else: a child of this process would begin with this one's peak.
    context = multiprocessing.get_context("forkserver")
    # Optimizers import the compiler.
    context.set_forkserver_preload([__name__, "torch._dynamo"])
    reader, writer = context.Pipe(duplex=False)
    with reader:
        process = context.Process(target=_send_memory, args=(writer, case, variant, setting), daemon=True)
        process.start()
        writer.close()
        try:
            measured = reader.recv()
            process.join(_JOIN_TIMEOUT)
        except EOFError:
            return None
        finally:
            process.kill()
            process.join()
    if isinstance(measured, Exception):
        raise measured
    return measured


def _send_memory(writer: Connection, case: Case, variant: str, setting: Setting) -> None:
    try:
        torch.set_num_threads(setting.threads)
        measured = steps_memory(case, lambda case: build(case, variant, setting).step, setting.device)
    except Exception as error:
        measured = error
    # Nobody listens any more where the command was ended while this process started.
    with contextlib.suppress(BrokenPipeError):
        writer.send(measured)


def steps_memory(case: Case, make: Callable[[Case], Step], device: torch.device) -> Memory:
    """Measure the steps of a case in this process, which has done little else.

    Steps of a tiny case go first, so that libraries and compilers are there already.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        # Otherwise glibc learns from each array that is freed, and keeps later ones of up to 32 MiB in its heap.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
    make(_tiny(case))()
    gc.freeze()  # a collection that looked at the libraries' million objects would take longer than the steps
    before = _peak(device)
    step = make(case)
    gc.collect()
    # Where the peak cannot be reset, building a variant counts as its steps do.
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            # https://docs.kernel.org/filesystems/proc.html, section 3.3: 5 resets the peak resident set size.
            Path("/proc/self/clear_refs").write_text("5")
    for _ in range(_STEPS):
        step()
    peak = _peak(device) - before
    if not case.counted:
        return Memory(peak, None)
    with LiveBytes(case.counted) as live:
        step()
    return Memory(peak, live.peak)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident()


def peak_resident() -> int:
    """Return the most bytes of this process that were in memory at once, since its start or the last reset."""
    with contextlib.suppress(OSError):
        # Not `ru_maxrss`, where Linux has this: that is never less than the peak of the process that started this one.
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    # Kilobytes, but for macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _tiny(case: Case) -> Case:
    """Make a case of the same kind that needs no memory."""
    genes = {
        name: g and g._replace(options={k: v for k, v in g.options.items() if k == "max_tile"})
        for name, g in (("periodic", case.periodic), ("relu", case.relu))
    }
    net = partial(nn.Linear, 32, 32, bias=False) if case.generation else partial(mlp, (32, 32, 10), 0)
    return replace(case, net=net, batch=partial(features, (8, 32), 10), **genes)
