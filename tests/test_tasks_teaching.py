"""A trained network's outputs as targets: the loss, and `--teacher` from the command line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model
from torch import Tensor, nn

from gbfunc.cli import main
from gbfunc.tasks import TASKS, Recipe, Task, Windows, loss_fn, token_loss
from gbfunc.tasks.base import soft_divergence, taught
from gbfunc.tasks.pnets import PNETS, Interface

SIZES = ["--sizes", "64", "24", "10", "--batch-size", "300"]


def naive_divergence(student: Tensor, teacher: Tensor, temperature: float) -> float:
    """The mean over rows of sum p log(p / q), in float64, number by number."""
    rows = []
    for z, t in zip(student.double().reshape(-1, student.shape[-1]), teacher.double().reshape(-1, student.shape[-1]),
                    strict=True):  # fmt: skip
        q, p = ([math.exp(v / temperature) for v in values.tolist()] for values in (z, t))
        q, p = ([v / sum(values) for v in values] for values in (q, p))
        rows.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    return sum(rows) / len(rows)


@pytest.mark.parametrize(("shape", "temperature"), [((5, 3), 0.7), ((2, 4, 3), 4.0)])
def test_the_divergence_is_that_of_the_paper(shape: tuple[int, ...], temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (2 * torch.randn(shape, generator=generator) for _ in range(2))
    expected = naive_divergence(student, teacher, temperature)
    assert float(soft_divergence(student, teacher, temperature)) == pytest.approx(expected, rel=1e-5)
    assert float(soft_divergence(teacher, teacher, temperature)) == pytest.approx(0, abs=1e-6)


def test_the_loss_mixes_labels_and_teacher() -> None:
    task = TASKS["digits"]()
    student, teacher = task.build(0), task.build(1)
    batch = next(task.val.chunks(7))
    plain, aux = loss_fn(student, batch)
    plain = float(plain.detach())
    for weight, temperature in ((0.0, 2.0), (0.3, 3.0), (1.0, 1.0)):
        loss, told = taught(task, teacher, weight, temperature).loss(student, batch)
        divergence = naive_divergence(student(batch[0]), teacher(batch[0]), temperature)
        assert float(loss.detach()) == pytest.approx(
            (1 - weight) * plain + weight * temperature**2 * divergence, rel=1e-4
        )
        assert told["accuracy"] == aux["accuracy"] and float(told["teacher_kl"]) == pytest.approx(divergence, rel=1e-4)
    loss.backward()
    assert all(p.grad is None for p in teacher.parameters()) and not teacher.training
    assert all(p.grad is not None for p in student.parameters())


def test_it_works_for_tokens() -> None:
    interface, tokens = Interface((8,), 12, tokens=True), Windows(torch.arange(60) % 12, 8, 60)
    pnet = PNETS["gpt"](interface, layers=1, width=16, heads=2)
    task = Task("t", interface, tokens, tokens, tokens, pnet, lambda pnet, size: Recipe(), loss=token_loss)
    net = task.build(0).eval()
    loss, aux = taught(task, task.build(0), 1.0, 2.0).loss(net, next(tokens.chunks(3)))
    assert float(loss.detach()) == pytest.approx(0, abs=1e-5) and aux.keys() == {"teacher_kl"}


def test_no_teacher_is_asked_for_shapes() -> None:
    class Refusing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("it must not be asked")

    task = TASKS["digits"]()
    x, y = (part.to("meta") for part in next(task.val.chunks(3)))
    loss, _ = taught(task, Refusing()).loss(task.build(0).to("meta"), (x, y))
    assert loss.is_meta


def test_what_cannot_teach_is_refused() -> None:
    digits = TASKS["digits"]()
    for name, value, expected in (
        ("weight", 1.5, "from 0 to 1"),
        ("temperature", 0.0, "a positive number"),
        ("temperature", math.inf, "a positive number"),
    ):
        with pytest.raises(ValueError, match=f"{name} must be {expected}, got {value}"):
            taught(digits, nn.Identity(), **{name: value})
    task = taught(digits, nn.Flatten())
    with pytest.raises(ValueError, match=r"must give logits \[3, 10\] as the p-net does, got \[3, 64\]"):
        task.loss(task.build(0), next(task.val.chunks(3)))


def test_a_dense_file_teaches_and_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense, out = tmp_path / "dense", tmp_path / "out"
    assert main(["train", "--dense", *SIZES, "--epochs", "8", "--out", str(dense)]) == 0
    genome = ["train", *SIZES, "--genome-params", "500", "--epochs", "1", "--overwrite", "--out"]
    for path in (dense, dense / "genome.safetensors"):
        assert main([*genome, str(out), "--teacher", str(path), "--teacher-weight", "1"]) == 0
        config = json.loads((out / "metrics.json").read_text())["config"]
        assert config["teacher"] == str(path) and (config["teacher_weight"], config["temperature"]) == (1.0, 2.0)
        assert "train_teacher_kl" in (out / "history.csv").read_text().splitlines()[0]
    # Labels are not asked for: four times the divergence is the loss.
    header, row = ((out / "history.csv").read_text().splitlines()[i].split(",") for i in (0, 1))
    values = dict(zip(header, row, strict=True))
    assert float(values["train_loss"]) == pytest.approx(4 * float(values["train_teacher_kl"]), rel=1e-4)
    # A genome teaches as well, of other widths than its pupil's.
    wide = ["train", "--sizes", "64", "32", "10", "--batch-size", "300", "--genome-params", "500", "--epochs", "1"]
    assert main([*wide, "--teacher", str(out)]) == 0
    capsys.readouterr()


def test_what_teaches_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(nn.Linear(3, 2), str(tmp_path / "other.safetensors"))
    (tmp_path / "text").write_text("no tensors")
    (tmp_path / "empty").mkdir()
    genome = ["train", *SIZES, "--genome-params", "500"]
    for options, message in (
        (["--teacher", str(tmp_path / "no")], "--teacher: no such file or folder"),
        (["--teacher", str(tmp_path / "empty")], "holds neither genome.safetensors nor model.safetensors"),
        (["--teacher", str(tmp_path / "text")], "is no safetensors file"),
        (["--teacher", str(tmp_path / "other.safetensors")], "does not hold the weights of mlp"),
        (["--teacher-weight", "0.3"], "can be used only with --teacher"),
    ):
        assert main([*genome, *options]) == 2
        told = capsys.readouterr().err
        assert message in told and told.count("\n") == 1


def test_a_training_goes_on_with_the_same_teacher_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, name in enumerate(("a", "b")):
        task = TASKS["digits"]().with_pnet(PNETS["mlp"](TASKS["digits"]().interface, sizes=(64, 24, 10)))
        save_model(task.build(seed), str(tmp_path / f"{name}.safetensors"))
    genome = ["train", *SIZES, "--genome-params", "500", "--epochs", "1", "--out", str(tmp_path / "out")]
    assert main([*genome, "--teacher", str(tmp_path / "a.safetensors"), "--checkpoint-every", "2"]) == 0
    resumed = [*genome, "--resume", "auto"]
    assert main([*resumed, "--teacher", str(tmp_path / "a.safetensors")]) == 0
    capsys.readouterr()
    # As after any change of settings, such a checkpoint does not count.
    last = sorted((tmp_path / "out" / "checkpoints").glob("step-*"))[-1]
    assert main([*genome, "--resume", str(last), "--teacher", str(tmp_path / "b.safetensors")]) == 2
    assert "trained with other settings: teacher" in capsys.readouterr().err
