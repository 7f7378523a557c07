"""Many ranks train as one process does on the joined batch: real processes, float64, every placement and type.

By default a case runs on two ranks or on three, and on both where the tiles do not go round; the whole product is
`pytest -m slow`.
"""

from functools import lru_cache
from typing import Any
from zlib import crc32

import optree
import pytest
import torch

from tests.support.rank_cases import CASES, COMPILED, EAGER
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.process

WORLDS = {2: 1, 3: 1, 4: 2}
"""Data axis by number of ranks."""


def is_slow(world: int, name: str) -> bool:
    return world == 4 or ("tile" not in name and world != (2, 3)[crc32(name.encode()) % 2])


@lru_cache
def by_ranks(world: int, slow: bool) -> list[dict[str, Any]]:
    names = [name for name in CASES if is_slow(world, name) == slow]
    return run_ranks(world, "rank_cases:run_cases", arguments={"data": WORLDS[world], "names": names}, timeout=110)


@lru_cache
def by_one(name: str) -> Any:
    return CASES[name](None)


def assert_equal(found: Any, expected: Any, tolerance: float, equal_nan: bool = False) -> None:
    assert not isinstance(found, str), found
    for key in ("reports", "state"):
        spec, leaves = optree.tree_structure(expected[key]), optree.tree_leaves(expected[key])
        assert optree.tree_structure(found[key]) == spec
        for a, b in zip(optree.tree_leaves(found[key]), leaves, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=equal_nan)


@pytest.mark.parametrize(
    ("world", "name"),
    [
        pytest.param(world, name, id=f"{world}-{name}", marks=[pytest.mark.slow] if is_slow(world, name) else [])
        for world in WORLDS
        for name in CASES
    ],
)
def test_ranks_find_what_one_process_finds(world: int, name: str) -> None:
    for found in by_ranks(world, is_slow(world, name)):
        assert_equal(found[name], by_one(name), 1e-9)


def test_each_rank_holds_its_part_of_the_genome() -> None:
    """Leaves and optimizer state of tiles are divided by the ranks, to within one tile."""
    for name in ("AdamW sharded periodic", "AdamW factors gnet"):
        held = [found[name]["held"] for found in by_ranks(3, is_slow(3, name))]
        whole = by_one(name)["held"]
        assert all(h < 0.5 * whole for h in held)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("world", "name"), [*((2, name) for name in COMPILED), (4, "compile sharded")])
def test_compiled_steps_on_ranks(world: int, name: str) -> None:
    arguments = {"data": WORLDS[world], "names": [name]}
    for found in run_ranks(world, "rank_cases:run_cases", arguments=arguments, timeout=900):
        assert_equal(found[name], EAGER[name](None), 1e-9)
