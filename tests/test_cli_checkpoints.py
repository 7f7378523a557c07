"""Training from the command line that is cut short and goes on, as a user would do it."""

import csv
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gbfunc as gb
from gbfunc.cli import main

ARGS = ["train", "--sizes", "64", "24", "10", "--genome-params", "200", "--epochs", "3", "--batch-size", "200"]
STEPS = 15


def course(out: Path) -> tuple[bytes, list[dict[str, str]]]:
    """The genome and the history without its times."""
    with (out / "history.csv").open(newline="") as file:
        rows = [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]
    return (out / "genome.safetensors").read_bytes(), rows


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[dict[str, str]]]:
    out = tmp_path_factory.mktemp("straight")
    assert main([*ARGS, "--out", str(out)]) == 0
    return course(out)


def keeping(out: Path, every: int = 2, *more: str) -> list[str]:
    return [*ARGS, "--out", str(out), "--checkpoint-every", str(every), *more]


def files(out: Path) -> list[str]:
    return sorted(p.name for p in (out / "checkpoints").iterdir() if p.name != ".lock")


def at_save(monkeypatch: pytest.MonkeyPatch, step: int, do: Callable[[], Any]) -> None:
    save = gb.Checkpointer.save

    def saving(self: gb.Checkpointer, state: Any, extra: Any = None) -> None:
        if int(state.step) == step:
            do()
        save(self, state, extra)

    monkeypatch.setattr(gb.Checkpointer, "save", saving)


