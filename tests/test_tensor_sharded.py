"""A genome that is split over ranks, with the tensor and the pipeline axis beside it: as one process finds it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.tensor_cases import SHARDED
from tests.support.versions import with_pipelines
from tests.test_distributed import assert_equal

pytestmark = pytest.mark.process


@lru_cache
def by_ranks(pipeline: bool) -> list[dict[str, Any]]:
    names = [name for name in SHARDED if ("pipeline" in name) == pipeline]
    axes = {"gnets": 2, "pipeline" if pipeline else "tensor": 2}
    return run_ranks(4, "tensor_cases:run_cases", arguments={"names": names, **axes}, timeout=170)


@lru_cache
def by_one(name: str) -> Any:
    return SHARDED[name](None)


@pytest.mark.parametrize("name", with_pipelines(SHARDED, "pipeline"))
def test_a_split_genome_makes_pieces_and_stages(name: str) -> None:
    for result in by_ranks("pipeline" in name):
        assert_equal(result[name], by_one(name), 1e-9)
