"""`gbfunc train --dtype`: what is written, measured and told is the rounded genome."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import gbfunc as gb
from gbfunc.cli import main
from gbfunc.formats import file_bytes
from gbfunc.tasks import TASKS, accuracy
from gbfunc.tasks.pnets import mlp
from gbfunc.trees import tree_map
from tests.support.trees_equal import same_bits

BRIEF = ["--sizes", "64", "48", "10", "--genome-params", "300", "--epochs", "1", "--batch-size", "400"]


def test_dtype_rounds_the_genome_that_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for dtype in ("default", "float32", "float16", "bfloat16"):
        option = [] if dtype == "default" else ["--dtype", dtype]
        assert main(["train", *BRIEF, *option, "--out", str(tmp_path / dtype)]) == 0
    plan, genome = gb.load(tmp_path / "default" / "genome.safetensors")
    own = json.loads((tmp_path / "default" / "metrics.json").read_text())
    assert own["dtype"] == "float32"
    assert (tmp_path / "float32" / "genome.safetensors").read_bytes() == (
        tmp_path / "default" / "genome.safetensors"
    ).read_bytes()
    told, task = capsys.readouterr().out, TASKS["digits"]()
    for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        rounded = gb.Genome(*tree_map(lambda leaf, to=dtype: leaf.to(to).float(), tuple(genome)))
        read_plan, read_genome = gb.load(tmp_path / name / "genome.safetensors")
        metrics = json.loads((tmp_path / name / "metrics.json").read_text())
        assert read_plan == plan and same_bits(read_genome, rounded)
        net = gb.materialize(plan, rounded, mlp((64, 48, 10), 0))
        assert accuracy(net, task.test) == metrics["test_accuracy"] and metrics["dtype"] == name
        size = (tmp_path / name / "genome.safetensors").stat().st_size
        assert metrics["genome_bytes"] == size < own["genome_bytes"] - 500
        assert f"{size:,}" in told


def test_plan_tells_the_size_as_it_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *BRIEF, "--dtype", "int5", "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["plan", "--config", str(tmp_path / "config.toml")]) == 0
    told = capsys.readouterr().out
    plan, genome = gb.load(tmp_path / "genome.safetensors")
    said = gb.load_metadata(tmp_path / "genome.safetensors")
    assert told == plan.report("int5", metadata=said) + "\n" != plan.report() + "\n"
    size = (tmp_path / "genome.safetensors").stat().st_size
    assert f" {size:,} bytes on disk as int5" in plan.report("int5", genome, said)
    with pytest.raises(ValueError, match="int9"):
        plan.report("int9")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", [None, "float16", "int6"])
def test_genome_bytes_are_those_of_the_whole_file(dtype: str | None, tmp_path: Path) -> None:
    """Exact from below, with what the file says of its task; codes take what their values need."""
    options = ["--genome-bytes", "2000", *(["--dtype", dtype] if dtype else []), "--out", str(tmp_path)]
    assert main(["train", "--sizes", "64", "48", "10", "--epochs", "1", "--batch-size", "400", *options]) == 0
    path = tmp_path / "genome.safetensors"
    size, (plan, _) = path.stat().st_size, gb.load(path)
    assert (0.8 if dtype == "int6" else 0.95) * 2000 <= size <= 2000
    assert plan.target == "at most 2,000 bytes" and "genome_bytes = 2000" in (tmp_path / "config.toml").read_text()
    most = file_bytes(plan, dtype, metadata=gb.load_metadata(path))
    assert 1900 <= sum(most.values()) <= 2000