# Steps 5 and 15 end an epoch, before its validation; 7 is no multiple of what is saved.
@pytest.mark.parametrize(("name", "stop"), [("SIGTERM", 4), ("SIGINT", 5), ("SIGTERM", 7)])
def test_stopped_it_goes_on_as_if_nothing_had_been(
    name: str, stop: int, straight: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    signum = signal.Signals[name]
    before = signal.getsignal(signum)
    with monkeypatch.context() as patch:
        at_save(patch, stop, lambda: os.kill(os.getpid(), signum))
        # The first --resume auto finds nothing, and begins.
        assert main(keeping(tmp_path, stop, "--resume", "auto")) == 128 + signum
    assert signal.getsignal(signum) is before
    told = capsys.readouterr()
    newest = tmp_path / "checkpoints" / f"step-{stop:08d}.safetensors"
    begins, *_, last = told.err.splitlines()
    assert "no checkpoint to resume in" in begins and told.out == ""
    assert last == f"gbfunc: stopped by {name} after step {stop}: --resume auto goes on from {newest}"
    assert not (tmp_path / "genome.safetensors").exists()

    assert main(keeping(tmp_path, 4, "--resume", "auto", "--keep", "2")) == 0
    assert course(tmp_path) == straight
    assert f"gbfunc: resumed {newest}" in capsys.readouterr().err.splitlines()
    assert files(tmp_path) == ["step-00000012.safetensors", f"step-000000{STEPS}.safetensors"]


def test_from_every_checkpoint_it_ends_the_same(straight: Any, tmp_path: Path, command: Any) -> None:
    assert main(keeping(tmp_path, 1, "--keep", "99")) == 0
    assert course(tmp_path) == straight and len(files(tmp_path)) == STEPS
    for i in (1, 14, STEPS):
        out, path = tmp_path / f"from-{i}", tmp_path / "checkpoints" / f"step-{i:08d}.safetensors"
        told = command([*ARGS, "--out", out, "--resume", path]).err
        assert course(out) == straight and not (out / "checkpoints").exists()
        assert (told.count("\n") == 1 and "training is finished, only measured again" in told) == (i == STEPS)


def test_finished_it_keeps_what_is_known_and_finetunes(tmp_path: Path, command: Any) -> None:
    tuning = ["--dtype", "int8", "--finetune", "3", "--overwrite"]
    printed = command(keeping(tmp_path, 100, *tuning)).out
    first = json.loads((tmp_path / "metrics.json").read_text())
    # The folder of the training holds the checkpoints.
    told = command(keeping(tmp_path, 100, *tuning, "--resume", str(tmp_path)))
    again = json.loads((tmp_path / "metrics.json").read_text())
    assert "training is finished, then --finetune takes its 3 steps\n" in told.err and "measured" not in told.err
    # Without a step there is no batch whose operations could be counted.
    assert first.keys() - again.keys() == {"model_flops_per_step", "model_flops_per_second"}
    assert "training, p-net" in printed and "training speed" in told.out


def test_damaged_ones_are_passed_over_and_told(straight: Any, tmp_path: Path, command: Any) -> None:
    assert main(keeping(tmp_path, 4, "--keep", "9")) == 0
    folder = tmp_path / "checkpoints"
    (folder / "step-00000015.safetensors").write_bytes(b"")
    data = bytearray((folder / "step-00000012.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "step-00000012.safetensors").write_bytes(data)
    lines = command(keeping(tmp_path, 4, "--resume", "auto")).err.splitlines()
    for line, step in zip(lines, (15, 12), strict=False):
        assert line.startswith(f"gbfunc: skipped step-000000{step}.safetensors: it is damaged")
    assert lines[2].endswith("step-00000008.safetensors")
    assert course(tmp_path) == straight
    # One that the user names must be valid.
    (folder / "step-00000012.safetensors").write_bytes(data)
    told = command([*ARGS, "--resume", folder / "step-00000012.safetensors"], 2).err
    assert "cannot be resumed: it is damaged" in told


def test_other_settings_are_refused_by_name(tmp_path: Path, command: Any) -> None:
    assert main(keeping(tmp_path, 100)) == 0
    whole = (tmp_path / "checkpoints" / "step-00000015.safetensors").read_bytes()
    config = (tmp_path / "config.toml").read_bytes()
    for more, words in (
        (["--epochs", "4"], "at step 15 (schedule "),
        (["--batch-size", "100", "--lr", "0.5"], "trained with other settings: batch_size 200, now 100"),
        (["--seed", "1"], "seed 0, now 1"),
        (["--genome-params", "180"], "another plan (genome_params"),
        (["--hypernet", "low_rank"], "another plan (genome_params"),
    ):
        told = command(keeping(tmp_path, 100, "--resume", "auto", *more), 2).err
        assert words in told and told.count("\n") == 1
    assert (tmp_path / "checkpoints" / "step-00000015.safetensors").read_bytes() == whole
    assert (tmp_path / "config.toml").read_bytes() == config
    # A new training does not mix with an old one.
    assert "has a finished training: --overwrite replaces it" in command(keeping(tmp_path, 100), 2).err


def test_changes_that_are_allowed_are_told(tmp_path: Path, command: Any) -> None:
    assert main(keeping(tmp_path, 100)) == 0
    more = keeping(tmp_path, 100, "--resume", "auto", "--epochs", "4", "--lr", "0.01")
    assert "; --allow-changes goes on nevertheless" in command(more, 2).err
    told = [line for line in command([*more, "--allow-changes"]).err.splitlines() if "changed" in line]
    assert told and all(line.startswith("gbfunc: changed: ") and "(schedule " in line for line in told)
    assert [row["step"] for row in course(tmp_path)[1]] == ["5", "10", "15", "20"]
    assert files(tmp_path) == [f"step-000000{STEPS}.safetensors", "step-00000020.safetensors"]
    for other, words in (
        (["--epochs", "3"], "step-00000020.safetensors must have at most 15 steps, got 20"),
        (["--batch-size", "100", "--epochs", "9"], "trained with other settings: batch_size 200, now 100"),
    ):
        assert words in command(keeping(tmp_path, 100, "--resume", "auto", "--allow-changes", *other), 2).err


def test_a_full_disk_does_not_end_training(
    straight: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A folder in the place of one file is refused as a write to a full disk is, and for this file alone.
    (tmp_path / "checkpoints").mkdir()
    at_save(monkeypatch, 8, lambda: (tmp_path / "checkpoints" / "step-00000008.safetensors").mkdir())
    assert main(keeping(tmp_path, 4, "--keep", "9")) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == 1 and "the checkpoint of step 8 could not be written" in warnings[0]
    assert course(tmp_path) == straight
    assert files(tmp_path) == [f"step-{i:08d}.safetensors" for i in (4, 8, 12, 15)]


def test_what_is_no_checkpoint_of_a_training_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    save = gb.Checkpointer.save
    monkeypatch.setattr(gb.Checkpointer, "save", lambda self, state, extra: save(self, state))
    assert main(keeping(tmp_path, 100)) == 0
    genome = tmp_path / "genome.safetensors"
    for source, words in (
        (tmp_path / "checkpoints", "expected a checkpoint of gbfunc train"),
        (genome, f"--resume: {genome} cannot be resumed"),
    ):
        assert words in command([*ARGS, "--resume", str(source)], 2).err.splitlines()[-1]
