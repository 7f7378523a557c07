"""What this machine is like, for the planner: `gbfunc bench --calibrate`.

A matrix product, a copy past the caches, small operators, and an all-reduce: between the ranks of `torchrun`, or else
between two processes on the loopback, each of which runs this module: `python -m gbfunc.lab.bench.calibrate ORDER`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gbfunc as gb
from gbfunc.lab.bench.links import run_module
from gbfunc.lab.bench.report import measure_ceilings
from gbfunc.parallel import Mesh, sum_ranks
from gbfunc.parallel.planner import DeviceSpec

_SENT_BYTES = 2**25
_TIMEOUT = 120.0


def calibrate(device: torch.device, *, rounds: int = 5) -> tuple[DeviceSpec, bool]:
    """What a rank has on this machine, and whether this process is to say so (one of many ranks is)."""
    ceilings = measure_ceilings(device, rounds=rounds)
    launched = int(os.environ.get("WORLD_SIZE", 1)) > 1 and "RANK" in os.environ
    first = True
    if launched:
        with gb.mesh(device=device) as mesh:
            link, latency, first = *measure_link(mesh, rounds), mesh.rank == 0
    else:
        link, latency = loopback(rounds)
    speeds = ceilings["gflops"] * 1e9, ceilings["gb_s"] * 1e9
    spec = DeviceSpec(*speeds, link, memory_of(device), latency, measure_overhead(device, rounds))
    return spec, first


def memory_of(device: torch.device) -> float:
    """Bytes of a GPU, or of the machine's memory."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


class _Operators(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def measure_overhead(device: torch.device, rounds: int, layers: int = 100) -> float:
    """Seconds of an operator on a few numbers, in forward and backward of a net of layers, module calls included."""
    net = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(8, 8), nn.GELU()))).to(device)
    x, weights, times = torch.ones(4, 8, device=device), list(net.parameters()), []
    with _Operators() as counted:
        torch.autograd.grad(net(x).sum(), weights)
    for _ in range(rounds + 1):
        start = time.perf_counter()
        torch.autograd.grad(net(x).sum(), weights)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) / counted.count


def measure_link(mesh: Mesh, rounds: int) -> tuple[float, float]:
    """Bytes that a rank sends in a second of a large all-reduce, and seconds of one of a single number."""
    large, small = (torch.zeros(n, device=mesh.device) for n in (_SENT_BYTES // 4, 1))
    seconds = {}
    for name, x in (("small", small), ("large", large)):
        times = []
        for _ in range(rounds + 1):
            mesh.barrier()
            start = time.perf_counter()
            sum_ranks(mesh, x)
            if mesh.device.type == "cuda":
                torch.cuda.synchronize(mesh.device)
            times.append(time.perf_counter() - start)
        seconds[name] = statistics.median(times[1:])
    sent = 2 * (mesh.world - 1) / mesh.world * large.nbytes
    return sent / max(seconds["large"] - seconds["small"], 1e-9), seconds["small"]


def loopback(rounds: int) -> tuple[float, float]:
    """Measure the link between two processes on this machine: bytes in a second, and seconds of a small message."""
    (link, latency), _ = run_module("gbfunc.lab.bench.calibrate", {"rounds": rounds}, 2, _TIMEOUT)
    return link, latency


def run_rank(order: str) -> None:
    """Measure the link as one of two processes."""
    asked = json.loads(order)
    os.environ |= {"RANK": str(asked["rank"]), "WORLD_SIZE": "2"}
    with gb.mesh(timeout=_TIMEOUT, init_method=f"file://{asked['folder']}/store") as mesh:
        found = measure_link(mesh, asked["rounds"])
    Path(asked["folder"], f"{asked['rank']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    run_rank(sys.argv[1])
