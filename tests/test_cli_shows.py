"""What the command line shows: help, progress, results, warnings, and the command to try next."""

import json
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from gbfunc.cli import main
from gbfunc.cli.options import TASKS as SHOWN
from gbfunc.cli.options import HypernetName
from gbfunc.cli.output import open_folder
from gbfunc.cli.parser import parse
from gbfunc.hypernets import HYPERNETS
from gbfunc.tasks import TASKS, find_task
from gbfunc.tasks.pnets import find_pnet
from gbfunc.tasks.pnets.base import n_params
from tests.test_cli import BRIEF, SMALL

FOLDERS = dict.fromkeys([name for name in SHOWN if name != "chat"], "") | dict.fromkeys(("trec", "texts"), "trec")
FOLDERS |= dict.fromkeys(("mnist", "fashion-mnist"), "mnist") | dict.fromkeys(("cifar10", "images"), "cifar10")


@pytest.mark.parametrize("name", FOLDERS)
def test_help_shows_the_values_of_the_recipe(name: str, shared_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["train", "--task", name, "--help"])
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    options = [option.partition("(default: ") for option in words.split(" --")[2:]]
    shown = {option.split()[0]: usual.split(")")[0] for option, _, usual in options}
    task = find_task(name, shared_data / FOLDERS[name] if FOLDERS[name] else None, {})
    recipe = task.recipe(task.genome_params or n_params(task.build(0)) / task.compression)
    usual = {"pnet": task.pnet.name, "genome-params": task.genome_params, "optimizer": recipe.optimizer.__name__}
    shared = ("batch-size", "lr", "steps", "warmup", "clip-norm")
    usual |= {key: getattr(recipe, key.replace("-", "_")) for key in shared}
    usual["epochs"] = None if recipe.steps else recipe.epochs
    assert {key: shown[key] for key in usual} == {k: "" if x is None else str(x) for k, x in usual.items()}
    assert SHOWN.keys() == TASKS.keys()
    # A constant and new rows are for a rule, and a module's factory has no name on a command line.
    assert set(get_args(HypernetName)) == HYPERNETS.keys() - {"constant", "new_rows", "module"}


