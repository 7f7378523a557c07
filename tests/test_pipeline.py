"""Pipelines: stages on ranks train as the whole does in one process, in float64, alone and with the other axes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.tensor_cases import PIPELINES
from tests.test_distributed import assert_equal

MESHES = {
    "2 stages": {"pipeline": 2},
    "2 stages, data 2": {"pipeline": 2, "data": 2},
    "2 stages, tensor 2": {"pipeline": 2, "tensor": 2},
    "2 stages, tensor 2, data 2": {"pipeline": 2, "tensor": 2, "data": 2},
}


@lru_cache
def by_ranks(axes: str) -> list[dict[str, Any]]:
    """All cases on all ranks: started once, as a rank takes seconds to start."""
    sizes = MESHES[axes]
    world = 2 ** len(sizes)
    return run_ranks(world, "tensor_cases:run_cases", arguments={"names": list(PIPELINES), **sizes}, timeout=300)


@lru_cache
def by_one(name: str) -> Any:
    return PIPELINES[name](None)


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("axes", MESHES)
def test_stages_train_as_the_whole(axes: str, name: str) -> None:
    if name.startswith(("gpt2", "llama")):
        pytest.importorskip("transformers")
    for result in by_ranks(axes):
        assert_equal(result[name], by_one(name), 1e-9)
