"""Texts with classes: how files are read and batches cut, and p-nets of them trained from the command line."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from gbfunc.cli import main
from gbfunc.cli.job import load_task
from gbfunc.cli.options import DataOptions
from gbfunc.tasks import Task, find_task
from gbfunc.tasks.base import Recipe, linear_decay
from gbfunc.tasks.pnets import find_pnet
from gbfunc.tasks.text import PaddedTexts, read_labelled

pytest.importorskip("tokenizers", reason="byte-pair tokens need tokenizers")
pytest.importorskip("transformers", reason="the p-nets need transformers")

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
NAMES = ("ann", "bob", "cat", "dan", "eve")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Questions of two kinds, which their first words tell apart."""
    lines = [f"{kind} {start} {name} {end} ?" for name in NAMES for end in ("eat", "go now", "sleep so very long")
             for kind, start in (("time", "When did"), ("place", "Where does"))]  # fmt: skip
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "test.txt").write_text("\n".join(lines[:7]))
    return tmp_path


def task_of(folder: Path, **options: Any) -> Task:
    return find_task("texts", folder, options)


def test_labels_are_sorted_and_examples_disjoint(folder: Path) -> None:
    task = task_of(folder)
    assert (len(task.train), len(task.val), len(task.test)) == (27, 3, 7)
    assert task.interface.outputs == 2 and task.interface.inputs == (64,) and task.interface.pad == 0
    assert task.encode is not None
    words = task.encode("When did ann eat ?")
    rows = (task.test.x[:, : len(words)] == words).all(1) & (task.test.lengths == len(words))
    # "place" is class 0, "time" class 1.
    assert rows.sum() == 1 and task.test.y[rows].item() == 1
    seen = [tuple(x.tolist()) for split in (task.train, task.val) for x in pad_to(split.x, 64)]
    assert len(set(seen)) == 30
    again = find_task("texts", str(folder), {})
    assert torch.equal(task.val.x, again.val.x) and torch.equal(task.train.y, again.train.y)


def pad_to(x_NL: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(x_NL, (0, length - x_NL.shape[1]))


def test_a_batch_is_as_long_as_its_longest_text(folder: Path) -> None:
    split = task_of(folder).train
    widths = set()
    for x_BL, y_B in split.batches(2, torch.Generator().manual_seed(0)):
        assert x_BL.shape[0] == len(y_B) == 2 and (x_BL != 0).any(0).all()
        widths.add(x_BL.shape[1])
    assert len(widths) > 1
    x, y = (list(parts) for parts in zip(*split.chunks(10), strict=True))
    assert torch.equal(torch.cat([pad_to(part, split.x.shape[1]) for part in x]), split.x)
    assert torch.equal(torch.cat(y), split.y) and [len(part) for part in y] == [10, 10, 7]
    assert x[0].shape[1] < x[-1].shape[1]
    assert split.to("meta").x.is_meta and isinstance(split.to("meta"), PaddedTexts)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("bert", TINY),
        ("roberta", TINY),
        ("gpt2", {"n_embd": 16, "n_layer": 1, "n_head": 2}),
        ("distilbert", {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}),
    ],
)
def test_padding_changes_no_logits_and_long_texts_are_cut(folder: Path, name: str, config: dict) -> None:
    task = task_of(folder)
    net = find_pnet(f"hf:{name}", task.interface, config).build(0).eval()
    for longer in (0, 3, 20):
        x_BL = torch.nn.functional.pad(task.test[:2][0], (0, longer))
        torch.testing.assert_close(net(x_BL), net(task.test.x[:2]), rtol=0, atol=1e-5)
    short = task_of(folder, max_tokens=4)
    assert short.train.x.shape[1] == 4 < task.train.x.shape[1] and short.interface.inputs == (4,)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train", "", "train.txt must have text, got only white space"),
        ("train", "a b\nlonely\n", r"train.txt, line 2: expected a label, white space and a text, got 'lonely'"),
        ("train", "a b\n no label\n", "train.txt, line 2: expected a label"),
        ("train", "a b\nb\t \n", "train.txt, line 2: expected a label"),
        ("train", "a b\na c\n", "two classes or more, got 'a' alone"),
        ("train", "a b\nb c\n", "must hold 10 texts or more, got 2"),
        ("test", "time When ?\nhow Why ?", "line 2: expected a label of train.txt, 'place', 'time', got 'how'"),
        ("test", None, "no such file of labelled texts: .*test.txt"),
    ],
)
def test_damaged_files_are_refused(folder: Path, name: str, content: str | None, message: str) -> None:
    path = folder / f"{name}.txt"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        task_of(folder)


def test_options_out_of_range_are_refused(folder: Path) -> None:
    for options, message in (
        ({"max_tokens": 3}, "max_tokens of the texts task must be an int >= 4, got 3"),
        ({"vocabulary": 100}, "vocabulary of the texts task must be an int >= 257, got 100"),
        ({"vocabulary": 300, "pretrained": "x"}, "has its own vocabulary, got vocabulary 300"),
    ):
        with pytest.raises(ValueError, match=message):
            task_of(folder, **options)


def test_files_come_from_any_system_and_any_white_space_ends_a_label(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfx one  two\r\ny three\xe2\x80\xa8four\r\n")
    assert read_labelled(path) == (["x", "y"], ["one  two", "three\u2028four"])
    for gap in (" ", "\t", "\t ", "\u00a0"):
        path.write_text(f"x{gap}one\ttwo\ny{gap}three four\n", encoding="utf-8")
        assert read_labelled(path) == (["x", "y"], ["one\ttwo", "three four"])


def test_linear_decay_rises_and_falls() -> None:
    schedule = linear_decay(Recipe(warmup=0.2), 1.0, 10)
    assert [round(schedule(step), 3) for step in (0, 1, 2, 5, 9, 10, 11)] == [0.5, 1.0, 0.889, 0.556, 0.111, 0.0, 0.0]


def test_a_genome_learns_and_is_read_back(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    model = ["--task", "texts", "--data-dir", str(folder), "--pnet-config", json.dumps(TINY)]
    length = ["--compression", "1.3", "--batch-size", "9", "--epochs", "20"]
    assert main(["train", *model, *length, "--out", str(out)]) == 0
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["val_accuracy"] == metrics["test_accuracy"] == 1.0 and metrics["ratio_params"] >= 1.3
    capsys.readouterr()
    assert main(["eval", *model, "--genome", str(out / "genome.safetensors")]) == 0
    assert "100.00%" in capsys.readouterr().out
    # Before transformers 5 a BERT cannot run on shapes alone.
    if int(version("transformers").partition(".")[0]) >= 5:
        assert main(["plan", *model, "--compression", "1.3", "--ranks", "2"]) == 0


def test_trec_is_as_published(shared_data: Path) -> None:
    if not (shared_data / "trec").is_dir():
        pytest.skip("no TREC in the folder of real data")
    task = load_task(DataOptions(task="trec", data_dir=shared_data / "trec"))
    assert (len(task.train), len(task.val), len(task.test)) == (4_952, 500, 500)
    assert task.test.y.bincount().tolist() == [138, 94, 9, 65, 81, 113]
    assert task.build(0)(next(task.val.chunks(2))[0]).shape == (2, 6)
