"""Tensor parallelism: pieces on ranks train as the whole does in one process, in float64."""

from functools import lru_cache
from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gbfunc.layers.factored import from_thin, thin_product
from gbfunc.parallel.styles import pad_vocabulary, tensor_styles
from gbfunc.tasks.pnets.gpt import GPT
from tests.support.ranks import run_ranks
from tests.support.tensor_cases import CASES, SHARDED
from tests.support.tensor_refusals import CALLS
from tests.support.versions import with_pipelines
from tests.test_distributed import assert_equal

MESHES = {"3": {"tensor": 3}, "2": {"tensor": 2}, "2, data 2": {"tensor": 2, "data": 2}}
LANGUAGE_MODELS = ("gpt", "llama")
TURNS = dict(zip(CASES, cycle(MESHES)))
TURNS |= {name: "2, data 2" for name in CASES if name.startswith(LANGUAGE_MODELS)}


@lru_cache
def by_ranks(axes: str) -> list[dict[str, Any]]:
    names = [name for name in CASES if TURNS[name] == axes]
    return run_ranks(
        4 if "data" in axes else int(axes),
        "tensor_cases:run_cases",
        arguments={"names": names, **MESHES[axes]},
        timeout=170,
    )


@pytest.mark.process
@pytest.mark.parametrize("name", CASES)
def test_pieces_train_as_the_whole(name: str) -> None:
    if name.startswith(("gpt2", "llama")):
        pytest.importorskip("transformers")
    expected = CASES[name](None)
    for result in by_ranks(TURNS[name]):
        assert_equal(result[name], expected, 1e-12)


@lru_cache
def sharded(pipeline: bool) -> list[dict[str, Any]]:
    names = [name for name in SHARDED if ("pipeline" in name) == pipeline]
    axes = {"gnets": 2, "pipeline" if pipeline else "tensor": 2}
    return run_ranks(4, "tensor_cases:run_cases", arguments={"names": names, **axes}, timeout=170)


@pytest.mark.process
@pytest.mark.parametrize("name", with_pipelines(SHARDED, "pipeline"))
def test_a_split_genome_makes_pieces_and_stages(name: str) -> None:
    expected = SHARDED[name](None)
    for result in sharded("pipeline" in name):
        assert_equal(result[name], expected, 1e-9)


@lru_cache
def said() -> list[dict[str, str]]:
    return run_ranks(2, "tensor_refusals:run_refused", timeout=60)


@pytest.mark.process
@pytest.mark.parametrize("words", CALLS)
def test_what_would_go_wrong_is_refused(words: str) -> None:
    for by_rank in said():
        assert words in by_rank[words], by_rank[words]


def test_a_vocabulary_is_padded_without_probability_for_the_new_words() -> None:
    torch.manual_seed(0)
    pnet = GPT(65, 8, 1, 8, 2, 8)
    padded: Any = pad_vocabulary(pnet, 4)
    tokens = torch.randint(0, 65, (2, 8))
    logits, plain = padded(tokens), pnet(tokens)
    assert logits.shape[-1] == 68 and padded.head.weight is padded.tokens.weight
    torch.testing.assert_close(logits[..., :65], plain)
    assert (logits.softmax(-1)[..., 65:] == 0).all()
    fitting: Any = pad_vocabulary(pnet, 5)
    assert fitting.head.out_features == 65
    with pytest.raises(ValueError, match="expected a p-net with an embedding"):
        pad_vocabulary(nn.Linear(2, 2), 2)


def test_an_unknown_pnet_has_no_styles() -> None:
    with pytest.raises(ValueError, match="there are styles for GPT, GPT2LMHeadModel, LlamaForCausalLM, got a Linear"):
        tensor_styles(nn.Linear(2, 2))


@settings(max_examples=50)
@given(tiles=st.tuples(*[st.integers(1, 3)] * 2), tile=st.tuples(*[st.integers(1, 4)] * 2), data=st.data())
def test_thin_products_of_ranks_make_the_whole(tiles: Any, tile: Any, data: st.DataObject) -> None:
    (nr, nc), (r, c), k = tiles, tile, 2
    left, right = (torch.randn(nr, nc, n, k, dtype=torch.float64) for n in (r, c))
    weight = (left @ right.mT).transpose(1, 2).reshape(nr * r, nc * c)
    x = torch.randn(3, nc * c, dtype=torch.float64)
    # Some ranks may have no features at all, the last one too.
    rows, cols = ([0, *sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))), n] for n in (nr * r, nc * c))
    parts = [thin_product(x[:, a:b], right, (a, b)) for a, b in zip(cols, cols[1:], strict=False)]
    thin = torch.stack(parts).sum(0)
    y = torch.cat([from_thin(thin, left, ((a, b),)) for a, b in zip(rows, rows[1:], strict=False)], 1)
    torch.testing.assert_close(y, x @ weight.T, rtol=1e-12, atol=1e-12)
