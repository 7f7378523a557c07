"""Layers with generated weights take the nested tensors that torch's layers take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gbfunc as gb
from tests.support.dense_oracle import assert_same, dense_answer, step_answer
from tests.support.forms import vectors

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "lazy": {"lazy": True},
    "layer": {"lazy": False, "remat": "layer"},
    "generate": {"remat": "generate"},
}
LAYOUTS = pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
# Torch says so of those with strides, once a process.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")


def nested(rows: Tensor, layout: torch.layout) -> Tensor:
    return torch.nested.as_nested_tensor([rows[:3], rows[3:]], layout=layout)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()


@pytest.mark.parametrize("base", [None, "own"])
@pytest.mark.parametrize("mode", MODES)
@LAYOUTS
def test_linear_layers_take_nested_inputs(layout: torch.layout, mode: str, base: Any) -> None:
    def loss(net: Any, rows: Tensor) -> Tensor:
        return torch.cat(net(nested(rows, layout)).unbind()).sin().sum()

    plan = gb.make_plan(mlp(), gb.low_rank(2), base=base, max_tile=64 if base else 5)
    expected = dense_answer(plan, mlp(), loss, vectors(8, 6))
    assert_same(step_answer(plan, mlp(), loss, vectors(8, 6), **MODES[mode]), expected)


@pytest.mark.skipif(torch.__version__ < "2.6", reason="torch 2.5 has no gradient of an embedding of nested numbers")
@pytest.mark.parametrize("mode", MODES)
def test_an_embedding_takes_nested_numbers(mode: str) -> None:
    def loss(net: Any, tokens: Tensor) -> Tensor:
        return torch.cat(net(nested(tokens, torch.jagged)).unbind()).sin().sum()

    make, tokens = lambda: nn.Embedding(40, 6).double(), torch.tensor([1, 5, 0, 1, 39])
    plan = gb.make_plan(make(), gb.low_rank(2), include=["weight"])
    assert_same(step_answer(plan, make(), loss, tokens, **MODES[mode]), dense_answer(plan, make(), loss, tokens))
