"""Born, then taught: a grown network trained further, by a script and as a function."""

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model
from torch import nn

import gbfunc as gb
from gbfunc.tasks import accuracy, find_task
from gbfunc.tasks.training import dense_trainer, fit, genome_trainer
from tests.support.ranks import ROOT


@pytest.fixture(scope="module")
def genome(tmp_path_factory: pytest.TempPathFactory) -> Path:
    task = find_task("digits", None, {})
    pnet = task.with_pnet(task.pnet.scaled(0.03)).build(0)  # pyright: ignore[reportOptionalCall]
    plan = task.plan(pnet, genome_params=400)
    trainer = genome_trainer(plan, pnet, task, recipe := replace(task.recipe(400), epochs=8), 0)
    path = tmp_path_factory.mktemp("genome") / "genome.safetensors"
    about = {"task": "digits", "pnet": "mlp", "pnet_config": {"hidden": [33]}}
    gb.save(path, plan, fit(trainer, task, recipe, 0, validate=False).state, metadata=about)
    return path


def test_the_script_teaches_a_grown_network(
    genome: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = genome.read_bytes()
    monkeypatch.setattr(sys, "argv", ["birth.py", str(genome), "--steps", "20", "--seed", "1", "--out", str(tmp_path)])
    capsys.readouterr()
    runpy.run_path(str(ROOT / "notebooks/results/birth.py"), run_name="__main__")
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    runs = metrics["runs"]["digits"]
    assert [row["weights"] for row in printed] == ["grown", "shuffled", "random"]
    for row, rows in zip(printed, runs.values(), strict=True):
        assert [r["step"] for r in rows] == [0, 1, 10, 18, 20]
        assert list(row["accuracy"].values()) == [r["accuracy"] for r in rows]

    task = find_task("digits", None, {})
    plan, held = gb.load(genome)
    task = task.with_pnet(task.pnet.scaled(0.03))  # pyright: ignore[reportOptionalCall]
    grown = gb.materialize(plan, held, task.build(1))
    assert runs["grown"][0]["accuracy"] == accuracy(grown, task.test)
    assert runs["random"][0]["accuracy"] == accuracy(task.build(1), task.test)
    assert runs["grown"][0]["accuracy"] > runs["random"][0]["accuracy"] + 0.3
    assert runs["shuffled"][0]["accuracy"] < 0.3
    # The taught weights are those of Adam at a constant rate on the images as they are, by the one training loop.
    recipe = replace(task.recipe(0), augment=None, schedule=lambda recipe, lr, steps: lambda step: lr, steps=20)
    fit(dense_trainer(grown, task, replace(recipe, dense_lr=metrics["lr"]["digits"]["grown"])), task, recipe, 1)
    taught = task.build(1)
    load_model(taught, tmp_path / "net.safetensors")
    for name, weight in taught.state_dict().items():
        torch.testing.assert_close(weight, grown.state_dict()[name], rtol=0, atol=0)
    assert runs["grown"][-1]["accuracy"] == accuracy(taught, task.test)
    assert (tmp_path / "birth.png").is_file() and genome.read_bytes() == before


def normed(classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, classes))


def test_shuffled_weights_are_the_same_numbers_at_other_places() -> None:
    net = normed(3)
    made, one = gb.shuffled(net, 5), gb.shuffled(net, 5, names=["4.weight"])
    for name, x in net.state_dict().items():
        y = made.state_dict()[name]
        assert y.equal(x) != (name in ("0.weight", "4.weight"))
        assert x.flatten().sort().values.equal(y.flatten().sort().values)
        assert one.state_dict()[name].equal(x) != (name == "4.weight")


@pytest.mark.parametrize(("layers", "classes"), [(1, 3), (2, 3), (None, 3), (None, 7)])
def test_layers_carry_over_with_their_norms_where_shapes_agree(layers: int | None, classes: int) -> None:
    source, net = normed(3), normed(classes)
    source(torch.randn(8, 1, 8, 8))
    made = gb.carry_over(source, net, layers=layers).state_dict()
    for name, x in source.state_dict().items():
        carried = name[0] in "01" or (classes == 3 and layers != 1)
        assert made[name].equal(x if carried else net.state_dict()[name])
    with pytest.raises(ValueError, match="layers must be an int >= 1 or None, got 0"):
        gb.carry_over(source, net, layers=0)
    with pytest.raises(ValueError, match="equal names and shapes"):
        gb.carry_over(nn.Linear(3, 2), nn.Linear(4, 5))
