"""`gbfunc train` on pipeline and tensor axes: one genome whatever the layout, and what is told of the training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gbfunc as gb
from gbfunc.cli.ranks import pipeline_microbatches
from tests.support.rank_commands import Ended
from tests.support.ranks import run_ranks
from tests.support.versions import needs_pipelines

TEXT = "".join(f"{i} times {i} is {i * i}, and so on.\n" for i in range(400))
CONFIG = {"--task-config": {"context": 16}, "--pnet-config": {"layers": 4, "width": 16, "heads": 2}}
STEPS, BATCH = 6, 8


def train(ranks: int, folder: Path, out: str, *options: str) -> list[Ended]:
    source = folder / "text.txt"
    source.write_text(TEXT)
    config = [word for option, value in CONFIG.items() for word in (option, json.dumps(value))]
    sizes = ["--steps", str(STEPS), "--batch-size", str(BATCH), "--compression", "2"]
    where = ["--data-dir", str(source), "--out", str(folder / out)]
    argv = ["train", "--task", "text", *config, *sizes, *where, *options]
    return [Ended(*found) for found in run_ranks(ranks, "rank_commands:run", arguments={"argv": argv})]


def trained(ranks: int, folder: Path, out: str, *options: str) -> dict[str, Any]:
    ended = train(ranks, folder, out, *options)
    assert not any(rank.code for rank in ended), ended
    assert sum(rank.out.count("test loss") for rank in ended) == 1, "rank 0 alone speaks"
    return json.loads((folder / out / "metrics.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    return trained(1, folder, "one", "--profile", str(folder / "profile one"), "--peak-flops", "1e12")


@pytest.mark.process
def test_ranks_of_other_options_or_data_are_refused(folder: Path) -> None:
    for rank, text in enumerate((TEXT, TEXT.replace("and", "dna"))):
        (folder / f"{rank}.txt").write_text(text)
    for ended in train(2, folder, "unlike", "--data-dir", str(folder / "@rank.txt"), "--measure-every", "2@rank"):
        assert ended.code == 2 and "ranks must have the same options and data: different from rank 0" in ended.err
        assert "are rank 1 in data (" in ended.err and '"measure_every": 21' in ended.err
    assert not (folder / "unlike").exists()


def genome_of(folder: Path, out: str) -> dict[str, torch.Tensor]:
    plan, genome = gb.load(folder / out / "genome.safetensors")
    return {name: tensor.double() for name, tensor in gb.generate(plan, genome).items()}


def assert_same_genome(folder: Path, out: str, tolerance: float = 2e-3) -> None:
    """The same weights as those of a single process, but for the order of float32 sums in Adam's first steps."""
    for name, expected in genome_of(folder, "one").items():
        error = torch.linalg.vector_norm(genome_of(folder, out)[name] - expected)
        assert error <= tolerance * torch.linalg.vector_norm(expected), name


@pytest.mark.process
def test_one_rank_tells_its_speed_and_a_profile(folder: Path, one: dict[str, Any]) -> None:
    context, width, words = 16, 16, len(set(TEXT))
    # Linear layers of four blocks, both products of attention, and the head; 2 operations a weight and a token.
    per_token = 4 * (12 * width**2 + 2 * context * width) + width * words
    assert one["model_flops_per_step"] == 3 * 2 * per_token * BATCH * context
    assert one["tokens_per_second"] == pytest.approx(one["samples_per_second"] * context)
    steps_per_second = one["samples_per_second"] / BATCH
    assert one["model_flops_per_second"] == pytest.approx(steps_per_second * one["model_flops_per_step"])
    assert one["peak_flops_share"] == pytest.approx(one["model_flops_per_second"] / 1e12)
    assert one["bytes_sent_per_step"] == 0 and one["bytes_sent_per_step_by_axis"] == {}
    events = json.loads((folder / "profile one" / "rank-0.json").read_text())["traceEvents"]
    # The first step warms up.
    assert {"ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#3"} <= {e.get("name") for e in events}
    assert "ProfilerStep" in (folder / "profile one" / "table.txt").read_text()


@pytest.mark.process
def test_two_tensor_ranks(folder: Path, one: dict[str, Any]) -> None:
    made = trained(2, folder, "tensor", "--mesh", "tensor=2", "--profile", str(folder / "profile tensor"))
    assert_same_genome(folder, "tensor")
    assert made["mesh"] == {"data": 1, "pipeline": 1, "gnets": 1, "tensor": 2}
    assert made["train_loss"] == pytest.approx(one["train_loss"], rel=1e-4)
    assert made["model_flops_per_step"] == one["model_flops_per_step"]
    assert made["bytes_sent_per_step_by_axis"].keys() == {"tensor", "world"}
    assert sum(made["bytes_sent_per_step_by_axis"].values()) == pytest.approx(made["bytes_sent_per_step"])
    assert "pipeline" not in made and "peak_flops_share" not in made
    assert sorted(p.name for p in (folder / "profile tensor").iterdir()) == ["rank-0.json", "rank-1.json", "table.txt"]


@pytest.mark.process
@needs_pipelines
@pytest.mark.parametrize("schedule", ["1f1b", *(pytest.param(s, marks=pytest.mark.slow) for s in ("gpipe", "zbv"))])
def test_two_pipeline_ranks(schedule: str, folder: Path, one: dict[str, Any]) -> None:
    made = trained(2, folder, schedule, "--mesh", "pipeline=2", "--pipeline", schedule)
    assert_same_genome(folder, schedule)
    assert (made["pipeline"], made["microbatches"]) == (schedule, 8)
    assert made["train_loss"] == pytest.approx(one["train_loss"], rel=1e-4)
    # Activations [1, 16, 16] of 8 microbatches, in float32, and where stages make a V those of both halves.
    assert made["bytes_sent_per_step_by_axis"]["pipeline"] == 8 * 16 * 16 * 4 * (2 if schedule == "zbv" else 1)


def test_microbatches_divide_the_rows() -> None:
    cases = {(12, 1, 2): 6, (12, 2, 2): 6, (8, 1, 2): 8, (9, 1, 2): 3}
    assert {given: pipeline_microbatches(*given) for given in cases} == cases
    for given in ((13, 2, 2), (2, 1, 4)):
        with pytest.raises(ValueError, match="divide the rows of each of its . shards, got a batch of"):
            pipeline_microbatches(*given)


@pytest.mark.process
def test_one_rank_prepares_files_before_the_others_read_them(tmp_path: Path) -> None:
    reports = run_ranks(3, "rank_turns:prepare_files", arguments={"folder": str(tmp_path)})
    assert [report["written"] for report in reports] == [True, False, False]
    assert {report["read"] for report in reports} == {"by rank 0"}
    error = "FileNotFoundError: no data"
    for name, rank in (("without data", 0), ("without room", 2)):
        told = f"ValueError: rank {rank} cannot begin: {error}"
        for i, report in enumerate(reports):
            assert report[name].startswith(error if i == rank else told)
