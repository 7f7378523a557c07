"""Tasks and p-nets of the user's own: what is wrong in their code is reported with its place."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import gbfunc as gb
from gbfunc.cli import main
from gbfunc.hypernets import TYPES
from gbfunc.tasks.pnets.base import import_factory

BAD = """import json
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        a, b = x.shape
        return self.layer(x)

def head(flat, n):
    return nn.Sequential(*[nn.Flatten()] * flat, nn.Linear(64, n))

def net():
    return Net()

def sized(interface, width):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 10))

def read(interface):
    return json.loads("no JSON")
"""


_FLAT = "raises RuntimeError: mat1 and mat2 shapes cannot be multiplied (16x8 and 64x10): start with nn.Flatten()"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--pnet", "bad_code:net"], ") (bad_code.py:11, in forward)"),
        (["--pnet", "bad_code:head", "--pnet-config", '{"flat": 0, "n": 10}', "--teacher", "bad_code.py"], _FLAT),
        (
            ["--pnet", "bad_code:head", "--pnet-config", '{"flat": 1, "n": 9}'],
            "must give outputs [2, 10], got [2, 9]: change its last layer",
        ),
        (["--pnet", "bad_code:read"], "line 1 column 1 (char 0) (bad_code.py:24, in read)"),
        (["--pnet", "bad_import:net"], "No module named 'not_there' (bad_import.py:2, in <module>)"),
        (["--pnet", "bad_code:sized"], "bad_code:sized: missing a required argument: 'width', got the options none"),
        (["--pnet", "bad_code:heads"], "module 'bad_code' has no attribute 'heads': did you mean head?"),
    ],
)
def test_errors_in_own_code_say_where(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad_code.py").write_text(BAD)
    Path("bad_import.py").write_text("import json\nimport not_there\n")
    monkeypatch.delitem(sys.modules, "bad_code", raising=False)
    assert main(["train", *options, "--genome-params", "300", "--steps", "2"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(words)


TYPE = """import gbfunc as gb, torch.nn as nn
@gb.register
class Mine(type(gb.periodic())):
    type = "mine"
net = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""


def test_commands_read_files_with_own_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_type.py").write_text(TYPE)
    net = import_factory("own_type:net", "a network")()
    plan = gb.make_plan(net, TYPES["mine"](features=3))  # pyright: ignore[reportCallIssue]
    gb.save("a", plan, gb.init_genome(plan, net), metadata={"task": "digits"})
    gb.save("b", plan, gb.init_genome(plan, net), metadata={"task": "digits", "pnet": "own_type:net"})
    for argv in (["eval"], ["export", "--out", "dense.safetensors"]):
        del TYPES["mine"], sys.modules["own_type"]
        assert "pass --pnet module:function of the file that does" in command([*argv, "--genome", "a"], 2).err
        assert "if you trust it, pass --pnet own_type:net" in command([*argv, "--genome", "b"], 2).err
        assert main([*argv, "--genome", "b", "--pnet", "own_type:net"]) == 0
    del TYPES["mine"], sys.modules["own_type"]


OWN = """from dataclasses import dataclass, replace
from itertools import count, islice
import torch
import torch.nn.functional as F
from gbfunc.tasks import Split, endless_batches
from gbfunc.tasks.images import digits

DIGITS = digits()

def of(**parts):
    return replace(DIGITS, name="own", **parts)

def losing(metrics):
    steps = count()
    return of(loss=lambda net, batch: (F.cross_entropy(net(batch[0]), batch[1]), metrics(next(steps))))

class Ragged(Split):
    def batches(self, batch_size, generator):
        order = torch.randperm(len(self), generator=generator)
        yield from ((self.x[i], self.y[i]) for i in order.split(batch_size))

    def to(self, device):
        return self

class Few(Split):
    def batches(self, batch_size, generator):
        return islice(super().batches(batch_size, generator), 5)

    def to(self, device):
        return self

def numbers():
    measure = lambda net, split: {"accuracy": torch.tensor(0.5), "count": torch.tensor([3])}
    task = losing(lambda step: {"halves": step / 2})
    return replace(task, evaluate=measure, train=Ragged(DIGITS.train.x, DIGITS.train.y))

def nothing():
    return of(evaluate=lambda net, split: None)

def another():
    return of(evaluate=lambda net, split: {"hits": 1})

def pair():
    return of(val=(DIGITS.val.x, DIGITS.val.y))

def vector():
    return losing(lambda step: {"hits": torch.ones(3)})

def changing():
    return losing(lambda step: {"hits": 1.0} if step else {})

def ended():
    return of(batches=lambda train, recipe, order, net: islice(endless_batches(train, 64, order), 1))

def few():
    return of(train=Few(DIGITS.train.x, DIGITS.train.y))
"""


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command that trains a small genome on a task of `own_tasks`, which is to be named at its end."""
    monkeypatch.chdir(tmp_path)
    Path("own_tasks.py").write_text(OWN)
    monkeypatch.delitem(sys.modules, "own_tasks", raising=False)
    return ["train", "--sizes", "64", "20", "10", "--genome-params", "300", "--task"]


def test_numbers_of_own_tasks_may_be_tensors(train: list[str]) -> None:
    # The batches' last one is not full, and left out.
    assert main([*train, "own_tasks:numbers", "--steps", "19", "--out", "out"]) == 0
    metrics = json.loads(Path("out/metrics.json").read_text())
    assert (metrics["val_accuracy"], metrics["test_count"]) == (0.5, 3)
    assert ",9.0," in Path("out/history.csv").read_text()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "evaluate of the task own must return a dict of numbers with the names ['accuracy'], got None"),
        ("another", "with the names ['accuracy'], got {'hits': 1}"),
        ("pair", "train, val and test of own_tasks:pair must be splits, such as gbfunc.tasks.Split, got tuple"),
        ("vector", "dict of numbers without the name 'loss'), got {'hits': tensor([1., 1., 1.])}"),
        ("changing", "must return the same metrics in all steps, got ['loss'], then ['hits', 'loss']"),
        ("ended", "expected 20 batches of the task own, got 1"),
        ("few", "a pass must have 18 full batches of 64, got 5"),
    ],
)
def test_own_tasks_that_cannot_be_are_refused(name: str, words: str, train: list[str], command: Any) -> None:
    assert words in command([*train, f"own_tasks:{name}", "--steps", "20"], 2).err.splitlines()[-1]
