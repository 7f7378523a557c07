"""Adapters of a pretrained network from the command line: trained, read back, and refused beside another base."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gbfunc as gb
from gbfunc.cli import main
from gbfunc.cli.genomes import read_genome
from gbfunc.cli.job import Job, make_job
from gbfunc.cli.options import DataOptions, GenomeOptions, PNetOptions
from tests.support.pretrained import save_language_model, save_network, save_texts

pytest.importorskip("tokenizers", reason="their tokens need tokenizers")
pytest.importorskip("transformers", reason="they need transformers")

SHORT = ["--genome-params", "200", "--batch-size", "4", "--epochs", "2"]


@pytest.fixture
def model(tmp_path: Path) -> list[str]:
    save_texts(tmp_path)
    return ["--task", "texts", "--data-dir", str(tmp_path), "--pretrained", str(save_network(tmp_path / "network"))]


def job_of(model: list[str], **genome: Any) -> Job:
    data = PNetOptions(task=model[1], data_dir=Path(model[3]), pretrained=model[5])
    given: dict[str, Any] = {"genome_params": 200, **genome}
    return make_job(data, GenomeOptions(**given))


def test_an_adapter_is_trained_and_read_back(model: list[str], tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    assert main(["train", *model, *SHORT, "--seed", "3", "--out", str(out)]) == 0
    metrics = json.loads((out / "metrics.json").read_text())
    plan, genome = gb.load(out / "genome.safetensors")
    assert plan.base is not None and metrics["base"]["digest"] == plan.base.digest
    assert metrics["genome_params"] == plan.genome_params <= 200 < metrics["pnet_params"]
    assert {t.name for t in plan.tensors if not t.base} == {"classifier.weight", "classifier.bias"}
    assert len([t for t in plan.tensors if t.base]) == 6
    assert (out / "genome.safetensors").stat().st_size < 5_000
    assert main(["eval", *model, "--genome", str(out / "genome.safetensors")]) == 0
    assert f"{metrics['test_accuracy']:.2%}" in capsys.readouterr().out
    _, task, net = read_genome(out / "genome.safetensors", DataOptions("texts", Path(model[3]), pretrained=model[5]))
    base = task.build(0)
    frozen, changed = "encoder.embeddings.word_embeddings.weight", "encoder.encoder.layer.0.output.dense.weight"
    assert torch.equal(net.get_parameter(frozen), base.get_parameter(frozen))
    assert not torch.equal(net.get_parameter(changed), base.get_parameter(changed))


def test_a_language_model_is_adapted_to_a_text_and_writes(tmp_path: Path, command: Any) -> None:
    text, base, out = tmp_path / "own.txt", save_language_model(tmp_path / "llama"), tmp_path / "out"
    text.write_text("once upon a time, upon a time once. " * 300)
    data = ["--task", "text", "--data-dir", str(text), "--pretrained", str(base), "--task-config", '{"context": 16}']
    command(["train", *data, "--genome-params", "300", "--steps", "40", "--seed", "1", "--out", str(out)])
    metrics = json.loads((out / "metrics.json").read_text())
    task = make_job(PNetOptions("text", text, pretrained=str(base)), GenomeOptions(genome_params=300)).task
    before = task.evaluate(task.build(0).eval(), task.test)["loss"]
    plan = task.plan(task.build(0), genome_params=900)
    assert all("v_proj" in t.name and t.slots[0].hypernet.type == "low_rank" for t in plan.tensors)
    assert metrics["genome_params"] <= 300 and metrics["test_loss"] < before
    sample = ["sample", "--genome", str(out / "genome.safetensors"), "--prompt", "once"]
    first, second = (command([*sample, "--tokens", "12", "--seed", "3"]).out for _ in range(2))
    assert first == second and len(first) > 4 and first.startswith("once")


def test_another_base_is_refused(model: list[str], tmp_path: Path, command: Any) -> None:
    out = tmp_path / "out"
    assert main(["train", *model, *SHORT, "--out", str(out)]) == 0
    other = [*model[:-1], str(save_network(tmp_path / "other", seed=8))]
    genome, silent = out / "genome.safetensors", tmp_path / "silent"
    gb.save(silent, *gb.load(genome))
    # The file names its base, where it says anything.
    assert main(["eval", *model[2:4], "--genome", str(genome)]) == 0
    for wrong, path in ((other, genome), (model[:4], silent)):
        told = command(["eval", *wrong, "--genome", str(path)], 2).err
        assert told.count("\n") == 1 and "is an adapter of a network of 3,520 parameters, the base that" in told


def test_what_changes_and_what_is_new_can_be_chosen(model: list[str]) -> None:
    def changed(**more: Any) -> set[str]:
        plan = job_of(model, **more).plan
        return {t.name.split(".", 4)[-1] for t in plan.tensors if t.base}

    attention = {f"attention.self.{name}.weight" for name in ("query", "value")}
    assert changed(target_modules=("query", "value")) == attention
    assert changed(target_modules=(r".*\.(query|value)",)) == attention
    assert changed(target_modules=("query",)) == {"attention.self.query.weight"}
    assert changed() == changed(target_modules=("all-linear",)) > attention
    plan = job_of(model, modules_to_save=("classifier", "encoder.layer.0.output.dense")).plan
    assert len([t for t in plan.tensors if not t.base]) == 4
    plan = job_of(model, base="none", genome_params=None, compression=1.1).plan
    assert plan.base is None and "encoder.embeddings.word_embeddings.weight" in {t.name for t in plan.tensors}
    # A folder's path says nothing elsewhere.
    assert job_of(model).plan.base.name == ""  # pyright: ignore[reportOptionalMemberAccess]


def test_bytes_of_an_adapter_are_taken_by_codes(model: list[str], tmp_path: Path, capsys: Any) -> None:
    def stored(*options: str) -> str:
        given = ["--batch-size", "4", "--steps", "10", "--genome-bytes", "1500", *options]
        assert main(["train", *model, *given, "--overwrite", "--out", str(tmp_path / "out")]) == 0
        metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
        assert metrics["genome_bytes"] <= 1_500
        return metrics["dtype"]

    assert stored() == "auto" and "dtype auto: most parameters for the number of bytes" in capsys.readouterr().err
    plan = ["plan", *model, "--genome-bytes", "1500"]
    planned = [capsys.readouterr().out for options in ([], ["--dtype", "auto"]) if main([*plan, *options]) == 0]
    assert planned[0] == planned[1]
    assert "frozen, and not in the genome" in planned[0] and "deltas of 6 tensors" in planned[0]
    for options in (["--dtype", "float16"], ["--optimizer", "SGD"], ["--placement", "sharded"]):
        dtype = "float16" if "float16" in options else "int8"
        assert stored(*options) == dtype
        assert ("dtype int8: most parameters" in capsys.readouterr().err) == (dtype == "int8")
