"""Many ranks train as one process does on the joined batch: real processes, float64, every placement and type."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import optree
import pytest
import torch

from tests.support.rank_cases import CASES, COMPILED, EAGER
from tests.support.ranks import run_ranks

WORLDS = {2: 1, 3: 1, 4: 2}
"""Data axis by number of ranks."""


@lru_cache
def by_ranks(world: int) -> list[dict[str, Any]]:
    """All cases on all ranks: started once, as a rank takes seconds to start."""
    return run_ranks(
        world, "rank_cases:run_cases", arguments={"data": WORLDS[world], "names": list(CASES)}, timeout=110
    )


@lru_cache
def by_one(name: str) -> Any:
    return CASES[name](None)


def assert_equal(found: Any, expected: Any, tolerance: float) -> None:
    assert not isinstance(found, str), found
    for key in ("reports", "state"):
        spec, leaves = optree.tree_structure(expected[key]), optree.tree_leaves(expected[key])
        assert optree.tree_structure(found[key]) == spec
        for a, b in zip(optree.tree_leaves(found[key]), leaves, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_find_what_one_process_finds(world: int, name: str) -> None:
    tolerance = 1e-12 if name.startswith("gradient") else 1e-9
    for found in by_ranks(world):
        assert_equal(found[name], by_one(name), tolerance)


def test_each_rank_holds_its_part_of_the_genome() -> None:
    """Leaves and optimizer state of tiles are divided by the ranks, to within one tile."""
    for name in ("AdamW sharded gnet", "AdamW factors periodic"):
        held = [found[name]["held"] for found in by_ranks(3)]
        whole = by_one(name)["held"]
        assert all(h < 0.5 * whole for h in held)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("world", "name"), [*((2, name) for name in COMPILED), (4, "compile sharded")])
def test_compiled_steps_on_ranks(world: int, name: str) -> None:
    arguments = {"data": WORLDS[world], "names": [name]}
    for found in run_ranks(world, "rank_cases:run_cases", arguments=arguments, timeout=900):
        assert_equal(found[name], EAGER[name](None), 1e-9)
