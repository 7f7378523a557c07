"""Causal language models of transformers: checkpointing, narrow bases, caches, and rows for new tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gbfunc as gb
from gbfunc.formats import genome_file_bytes
from tests.support.dense_oracle import moved_deltas

transformers = pytest.importorskip("transformers", reason="they are transformers' models")

api: Any = gb
TOKENS = torch.arange(24).reshape(2, 12) * 7 % 52
EMBEDDING = "model.embed_tokens.weight"


def llama(dtype: torch.dtype = torch.float64, tied: bool = True, grown_by: int = 0, seed: int = 0) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=50 if grown_by else 52, tie_word_embeddings=tied, **sizes)
    net = transformers.LlamaForCausalLM(config).to(dtype)
    torch.manual_seed(seed)
    net.resize_token_embeddings(50 + grown_by) if grown_by else None
    return net.train()


def adapter(net: Any, **options: Any) -> tuple[gb.Plan, gb.Genome]:
    plan = gb.make_plan(net, gb.bilinear(2, share="shapes"), **{"base": "own", **options})
    genome = gb.init_genome(plan, net)
    return plan, genome._replace(gnets=moved_deltas(plan, genome.gnets))


def gradients(net: Any) -> dict[str, Tensor]:
    net(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    return {k: p.grad for k, p in net.named_parameters()}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("base", ["own", None])
def test_checkpoints_give_equal_gradients(base: Any, lazy: bool, reentrant: bool) -> None:
    net = llama()
    plan, genome = adapter(net, base=base)
    plain, checkpointed = (api.GenomeModule(plan, net, genome, lazy=lazy).train() for _ in range(2))
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert any(getattr(m, "gradient_checkpointing", False) for m in checkpointed.modules())
    torch.testing.assert_close(gradients(checkpointed), gradients(plain), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("lazy", [True, False])
def test_a_bfloat16_base_is_right_to_its_precision(lazy: bool) -> None:
    net = llama(torch.bfloat16)
    plan, genome = adapter(net)
    found, wide = gradients(api.GenomeModule(plan, net, genome, lazy=lazy)), llama(torch.bfloat16).double()
    exact = {e: {k: x.double() for k, x in leaves.items()} for e, leaves in genome.gnets.items()}
    expected = gradients(api.GenomeModule(adapter(wide)[0], wide, genome._replace(gnets=exact), lazy=False))
    for name, target in expected.items():
        assert (found[name] - target).norm() < 0.05 * target.norm(), name


def test_text_is_generated_with_the_cache_as_without() -> None:
    net = llama(tied=False)
    plan, genome = adapter(net)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(TOKENS), "max_new_tokens": 6, "do_sample": False}
    written = [
        one.eval().generate(TOKENS, use_cache=cached, **options)
        for one in (api.GenomeModule(plan, net, genome), api.materialize(plan, genome, net))
        for cached in (True, False)
    ]
    assert all(torch.equal(written[0], other) for other in written) and written[0].shape == (2, 18)
    assert not torch.equal(written[0], net.eval().generate(TOKENS, **options))


@pytest.mark.parametrize("tied", [True, False])
def test_only_new_rows_are_trained_and_stored(tied: bool, tmp_path: Path) -> None:
    net, rules = llama(tied=tied, grown_by=2), [(r"embed_tokens|lm_head", gb.new_rows(2))]
    plan = gb.make_plan(net, base="own", rules=rules, target_modules=["q_proj"], exclude=["q_proj"])
    names = [EMBEDDING] if tied else [EMBEDDING, "lm_head.weight"]
    assert [t.name for t in plan.tensors] == names and plan.genome_params == (count := 32 * len(names))
    module = api.GenomeModule(plan, net)
    assert torch.equal(gb.generate(plan, module.to_genome(), base=net)[EMBEDDING], net.get_parameter(EMBEDDING))
    (found,), expected = gradients(module).values(), gradients(net)
    rows = torch.stack([expected[t.name][-2:] * t.slots[0].scale for t in plan.tensors])
    torch.testing.assert_close(found, rows, rtol=1e-10, atol=1e-14)
    # The rows of another growth are not those of the base: the file fits.
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    size = gb.save(tmp_path / "a.safetensors", plan, module.to_genome(), dtype=torch.float16)
    assert size == genome_file_bytes(plan, "float16") < 2 * count + 600
    gb.save(tmp_path / "a.safetensors", plan, module.to_genome())
    other = gb.materialize(*gb.load(tmp_path / "a.safetensors"), llama(tied=tied, grown_by=2, seed=1))
    torch.testing.assert_close(other(TOKENS).logits, module(TOKENS).logits, rtol=1e-10, atol=1e-12)
    assert torch.equal(other.get_parameter(EMBEDDING)[:-2], net.get_parameter(EMBEDDING)[:-2])
    with pytest.raises(ValueError, match="another p-net: .*51, 16"):
        gb.materialize(plan, module.to_genome(), llama(tied=tied, grown_by=1))
    with pytest.raises(ValueError, match="have new rows, and a LoRA adapter adds to rows that the base has"):
        gb.save_lora(tmp_path, plan, module.to_genome(), net)
