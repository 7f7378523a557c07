"""Texts: how they are read, cut and measured, and a GPT's genome trained on one from the command line."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from gbfunc.cli import main
from gbfunc.tasks import TASKS, continue_text, find_task, token_loss
from gbfunc.tasks.base import Net, Task, text_metrics
from gbfunc.tasks.data import Windows
from gbfunc.tasks.text import byte_pairs, python_help, read_text

TINY = ["--pnet-config", '{"layers": 1, "width": 16, "heads": 2}', "--task-config", '{"context": 16}']


@pytest.fixture
def verse(tmp_path: Path) -> Path:
    path = tmp_path / "verse.txt"
    path.write_text("To be, or not to be: that is the question. " * 60)
    return path


def test_byte_pairs_are_read_back_and_shorter() -> None:
    pytest.importorskip("tokenizers", reason="byte-pair tokens need tokenizers")
    source = python_help()[:50_000]
    tokens = byte_pairs(source, 400)
    assert tokens.size == 400
    for part in (source[:5_000], "never seen: żółć 😀"):
        assert tokens.decode is not None and tokens.decode(tokens.encode(part).tolist()) == part
    assert len(tokens.encode(source)) < 0.7 * len(source)
    task = find_task("text", None, {"context": 8, "vocabulary": 300})
    found = text_metrics(lambda x: torch.zeros(*x.shape, 300), task.val)
    assert task.interface.outputs == 300 and found["bits_per_char"] < math.log2(300)


def test_windows_cover_the_text_once_and_batches_are_windows_from_anywhere() -> None:
    tokens = torch.arange(30)
    windows, generator = Windows(tokens, context=4, chars=30), torch.Generator().manual_seed(0)
    chunks = list(windows.chunks(3))
    x, y = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    assert len(windows) == len(x) == 7 and torch.equal(x.flatten(), tokens[:28]) and torch.equal(y, x + 1)
    assert [len(a) for a, _ in chunks] == [3, 3, 1]
    seen = set()
    for _ in range(100):
        batches = list(windows.batches(2, generator))
        assert len(batches) == 3
        for x, y in batches:
            assert x.shape == (2, 4) and torch.equal(y, x + 1) and torch.equal(x, x[:, :1] + torch.arange(4))
            seen |= set(x[:, 0].tolist())
    assert seen == set(range(26))


def test_metrics_by_hand() -> None:
    tokens = torch.randint(5, (42,), generator=torch.Generator().manual_seed(0))
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))
    windows = Windows(tokens, context=8, chars=84)
    expected = -table.log_softmax(1)[tokens[:40], tokens[1:41]].mean().item()
    found = text_metrics(lambda x: table[x], windows)
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    # Two characters a token.
    assert found["bits_per_char"] == pytest.approx(expected / math.log(2) / 2, rel=1e-5)
    loss, figures = token_loss(lambda x: table[x], next(windows.chunks(100)))
    assert float(loss) == pytest.approx(expected, rel=1e-5) and figures == {}


def test_the_built_in_text() -> None:
    task = TASKS["text"]()
    assert len(task.train) > 3_000 and task.interface.tokens and task.interface.inputs == (64,)
    assert task.decode is not None
    parts = [task.decode(s.tokens.tolist()) for s in (task.test, task.train, task.val)]
    assert "".join(parts) == python_help()
    assert 0.09 < len(parts[2]) / len(python_help()) < 0.11


def test_tiny_shakespeare(shared_data: Path) -> None:
    task = find_task("text", shared_data / "tinyshakespeare", {})
    assert task.interface.outputs == 65
    # The usual split: the last tenth validates.
    assert len(task.val.tokens) == 111_540
    net = task.build(0)
    for size in (31_000, 44_000, 62_000):
        plan = task.plan(net, genome_params=size)
        assert 0.98 * size <= plan.genome_params <= size
    # The norms and the embedding of a small genome leave it room.
    plan = task.plan(net, genome_params=20_000)
    assert 0.98 * 20_000 <= plan.genome_params <= 20_000 and not plan.direct


def test_text_from_the_command_line(verse: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = ["--task", "text", "--data-dir", str(verse)], tmp_path / "run"
    options = ["--compression", "2", "--steps", "60", "--seed", "1", "--out", str(out)]
    assert main(["train", *data, *TINY, *options]) == 0
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["ratio_params"] >= 2 and metrics["val_loss"] < math.log(20)
    assert metrics["val_bits_per_char"] == pytest.approx(metrics["val_loss"] / math.log(2))
    capsys.readouterr()
    genome = ["--genome", str(out / "genome.safetensors")]
    assert main(["eval", *data, *genome]) == 0
    assert f"{metrics['test_loss']:.4f} nats" in capsys.readouterr().out
    sample = ["sample", *data[2:], *genome]
    assert main([*sample, "--prompt", "To be", "--tokens", "40"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("To be") and len(told.out) == len("To be") + 40 + 1 and not told.err
    assert set(told.out) <= set(verse.read_text()) | {"\n"}
    for wrong, message in (
        (["--prompt", ""], "the prompt must hold at least one character"),
        (["--prompt", "Où"], "expected the 17 characters of the text, got 'O', 'ù'"),
        (["--prompt", "a", "--temperature", "-1"], "temperature must be a number >= 0, got -1.0"),
        (["--prompt", "a", "--tokens", "0"], "tokens must be an int >= 1, got 0"),
        (["--prompt", "a", "--seed", "-1"], "--seed must be at least 0"),
        (["--prompt", "a", "--genome", str(verse)], "verse.txt"),
    ):
        assert main([*sample, *wrong]) == 2
        told = capsys.readouterr()
        assert told.err.startswith("gbfunc: error: ") and message in told.err and told.err.count("\n") == 1
        assert not told.out


def test_texts_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such text file or folder"):
        read_text(tmp_path / "nowhere.txt")
    with pytest.raises(FileNotFoundError, match="expected .txt files in"):
        read_text(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"fine \xff\xfe")
    (tmp_path / "b.txt").write_bytes(b" \n")
    with pytest.raises(ValueError, match=r"a.txt is not a text in UTF-8 \(byte 5\)"):
        read_text(tmp_path)
    with pytest.raises(ValueError, match="b.txt must have text, got only white space"):
        read_text(tmp_path / "b.txt")
    (tmp_path / "b.txt").write_bytes(b"fine" + bytes(3_000))
    with pytest.raises(ValueError, match="b.txt must be text, got NUL at character 4"):
        read_text(tmp_path / "b.txt")
    (tmp_path / "b.txt").write_text("too short for windows", encoding="utf-8-sig")
    assert read_text(tmp_path / "b.txt") == "too short for windows"
    with pytest.raises(ValueError, match="more than 65 tokens in each part of .*b.txt, got 1: use a longer text"):
        TASKS["text"](data_dir=tmp_path / "b.txt")
    for config in ({"context": 1}, {"context": "long"}, {"vocabulary": 100}):
        with pytest.raises(ValueError, match="of the text task must be an int >= "):
            find_task("text", None, config)


def test_a_folder_is_one_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in {
        "b/2.txt": "third, in a folder\n",
        "b/10.txt": "second: 1 comes before 2",
        "a.txt": "\ufefffirst, ends with a line\n",
        "c.txt": "last " * 20,
        "empty.txt": "",
        ".hidden.txt": "no",
        ".git/x.txt": "no",
        "notes.md": "no",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    expected = "first, ends with a line\nsecond: 1 comes before 2\nthird, in a folder\n" + "last " * 20
    assert read_text(tmp_path) == expected
    task = TASKS["text"](data_dir=tmp_path, context=2)
    assert task.decode is not None
    assert "".join(task.decode(s.tokens.tolist()) for s in (task.test, task.train, task.val)) == expected
    monkeypatch.setattr(sys.modules[read_text.__module__], "_MAX_BYTES", 60)
    with pytest.raises(ValueError, match="at most 60 bytes of text"):
        read_text(tmp_path)


@pytest.fixture(scope="module")
def help_text() -> Task:
    return TASKS["text"](context=8)


def markov(task: Task, seed: int = 0) -> tuple[Net, torch.Tensor]:
    """A model that looks at the last token alone, and its table of logits; it refuses to see too much."""
    n = task.interface.outputs
    # Two more than the task knows, and the likeliest: they must never be drawn.
    table = torch.randn(n, n + 2, generator=torch.Generator().manual_seed(seed))
    table[:, n:] = 50.0

    def net(tokens: torch.Tensor) -> torch.Tensor:
        assert tokens.shape[0] == 1 and 1 <= tokens.shape[1] <= task.interface.inputs[0]
        return table[tokens]

    return net, table[:, :n]


def test_the_likeliest_text_by_hand(help_text: Task) -> None:
    net, table = markov(help_text)
    assert help_text.encode is not None and help_text.decode is not None
    token, expected = int(help_text.encode("a")[-1]), []
    for _ in range(20):
        token = int(table[token].argmax())
        expected.append(token)
    prompt = "Python is a"
    assert continue_text(net, help_text, prompt, 20, temperature=0.0) == help_text.decode(expected)
    # So little warmth changes nothing, and does not overflow.
    assert continue_text(net, help_text, prompt, 20, temperature=1e-300) == help_text.decode(expected)


def test_text_is_drawn_as_the_logits_have_it(help_text: Task) -> None:
    n = help_text.interface.outputs
    logits = torch.randn(n, generator=torch.Generator().manual_seed(3))
    drawn = continue_text(lambda x: logits.expand(*x.shape, n), help_text, "a", 4_000, temperature=0.7, seed=1)
    assert help_text.encode is not None
    counts = torch.bincount(help_text.encode(drawn), minlength=n)
    expected = 4_000 * (logits / 0.7).softmax(0)
    # Pearson's statistic has mean n - 1 and variance 2 (n - 1), a little more for rare tokens.
    assert float(((counts - expected) ** 2 / expected).sum()) < n + 8 * math.sqrt(2 * n)
