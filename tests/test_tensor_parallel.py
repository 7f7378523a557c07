"""Tensor parallelism: pieces on ranks train as the whole does in one process, in float64."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn

from gbfunc.parallel.styles import pad_vocabulary, tensor_styles
from gbfunc.tasks.pnets.gpt import GPT
from tests.support.ranks import run_ranks
from tests.support.tensor_cases import CASES, REFUSED
from tests.test_distributed import assert_equal


@lru_cache
def by_ranks(world: int) -> list[dict[str, Any]]:
    """All cases on all ranks: started once, as a rank takes seconds to start."""
    axes = {3: {"tensor": 3}, 2: {"tensor": 2}, 4: {"tensor": 2, "data": 2}}[world]
    return run_ranks(world, "tensor_cases:run_cases", arguments={"names": list(CASES), **axes}, timeout=170)


@lru_cache
def by_one(name: str) -> Any:
    return CASES[name](None)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", [3, pytest.param(2, marks=pytest.mark.slow), 4])
def test_pieces_train_as_the_whole(world: int, name: str) -> None:
    if name.startswith(("gpt2", "llama")):
        pytest.importorskip("transformers")
    if name.startswith(("gpt", "llama")) and world == 3:
        assert "4 cannot be split over 3 tensor ranks, 1, 2, 4 would fit" in by_ranks(3)[0][name]
        return
    for result in by_ranks(world):
        assert_equal(result[name], by_one(name), 1e-12)


@lru_cache
def said() -> list[dict[str, str]]:
    return run_ranks(2, "tensor_cases:run_refused", timeout=60)


@pytest.mark.parametrize("words", REFUSED)
def test_what_would_go_wrong_is_refused(words: str) -> None:
    for by_rank in said():
        assert words in by_rank[words], by_rank[words]


def test_a_vocabulary_is_padded_without_probability_for_the_new_words() -> None:
    torch.manual_seed(0)
    pnet = GPT(65, 8, 1, 8, 2, 8)
    padded = pad_vocabulary(pnet, 4)
    tokens = torch.randint(0, 65, (2, 8))
    logits, plain = padded(tokens), pnet(tokens)
    assert logits.shape[-1] == 68 and padded.head.weight is padded.tokens.weight
    torch.testing.assert_close(logits[..., :65], plain)
    assert (logits.softmax(-1)[..., 65:] == 0).all()
    assert pad_vocabulary(pnet, 5).head.out_features == 65
    with pytest.raises(ValueError, match="has no embedding"):
        pad_vocabulary(nn.Linear(2, 2), 2)


def test_an_unknown_pnet_has_no_styles() -> None:
    with pytest.raises(ValueError, match="there are styles for GPT, GPT2LMHeadModel, LlamaForCausalLM, got a Linear"):
        tensor_styles(nn.Linear(2, 2))
