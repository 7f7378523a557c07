"""`gbfunc federated`, and the app of the guide."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gbfunc as gb
from gbfunc.cli import main
from gbfunc.tasks import find_task
from tests.support.ranks import ROOT

pytest.importorskip("flwr", reason="its versions of other packages are not those of the other tests: see .ci/run")

FEDERATED = ["federated", "--sizes", "64", "55", "10", "--genome-params", "400", "--clients", "10", "--sample", "3"]


def test_the_command_learns_and_goes_on(tmp_path: Path, command: Any) -> None:
    out = tmp_path / "out"
    options = [*FEDERATED, "--alpha", "0.5", "--local-steps", "10", "--schedule", "constant", "--out", str(out)]
    assert main([*options, "--rounds", "12"]) == 0
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["test_accuracy"] > 0.7 and metrics["rounds"] == 12 and not metrics["left_out"]
    # int4 and int8 of 400 numbers, and some 300 bytes of Flower's message.
    assert metrics["largest_reply"] < 400 / 2 + 450 and metrics["bytes_down"] < 36 * (400 + 750)
    plan, genome = gb.load(out / "genome.safetensors")
    assert plan.genome_params <= 400 and len(gb.flatten(genome)[0]) == plan.genome_params
    assert "--resume continues it" in command([*options, "--rounds", "14"], 2).err
    assert main([*options, "--rounds", "14", "--resume"]) == 0
    again = json.loads((out / "metrics.json").read_text())
    assert again["rounds"] == 14
    # What was sent before the stop counts, too.
    assert again["bytes_up"] > 1.1 * metrics["bytes_up"] and again["bytes_down"] > 1.1 * metrics["bytes_down"]
    # Bit for bit: momentum, and what the clients have not sent yet.
    straight = ["--rounds", "14", "--out", str(tmp_path / "straight")]
    assert main([*options[:-2], *straight]) == 0
    vectors = [gb.flatten(gb.load(x / "genome.safetensors")[1])[0] for x in (out, tmp_path / "straight")]
    assert torch.equal(*vectors)
    rounds = [int(line.split(",")[1]) for line in (out / "history.csv").read_text().splitlines()[1:]]
    assert rounds == [0, 10, 12, 14]


def test_clients_share_texts(shared_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--task-config", '{"max_tokens": 8, "vocabulary": 300}', "--compression", "5"]
    words = ["federated", "--task", "trec", "--data-dir", str(shared_data / "trec"), *small, "--clients", "9"]
    assert main([*words, "--sample", "2", "--alpha", "1", "--rounds", "1", "--local-steps", "2"]) == 0
    assert "1 rounds; per client and round" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--strategy", "FedSGD"], "--strategy must be one of Bulyan, FedAdagrad, FedAdam, FedAvg"),
        (["--strategy-config", '{"etta": 1}'], "--strategy-config does not fit FedAvgM"),
        (["--up", "int9"], "up must be one of float32"),
        (["--strategy-config", '{"min_train_nodes": 11}'], "min_train_nodes must be at most --clients 10, got 11"),
        (["--strategy", "Bulyan", "--sample", "6"], "Bulyan needs at least 7 clients a round for 1 num"),
        (["--strategy", "FedTrimmedAvg"], "beta 0.2 trims none of 3 clients: give --strategy-config '{\"beta\": B}'"),
        (["--sample", "11"], "--sample must be at most --clients 10, got 11"),
        (["--alpha", "0"], "alpha > 0"),
        (["--resume"], "--resume needs --out"),
        (["--clients", "1000"], "1000 clients need 10 examples each"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: list[str], words: str, command: Any) -> None:
    assert words in command([*FEDERATED, *options], 2).err


@pytest.mark.parametrize(("name", "sample"), [("Krum", 5), ("MultiKrum", 5), ("Bulyan", 7), ("FedTrimmedAvg", 5)])
def test_robust_strategies_run(name: str, sample: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FEDERATED[:-1], str(sample), "--strategy", name, "--rounds", "2", "--local-steps", "2"]) == 0
    assert "2 rounds; per client and round" in capsys.readouterr().out


def test_the_dense_network_travels_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [*FEDERATED[:5], "--clients", "5", "--sample", "2", "--rounds", "1", "--dense", "--up", "int8"]
    assert main([*words, "--down", "float32", "--out", str(tmp_path)]) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["genome_params"] == 64 * 55 + 55 + 55 * 10 + 10
    assert metrics["bytes_down"] > 2 * 4 * metrics["genome_params"] > 3 * metrics["bytes_up"]


def test_the_guides_app_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "notebooks/guides/federated.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    task = find_task("digits", None, {})
    pnet = task.with_pnet(task.pnet.scaled(0.1)).build(0)  # pyright: ignore[reportOptionalCall]
    plan = task.plan(pnet, genome_params=600)
    gb.save(tmp_path / "genome", plan, gb.init_genome(plan, pnet, seed=0))
    monkeypatch.setenv("GENOME", str(tmp_path / "genome"))
    threads = torch.get_num_threads()
    try:
        exec(compile(code, "digits.py", "exec"), {"__name__": "__main__"})
    finally:
        torch.set_num_threads(threads)
    accuracy = float(capsys.readouterr().out.split("'accuracy': ")[1].split("}")[0])
    assert accuracy > 0.9
    net = gb.materialize(*gb.load(tmp_path / "genome.trained"), pnet)
    assert task.evaluate(net, task.test)["accuracy"] == accuracy
