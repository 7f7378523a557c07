"""Pipelines: stages on ranks train as the whole does in one process, in float64, alone and with the other axes.

By default each case runs on one of the smaller meshes, and two on 8 ranks; the whole product is `pytest -m slow`.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import cycle
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
TURNS = dict(zip(PIPELINES, cycle(("2 stages", "2 stages, data 2", "2 stages", "2 stages, tensor 2"))))
ON_8_RANKS = ("gpt 1f1b periodic", "gpt zbv gnet")


def is_slow(axes: str, name: str) -> bool:
    """Whether the default run leaves a case out; every schedule and kind of p-net meets the smaller meshes."""
    return TURNS[name] != axes and not (len(MESHES[axes]) == 3 and name in ON_8_RANKS)


@lru_cache
def by_ranks(axes: str, slow: bool) -> list[dict[str, Any]]:
    """All cases of a mesh on all its ranks, those of the default run or the others: a rank takes seconds to start."""
    names, sizes = [name for name in PIPELINES if is_slow(axes, name) == slow], MESHES[axes]
    return run_ranks(
        2 ** len(sizes), "tensor_cases:run_cases", arguments={"names": names, **sizes}, timeout=300 if slow else 100
    )


@lru_cache
def by_one(name: str) -> Any:
    return PIPELINES[name](None)


@pytest.mark.parametrize(
    ("axes", "name"),
    [
        pytest.param(axes, name, id=f"{axes}-{name}", marks=[pytest.mark.slow] if is_slow(axes, name) else [])
        for axes in MESHES
        for name in PIPELINES
    ],
)
def test_stages_train_as_the_whole(axes: str, name: str) -> None:
    if name.startswith(("gpt2", "llama")):
        pytest.importorskip("transformers")
    for result in by_ranks(axes, is_slow(axes, name)):
        assert_equal(result[name], by_one(name), 1e-9)
