"""What goes wrong while training is saved: kills, full disks, folders that cannot be written."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_storage_checkpoint import ADAM, advance, names, save

import gbfunc as gb
from gbfunc.storage import checkpoint
from tests.support.trees_equal import same_bits
from tests.support.zoo import step_of

SUPPORT = Path(__file__).resolve().parent / "support"


@pytest.mark.process
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rounds", [25, pytest.param(500, marks=pytest.mark.slow)])
def test_a_kill_leaves_the_newest_valid(rounds: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "crash_saves.py"), str(tmp_path), str(rounds), str(int(rounds > 25))],
        env={**os.environ, "PYTHONPATH": str(SUPPORT.parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=4 * rounds,
        check=False,
    )
    assert not done.returncode, done.stderr[-2000:]
    found = json.loads(done.stdout)
    # The lock, and what KEEP says: whatever the killed ones left half-written is gone.
    assert found["rounds"] == rounds and found["files"][0] == ".lock" and len(found["files"]) == 3


@contextlib.contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    """The system refuses to write further into any file, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_costs_one_checkpoint(tmp_path: Path) -> None:
    step, batch = step_of("conv_bn", optimizer=ADAM, donate=True)
    with gb.Checkpointer(tmp_path, step) as checkpointer:
        state = advance(step, step.init(), batch, 1)
        checkpointer.save(state)
        checkpointer.wait()
        with largest_file(1_000):
            state = advance(step, state, batch, 1)
            checkpointer.save(state)
            words = "checkpoint of step 2 could not be written .*; earlier ones are intact"
            with pytest.raises(OSError, match=words):
                checkpointer.wait()
            assert names(tmp_path) == ["step-00000001.safetensors"]
            # Told by the next save, which is tried nevertheless.
            checkpointer.save(state)
            state = advance(step, state, batch, 1)
            with pytest.raises(OSError, match=words):
                checkpointer.save(state)
            with pytest.raises(OSError, match="checkpoint of step 3"):
                checkpointer.wait()
        assert int(gb.load_checkpoint(tmp_path, step, step.init()).state.step) == 1
        # Nothing that was trained is lost once there is room.
        checkpointer.save(state)
    assert names(tmp_path) == ["step-00000001.safetensors", "step-00000003.safetensors"]
    found = gb.load_checkpoint(tmp_path, step, step.init())
    assert same_bits(found.state, advance(step, step.init(), batch, 3))


def test_closing_tells_what_was_not_written(tmp_path: Path) -> None:
    step, _ = step_of("mlp")
    with pytest.raises(OSError, match="checkpoint of step 0 could not be written"), largest_file(100):
        save(tmp_path, step, step.init())
    # The error that ended a training is not hidden by one in writing, and the folder is let go.
    with pytest.raises(ZeroDivisionError), largest_file(100), gb.Checkpointer(tmp_path, step) as checkpointer:
        checkpointer.save(step.init())
        raise ZeroDivisionError
    assert names(tmp_path) == []


@pytest.mark.parametrize("where", ["/proc/checkpoints", "/proc", "file", "file/below", "x" * 300])
def test_a_folder_that_cannot_be_written_is_told_at_once(where: str, tmp_path: Path) -> None:
    if where.startswith("/proc") and not Path("/proc/self").exists():
        pytest.skip("no /proc, which even root cannot write")
    step, _ = step_of("mlp")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="cannot keep checkpoints there"):
        gb.Checkpointer(tmp_path / where, step)
    assert (tmp_path / "file").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("key", ["plan", "training", "extra"])
def test_wrong_metadata_under_a_right_digest_is_refused_in_one_line(key: str, tmp_path: Path) -> None:
    step, _ = step_of("mlp")
    save(tmp_path, step, step.init())
    (path,) = tmp_path.glob("step-*")
    metadata, tensors = checkpoint._decode(path.read_bytes())
    about = {k: v for k, v in metadata.items() if k not in ("format", "sha256")}
    wrong = ["null", "[]", '"x"', "{", "[" * 5000, '{"a":' * 3000, '{"sha256":[]}', '{"sha256":"x","ensembles":3}']
    values = ('"tensor","of":"x"', '[],"of":"x"', '"dict","of":[[[1],2]]', '"bytes"')
    tagged = ['{"a":{"$type":' + value + "}}" for value in values]
    wrong += tagged if key == "extra" else ['{"lr":[3]}']
    files = [checkpoint._encode(tensors, {**about, key: text}) for text in wrong if key != "extra" or "sha" not in text]
    files.append(checkpoint._encode(tensors, {k: v for k, v in about.items() if k != key}))
    steps = torch.tensor(-5), torch.tensor([2, 3]), torch.tensor(2.0)
    files += [checkpoint._encode({**tensors, "step": n}, about) for n in steps]
    for data in files:
        path.write_bytes(data)
        for place in (path, tmp_path):
            with pytest.raises(ValueError, match="cannot be resumed: [^\n]+$"):
                gb.load_checkpoint(place, step, step.init())
