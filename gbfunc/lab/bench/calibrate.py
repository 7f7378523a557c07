"""Speeds of this machine, for the planner: `gbfunc bench --calibrate`.

A matrix product, a copy past the caches, small operators, and an all-reduce: between the ranks of `torchrun`, otherwise
between two processes on the loopback.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.spawn import spawn

import gbfunc as gb
from gbfunc.lab.bench.report import time_together
from gbfunc.parallel import Mesh, sum_ranks
from gbfunc.parallel.planner import DeviceSpec

_SENT_BYTES, _TIMEOUT, _LAYERS, _ROUNDS = 2**25, 120.0, 100, 5
_GEMM_WIDTH, _COPY_BYTES = 2048, 2**28


def calibrate(device: torch.device) -> tuple[DeviceSpec, bool]:
    """Measure the device of one rank; also return whether this process reports."""
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
    """Measure operations per second of a product in float32, and bytes per second of a copy, read and written."""
    a, b, out = (torch.randn(_GEMM_WIDTH, _GEMM_WIDTH, device=device) for _ in range(3))
    source, target = (torch.ones(_COPY_BYTES // 4, device=device) for _ in range(2))
    functions = {"product": lambda: torch.mm(a, b, out=out), "copy": lambda: target.copy_(source)}
    times = time_together(functions, device, rounds=_ROUNDS)
    return 2 * _GEMM_WIDTH**3 / times["product"].seconds, 2 * _COPY_BYTES / times["copy"].seconds


def _measure_overhead(device: torch.device) -> float:
    """Measure the seconds per operator of a net of tiny layers, forward and backward, module calls included."""
    net = nn.Sequential(*(m for _ in range(_LAYERS) for m in (nn.Linear(8, 8), nn.GELU()))).to(device)
    x, weights = torch.ones(4, 8, device=device), list(net.parameters())

    def step(x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(net(x).sum(), weights)

    operators = sum(node.op == "call_function" for node in make_fx(step)(x).graph.nodes)
    return time_together({"step": lambda: step(x)}, device, rounds=_ROUNDS)["step"].seconds / operators


def _measure_link(mesh: Mesh) -> tuple[float, float]:
    """Measure the bytes per second that a rank sends, and the seconds of an all-reduce of a single number."""
    seconds = []
    for n in (1, _SENT_BYTES // 4):
        x, times = torch.zeros(n, device=mesh.device), []
        # As many calls on each rank, however long they take.
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
    with gb.mesh(timeout=_TIMEOUT, init_method=f"file://{folder}/store") as mesh:
        torch.save(_measure_link(mesh), Path(folder, str(rank)))
