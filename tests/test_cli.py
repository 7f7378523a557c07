"""The command line from end to end on real digits, and its errors."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file

import gbfunc as gb
from gbfunc.cli import main
from gbfunc.cli.options import HypernetName
from gbfunc.cli.ranks import amp_slowdown, amp_warning
from gbfunc.hypernets import HYPERNETS
from gbfunc.tasks import TASKS, accuracy
from gbfunc.tasks.pnets import PNETS, mlp
from gbfunc.tasks.training import dense_trainer, fit

SMALL = ["--sizes", "64", "48", "10", "--genome-params", "300"]
QUICK = [*SMALL, "--epochs", "2", "--batch-size", "100"]
BRIEF = [*SMALL, "--epochs", "1", "--batch-size", "400"]
METRICS = {
    "task": str,
    "hypernet": str,
    "pnet_params": int,
    "genome_params": int,
    "ratio_params": float,
    "dense_bytes": int,
    "genome_bytes": int,
    "ratio_bytes": float,
    "test_accuracy": float,
    "val_accuracy": float,
    "train_loss": float,
    "seconds": float,
    "steps": int,
    "seed": int,
}


def read(folder: Path) -> tuple[dict, list[dict[str, str]]]:
    with (folder / "history.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return json.loads((folder / "metrics.json").read_text()), rows


def test_train_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a" / "run"
    assert main(["train", *QUICK, "--seed", "4", "--out", str(out)]) == 0
    metrics, rows = read(out)
    assert {k: type(v) for k, v in metrics.items() if k in METRICS} == METRICS
    assert metrics["task"] == "digits" and metrics["hypernet"] == "periodic" and metrics["seed"] == 4
    assert metrics["pnet_params"] == 65 * 48 + 49 * 10 and metrics["genome_params"] <= 300
    assert metrics["ratio_params"] == metrics["pnet_params"] / metrics["genome_params"]
    assert metrics["dense_bytes"] == 4 * metrics["pnet_params"]
    assert metrics["genome_bytes"] == (out / "genome.safetensors").stat().st_size
    assert metrics["steps"] == 2 * (1_197 // 100)
    assert [row["epoch"] for row in rows] == ["1", "2"] and rows[-1]["step"] == str(metrics["steps"])
    assert float(rows[-1]["train_loss"]) == metrics["train_loss"] < float(rows[0]["train_loss"])
    assert (out / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in out.iterdir()) == [
        "best.safetensors",
        "config.toml",
        "genome.safetensors",
        "history.csv",
        "learning_curve.png",
        "metrics.json",
    ]
    # What is reported is what the file holds.
    plan, genome = gb.load(out / "genome.safetensors")
    task = TASKS["digits"]()
    net = gb.materialize(plan, genome, mlp((64, 48, 10), 0))
    assert accuracy(net, task.test) == metrics["test_accuracy"] > 0.2
    told = capsys.readouterr()
    assert "\r" not in told.err and "\x1b" not in told.err + told.out
    assert told.err.splitlines() == [line for line in told.err.splitlines() if line.startswith("genome: step ")]
    assert f"{metrics['test_accuracy']:.2%}" in told.out

    assert main(["eval", "--genome", str(out / "genome.safetensors")]) == 0
    assert f"{metrics['test_accuracy']:.2%}" in capsys.readouterr().out


def test_dense_trains_the_net_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--sizes", "64", "24", "10", "--epochs", "2"]
    assert main(["train", "--dense", *sizes, "--seed", "1", "--out", str(tmp_path)]) == 0
    metrics, rows = read(tmp_path)
    assert metrics["network"] == "dense" and metrics["hypernet"] is None
    assert metrics["genome_params"] == metrics["pnet_params"] == 65 * 24 + 25 * 10 and metrics["val_accuracy"] > 0.5
    assert {row["run"] for row in rows} == {"dense"}
    plan, genome = gb.load(tmp_path / "genome.safetensors")
    assert not genome.gnets and genome.direct.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    # The same as training without gbfunc, on the same schedule and data.
    task = TASKS["digits"]().with_pnet(PNETS["mlp"](TASKS["digits"]().interface, sizes=(64, 24, 10)))
    recipe = replace(task.recipe(metrics["genome_params"]), epochs=2)
    again = fit(dense_trainer(task.build(1), task, recipe), task, recipe, 1).history
    assert again[-1]["train_loss"] == pytest.approx(metrics["train_loss"], rel=1e-4)
    capsys.readouterr()
    assert main(["eval", "--genome", str(tmp_path / "genome.safetensors")]) == 0
    assert f"{metrics['test_accuracy']:.2%}" in capsys.readouterr().out


def test_the_same_seed_gives_the_same_genome(tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert main(["train", *BRIEF, "--seed", seed, "--out", str(tmp_path / name)]) == 0
    a, b, c = (load_file(tmp_path / n / "genome.safetensors") for n in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a | b)
    assert not all(torch.equal(a[name], c[name]) for name in a | c)


def test_demo_compares_three_nets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *QUICK, "--out", str(tmp_path)]) == 0
    metrics, rows = read(tmp_path)
    assert METRICS.keys() <= metrics.keys()
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


@pytest.mark.parametrize("hypernet", get_args(HypernetName))
def test_every_hypernet_trains(hypernet: str, tmp_path: Path) -> None:
    options = ["--sizes", "64", "48", "10", "--compression", "2", "--epochs", "1", "--batch-size", "400"]
    assert main(["train", *options, "--hypernet", hypernet, "--lr", "0.01", "--out", str(tmp_path)]) == 0
    metrics, _ = read(tmp_path)
    assert metrics["hypernet"] == hypernet and metrics["ratio_params"] >= 2


def test_names_cover_the_tables() -> None:
    # A constant is for a rule, and a module's factory has no name on a command line.
    assert set(get_args(HypernetName)) == set(HYPERNETS) - {"constant", "module"}


def test_results_are_replaced_and_nothing_else_is_touched(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["train", *BRIEF, "--out", str(tmp_path)]) == 0
    assert read(tmp_path)[0]["task"] == "digits"
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not [p for p in tmp_path.iterdir() if p.suffix == ".part"]


def test_a_finished_training_is_replaced_only_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", *SMALL, "--steps", "1", "--out", str(tmp_path)]
    assert main(train) == 0
    genome = (tmp_path / "genome.safetensors").read_bytes()
    for resume in ([], ["--resume", "auto"]):
        assert main([*train, "--seed", "1", *resume]) == 2
        told = capsys.readouterr().err.splitlines()[-1]
        assert told.endswith("holds a finished training: --overwrite replaces it, or choose another --out")
    assert (tmp_path / "genome.safetensors").read_bytes() == genome
    assert main([*train, "--seed", "1", "--overwrite"]) == 0
    assert (tmp_path / "genome.safetensors").read_bytes() != genome


def test_a_refused_command_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a" / "b"
    for options in (
        ["--optimizer-config", '{"nope": 1}', "--checkpoint-every", "1"],
        ["--log-every", "0", "--checkpoint-every", "1", "--log", "csv"],
        ["--batch-size", "5000", "--log", "csv"],
    ):
        assert main(["train", *SMALL, *options, "--out", str(out)]) == 2 and not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "constriction", None)
    assert main(["compare", "--quick", "--sizes", "200", "--methods", "pruned", "--out", str(out)]) == 2
    assert "pip install 'gbfunc[cli]'" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_refused_export_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *SMALL, "--steps", "1", "--out", str(tmp_path / "run")]) == 0
    genome = ["--genome", str(tmp_path / "run" / "genome.safetensors")]
    for out, words in (
        (tmp_path / "a" / "b" / "net.unknown", "got the suffix '.unknown'; gbfunc export writes pages (.html)"),
        (tmp_path / "run" / "metrics.json" / "net.onnx", "metrics.json is a file, expected a folder"),
        (tmp_path / "run", "run is a folder, expected a file"),
    ):
        assert main(["export", *genome, "--out", str(out)]) == 2 and words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_slow_autocast_is_warned_of() -> None:
    assert amp_slowdown(torch.bfloat16, torch.device("cpu")) > 0
    words = amp_warning("bfloat16", 6.27) or ""
    assert "takes 6.3 times as long as in float32, and a step is the longer the more of it are such products" in words
    assert amp_warning("bfloat16", 0.6) is None


def test_without_out_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *BRIEF]) == 0
    assert not list(tmp_path.iterdir())


def test_plan_prints_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--compression", "20", "--sizes", "64", "128", "10"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("0.weight", "0.bias", "2.weight", "2.bias"))


def test_mnist_from_the_command_line(shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--task", "mnist", "--data-dir", str(shared_data / "mnist")]
    options = [
        "--sizes",
        "784",
        "16",
        "10",
        "--genome-params",
        "200",
        "--epochs",
        "1",
        "--batch-size",
        "5000",
    ]
    assert main(["train", *data, *options, "--out", str(tmp_path)]) == 0
    metrics, _ = read(tmp_path)
    assert metrics["task"] == "mnist" and metrics["steps"] == 11
    capsys.readouterr()
    assert main(["eval", *data, "--genome", str(tmp_path / "genome.safetensors")]) == 0
    assert f"{metrics['test_accuracy']:.2%}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train", "--task", "mnist"], "--data-dir"),
        (["train", "--task", "mnist", "--data-dir", "/no/such/folder"], "/no/such/folder"),
        (["train", "--task", "nope"], "no task 'nope': choose one of"),
        (["train", "--task", "no.such.module:task"], "cannot import no.such.module"),
        (["train", "--pnet", "nope"], "no p-net 'nope': choose one of"),
        (["train", "--pnet", "gpt"], "the p-net gpt reads text"),
        (["train", "--pnet", "gpt", "--sizes", "3", "4"], "the p-net gpt has no option sizes"),
        (["train", "--pnet-config", "{"], "--pnet-config must be a JSON object such as"),
        (["plan", "--sizes", "64", "9", "10", "--pnet-config", '{"hidden": [8]}'], "(hidden) both say the sizes"),
        (["train", "--task-config", "[1]"], "--task-config must be a JSON object such as"),
        (["train", "--task", "text", "--data-dir", "/no/such/file"], "no such text file or folder: /no/such/file"),
        (["train", "--epochs", "1", "--steps", "3"], "at most one of --epochs and --steps, got 1 and 3"),
        (["train", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["train", "--sizes", "64", "10", "12"], "must start with 64 inputs and end with 10"),
        (["train", "--lr", "nan"], "--lr must be a positive number, got nan"),
        (["train", "--optimizer-config", '{"lr": 0.1}'], "has ['lr']: --lr, --direct-lr and --weight-decay say these"),
        (["train", "--batch-size", "5000"], "got 5000"),
        (["train", "--batch-size", "0"], "got 0"),
        (["train", "--seed", "-1"], "--seed must be at least 0 and below 2**63, got -1"),
        (["plan", "--seed", str(2**63)], "--seed must be"),
        (["plan", "--compression", "1e-320"], "1e-320"),
        (["train", "--device", "abacus"], "--device 'abacus' cannot be used"),
        (["train", "--device", "meta"], "--device 'meta' cannot be used"),
        (["train", "--device", "hpu"], "--device 'hpu' cannot be used"),
        (["bench", "--calibrate", "--threads", "0"], "--threads must be at least 1, got 0"),
        (["train", "--other-data-dir", "folder"], "are what a genome's network learns: say --from-birth"),
        (["plan", "--sizes", "64", str(10**14), "10"], "can't allocate memory: you tried to allocate"),
        (["train", "--genome-params", "500", "--compression", "40"], "at most one of --genome-params, --genome-bytes"),
        (["plan", "--hypernet", "xox"], "this size is the task's default: --genome-params, --genome-bytes and"),
        (["plan", "--genome-params", "3"], "3"),
        (["plan", "--compression", "1000000"], "a genome 1,000,000 times smaller cannot be reached: the smallest"),
        (["plan", "--compression", "nan"], "--compression must be a positive number, got nan"),
        (["demo", "--compression", "-1"], "--compression must be a positive number, got -1.0"),
        (["eval", "--genome", "/no/such/genome"], "no such genome file: /no/such/genome"),
    ],
)
def test_errors_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("gbfunc: error: ") and message in told.err and told.err.count("\n") == 1


def test_cuda_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert main(["train", "--device", "cuda"]) == 2
    assert "--device 'cuda' cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "demo", "compare", "bench", "federated"])
@pytest.mark.parametrize("below", ["", "a/b"])
def test_out_that_is_a_file_is_refused_before_training(
    command: str, below: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    assert main([command, "--out", str(tmp_path / "file" / below)]) == 2
    told = capsys.readouterr().err
    assert f"{tmp_path / 'file'} is a file, expected a folder" in told and told.count("\n") == 1


def test_a_genome_is_not_exported_onto_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *BRIEF, "--out", str(tmp_path)]) == 0
    genome = tmp_path / "genome.safetensors"
    before = genome.read_bytes()
    assert main(["export", "--genome", str(genome), "--out", str(tmp_path / "." / genome.name)]) == 2
    assert "is the genome's own file, which would be lost" in capsys.readouterr().err
    assert genome.read_bytes() == before


@pytest.mark.parametrize("options", [["--exclude", "2.weight"], ["--rule", "2.weight=none"], ["--exclude", "0.weight"]])
def test_any_layer_of_the_usual_p_net_may_stay_direct(options: list[str], tmp_path: Path) -> None:
    sized = ["--sizes", "64", "24", "10", "--genome-params", "1700", "--steps", "1", "--out", str(tmp_path)]
    assert main(["train", *sized, *options]) == 0
    plan, genome = gb.load(tmp_path / "genome.safetensors")
    assert [t.name for t in plan.direct if len(t.shape) > 1] == [options[1].removesuffix("=none")]
    assert genome.direct


def labelled(folder: Path, names: tuple[str, str]) -> list[str]:
    """A folder of texts in two classes, as options."""
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
    assert "holds classes ['cool', 'hot'], the data ['apt', 'hot']" in capsys.readouterr().err
    (tmp_path / "low.txt").write_text("a small text of lower case\n" * 300)
    (tmp_path / "high.txt").write_text("A SMALL TEXT OF LOWER CASE\n" * 300)
    small = ["--pnet-config", json.dumps({"layers": 1, "width": 16, "heads": 2, "hidden": 16}), "--steps", "2"]
    low, high = (["--task", "text", "--data-dir", str(tmp_path / f"{name}.txt")] for name in ("low", "high"))
    assert main(["train", *low, *small, "--compression", "2", "--overwrite", "--out", str(out)]) == 0
    for command in ("eval", "sample"):
        assert main([command, "--genome", str(out / "genome.safetensors"), *low[2:]]) == 0
        assert main([command, "--genome", str(out / "genome.safetensors"), *high[2:]]) == 2
        assert "another text's alphabet than the data's" in capsys.readouterr().err


def test_eval_refuses_what_is_no_genome(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "genome.safetensors"
    path.write_bytes(b"not a genome")
    assert main(["eval", "--genome", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_genome_of_another_task_or_p_net_is_named(
    tmp_path: Path, shared_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *BRIEF, "--out", str(tmp_path)]) == 0
    genome = ["--genome", str(tmp_path / "genome.safetensors")]
    capsys.readouterr()
    holds = "holds the genome of a p-net of 3,610 parameters (0.weight (48, 64), 0.bias (48,) and 2 more)"
    mnist = ["--task", "mnist", "--data-dir", str(shared_data / "mnist")]
    for argv, message in (
        (["eval", *mnist, *genome], f"{holds}, which is no mlp for the task mnist: sizes must start with 784"),
        (["sample", *genome], f"{holds}, which is no gpt for the task text: expected the parameters of gpt"),
        (["eval", *genome, "--pnet-config", '{"hidden": [47]}'], "--pnet-config says hidden [47], but"),
        (["eval", *genome, "--pnet-config", '{"sizes": [64, 47, 10]}'], "--pnet-config says hidden [47], but"),
    ):
        assert main(argv) == 2
        told = capsys.readouterr()
        assert message in told.err and told.err.count("\n") == 1 and told.out == ""
    assert main(["eval", *genome, "--pnet-config", '{"hidden": [48]}']) == 0


def test_eval_refuses_a_genome_of_another_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pnet = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 10))
    plan = gb.make_plan(pnet, gb.periodic(features=2))
    step = gb.make_train_step(
        plan, pnet, lambda net, batch: net(batch).sum(), gb.torch_optimizer(torch.optim.SGD, lr=0.1)
    )
    gb.save(tmp_path / "g.safetensors", plan, step.init(seed=0))
    assert main(["eval", "--genome", str(tmp_path / "g.safetensors")]) == 2
    assert "must start with 64" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train", "--epoch", "3"], "train has no option --epoch (did you mean --epochs?): see gbfunc train --help"),
        (["train", "--zzz", "3"], "train has no option --zzz: see"),
        (["train", "--ot", "3"], "train has no option --ot (did you mean --out?)"),
        (["train", "--compresion=3"], "train has no option --compresion (did you mean --compression?)"),
        (["train", "--epochs", "many"], "--epochs must be INT, got 'many'"),
        (["train", "--sizes", "3", "x"], "--sizes must be INT INT ..., got '3', 'x'"),
        (["train", "--seed", "x"], "--seed: invalid literal for int() with base 10: 'x'"),
        (["train", "--hypernet", "foo"], "invalid choice 'foo' for argument '--hypernet'"),
        (["plan", "extra"], "Unrecognized options: extra"),
        (["trian"], "no command 'trian' (did you mean train?): choose one of demo, plan, train"),
        (["dance"], "no command 'dance': choose one of demo, plan, train"),
        ([], "a command is missing: choose one of demo, plan"),
        (["eval"], "Missing from gbfunc eval: --genome FILE: see gbfunc eval --help"),
    ],
)
def test_the_parser_refuses_in_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert told.err.startswith("gbfunc: error: ") and message in told.err


@pytest.mark.parametrize(
    ("command", "called"), [("plan", "make_job"), ("eval", "read_genome"), ("bench", "find_device")]
)
def test_sigterm_ends_a_command_with_a_line(
    command: str, called: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(f"gbfunc.cli.{command}.{called}", lambda *args, **kwargs: signal.raise_signal(signal.SIGTERM))
    assert main([command, *["--genome", "genome"] * (command == "eval")]) == 143
    assert capsys.readouterr() == ("", "gbfunc: stopped by SIGTERM\n")
    assert signal.getsignal(signal.SIGTERM) is before


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out == f"gbfunc {gb.__version__}\n"


@pytest.mark.parametrize("command", ["demo", "plan", "train", "eval"])
def test_help_names_every_option_with_its_default(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "--task" in text and "--data-dir" in text
    assert all(name in text for name in (*TASKS, *PNETS))
    assert ("--epochs" in text) == (command in ("demo", "train"))


@pytest.mark.process
def test_python_dash_m() -> None:
    command = [sys.executable, "-m", "gbfunc", "plan", "--nope"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2 and "nope" in done.stderr and not done.stdout
