"""Attention on projections in another form than dense: every mask, packed and separate weights, dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.forms import KINDS, Formed, assert_equals_dense, on_form, vectors

EACH_KIND = pytest.mark.parametrize("kind", KINDS)


# Rows of the three projections are blocks of the packed weight: tiles that end where they do, and others.
@EACH_KIND
@pytest.mark.parametrize("cut", [(1, 1), (3, 1), (6, 3), (24, 8), (2, 2), (4, 1), (5, 2)])
@pytest.mark.parametrize("use", ["self", "cross", "masked", "causal", "hidden", "no weights"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_packed_attention(kind: str, cut: tuple[int, int], use: str, batch_first: bool) -> None:
    module = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=batch_first, dtype=torch.float64)
    cuts = {"in_proj_weight": cut, "out_proj.weight": (cut[1], cut[1])}
    attend = attention_use(use)
    formed = assert_equals_dense(kind, module, cuts, attend, vectors(5, 5, 8))
    assert not formed.reads


@EACH_KIND
@pytest.mark.parametrize("cut", [(1, 1), (2, 3)])
@pytest.mark.parametrize("use", ["separate", "separate causal"])
def test_separate_attention(kind: str, cut: tuple[int, int], use: str) -> None:
    module = nn.MultiheadAttention(8, 2, dropout=0.3, kdim=3, vdim=5, dtype=torch.float64)
    cuts = {"q_proj_weight": cut, "k_proj_weight": cut, "v_proj_weight": cut, "out_proj.weight": (1, 1)}
    assert not assert_equals_dense(kind, module, cuts, attention_use(use), vectors(5, 5, 8)).reads


def attention_use(name: str) -> Callable[[Formed, Tensor], Any]:
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    hidden = torch.zeros(5, 5, dtype=torch.bool)
    hidden[0, -1] = True
    uses: dict[str, Callable[[Formed, Tensor], Any]] = {
        "self": lambda net, x: net(x, x, x, average_attn_weights=False),
        "cross": lambda net, x: net(x, x.sin(), x.cos()),
        "masked": lambda net, x: net(x, x, x, attn_mask=causal.repeat(10, 1, 1) < 0),
        "causal": lambda net, x: net(x, x, x, attn_mask=causal, is_causal=True, need_weights=False),
        "hidden": lambda net, x: net(x, x, x, attn_mask=causal < 0, key_padding_mask=hidden),
        "no weights": lambda net, x: net(x, x, x, key_padding_mask=hidden, need_weights=False),
        "separate": lambda net, x: net(x, x[..., :3].sin(), x[..., :5].cos()),
        "separate causal": lambda net, x: net(x, x[..., :3], x[..., :5], attn_mask=causal, is_causal=True),
    }
    return uses[name]


@EACH_KIND
@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        ((vectors(5, 8),) * 3, {}),
        ((vectors(5, 2, 6),) * 3, {}),
        ((vectors(5, 2, 8),) * 3, {"is_causal": True}),
        ((vectors(5, 2, 8),) * 3, {"attn_mask": torch.zeros(4, 4)}),
    ],
    ids=["unbatched", "features", "no mask", "mask"],
)
def test_rare_inputs_get_the_answer_or_the_error_of_the_stock_layer(kind: str, inputs: Any, options: Any) -> None:
    module = nn.MultiheadAttention(8, 2, dtype=torch.float64)
    cuts = {"in_proj_weight": (3, 1), "out_proj.weight": (1, 1)}

    def use(net: Any, *inputs: Tensor) -> Any:
        return net(*inputs, **options)

    try:
        module(*inputs, **options)
    except (AssertionError, RuntimeError) as error:
        with pytest.raises(type(error)):
            on_form(kind, module, cuts)(*inputs, **options)
    else:
        assert_equals_dense(kind, module, cuts, use, *inputs)
