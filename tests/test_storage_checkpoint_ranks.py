"""Checkpoints of trainings on many ranks: errors on every rank, and the death of one."""

from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import gbfunc as gb
from tests.support.rank_checkpoints import course, make
from tests.support.ranks import PATIENCE, launch, run_ranks

pytestmark = pytest.mark.process


def assert_close_trees(found: Any, expected: Any, tolerance: float) -> None:
    leaves, structure = optree.tree_flatten(expected)
    assert optree.tree_structure(found) == structure
    for a, b in zip(optree.tree_leaves(found), leaves, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_every_rank_is_told(tmp_path: Path) -> None:
    course(None, tmp_path / "one", 1)
    for rank, found in enumerate(run_ranks(2, "rank_checkpoints:refusals", arguments={"folder": tmp_path / "one"})):
        folder, plan, file = found
        assert "cannot keep checkpoints there" in folder
        assert "another plan" in plan and plan.startswith("ValueError")
        assert file.startswith("FileNotFoundError")
        assert ("on rank 0" in folder) == (rank > 0)


@pytest.mark.parametrize(("victim", "moment"), [pytest.param(1, "before", marks=pytest.mark.slow), (0, "during")])
def test_a_rank_that_dies_in_a_save(victim: int, moment: str, tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path / "run"), "victim": victim, "moment": moment, "timeout": 20.0 * PATIENCE}
    ended = launch(2, "rank_checkpoints:killed", tmp_path, 100, arguments)
    assert ended[victim][0] == -9 and ended[1 - victim][0] == 0, ended
    error = torch.load(tmp_path / f"result-{1 - victim}.pt", weights_only=False)
    assert "another rank died or is stuck" in error
    # What was committed is there; what was not has left no trace that misleads.
    step = make(None)
    found = gb.load_checkpoint(tmp_path / "run", step, step.init())
    assert int(found.state.step) == 2 and not found.skipped
