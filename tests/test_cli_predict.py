"""`gbfunc train --finetune`, and what needs the genome's file alone: `eval` and `predict`."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import gbfunc as gb
from gbfunc.cli import main
from gbfunc.tasks import training
from gbfunc.tasks.pnets import mlp

BRIEF = ["--sizes", "64", "48", "10", "--genome-params", "300", "--epochs", "2", "--batch-size", "200"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    assert main(["train", *BRIEF, "--dtype", "int5", "--finetune", "8", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def genome(trained: Path) -> str:
    return str(trained / "genome.safetensors")


def told(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> list[str]:
    """Lines on standard output, or standard error after an error, of a command."""
    assert main([str(a) for a in arguments]) == code
    said = capsys.readouterr()
    return (said.err if code else said.out).splitlines()


def probabilities(genome: str, x: torch.Tensor) -> torch.Tensor:
    plan, held = gb.load(genome)
    return gb.materialize(plan, held, mlp((64, 48, 10), 0))(x).softmax(1).detach()


def test_finetune_goes_on_where_the_training_ended(trained: Path) -> None:
    metrics = json.loads((trained / "metrics.json").read_text())
    rows = list(csv.DictReader((trained / "history.csv").read_text().splitlines()))
    assert metrics["steps"] == 2 * 5 + 8 and metrics["dtype"] == "int5"
    assert [int(row["step"]) for row in rows] == [5, 10, 15, 18]
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds)
    # What was validated last is what the file holds, unless it was worse than before.
    assert metrics["val_accuracy"] >= float(rows[-1]["val_accuracy"])


def test_a_finetune_that_makes_it_worse_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "RATE", 300.0)
    out = tmp_path / "run"
    assert main(["train", *BRIEF, "--epochs", "20", "--dtype", "int8", "--finetune", "8", "--out", str(out)]) == 0
    rows = list(csv.DictReader((out / "history.csv").read_text().splitlines()))
    metrics = json.loads((out / "metrics.json").read_text())
    assert "the genome before --finetune is kept, validation accuracy" in capsys.readouterr().err
    assert metrics["val_accuracy"] > float(rows[-1]["val_accuracy"])
    before = next(float(row["val_accuracy"]) for row in rows if row["step"] == "100")
    assert metrics["val_accuracy"] == pytest.approx(before, abs=0.03)


def test_eval_needs_the_file_alone(trained: Path, genome: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = gb.load_metadata(genome)
    scale = {"mean": pytest.approx(4.9, abs=0.1), "std": pytest.approx(6.0, abs=0.1), "white": 16}
    shape = {"interface": [[1, 8, 8], 10], "pnet_config": {"hidden": [48]}}
    assert said == {"task": "digits", "pnet": "mlp", **shape, **scale}
    out = "\n".join(told(capsys, "eval", "--genome", genome))
    assert f"{json.loads((trained / 'metrics.json').read_text())['test_accuracy']:.2%}" in out


def test_eval_of_another_p_net(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    brief = ["--pnet-config", '{"hidden": [20], "bandwidth": 2.0}', "--compression", "5", "--steps", "2"]
    told(capsys, "train", *brief, "--out", tmp_path)
    assert gb.load_metadata(tmp_path / "genome.safetensors")["pnet_config"] == {"hidden": [20], "bandwidth": 2.0}
    test = json.loads((tmp_path / "metrics.json").read_text())["test_accuracy"]
    assert f"{test:.2%}" in "\n".join(told(capsys, "eval", "--genome", tmp_path / "genome.safetensors"))
    np.save(tmp_path / "x.npy", np.zeros((2, 8, 8)))
    assert len(told(capsys, "predict", "--genome", tmp_path / "genome.safetensors", tmp_path / "x.npy")) == 2


def test_predict_reads_arrays_and_images(genome: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pixels = load_digits(return_X_y=True)[0][:3].reshape(-1, 8, 8)
    np.save(tmp_path / "x.npy", pixels)
    np.savez(tmp_path / "x.npz", first=pixels[0], last=pixels[2][:, :, None])
    Image.fromarray((pixels[1] * 255 / 16).round().astype(np.uint8)).save(tmp_path / "one.png")
    said = gb.load_metadata(genome)
    x = torch.from_numpy((pixels - said["mean"]) / said["std"]).float()
    best, label = probabilities(genome, x).max(1)
    expected = [f"{label[i]}\t{best[i]:.4f}" for i in range(3)]
    names = [tmp_path / name for name in ("x.npy", "x.npz", "one.png")]
    lines = told(capsys, "predict", "--genome", genome, *names)
    assert lines[:3] == [f"{tmp_path}/x.npy[{i}]\t{words}" for i, words in enumerate(expected)]
    assert lines[3:5] == [f"{tmp_path}/x.npz[first, 0]\t{expected[0]}", f"{tmp_path}/x.npz[last, 0]\t{expected[2]}"]
    name, number, chance = lines[5].split("\t")
    assert (name, int(number)) == (f"{tmp_path}/one.png", int(label[1]))
    assert float(chance) == pytest.approx(float(best[1]), abs=0.02)


@pytest.mark.parametrize("name", ["16.PNG", "16.pgm", "16.tiff", "alpha.png", "palette.png", "turned.png"])
def test_pictures_of_any_kind_show_the_same(
    name: str, genome: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grey = (load_digits(return_X_y=True)[0][4].reshape(8, 8) * 255 / 16).round().astype(np.uint8)
    plain = Image.fromarray(grey)
    # Black ink that covers what the digit leaves dark, on a transparent ground.
    ink = Image.fromarray(np.stack([np.zeros_like(grey), 255 - grey], 2), "LA")
    kinds = {"16": Image.fromarray(grey.astype(np.uint16) * 257), "alpha": ink, "palette": plain.quantize(256)}
    kinds["turned"] = plain.rotate(90)
    plain.save(tmp_path / "plain.png")
    kind, exif = name.partition(".")[0], Image.Exif()
    exif[0x0112] = 6 if kind == "turned" else 1  # How the camera was held.
    kinds[kind].save(tmp_path / name, exif=exif)
    lines = told(capsys, "predict", "--genome", genome, "--top", 10, tmp_path / "plain.png", tmp_path / name)
    assert len({line.partition("\t")[2] for line in lines}) == 1


def test_predict_tells_classes_by_name(genome: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    classes = [f"\x1b[2J\nclass {i}" for i in range(10)]
    gb.save(tmp_path / "g", *gb.load(genome), metadata=gb.load_metadata(genome) | {"classes": classes})
    np.save(tmp_path / "x.npy", load_digits(return_X_y=True)[0][0].reshape(8, 8))
    (line,) = told(capsys, "predict", "--genome", tmp_path / "g", tmp_path / "x.npy", "--top", "10")
    words = line.split("\t")[1:]
    assert sorted(words[::2]) == [rf"\x1b[2J\nclass {i}" for i in range(10)]
    chances = [float(chance) for chance in words[1::2]]
    assert chances == sorted(chances, reverse=True) and sum(chances) == pytest.approx(1, abs=1e-3)


BAD_INPUTS: dict[str, tuple[Any, str]] = {
    "shape.npy": (np.zeros((3, 8, 9)), r"must have images of shape (1, 8, 8) in finite numbers, got float64 (3, 8, 9)"),
    "nan.npy": (np.full((8, 8), np.nan), "must have images of shape (1, 8, 8) in finite numbers, got float64 (8, 8)"),
    "object.npy": (np.array([{}], object), "is not a valid file of arrays"),
    "damaged.npz": (b"PK\3\4", "is not a valid file of arrays"),
    "damaged.png": (b"\x89PNG", "is not a valid picture"),
    "words.TXT": (b"one", "is not a valid picture"),
    "white.tiff": (Image.fromarray(np.full((8, 8), 90_000, np.int32)), "expected pixels of 8 or 16 bits, got mode I,"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_inputs_that_are_none(name: str, genome: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, words = BAD_INPUTS[name]
    path = tmp_path / name
    if isinstance(content, Image.Image):
        content.save(path)
    else:
        _ = path.write_bytes(content) if isinstance(content, bytes) else np.save(path, content, allow_pickle=True)
    assert words in told(capsys, "predict", "--genome", genome, path, code=2)[-1]


IMAGES = {"interface": [[1, 8, 8], 10]}
BAD_METADATA: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"task": ""}, "does not say its task: pass --task NAME --pnet NAME, or write them by gb.save(..., meta"),
    "no task": ({"task": "", "pnet": "os:x"}, "does not say its task: pass --task NAME --pnet os:x"),
    "no pixels": ({}, "lacks mean and std of digits's pixels: gb.save"),
    "another p-net": ({"pnet_config": {"hidden": [47]}}, "does not fit the p-net; it needs the same --pnet and"),
    "code": ({"task": "os:getcwd"}, "code that a file may not run: if you trust it, pass --task os:getcwd"),
    "code of an environment": ({"task": "os:getcwd", "env": "os:x"}, "pass --task os:getcwd --env os:x"),
    "an escape": ({"task": "\x1b[2J"}, r"\x1b[2J"),
    "a number": ({"task": 3}, "no task '3': choose one of"),
    "a list": ({"pnet_config": []}, "--pnet-config must be a JSON object"),
    "interface": ({"interface": [[1, 8, "x"], 10]}, "does not say what its inputs are"),
    "many": ({"interface": [[1, 8, 8], 10, False, 0, 0, None, 9]}, "does not say what its inputs are"),
    "tokens": ({"interface": [[64], 6, False, 99]}, "tokens were learned from its texts: pass their folder"),
    "no deviation": ({**IMAGES, "mean": 4.9, "std": 0}, "must have a std above 0, got 0"),
    "a mean by names": ({**IMAGES, "mean": {"a": 1}, "std": 1}, "as mean, got {'a': 1}"),
    "white as text": ({**IMAGES, "mean": 4, "std": 1, "white": "nan"}, "as white, got 'nan'"),
    "places": (
        {"interface": [[1, 20_000, 20_000], 10], "pnet": "hf:vit", "pnet_config": {"patch_size": 1, "hidden_size": 12}},
        "expected a network with tensors of at most ",
    ),
    "classes": ({**IMAGES, "classes": ["a"]}, "must name 10 classes, got ['a']"),
}


@pytest.mark.parametrize("name", BAD_METADATA)
def test_metadata_that_does_not_do(name: str, genome: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said, words = BAD_METADATA[name]
    gb.save(tmp_path / "g", *gb.load(genome), metadata={"task": "digits", "pnet_config": {"hidden": [48]}} | said)
    np.save(tmp_path / "x.npy", np.zeros((8, 8)))
    assert words in told(capsys, "predict", "--genome", tmp_path / "g", tmp_path / "x.npy", code=2)[-1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("{} {x} --task mnist", "the genome's file has the task digits, got --task mnist: pass --data-dir too"),
        ("{} {x} --pnet gpt", "the p-net gpt reads text"),
        ("{}", "predict needs files"),
        ("{} none.png", "no such picture, .npy or .npz file: none.png"),
        ("none {x}", "no genome file at"),
    ],
)
def test_options_against_the_file(
    options: str, words: str, genome: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "x.npy", np.zeros((8, 8)))
    arguments = options.format(genome, x=tmp_path / "x.npy").split()
    assert words in told(capsys, "predict", "--genome", *arguments, code=2)[-1]
