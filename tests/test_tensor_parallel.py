"""Tensor parallelism: pieces on ranks train as the whole does in one process, in float64."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.tensor_cases import CASES
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
