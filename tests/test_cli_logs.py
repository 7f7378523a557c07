"""What a training writes beside its genome: logs behind one hook, the best genome, and where it comes from."""

import csv
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

import gbfunc as gb
from gbfunc.cli import main
from gbfunc.cli.job import data_digest
from gbfunc.cli.output import Best
from gbfunc.tasks import TASKS, Metric, accuracy
from gbfunc.tasks.pnets import mlp
from gbfunc.tasks.training import wandb_log

SMALL = ["--sizes", "64", "24", "10", "--genome-params", "200", "--batch-size", "100"]


def logged(path: Path) -> dict[str, list[tuple[int, float]]]:
    with path.open(newline="") as file:
        rows = [(row["metric"], (int(row["step"]), float(row["value"]))) for row in csv.DictReader(file)]
    return {name: [entry for metric, entry in rows if metric == name] for name, _ in rows}


def test_logs_hold_the_course_of_a_training(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="a log for it needs it")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logs = ["--log", "csv", "tensorboard", "--log-every", "4", "--lr", "0.02"]
    assert main(["train", *SMALL, "--epochs", "2", *logs, "--out", str(tmp_path)]) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    kept = logged(tmp_path / "log.csv")
    assert kept.keys() == {"train_loss", "train_accuracy", "lr", "val_accuracy"}
    # An epoch is of 11 steps, after which sums begin anew.
    assert [step for step, _ in kept["train_loss"]] == [4, 8, 12, 16, 20] == [step for step, _ in kept["lr"]]
    assert [step for step, _ in kept["val_accuracy"]] == [11, 22]
    assert kept["val_accuracy"][-1][1] == metrics["val_accuracy"] and max(rate for _, rate in kept["lr"]) <= 0.02
    (folder,) = (tmp_path / "tensorboard").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    for name, entries in kept.items():
        scalars = events.Scalars(name)
        assert [(s.step, pytest.approx(s.value, rel=1e-6)) for s in scalars] == entries
    assert "| lr | 0.02 |" in str(events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0])


def test_logging_goes_on_after_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = gb.Checkpointer.save

    def failing(self: Any, state: Any, extra: Any = None) -> None:
        save(self, state, extra)
        if int(state.step) == 6:
            raise KeyboardInterrupt

    straight, cut = tmp_path / "straight", tmp_path / "cut"
    argv = ["train", *SMALL, "--steps", "12", "--log", "csv", "--log-every", "4"]
    assert main([*argv, "--out", str(straight)]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(gb.Checkpointer, "save", failing)
        assert main([*argv, "--checkpoint-every", "6", "--out", str(cut)]) == 130
    assert main([*argv, "--resume", "auto", "--out", str(cut)]) == 0
    first, second = logged(straight / "log.csv"), logged(cut / "log.csv")
    # The checkpoint is of a step between two entries.
    assert [step for step, _ in second["train_loss"]] == [4, 8, 12] and first == second


def test_the_best_genome_is_kept(tmp_path: Path) -> None:
    # At such a rate the last one is not the best.
    options = ["--steps", "60", "--measure-every", "4", "--lr", "0.3", "--schedule", "constant"]
    assert main(["train", *SMALL, *options, "--out", str(tmp_path)]) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    with (tmp_path / "history.csv").open(newline="") as file:
        rows = {int(row["step"]): float(row["val_accuracy"]) for row in csv.DictReader(file)}
    best = max(rows, key=lambda step: rows[step])
    assert (metrics["best_step"], metrics["best_val_accuracy"]) == (best, rows[best]) and best < 60
    plan, genome = gb.load(tmp_path / "best.safetensors")
    net = gb.materialize(plan, genome, mlp((64, 24, 10), 0))
    assert accuracy(net, TASKS["digits"]().val) == rows[best] > metrics["val_accuracy"]
    assert accuracy(net, TASKS["digits"]().test) == metrics["best_test_accuracy"]


@pytest.mark.parametrize("sign", [1, -1])
def test_which_is_the_best(sign: int, tmp_path: Path) -> None:
    path, nan = tmp_path / "best", float("nan")

    def run(values: list[float], first: int = 0) -> list[int]:
        saved: list[int] = []

        def write(state: int, _: Path) -> None:
            saved.append(state)
            path.touch()

        best = Best(path, Metric("x", higher_is_better=sign > 0), write)
        history = [{"step": i, "val_x": sign * value} for i, value in enumerate(values)]
        for i in range(first, len(values)):
            best(i, history[: i + 1])
        assert best.row(history)["step"] == (saved or [0])[-1]
        return saved

    # One that goes on without the file of what was before begins there; one that goes on with it does not.
    assert run([5.0, 1.0, 2.0], first=1) == [1, 2]
    assert run([1.0, nan, 1.0, 3.0, 2.0]) == [0, 3]
    assert run([5.0, 1.0, 2.0], first=1) == []
    path.unlink()
    assert run([nan, nan, 0.0]) == [0, 2]


def test_it_says_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gbfunc", "train", "--out", "a folder"])
    assert main(["train", *SMALL, "--steps", "1", "--out", str(tmp_path)]) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["command"] == "gbfunc train --out 'a folder'"
    assert metrics["versions"]["torch"] == torch.__version__ and metrics["versions"]["gbfunc"] == gb.__version__
    assert isinstance(metrics["device"], str) and metrics["seconds"] > 0
    assert metrics["plan_digest"] == gb.load(tmp_path / "genome.safetensors")[0].digest()
    task = TASKS["digits"]()
    assert metrics["data_digest"] == data_digest(task)
    task.val.x[3] += 1
    assert metrics["data_digest"] != data_digest(task)


def test_a_log_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    for package in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
        told = command(["train", *SMALL, "--steps", "1", "--log", package, "--out", str(tmp_path)], 2).err
        assert f"pip install 'gbfunc[{package}]'" in told and told.count("\n") == 1


def test_wandb_gets_settings_and_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with wandb_log(tmp_path, {"lr": 0.1}) as on_log:
        on_log(3, {"train_loss": 1.5})
    wandb.init.assert_called_once_with(dir=str(tmp_path), config={"lr": 0.1})
    run = wandb.init.return_value
    run.__enter__.return_value.log.assert_called_once_with({"train_loss": 1.5}, step=3)
    run.__exit__.assert_called_once()
