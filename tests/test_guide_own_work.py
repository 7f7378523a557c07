"""The guide's example of a task and a p-net of one's own, as it stands there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import gbfunc as gb
from gbfunc import hypernets
from gbfunc.cli import main

GUIDE = Path(__file__).resolve().parents[1] / "notebooks/guides/tasks.md"


def block(name: str) -> str:
    """The first fenced block after `<!-- example: name -->`."""
    found = re.search(
        rf"<!-- example: {re.escape(name)} -->\n```\w+\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.S
    )
    assert found is not None
    return found[1]


def test_own_work_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_work.py").write_text(block("my_work.py"))
    program, *arguments = shlex.split(block("my_work"))
    assert program == "gbfunc" and main(arguments) == 0
    metrics = json.loads(Path("run/metrics.json").read_text())
    assert metrics["task"] == "tumours" and metrics["pnet"] == "my_work:build"
    assert metrics["pnet_params"] == 31 * 200 + 201 * 2 and metrics["ratio_params"] >= 20
    assert metrics["test_accuracy"] > 0.9
    config = ["--pnet", "my_work:build", "--pnet-config", '{"width": 200}']
    capsys.readouterr()
    assert main(["eval", "--task", "my_work:task", *config, "--genome", "run/genome.safetensors"]) == 0
    assert f"{metrics['test_accuracy']:.2%}" in capsys.readouterr().out
    # Another width than it was trained with.
    assert main(["eval", "--task", "my_work:task", "--genome", "run/genome.safetensors"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_own_types_are_saved_and_loaded(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(block("own types"), str(GUIDE), "exec"), names)
    try:
        pnet = nn.Linear(12, 9)
        plan = gb.make_plan(pnet, names["Outer"](), genome_params=50)
        gb.save(tmp_path / "g", plan, gb.init_genome(plan, pnet))
        assert gb.load(tmp_path / "g")[0] == plan
    finally:
        del hypernets.TYPES["outer"]
