"""What the bench runs on, and the bytes that it counts."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import gbfunc as gb
from gbfunc.lab.bench.cases import Case, Setting, build, features
from gbfunc.lab.bench.report import measure_memory, peak_resident
from gbfunc.tasks.pnets.mlp import mlp
from tests.support.live import LiveBytes

CPU = Setting(torch.device("cpu"), 1)


def deep(layers: int, width: int) -> Case:
    sizes = (width,) * (layers + 1)
    batch = partial(features, (2, width), width)
    return Case("deep", partial(mlp, sizes, 0), batch, (), {"hypernet": gb.periodic(2)})


def test_remat_by_layer_keeps_an_eighth() -> None:
    case = deep(24, 32)
    peaks = {}
    for variant in ("periodic materialised", "periodic remat layer"):
        step = build(case, variant, CPU)[0]
        step()
        with LiveBytes(4 * 32 * 32) as live:
            step()
        peaks[variant] = live.peak
    assert peaks["periodic materialised"] >= 24 * 4 * 32 * 32
    assert peaks["periodic remat layer"] <= peaks["periodic materialised"] / 8


@pytest.mark.process
def test_peak_memory_of_another_process() -> None:
    found = measure_memory(deep(1, 1024), "dense", CPU)
    # Weights, gradients and two moments, of 4 MiB each.
    assert found is not None and 15 * 2**20 < found < 40 * 2**20
    assert peak_resident() > 2**20


def group(pid: int) -> list[str]:
    """Processes of a process group, as Linux has them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, leader = path.read_text().rpartition(")")[2].split()[:3]
            found += [path.parent.name] if int(leader) == pid and state != "Z" else []
    return found


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_bench_that_is_ended_leaves_no_process(tmp_path: Path) -> None:
    words = "-m gbfunc bench --quick --cases generation --out".split()
    command = [sys.executable, *words, str(tmp_path / "a")]
    bench = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    try:
        # Itself, a tracker of resources, the server, and the process that it made.
        while len(group(bench.pid)) < 4 and bench.poll() is None:
            time.sleep(0.05)
        bench.send_signal(signal.SIGTERM)
        # A process that has just begun may add its own error.
        assert "gbfunc: stopped by SIGTERM\n" in bench.communicate()[1] and bench.returncode == 143
        while group(bench.pid):
            time.sleep(0.05)
    finally:
        if group(bench.pid):
            os.killpg(bench.pid, signal.SIGKILL)
    assert not list(tmp_path.iterdir())
