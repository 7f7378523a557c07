"""`gbfunc train` under `torchrun`: one genome whatever the ranks, and one voice."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from gbfunc.cli import main
from gbfunc.cli.ranks import find_device, parse_mesh
from tests.support.ranks import PATIENCE, ROOT

TRAIN = ["train", "--epochs", "1", "--sizes", "64", "40", "10", "--genome-params", "300", "--checkpoint-every", "5"]


def torchrun(*options: str) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [sys.executable, *launcher, *options, "-m", "gbfunc", *TRAIN]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.process
def test_two_ranks_train_the_genome_that_one_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    command = [*torchrun(), "--out", str(two), "--placement", "sharded", "--mesh", "data=1,gnets=2"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200 * PATIENCE)
    assert done.returncode == 0, done.stderr
    assert main([*TRAIN, "--out", str(one)]) == 0
    a, b = (json.loads((out / "metrics.json").read_text()) for out in (one, two))
    assert b["train_loss"] == pytest.approx(a["train_loss"], rel=1e-3) and a["steps"] == b["steps"]
    assert (b["ranks"], b["placement"]) == (2, "sharded")
    assert b["mesh"] == {"data": 1, "pipeline": 1, "gnets": 2, "tensor": 1}
    assert a["bytes_sent_per_step"] == 0 and b["bytes_sent_per_step"] > 4 * 64 * 40
    assert all(m["samples_per_second"] > 0 and m["peak_memory_bytes"] > 2**20 for m in (a, b))
    # Rank 0 alone speaks.
    assert done.stdout.count("test accuracy") == capsys.readouterr().out.count("test accuracy") == 1


@pytest.mark.process
@pytest.mark.slow
def test_torchrun_goes_on_by_itself_after_a_kill(tmp_path: Path) -> None:
    options = ("--out", str(tmp_path), "--resume", "auto", "--epochs", "40")
    command = [*torchrun("--max-restarts", "1"), *options]
    run = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True)
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


def test_a_mesh_is_read_from_text() -> None:
    assert parse_mesh(None) == {} and parse_mesh("data=2") == {"data": 2}
    assert parse_mesh(" gnets=1, data=4") == {"data": 4, "gnets": 1} and parse_mesh("gnets=2") == {"gnets": 2}
    for text in ("", "2", "data=two", "data=2,data=2", "rows=2", "data=-1"):
        with pytest.raises(ValueError, match="--mesh must name"):
            parse_mesh(text)


def test_auto_is_the_gpu_if_each_rank_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, ranks, expected in ((0, 1, "cpu"), (1, 1, "cuda"), (1, 2, "cpu"), (2, 2, "cuda")):
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert find_device("auto").type == expected
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ValueError, match="--device cuda needs a GPU, and torch finds none here: try --device auto"):
        find_device("cuda")