def test_numbers_are_kept_and_shown_without_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    def failing(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gbfunc.plots.learning_curve", failing)
    said, told = command(["train", *BRIEF, "--out", tmp_path])
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    table, course = said.split("└")
    assert f"{metrics['test_accuracy']:.2%}" in table and "training" not in table
    assert "training: 2 steps in " in course and "MiB of memory" in course
    assert "warning: learning_curve.png could not be written: [Errno 28] No space left on device" in told
    assert f"{tmp_path}: best.safetensors, config.toml, genome.safetensors, history.csv, metrics.json\n" in said
    assert f"try next: gbfunc eval --genome {tmp_path / 'genome.safetensors'}" in said
    assert "; no files are kept: --out DIR keeps the genome" in command(["train", *BRIEF]).err


def test_an_interrupted_training_says_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopping(self: Any, state: Any, history: Any) -> None:
        self.write(state, self.path)
        raise KeyboardInterrupt

    monkeypatch.setattr("gbfunc.cli.output.Best.__call__", stopping)
    assert main(["train", *BRIEF, "--out", str(tmp_path)]) == 130
    cure = "--out DIR --checkpoint-every STEPS saves checkpoints to resume from"
    held = f"{tmp_path / 'best.safetensors'} has the best genome so far"
    assert capsys.readouterr().err.splitlines()[-1] == f"gbfunc: interrupted: {held}; {cure}"


@pytest.mark.filterwarnings("default:after 200 steps")
def test_a_training_at_chance_says_so(command: Any) -> None:
    train = ["train", *SMALL, "--steps", "202", "--schedule", "constant", "--measure-every", "202"]
    assert "gbfunc: warning: after 200 steps the loss, " in command([*train, "--lr", "10"]).err
    assert "warning" not in command(train).err


def test_one_training_at_a_time_writes_into_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_folder(tmp_path, locked=True):
        for command in ("train", "demo"):
            assert main([command, *BRIEF, "--out", str(tmp_path)]) == 2
            assert f"--out {tmp_path}: another training writes there" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


TEACHERS = {
    "net.pt": lambda net: net.state_dict(),
    "wrapped.pt": lambda net: {"epoch": 3, "model": {f"module.{k}": x for k, x in net.state_dict().items()}},
    "whole.pt": lambda net: net,
    "other.pt": lambda net: nn.Linear(3, 2).state_dict(),
    "list.pt": lambda net: [1],
}
_HOLDS = "must have the weights of own_net:make"
NO_TEACHERS = {
    "whole.pt": "whole.pt has objects other than weights, which are not run: save net.state_dict() with torch.save",
    "other.pt": f"{_HOLDS} (modules must have the same names; --pnet ",
    "list.pt": f"{_HOLDS}: expected tensors by name, such as net.state_dict(), got list",
    "own_net.py": _HOLDS,
    "other.safetensors": _HOLDS,
    "none": "--teacher: no such file or folder: none",
    "empty": "--teacher: empty has none of genome.safetensors, model.safetensors, ",
}


def test_a_trained_network_teaches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    task = TASKS["digits"]()
    monkeypatch.chdir(tmp_path)
    made = "nn.Sequential(nn.Flatten(), nn.Linear(64, 90), nn.ReLU(), nn.Linear(90, 10))"
    Path("own_net.py").write_text(f"from torch import nn\ndef make():\n    return {made}\n")
    monkeypatch.delitem(sys.modules, "own_net", raising=False)
    torch.manual_seed(0)
    net = eval(made)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(50):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(task.train.x), task.train.y).backward()
        optimizer.step()
    for name, held in TEACHERS.items():
        torch.save(held(net), tmp_path / name)
    save_model(nn.Linear(3, 2), str(tmp_path / "other.safetensors"))
    (tmp_path / "hub").mkdir()
    (tmp_path / "empty").mkdir()
    torch.save(net.state_dict(), tmp_path / "hub" / "pytorch_model.bin")
    train = ["train", "--pnet", "own_net:make", "--steps", "2", "--teacher"]
    for name in ("net.pt", "wrapped.pt", "hub"):
        told = command([*train, name, "--genome-bytes", "6000", "--out", name.replace("pt", "run")]).err
        assert "a genome fitted to the teacher's weights has validation accuracy" in told and "begins from this" in told
        metrics = json.loads(Path(name.replace("pt", "run"), "metrics.json").read_text())
        assert metrics["dtype"] == "auto" and "near chance" not in told
        assert f"gbfunc: the teacher has validation accuracy {metrics['teacher_val_accuracy']:.2%}\n" in told
    torch.save({k: 0 * x for k, x in net.state_dict().items()}, "chance.pt")
    shown = command([*train, "chance.pt", "--genome-params", "900", "--out", "chance"])
    assert "the teacher is near chance" in shown.err and "teacher: validation accuracy" in shown.out
    assert "try next: gbfunc eval --pnet own_net:make --genome chance" in shown.out
    assert "training begins from random g-nets" in command([*train, "net.pt", "--genome-params", "200"]).err
    for name, words in NO_TEACHERS.items():
        told = command([*train, name], 2).err
        assert words in told and told.count("\n") == 1


def test_a_folder_of_the_hub_teaches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    config = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    net: Any = find_pnet("hf:vit", TASKS["digits"]().interface, config | {"patch_size": 4}).build(0)
    net.save_pretrained(tmp_path / "hub")
    sizes = ["--pnet", "hf:vit", "--pnet-config", json.dumps(config | {"patch_size": 4}), "--compression", "3"]
    train = ["train", *sizes, "--steps", "2", "--teacher", str(tmp_path / "hub")]
    assert main(train) == 0 and "teacher_kl" in capsys.readouterr().err
    save_file({"vit.layernorm.bias": torch.zeros(16)}, tmp_path / "hub" / "model.safetensors", {"format": "pt"})
    assert main(train) == 2 and "weights of all parameters, got none for ['" in capsys.readouterr().err
