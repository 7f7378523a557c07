"""What the guides say to write runs, as it stands there."""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gbfunc as gb
from gbfunc import encoding, hypernets
from gbfunc.cli import main

_GUIDES = Path(__file__).resolve().parents[1] / "notebooks/guides"
TEXT, OWN, CONTROL = ((_GUIDES / name).read_text(encoding="utf-8") for name in ("torchgb.md", "tasks.md", "control.md"))
_PROSE = {"extra=", "Checkpointer", '"factors"', '"replicated"'}


def block(name: str, text: str = TEXT) -> str:
    found = re.search(rf"<!-- example: {re.escape(name)} -->\n```\w+\n(.*?)```", text, re.S)
    assert found is not None
    return found[1]


def right_column() -> list[str]:
    """All code in the second columns of the tables, in order."""
    rows = [re.split(r"(?<!\\)\|", line) for line in TEXT.splitlines() if line.startswith("| ")]
    return [code.replace(r"\|", "|") for row in rows for code in re.findall(r"`([^`]+)`", row[2])]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    # Steps of small nets are fastest so, where other work takes a core by far.
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    torch.set_num_threads(threads)


def test_every_right_hand_side_runs(workplace: None, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(block("setting"), names)
    codes = [code for code in right_column() if code not in _PROSE and not code.startswith(("gbfunc ", "--", ".txt"))]
    values = {}
    for code in codes:
        try:
            values[code] = eval(code, names)
        except SyntaxError:
            exec(code, names)
    assert len(codes) > 35
    plan, state = names["plan"], names["gnet_params"]
    assert names["matrix"].shape == (256, 784) and names["tiles"].shape == (24, 86, 98)
    assert torch.equal(names["trained"][6].weight, names["model"][6].weight)
    assert not torch.equal(names["trained"][2].weight, names["model"][2].weight)
    assert values["plan.ratio_params"] == plan.pnet_params / plan.genome_params >= 20
    split = values["plan.genome_params - sum(t.numel for t in plan.direct)"]
    assert split + values["sum(t.numel for t in plan.direct)"] == plan.genome_params
    aligned = [value for code, value in values.items() if "update_alignment" in code]
    assert len(aligned) == 1 and 0 < aligned[0] <= 1
    assert names["extra"] == {"epoch": 3} and int(state.step) == 1 and bool(names["info"].finite)
    assert "0.weight" in capsys.readouterr().out


def test_commands_are_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that need no data go as far as a plan; the others ask for it in one line."""
    commands = [code.split()[1:] for code in right_column() if code.startswith("gbfunc ")]
    assert len(commands) == 3
    for command in commands:
        arguments = [x if x != "FOLDER" else str(tmp_path) for x in command]
        code = main(["plan", *arguments[1:]])
        told = capsys.readouterr()
        assert code == 0 or "needs --data-dir" in told.err or "expected .txt files in" in told.err, told.err


def test_the_mlp_example_learns(
    workplace: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mlp_example.py").write_text(block("mlp_example.py").replace("EPOCHS = 10", "EPOCHS = 4"))
    monkeypatch.setattr(sys, "argv", ["mlp_example.py"])
    runpy.run_path("mlp_example.py")
    told = capsys.readouterr().out
    assert float(re.findall(r"accuracy ([\d.]+)%", told)[-1]) > 92
    plan, _ = gb.load("genome.safetensors")
    assert f"{plan.ratio_params:.1f}x" in told and 20.0 <= plan.ratio_params < 20.5


def test_own_work_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_work.py").write_text(block("my_work.py", OWN))
    program, *arguments = shlex.split(block("my_work", OWN).replace("\\\n", " "))
    assert program == "gbfunc" and main(arguments) == 0
    metrics = json.loads(Path("tumours/metrics.json").read_text())
    assert metrics["task"] == "tumours" and metrics["pnet"] == "my_work:build"
    assert metrics["pnet_params"] == 31 * 200 + 201 * 2 and metrics["ratio_params"] >= 20
    assert metrics["test_accuracy"] > 0.9
    config = ["--pnet", "my_work:build", "--pnet-config", '{"width": 200}']
    told = command(["eval", "--task", "my_work:task", *config, "--genome", "tumours/genome.safetensors"]).out
    assert f"{metrics['test_accuracy']:.2%}" in told
    # Another width than it was trained with.
    assert command(["eval", "--task", "my_work:task", "--genome", "tumours/genome.safetensors"], 2).err.count("\n") == 1


def test_own_types_are_saved_and_loaded(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(block("own types", OWN), "tasks.md", "exec"), names)
    try:
        pnet = nn.Linear(12, 9)
        plan = gb.make_plan(pnet, names["Outer"](), genome_params=50)
        gb.save(tmp_path / "g", plan, gb.init_genome(plan, pnet))
        assert gb.load(tmp_path / "g")[0] == plan
    finally:
        del hypernets.TYPES["outer"]


def test_own_encodings_are_saved_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(block("own encoding", OWN), "tasks.md", "exec"), names)
    try:
        assert gb.load("ramp.safetensors")[0] == names["plan"]
    finally:
        del encoding.TYPES["ramp"]


@pytest.mark.process
def test_own_settings_of_control_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium")
    monkeypatch.chdir(tmp_path)
    Path("my_control.py").write_text(block("my_control.py", CONTROL))
    _, *arguments = shlex.split(block("my_control", CONTROL).replace("\\\n", " ").replace("20480", "2048"))
    assert main(arguments) == 0 and json.loads(Path("cartpole-own/metrics.json").read_text())["env_steps"] == 2048


def test_the_evolution_example_runs(workplace: None) -> None:
    pytest.importorskip("evotorch")
    exec(block("evolution", CONTROL), {})
    assert gb.load("evolved.safetensors")[0].genome_params <= 450
