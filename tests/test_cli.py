"""The command line from end to end on real digits, and its errors."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gbfunc as gb
from gbfunc.cli import main
from gbfunc.formats import file_bytes
from gbfunc.tasks import TASKS, accuracy
from gbfunc.tasks.pnets import PNETS, mlp
from gbfunc.tasks.training import dense_trainer, fit
from gbfunc.trees import tree_map
from tests.support.trees_equal import same_bits

SMALL = ["--sizes", "64", "48", "10", "--genome-params", "300"]
QUICK = [*SMALL, "--epochs", "2", "--batch-size", "100"]
BRIEF = [*SMALL, "--epochs", "1", "--batch-size", "400"]
METRICS = set("task hypernet pnet_params genome_params ratio_params dense_bytes genome_bytes ratio_bytes".split())
METRICS |= {"test_accuracy", "val_accuracy", "train_loss", "seconds", "steps", "seed"}


def read(folder: Path) -> tuple[dict, list[dict[str, str]]]:
    with (folder / "history.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return json.loads((folder / "metrics.json").read_text()), rows


def test_train_writes_what_it_measured(tmp_path: Path, command: Any) -> None:
    out = tmp_path / "a" / "run"
    told = command(["train", *QUICK, "--seed", "4", "--out", out])
    metrics, rows = read(out)
    assert METRICS <= metrics.keys()
    assert metrics["task"] == "digits" and metrics["hypernet"] == "periodic" and metrics["seed"] == 4
    assert metrics["pnet_params"] == 65 * 48 + 49 * 10 and metrics["genome_params"] <= 300
    assert metrics["ratio_params"] == metrics["pnet_params"] / metrics["genome_params"]
    assert metrics["dense_bytes"] == 4 * metrics["pnet_params"]
    assert metrics["genome_bytes"] == (out / "genome.safetensors").stat().st_size
    assert metrics["steps"] == 2 * (1_197 // 100)
    assert [row["epoch"] for row in rows] == ["1", "2"] and rows[-1]["step"] == str(metrics["steps"])
    assert float(rows[-1]["train_loss"]) == metrics["train_loss"] < float(rows[0]["train_loss"])
    assert (out / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    names = "best.safetensors config.toml genome.safetensors history.csv learning_curve.png metrics.json"
    assert sorted(p.name for p in out.iterdir()) == names.split()
    # What is reported is what the file holds.
    plan, genome = gb.load(out / "genome.safetensors")
    task = TASKS["digits"]()
    net = gb.materialize(plan, genome, mlp((64, 48, 10), 0))
    assert accuracy(net, task.test) == metrics["test_accuracy"] > 0.2
    assert "\r" not in told.err and "\x1b" not in told.err + told.out
    first, *lines = told.err.splitlines()
    assert first == f"gbfunc: training on {metrics['config']['device']}, {metrics['device']}"
    assert lines and all(line.startswith("genome: step ") for line in lines)
    assert f"{metrics['test_accuracy']:.2%}" in told.out

    assert f"{metrics['test_accuracy']:.2%}" in command(["eval", "--genome", str(out / "genome.safetensors")]).out


def test_dense_trains_the_net_itself(tmp_path: Path, command: Any) -> None:
    sizes = ["--sizes", "64", "24", "10", "--epochs", "2"]
    assert main(["train", "--dense", *sizes, "--seed", "1", "--out", str(tmp_path)]) == 0
    metrics, rows = read(tmp_path)
    assert metrics["network"] == "dense" and metrics["hypernet"] is None
    assert metrics["genome_params"] == metrics["pnet_params"] == 65 * 24 + 25 * 10 and metrics["val_accuracy"] > 0.5
    assert {row["run"] for row in rows} == {"dense"}
    plan, genome = gb.load(tmp_path / "genome.safetensors")
    assert not genome.gnets and genome.direct.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    # The same as training without gbfunc, on the same schedule and data.
    task = TASKS["digits"]().with_pnet(PNETS["mlp"](TASKS["digits"]().interface, hidden=(24,)))
    recipe = replace(task.recipe(metrics["genome_params"]), epochs=2)
    again = fit(dense_trainer(task.build(1), task, recipe), task, recipe, 1).history
    assert again[-1]["train_loss"] == pytest.approx(metrics["train_loss"], rel=1e-4)
    assert f"{metrics['test_accuracy']:.2%}" in command(["eval", "--genome", str(tmp_path / "genome.safetensors")]).out


def test_demo_compares_three_nets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *QUICK, "--out", str(tmp_path)]) == 0
    metrics, rows = read(tmp_path)
    assert METRICS <= metrics.keys()
    assert metrics["small_dense_params"] >= metrics["genome_params"]
    assert 0 <= metrics["dense_test_accuracy"] <= 1 and 0 <= metrics["small_dense_test_accuracy"] <= 1
    assert [row["run"] for row in rows] == ["genome"] * 2 + ["dense p-net"] * 2 + ["small dense net"] * 2
    assert len({row["step"] for row in rows}) == 2
    assert (tmp_path / "weights.png").read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out
    for key in ("pnet_params", "genome_params", "genome_bytes", "dense_bytes", "small_dense_params"):
        assert f"{metrics[key]:,}" in table
    for key in ("test_accuracy", "dense_test_accuracy", "small_dense_test_accuracy"):
        assert f"{metrics[key]:.2%}" in table


def test_a_finished_training_is_replaced_only_if_asked(tmp_path: Path, command: Any) -> None:
    train = ["train", *SMALL, "--steps", "1", "--out", str(tmp_path)]
    assert main(train) == 0
    genome = (tmp_path / "genome.safetensors").read_bytes()
    for resume in ([], ["--resume", "auto"]):
        told = command([*train, "--seed", "1", *resume], 2).err.splitlines()[-1]
        assert told.endswith("has a finished training: --overwrite replaces it, or choose another --out")
    assert (tmp_path / "genome.safetensors").read_bytes() == genome
    assert main([*train, "--seed", "1", "--overwrite"]) == 0
    assert (tmp_path / "genome.safetensors").read_bytes() != genome


def labelled(folder: Path, names: tuple[str, str]) -> list[str]:
    folder.mkdir()
    lines = [f"{names[i % 2]} {'warm bright' if i % 2 else 'cold dark'} {i}" for i in range(60)]
    for part in ("train", "test"):
        (folder / f"{part}.txt").write_text("\n".join(lines), encoding="utf-8")
    return ["--task", "texts", "--data-dir", str(folder)]


def test_labels_and_characters_mean_what_they_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    config = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    small = ["--pnet-config", json.dumps(config), "--steps", "2"]
    one, other = labelled(tmp_path / "a", ("cool", "hot")), labelled(tmp_path / "b", ("hot", "apt"))
    out = tmp_path / "texts"
    assert main(["train", *one, *small, "--compression", "1.5", "--out", str(out)]) == 0
    assert main(["eval", "--genome", str(out / "genome.safetensors"), *one]) == 0
    assert main(["eval", "--genome", str(out / "genome.safetensors"), *other]) == 2
    assert "has classes ['cool', 'hot'], the data ['apt', 'hot']" in capsys.readouterr().err
    (tmp_path / "low.txt").write_text("a small text of lower case\n" * 300)
    (tmp_path / "high.txt").write_text("A SMALL TEXT OF LOWER CASE\n" * 300)
    small = ["--pnet-config", json.dumps({"layers": 1, "width": 16, "heads": 2, "hidden": 16}), "--steps", "2"]
    low, high = (["--task", "text", "--data-dir", str(tmp_path / f"{name}.txt")] for name in ("low", "high"))
    assert main(["train", *low, *small, "--compression", "2", "--overwrite", "--out", str(out)]) == 0
    for command in ("eval", "sample"):
        assert main([command, "--genome", str(out / "genome.safetensors"), *low[2:]]) == 0
        assert main([command, "--genome", str(out / "genome.safetensors"), *high[2:]]) == 2
        assert "another alphabet than the data's text" in capsys.readouterr().err


def test_dtype_rounds_the_genome_that_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(name: str, *options: str) -> tuple[bytes, dict]:
        assert main(["train", *BRIEF, *options, "--out", str(tmp_path / name)]) == 0
        return (tmp_path / name / "genome.safetensors").read_bytes(), read(tmp_path / name)[0]

    data, own = run("default")
    assert own["dtype"] == "float32" and run("float32", "--dtype", "float32")[0] == data
    plan, genome = gb.load(tmp_path / "default" / "genome.safetensors")
    for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        data, metrics = run(name, "--dtype", name)
        rounded = gb.Genome(*tree_map(lambda leaf, to=dtype: leaf.to(to).float(), tuple(genome)))
        read_plan, read_genome = gb.load(tmp_path / name / "genome.safetensors")
        assert read_plan == plan and same_bits(read_genome, rounded)
        net = gb.materialize(plan, rounded, mlp((64, 48, 10), 0))
        assert accuracy(net, TASKS["digits"]().test) == metrics["test_accuracy"] and metrics["dtype"] == name
        assert metrics["genome_bytes"] == len(data) < own["genome_bytes"] - 500
        assert f"{len(data):,}" in capsys.readouterr().out


def test_plan_tells_the_size_as_it_is_stored(tmp_path: Path, command: Any) -> None:
    assert main(["train", *BRIEF, "--dtype", "int5", "--out", str(tmp_path)]) == 0
    told = command(["plan", "--config", str(tmp_path / "config.toml")]).out
    plan, genome = gb.load(tmp_path / "genome.safetensors")
    said = gb.load_metadata(tmp_path / "genome.safetensors")
    assert told == plan.report("int5", metadata=said) + "\n" != plan.report() + "\n"
    size = (tmp_path / "genome.safetensors").stat().st_size
    assert f" {size:,} bytes on disk as int5" in plan.report("int5", genome, said)
    with pytest.raises(ValueError, match="int9"):
        plan.report("int9")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", [None, "float16", "int6"])
def test_genome_bytes_are_those_of_the_whole_file(dtype: str | None, tmp_path: Path) -> None:
    """Exact from below, with what the file says of its task; codes take what their values need, and are the default."""
    options = ["--genome-bytes", "2000", *(["--dtype", dtype] if dtype else []), "--out", str(tmp_path)]
    assert main(["train", "--sizes", "64", "48", "10", "--epochs", "1", "--batch-size", "400", *options]) == 0
    path = tmp_path / "genome.safetensors"
    size, (plan, _) = path.stat().st_size, gb.load(path)
    assert (0.95 if dtype == "float16" else 0.8) * 2000 <= size <= 2000
    assert read(tmp_path)[0]["dtype"] == (dtype or "auto")
    assert plan.target == "at most 2,000 bytes" and "genome_bytes = 2000" in (tmp_path / "config.toml").read_text()
    if dtype is not None:
        assert 1900 <= sum(file_bytes(plan, dtype, metadata=gb.load_metadata(path)).values()) <= 2000
