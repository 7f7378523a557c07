"""`--config`: a training as a file, which repeats it bit for bit; options of plan and optimizer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomlkit
import yaml

import gbfunc as gb
from gbfunc.cli import main
from gbfunc.cli.job import make_job
from gbfunc.cli.parser import config_words, parse

SMALL = ["--sizes", "64", "24", "10", "--genome-params", "200", "--steps", "6", "--batch-size", "100"]


def genome_of(folder: Path) -> bytes:
    return (folder / "genome.safetensors").read_bytes()


SGD = """--optimizer SGD --optimizer-config {"momentum":0.9} --schedule cosine --lr 0.3"""
GNET = """--seed 3 --epochs 1 --dtype int8 --finetune 3 --hypernet gnet --hypernet-config {"activation":"tanh"}"""
MOST = """--optimizer AdamW --weight-decay 0.1 --clip-norm 0.5 --measure-every 2 --dtype float16 --amp bfloat16
--rule 2.weight=low_rank{"rank":1} --max-tile 16 24 --exclude bias --warmup 0.3 --direct-lr 0.01 --checkpoint-every 3"""


@pytest.mark.process
@pytest.mark.parametrize("more", [[], GNET.split(), SGD.split(), MOST.split()], ids=["recipe", "gnet", "sgd", "most"])
def test_the_written_configuration_repeats_the_genome(more: list[str], tmp_path: Path) -> None:
    given = [word for word in SMALL if "--epochs" not in more or word not in ("--steps", "6")]
    assert main(["train", *given, *more, "--out", str(tmp_path / "a")]) == 0
    config = tmp_path / "a" / "config.toml"
    assert main(["train", "--config", str(config), "--out", str(tmp_path / "b")]) == 0
    assert genome_of(tmp_path / "a") == genome_of(tmp_path / "b")
    assert config.read_bytes() == (tmp_path / "b" / "config.toml").read_bytes()
    settings = tomlkit.parse(config.read_text()).unwrap()
    assert settings == json.loads((tmp_path / "a" / "metrics.json").read_text())["config"]
    assert {"lr", "batch_size", "seed", "device", "dtype", "optimizer", "schedule"} <= settings.keys()
    assert ("epochs" in settings) != ("steps" in settings)
    assert not {"out", "config", "checkpoint_every"} & settings.keys()
    assert parse(["train", "--config", str(config), "--seed", "9"]).data.seed == 9


def test_every_format_says_the_same(tmp_path: Path) -> None:
    options = {"sizes": [64, 48, 10], "lr": 1e-05, "pnet-config": {"odd": None}, "rule": ["a=none"], "compile": True}
    (tmp_path / "a.json").write_text(json.dumps(options))
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(options))
    (tmp_path / "a.toml").write_text(tomlkit.dumps(options | {"pnet-config": '{"odd": null}'}))
    parsed = [parse(["train", "--config", str(path)]) for path in sorted(tmp_path.iterdir())]
    for train, path in zip(parsed, sorted(tmp_path.iterdir()), strict=True):
        assert train.config == path
        assert (train.data.sizes, train.training.lr, train.execution.compile) == ((64, 48, 10), 1e-05, True)
        assert train.genome.rule == ("a=none",) and json.loads(train.data.pnet_config) == {"odd": None}
    for name in ("a.toml", "a.yaml"):
        (tmp_path / name).write_text("# nothing\n")
        assert parse(["train", "--config", str(tmp_path / name)]).training.lr is None
    # Without the minus of its exponent's dot, YAML reads a text.
    (tmp_path / "b.yml").write_text("lr: 1e-3\nhypernet: null\nsizes: [64, 10]")
    train = parse(["train", "--config", str(tmp_path / "b.yml"), "--sizes", "64", "8", "10", "--lr", "None"])
    assert (train.data.sizes, train.training.lr, train.genome.hypernet) == ((64, 8, 10), None, None)


def test_the_command_line_wins_over_alternatives_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "a.TOML"
    config.write_bytes(b"\xef\xbb\xbf" + tomlkit.dumps({"genome_params": 200, "training": {"steps": 6}}).encode())
    for more, size in (["--genome-bytes=3000"], (None, 3000, None)), (["--compression", "9"], (None, None, 9.0)):
        train = parse(["train", "--config", str(config), *more, "--epochs", "1"])
        assert (train.training.epochs, train.training.steps) == (1, None)
        assert (train.genome.genome_params, train.genome.genome_bytes, train.genome.compression) == size
    train = parse(["train", "--config", str(config), "--lr", "0.1"])
    assert (train.training.steps, train.genome.genome_params) == (6, 200)
    assert main(["train", "--config", str(config), "--steps", "2", "--epochs", "1"]) == 2
    assert "give at most one of --epochs and --steps, got 1 and 2" in capsys.readouterr().err


def test_other_commands_take_what_they_share(tmp_path: Path, command: Any) -> None:
    assert main(["train", *SMALL, "--out", str(tmp_path)]) == 0
    config = str(tmp_path / "config.toml")
    accuracy = json.loads((tmp_path / "metrics.json").read_text())["test_accuracy"]
    evaluation = ["eval", "--config", config, "--genome", tmp_path / "genome.safetensors"]
    assert f"{accuracy:.2%}" in command(evaluation).out
    # What is a device to train on is a file where ranks are planned.
    assert "1,810" in command(["plan", "--config", config]).out
    assert not any(word.startswith("--device") for word in config_words("plan", ["--config", config]))


TOML = """
include = ["^0.bias"]
exclude = ["^2.bias"]
rule = ['^2.weight=low_rank{"rank": 2}', "^0.bias=constant"]
[encodings]
"0.weight" = [{ type = "table", file = "kinds.npy" }, { type = "grid", dims = [8, 8], bandwidth = 3.0 }]
"2.weight" = ["gray", { type = "per_axis", channels = "binary", positions = { type = "grid", dims = [2, 2] },
              n_positions = 4 }]
"""


def test_a_file_says_codes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kinds = np.random.default_rng(0).normal(size=(48, 3)).astype(np.float16)
    np.save("kinds.npy", kinds)
    Path("plan.toml").write_text(TOML.replace("},\n             ", "},"))
    options = parse(["plan", "--config", "plan.toml", "--sizes", "64", "48", "10", "--genome-params", "400"])
    first, bias, last, end = make_job(options.data, options.genome).plan.tensors
    (slot,), (other,) = first.slots, last.slots
    assert slot.row_code == gb.table(kinds) and slot.col_code == gb.grid(8, 8, bandwidth=3.0)
    assert other.hypernet == gb.low_rank(2) and other.row_code == gb.gray()
    assert other.col_code == gb.per_axis(gb.binary(), gb.grid(2, 2), 4)
    assert bias.slots[0].hypernet == gb.constant() and end.role == "direct"
