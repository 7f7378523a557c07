"""Genomes of several plans and heads in a batch, and text by each row's genome, as each genome gives alone."""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.plan import Plan
from tests.support.dense_oracle import moved_deltas
from tests.support.forms import assert_close, vectors
from tests.test_layers_beside import FourBits, network
from tests.test_many import INDEX, TOKENS, Classifier


def moved(plan: Plan, pnet: nn.Module, n: int) -> gb.Genome:
    genome = gb.init_genome(plan, pnet, n)
    return genome._replace(gnets=moved_deltas(plan, genome.gnets), direct={k: x + n for k, x in genome.direct.items()})


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=19, **sizes, pad_token_id=0, eos_token_id=3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).double().eval()


def mixed() -> tuple[Any, list[Plan], list[gb.Genome]]:
    """Six genomes of three plans: other layers, sizes and types, several tiles, norms beside deltas."""
    pnet = llama()
    plans = [
        gb.make_plan(pnet, gb.bilinear(2, share="shapes"), base="own"),
        gb.make_plan(pnet, gb.low_rank(1), base="own", target_modules=["q_proj", "down_proj"], max_tile=8),
        gb.make_plan(pnet, gb.gnet((2,)), base="own", target_modules=["v_proj"], include=[r"norm\.weight"]),
    ]
    each = [plans[i % 3] for i in range(6)]
    return pnet, each, [moved(plan, pnet, i) for i, plan in enumerate(each)]


@pytest.mark.parametrize("grown", [None, 0, 2])
def test_plans_of_one_base(grown: int | None) -> None:
    pnet, plans, genomes = mixed()
    net: Any = gb.materialize_many(plans, genomes, pnet, grown=grown)
    nets = [gb.materialize(plan, genome, pnet) for plan, genome in zip(plans, genomes, strict=True)]
    with torch.no_grad():
        for index in (INDEX, torch.tensor([5, 4]), torch.tensor([2]), INDEX):
            expected = [nets[i](TOKENS[b : b + 1]).logits for b, i in enumerate(index.tolist())]
            assert_close(net(index, TOKENS[: len(index)], use_cache=False).logits, torch.cat(expected))
    assert "model.layers.0.self_attn.q_proj" in net.row_wise and "" not in net.row_wise


@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True, "temperature": 1.5, "top_k": 9}], ids=["greedy", "sampling"]
)
def test_text_of_each_row_is_that_of_its_genome_alone(options: dict[str, Any]) -> None:
    pnet, plans, genomes = mixed()
    net: Any = gb.materialize_many(plans, genomes, pnet)
    seeds = [5, 6, 7, 8, 9]
    mask = (torch.arange(6) >= torch.tensor([[0], [2], [0], [1], [3]])).long()
    options |= {"max_new_tokens": 9, "pad_token_id": 0}
    made = net.generate(INDEX, TOKENS, attention_mask=mask, seeds=seeds if "do_sample" in options else None, **options)
    for b, i in enumerate(INDEX.tolist()):
        torch.manual_seed(seeds[b])
        alone: Any = gb.materialize(plans[i], genomes[i], pnet)
        row = alone.generate(TOKENS[b : b + 1], attention_mask=mask[b : b + 1], **options)[0]
        assert torch.equal(made[b, : len(row)], row) and not made[b, len(row) :].any()
    for wrong, words in [({"num_beams": 2}, "one sequence per row, got {'num_beams': 2}"), ({"seeds": [1]}, "5 rows")]:
        with pytest.raises(ValueError, match=words):
            net.generate(INDEX, TOKENS, **wrong)


def test_heads_with_their_own_classes() -> None:
    body, heads = Classifier().double().eval(), [3, 2, 5]
    pnets = [copy.deepcopy(body) for _ in heads]
    for pnet, n in zip(pnets, heads, strict=True):
        pnet.body, pnet.head[1] = body.body, nn.Linear(6, n).double()
    make = partial(gb.make_plan, hypernet=gb.low_rank(1), base="own", modules_to_save=["head"])
    plans = [make(pnet, target_modules=["0", "2"][: 1 + i % 2]) for i, pnet in enumerate(pnets)]
    genomes = [moved(plan, pnet, i) for i, (plan, pnet) in enumerate(zip(plans, pnets, strict=True))]
    net, x = gb.materialize_many(plans, genomes, pnets), vectors(5, 8)
    for index in (torch.tensor([1, 0, 2, 1, 2]), torch.tensor([0, 1]), torch.tensor([1])):
        out = net(index, x[: len(index)])
        assert out.shape == (len(index), max(heads[i] for i in index.tolist()))
        for b, i in enumerate(index.tolist()):
            row: Tensor = gb.materialize(plans[i], genomes[i], pnets[i])(x[b : b + 1])[0]
            assert_close(out[b, : heads[i]], row)
            assert bool((out[b, heads[i] :] == -math.inf).all())
    # An input for all rows is as long as the batch of one p-net.
    index, shifts = torch.tensor([1, 2, 1, 2, 0]), vectors(2, 8)
    out = net(index, x, shifts)
    for b, i in enumerate(index.tolist()):
        alone = gb.materialize(plans[i], genomes[i], pnets[i])
        assert_close(out[b, : heads[i]], alone(x[b : b + 1], shifts)[0])
    for wrong in ((plans[:2], genomes, pnets), (plans, genomes, pnets[:1]), ([], [], body)):
        with pytest.raises(ValueError, match="expected at least one genome, and a plan and a p-net for each"):
            gb.materialize_many(*wrong)
    whole = gb.make_plan(pnets[0])
    with pytest.raises(ValueError, match="expected plans that all have a base, or none"):
        gb.materialize_many([whole, plans[0]], [gb.init_genome(whole, pnets[0]), genomes[0]], pnets[0])


def test_deltas_beside_layers() -> None:
    pnet = network(FourBits, 0)
    plans = [gb.make_plan(pnet, gb.bilinear(1 + i), base="own", exclude=["0"] * i) for i in range(2)]
    genomes = [moved(plan, pnet, i) for i, plan in enumerate(plans)]
    index, x = torch.tensor([1, 0, 0, 1, 1]), vectors(5, 16)
    out = gb.materialize_many(plans, genomes, pnet)(index, x)
    for b, i in enumerate(index.tolist()):
        assert_close(out[b], gb.materialize(plans[i], genomes[i], pnet, factored=True)(x[b : b + 1])[0])
