"""Folders of the Hugging Face hub, offline."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gbfunc as gb
from gbfunc.trees import flatten_tree
from tests.support.zoo import ZOO, genome_of

pytest.importorskip("huggingface_hub", reason="folders of the hub need huggingface_hub")


@pytest.fixture
def module() -> gb.GenomeModule:
    pnet, plan, genome = genome_of(ZOO["conv_bn"])
    return gb.GenomeModule(plan, pnet, genome)


def test_a_folder_gives_the_module_back(module: gb.GenomeModule, tmp_path: Path) -> None:
    assert module.save_pretrained(tmp_path / "new" / "folder") is None
    folder = tmp_path / "new" / "folder"
    assert {path.name for path in folder.iterdir()} == {"genome.safetensors", "config.json", "README.md"}
    other = gb.GenomeModule.from_pretrained(folder, pnet=ZOO["conv_bn"].pnet(5))
    given, expected = (flatten_tree(m.to_genome()) for m in (other, module))
    assert all(torch.equal(given[k], expected[k]) for k in expected) and other.plan == module.plan
    batch = ZOO["conv_bn"].batch()
    assert torch.equal(other.eval()(batch), module.eval()(batch))
    # Written again it has the new genome and the user's card.
    (folder / "README.md").write_text("my words")
    with torch.no_grad():
        next(module.parameters()).add_(1)
    module.save_pretrained(folder)
    other = gb.GenomeModule.from_pretrained(str(folder), pnet=ZOO["conv_bn"].pnet())
    assert torch.equal(next(other.parameters()), next(module.parameters()))
    assert (folder / "README.md").read_text() == "my words"


def test_the_config_and_the_card_say_the_sizes(module: gb.GenomeModule, tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    module.save_pretrained(tmp_path)
    plan, size = module.plan, (tmp_path / "genome.safetensors").stat().st_size
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["gbfunc_version"] == gb.__version__ and config["base"] is None
    sizes = {name: getattr(plan, name) for name in ("genome_params", "pnet_params", "dense_bytes")}
    assert config["plan"] == {"digest": plan.digest(), "genome_bytes": size, **sizes}
    card = ModelCard.load(tmp_path / "README.md")
    head = card.data.to_dict()
    assert head["library_name"] == "gbfunc" and head["tags"] == ["gbfunc", "hypernetwork"]
    assert f"{plan.genome_params:,} trained parameters in a file of {size:,} bytes" in card.text
    assert 'gb.GenomeModule.from_pretrained("FOLDER OR NAME", pnet=pnet)' in card.text


def test_options_that_have_no_effect_are_refused(module: gb.GenomeModule, tmp_path: Path) -> None:
    for options in ({"private": True}, {"repo_id": "a/b"}):
        with pytest.raises(TypeError, match=f"save_pretrained takes {[*options][0]} with push_to_hub=True only"):
            module.save_pretrained(tmp_path / "x", **options)
    for call in (module.push_to_hub, partial(module.save_pretrained, push_to_hub=True, repo_id="a/b")):
        with pytest.raises(TypeError, match="unexpected keyword argument 'Dtype'"):
            call(str(tmp_path / "x"), Dtype="float16")


@pytest.mark.parametrize(
    ("said", "name"),
    [({"_name_or_path": "a/net"}, "a/net"), ({"name_or_path": "bert"}, "bert"), ({"_name_or_path": "of/my/own"}, None)],
)
def test_the_card_of_an_adapter_names_the_base(said: dict[str, str], name: str | None, tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    pnet = torch.nn.Sequential(torch.nn.Linear(30, 20))
    pnet.config = SimpleNamespace(**said)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    gb.GenomeModule(gb.make_plan(pnet, gb.periodic(2), base="own"), pnet).save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.to_dict().get("base_model") == name and (f"`{name}`" in card.text) == (name is not None)
    assert "](http" not in card.text


@pytest.mark.parametrize("name", ["{}/nowhere", "someone/nothing", "./nowhere"])
def test_a_missing_folder_is_one_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="must be a folder or a hub repository with a genome"):
        gb.GenomeModule.from_pretrained(name.format(tmp_path), pnet=ZOO["mlp"].pnet(), cache_dir=tmp_path / "cache")


def test_what_does_not_fit_is_refused(module: gb.GenomeModule, tmp_path: Path) -> None:
    module.save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="from_pretrained needs pnet=, the module that the genome was made for"):
        gb.GenomeModule.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the plan was made for another p-net"):
        gb.GenomeModule.from_pretrained(tmp_path, pnet=ZOO["mlp"].pnet())
    (tmp_path / "genome.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no genome file at '.*genome.safetensors'"):
        gb.GenomeModule.from_pretrained(tmp_path, pnet=ZOO["conv_bn"].pnet())


def test_a_push_uploads_the_same_folder(module: gb.GenomeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi

    uploaded: dict[str, Any] = {}

    class Repository:
        repo_id = "someone/genome"

    def upload(self: HfApi, *, folder_path: Path, **options: Any) -> str:
        uploaded.update({path.name: path.read_bytes() for path in folder_path.iterdir()}, **options)
        return "address"

    monkeypatch.setattr(HfApi, "create_repo", lambda self, **options: Repository())
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    assert module.push_to_hub("someone/genome", commit_message="first", dtype="float16") == "address"
    assert {"genome.safetensors", "config.json", "README.md"} <= uploaded.keys()
    assert uploaded["repo_id"] == "someone/genome" and uploaded["commit_message"] == "first"
    assert b'from_pretrained("someone/genome", pnet=pnet)' in uploaded["README.md"]
    assert b'"numbers":"float16"' in uploaded["genome.safetensors"]


@pytest.mark.process
def test_without_the_package_folders_work_and_the_hub_says_what_to_install(tmp_path: Path) -> None:
    script = """
import sys
sys.modules["huggingface_hub"] = None
import torch, gbfunc as gb
pnet = torch.nn.Linear(4, 3)
module = gb.GenomeModule(gb.make_plan(pnet, gb.periodic(2)), pnet)
module(torch.ones(2, 4)).sum().backward()
module.save_pretrained("x")
gb.GenomeModule.from_pretrained("x", pnet=pnet)
for call in (lambda: module.push_to_hub("a/b"), lambda: gb.GenomeModule.from_pretrained("a/b", pnet=pnet)):
    try:
        call()
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.count("needs the package huggingface_hub: pip install huggingface_hub") == 2
