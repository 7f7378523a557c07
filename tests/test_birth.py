"""Born, then taught: a grown network trained further, from the command line and as a function."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model

import gbfunc as gb
from gbfunc.cli import main
from gbfunc.lab.birth import GROWN, RANDOM, in_the_size_of, lessons, teach
from gbfunc.tasks import accuracy, find_task
from gbfunc.tasks.pnets import Interface
from gbfunc.tasks.training import dense_trainer, fit, genome_trainer


@pytest.fixture(scope="module")
def genome(tmp_path_factory: pytest.TempPathFactory) -> Path:
    task = find_task("digits", None, {})
    pnet = task.with_pnet(task.pnet.scaled(0.03)).build(0)  # pyright: ignore[reportOptionalCall]
    plan = task.plan(pnet, genome_params=400)
    trainer = genome_trainer(plan, pnet, task, recipe := replace(task.recipe(400), epochs=8), 0)
    path = tmp_path_factory.mktemp("genome") / "genome.safetensors"
    gb.save(path, plan, fit(trainer, task, recipe, 0, validate=False).state)
    return path


def test_a_grown_network_is_taught(genome: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = genome.read_bytes()
    capsys.readouterr()
    assert main(["train", "--from-birth", str(genome), "--steps", "20", "--seed", "1", "--out", str(tmp_path)]) == 0
    printed, told = capsys.readouterr()
    lines = [line for line in told.splitlines() if " accuracy " in line]
    assert lines and all(("validation accuracy" if "choosing" in line else "test accuracy") in line for line in lines)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    runs = metrics["runs"]["digits"]
    assert [row["step"] for row in runs["grown"]] == [row["step"] for row in runs["random"]] == [0, 1, 10, 18, 20]
    assert all(f"{row['accuracy']:.2%}" in printed for rows in runs.values() for row in rows)

    task = find_task("digits", None, {})
    plan, held = gb.load(genome)
    task = task.with_pnet(task.pnet.fitted({t.name: t.shape for t in plan.tensors}))  # pyright: ignore[reportOptionalCall]
    grown = gb.materialize(plan, held, task.build(1))
    assert runs["grown"][0]["accuracy"] == accuracy(grown, task.test)
    assert runs["random"][0]["accuracy"] == accuracy(task.build(1), task.test)
    assert runs["grown"][0]["accuracy"] > runs["random"][0]["accuracy"] + 0.3
    # The taught weights are those of Adam at a constant rate on the images as they are, by the one training loop.
    recipe = replace(task.recipe(0), augment=None, schedule=lambda recipe, lr, steps: lambda step: lr, steps=20)
    fit(dense_trainer(grown, task, replace(recipe, dense_lr=metrics["lr"]["digits"]["grown"])), task, recipe, 1)
    taught = task.build(1)
    load_model(taught, tmp_path / "net.safetensors")
    for name, weight in taught.state_dict().items():
        torch.testing.assert_close(weight, grown.state_dict()[name], rtol=0, atol=0)
    assert runs["grown"][-1]["accuracy"] == accuracy(taught, task.test)
    with (tmp_path / "history.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["digits: grown"] * 5 + ["digits: random"] * 5
    assert float(rows[4]["accuracy"]) == runs["grown"][-1]["accuracy"]
    assert (tmp_path / "birth.png").is_file() and genome.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--genome-params", "300", "--dense"], "--dense and --genome-params cannot be used with --from-birth"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--other", "text"], "cannot learn the task text"),
        (["--other", "nothing"], "no task 'nothing'"),
    ],
)
def test_what_does_not_fit_is_refused(
    genome: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--from-birth", str(genome), *options]) == 2
    assert words in capsys.readouterr().err
    assert main(["train", "--other", "digits"]) == 2


def test_each_start_takes_the_rate_that_is_best_on_validation() -> None:
    task = find_task("digits", None, {})
    task = task.with_pnet(task.pnet.scaled(0.02))  # pyright: ignore[reportOptionalCall]
    recipe = lessons(task, replace(task.recipe(0), steps=15))
    grown = task.build(5)
    both = {rates: teach(grown, task, recipe, 0, rates=rates) for rates in ((1.0,), (1e-3,), (1e-3, 1.0))}
    for start in (GROWN, RANDOM):
        fast, slow, chosen = (taught[start] for taught in both.values())
        assert chosen.lr == fast.lr == recipe.dense_lr and chosen.rows == fast.rows != slow.rows
        assert chosen.rows[0] == slow.rows[0] and set(chosen.rows[0]) == {"step", "epoch", "accuracy"}


def test_images_in_another_size() -> None:
    task = find_task("digits", None, {})
    large = in_the_size_of(task, Interface((1, 28, 28), 10))
    assert large.train.x.shape[1:] == large.interface.inputs == (1, 28, 28) and large.test.y is task.test.y
    assert float(large.train.x.mean()) == pytest.approx(0, abs=1e-4)
    assert float(large.train.x.std()) == pytest.approx(1, abs=1e-4)
    again = in_the_size_of(large, task.interface)
    seen = torch.stack([again.test.x.flatten(), task.test.x.flatten()])
    assert float(torch.corrcoef(seen)[0, 1]) > 0.9
    assert in_the_size_of(task, task.interface) is task
    with pytest.raises(ValueError, match="cannot learn the task digits"):
        in_the_size_of(task, Interface((3, 8, 8), 10))
