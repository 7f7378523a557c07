"""`gbfunc train` under `torchrun`: one genome whatever the ranks, and one voice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gbfunc.cli.ranks import parse_mesh
from tests.support.ranks import PATIENCE, ROOT

TRAIN = ("-m", "gbfunc", "train", "--epochs", "1", "--sizes", "64", "40", "10", "--genome-params", "300")


def train(ranks: int, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Train digits for an epoch, under torchrun where there are many ranks."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)) if ranks > 1 else ()
    command = [sys.executable, *launcher, *TRAIN, "--out", str(out), *options]
    own = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=100 * PATIENCE, check=False)


def metrics_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "metrics.json").read_text())


def test_two_ranks_train_the_genome_that_one_trains(tmp_path: Path) -> None:
    """Batch sizes are global: the same losses, but for the order of float32 sums."""
    one, two = train(1, tmp_path / "1"), train(2, tmp_path / "2", "--placement", "sharded", "--mesh", "data=1,gnets=2")
    assert one.returncode == 0, one.stderr
    assert two.returncode == 0, two.stderr
    a, b = metrics_of(tmp_path / "1"), metrics_of(tmp_path / "2")
    assert b["train_loss"] == pytest.approx(a["train_loss"], rel=1e-3) and a["steps"] == b["steps"]
    assert (b["ranks"], b["placement"]) == (2, "sharded")
    assert b["mesh"] == {"data": 1, "pipeline": 1, "gnets": 2, "tensor": 1}
    assert a["bytes_sent_per_step"] == 0 and b["bytes_sent_per_step"] > 4 * 64 * 40
    assert all(m["samples_per_second"] > 0 and m["peak_memory_bytes"] > 2**20 for m in (a, b))
    assert two.stdout.count("test accuracy") == one.stdout.count("test accuracy") == 1, "rank 0 alone speaks"


def test_what_two_ranks_have_trained_one_goes_on_with(tmp_path: Path) -> None:
    made = train(2, tmp_path, "--checkpoint-every", "5", "--placement", "replicated")
    assert made.returncode == 0, made.stderr
    newest = sorted((tmp_path / "checkpoints").glob("step-*"))[-1]
    genome = (tmp_path / "genome.safetensors").read_bytes()
    newest.rename(newest.with_name("put-aside"))
    again = train(1, tmp_path, "--checkpoint-every", "5", "--resume", "auto")
    assert again.returncode == 0, again.stderr
    assert "resumed" in again.stderr and again.stderr.count("gbfunc: ") == 1
    assert len((tmp_path / "genome.safetensors").read_bytes()) == len(genome)
    assert train(1, tmp_path, "--resume", "auto", "--seed", "1").stderr.count("other settings: seed 0, now 1") == 1


@pytest.mark.slow
def test_torchrun_goes_on_by_itself_after_a_kill(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    options = ("--out", str(tmp_path), "--checkpoint-every", "5", "--resume", "auto", "--epochs", "40")
    own = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *launcher, *TRAIN, *options]
    run = subprocess.Popen(command, env=own, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + 60 * PATIENCE
        while not list((tmp_path / "checkpoints").glob("step-*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        children = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True, check=True).stdout
        os.kill(int(children.split()[-1]), signal.SIGKILL)
        _, told = run.communicate(timeout=120 * PATIENCE)
    finally:
        with suppress(ProcessLookupError):  # the launcher's ranks are in its session
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    assert run.returncode == 0, told
    assert "gbfunc: resumed" in told and (tmp_path / "genome.safetensors").is_file()


@pytest.mark.parametrize(
    ("text", "found"),
    [(None, {}), ("data=2", {"data": 2}), ("data=2,gnets=3", {"data": 2, "gnets": 3}), (" gnets=1, data=4", None)],
)
def test_a_mesh_is_read_from_text(text: str | None, found: dict[str, int] | None) -> None:
    assert parse_mesh(text) == (found if found is not None else {"data": 4, "gnets": 1})


@pytest.mark.parametrize("text", ["", "2", "data=two", "data=2,data=2", "rows=2", "gnets=2", "data=-1"])
def test_a_mesh_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--mesh must name"):
        parse_mesh(text)
