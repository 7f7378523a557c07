"""Deltas as LoRA folders: peft gives the same outputs."""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.storage.lora import as_low_rank
from gbfunc.tiling import join_tiles, tile_grid
from tests.support.adapters import adapter, moved, pretrained, tokens
from tests.support.hugging_face import tiny
from tests.support.strategies import Net
from tests.support.zoo import tied


def peft_model(pnet: nn.Module, folder: Path) -> nn.Module:
    peft = pytest.importorskip("peft", reason="it is what reads the folder")
    with warnings.catch_warnings():
        # What peft 0.21 asks of models is deprecated in transformers 5.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return peft.PeftModel.from_pretrained(pnet, folder).eval()


def assert_served(
    plan: gb.Plan, genome: gb.Genome, pnet: nn.Module, other: nn.Module, folder: Path, batch: Any, merges: bool = True
) -> None:
    assert gb.save_lora(folder, plan, genome, pnet) == (folder / "adapter_model.safetensors").stat().st_size
    module = gb.GenomeModule(plan, pnet, genome).eval()
    outputs = [logits(net(batch)) for net in (module, gb.materialize(plan, genome, pnet).eval(), pnet.eval())]
    served_by: Any = peft_model(other, folder)
    served = logits(served_by(batch))
    torch.testing.assert_close(served, outputs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(served, outputs[1], rtol=1e-5, atol=1e-5)
    assert (outputs[2] - outputs[0]).abs().max() > 1e-2
    if merges:
        merged = logits(served_by.merge_and_unload().eval()(batch))
        torch.testing.assert_close(merged, outputs[0], rtol=1e-5, atol=1e-5)


def logits(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out.logits


@given(st.integers(1, 9), st.integers(1, 9), st.tuples(st.integers(1, 5), st.integers(1, 5)), st.integers(1, 3))
def test_tiles_are_one_product_of_low_rank(rows: int, cols: int, tile: tuple[int, int], k: int) -> None:
    grid = tile_grid((rows, cols), tile)
    draw = torch.Generator().manual_seed(rows + 10 * cols)
    left, right = (
        torch.randn(grid.n_rows, grid.n_cols, size, k, generator=draw, dtype=torch.float64)
        for size in (grid.tile_rows, grid.tile_cols)
    )
    a, b = as_low_rank(left, right, grid)
    torch.testing.assert_close(b @ a, join_tiles((left @ right.mT).flatten(0, 1), grid))
    assert len(a) == b.shape[1] == grid.n_tiles * k


@pytest.mark.parametrize("hypernet", [gb.low_rank(2), gb.periodic(2), gb.periodic(2, share="layers"), gb.xox(3)])
@pytest.mark.parametrize("max_tile", [None, 6, (4, 5)])
def test_peft_gives_the_same_outputs(hypernet: Any, max_tile: Any, tmp_path: Path) -> None:
    pnet, plan, genome = adapter(hypernet, max_tile=max_tile)
    assert_served(plan, genome, pnet, pretrained(), tmp_path, tokens())


def test_a_generated_head_is_dense_in_the_file(tmp_path: Path) -> None:
    pnet = pretrained()
    rules = [("classifier.weight", gb.low_rank(1))]
    plan = gb.make_plan(
        pnet, gb.low_rank(2), base="own", target_modules=["query"], modules_to_save=["classifier"], rules=rules
    )
    assert {t.name: t.role for t in plan.tensors}["classifier.weight"] == "generated"
    assert_served(plan, moved(gb.init_genome(plan, pnet)), pnet, pretrained(), tmp_path, tokens())
    assert load_file(tmp_path / "adapter_model.safetensors")["base_model.model.classifier.weight"].shape == (3, 8)


def test_a_norm_that_is_new_is_saved_with_its_statistics(tmp_path: Path) -> None:
    pnet, plan, genome = adapter(modules_to_save=["classifier", "norm"], target_modules=["query"])
    genome = genome._replace(buffers={k: x + 1 for k, x in genome.buffers.items()})
    assert_served(plan, genome, pnet, pretrained(), tmp_path, tokens())


def nested() -> nn.Module:
    def use(net: Any, x: Tensor) -> Tensor:
        return net.out(net.inner["head"](torch.tanh(net.inner["query"](torch.tanh(net.query(x))))))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inner = nn.ModuleDict({"query": nn.Linear(4, 4), "head": nn.Linear(4, 4)})
        return Net(use, query=nn.Linear(4, 4), inner=inner, out=nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("targets", "rules"),
    [
        ("query", []),
        (r"inner\.query", []),
        (["query"], [("^query.weight", gb.low_rank(1))]),
        (["query", "head"], [("inner.query.weight", gb.low_rank(1))]),
    ],
)
def test_names_that_end_alike_are_kept_apart(targets: Any, rules: Any, tmp_path: Path) -> None:
    pnet = nested()
    plan = gb.make_plan(pnet, gb.low_rank(2), base="own", target_modules=targets, rules=rules)
    genome = moved(gb.init_genome(plan, pnet), 10.0)
    assert_served(plan, genome, pnet, nested(), tmp_path, torch.ones(3, 4))


def test_gpt2_with_hugging_faces_conv1d_and_a_tied_embedding(tmp_path: Path) -> None:
    pnet = tiny("GPT2LMHeadModel", vocab_size=30)
    plan = gb.make_plan(
        pnet, gb.periodic(2), base="own", target_modules=["c_attn", "c_proj", "c_fc", "wte"], max_tile=20
    )
    genome = moved(gb.init_genome(plan, pnet), 2.0)
    batch = torch.randint(0, 30, (3, 8), generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        # Peft tells of tied weights, which both have the matrices here.
        warnings.simplefilter("ignore")
        assert_served(plan, genome, pnet, tiny("GPT2LMHeadModel", vocab_size=30), tmp_path, batch, merges=False)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["fan_in_fan_out"] and "lm_head" in config["target_modules"]


def refused(match: str, pnet: nn.Module, hypernet: Any = None, **options: Any) -> None:
    plan = gb.make_plan(pnet, hypernet or gb.low_rank(2), base="own", **options)
    with pytest.raises(ValueError, match=f"{match}.*gb.materialize"):
        gb.save_lora("nowhere", plan, gb.init_genome(plan, pnet), pnet)


def test_what_cannot_be_exported_is_named() -> None:
    refused("'query.weight' .a linear by gnet. has no factors", pretrained(), gb.gnet((3,)), target_modules=["query"])
    refused("the delta of 'query.bias' .a vector", pretrained(), target_modules=["query"], include=["query.bias"])
    attention = nn.TransformerEncoderLayer(8, 2, 12)
    refused(
        "'self_attn.in_proj_weight' .a attention_in by low_rank. has no factors",
        attention,
        target_modules=["self_attn"],
    )
    refused("'self_attn.out_proj.weight' is not of a layer that LoRA knows", attention, target_modules=["out_proj"])
    refused("'0.weight' cannot be part.*no dilation", nn.Sequential(nn.Conv2d(2, 3, 3, dilation=2)))
    refused("'0.weight' cannot be part.*one group", nn.Sequential(nn.Conv2d(2, 4, 3, groups=2)))
    net = nn.ModuleDict({"inner": nn.Linear(4, 4), "head": nn.Linear(4, 2), "more": nn.ParameterList([torch.ones(2)])})
    refused("the plan has only new modules", net, modules_to_save=["head"], exclude=["inner"])
    refused("have a forward, and 'more' has none", net, target_modules=["inner"], modules_to_save=["more"])
    pnet = nn.Sequential(nn.Linear(4, 4))
    plan = gb.make_plan(pnet, gb.low_rank(1))
    with pytest.raises(ValueError, match="changes a base, and the plan has none"):
        gb.save_lora("nowhere", plan, gb.init_genome(plan, pnet), pnet)
    pnet, plan, genome = adapter()
    with pytest.raises(ValueError, match="load the weights that the plan was made for"):
        gb.save_lora("nowhere", plan, genome, pretrained(1))


@pytest.mark.parametrize("name", ["embedding", "head"])
def test_a_new_tied_tensor_is_found_by_each_of_its_names(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    pnet = tied()
    plan = gb.make_plan(pnet, gb.low_rank(1), base="own", target_modules=["hidden"], modules_to_save=[name])
    assert [t.name for t in plan.tensors if not t.base] == ["embedding.weight"]
    genome = moved(gb.init_genome(plan, pnet))
    assert_served(plan, genome, pnet, copy.deepcopy(pnet), tmp_path, torch.arange(11), merges=False)
