"""Tasks and p-nets of the user's own: what is wrong in their code is reported with its place."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gbfunc.cli import main

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

def net():
    return Net()

def sized(interface, width):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 10))

def read(interface):
    return json.loads("no JSON")

def named():
    from gbfunc.tasks.pnets import PNet
    return PNet("mlp", lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 10)))
"""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--pnet", "bad_code:net"], ") (bad_code.py:11, in forward)"),
        (["--pnet", "bad_code:read"], "line 1 column 1 (char 0) (bad_code.py:21, in read)"),
        (["--pnet", "bad_import:net"], "No module named 'not_there' (bad_import.py:2, in <module>)"),
        (["--pnet", "bad_code:sized"], 'bad_code:sized needs the option width, such as {"width": ...}, got none'),
        (["--pnet", "bad_code:named"], "as which its files would be read: give it another name"),
        (["--pnet", "bad_code:none"], "bad_code has no 'none' (bad_code:none)"),
    ],
)
def test_errors_in_own_code_say_where(
    options: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad_code.py").write_text(BAD)
    Path("bad_import.py").write_text("import json\nimport not_there\n")
    monkeypatch.delitem(sys.modules, "bad_code", raising=False)
    assert main(["train", *options, "--genome-params", "300", "--steps", "2"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(words)
