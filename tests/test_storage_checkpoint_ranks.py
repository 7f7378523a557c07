"""Checkpoints of trainings on many ranks: resumed on any number of them, and after the death of one."""

import shutil
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import gbfunc as gb
from tests.support.rank_checkpoints import PLACEMENTS, course, make
from tests.support.ranks import PATIENCE, launch, run_ranks

pytestmark = pytest.mark.process

UNTIL, SAVED = 6, 3


def assert_close_trees(found: Any, expected: Any, tolerance: float) -> None:
    leaves, structure = optree.tree_flatten(expected)
    assert optree.tree_structure(found) == structure
    for a, b in zip(optree.tree_leaves(found), leaves, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("courses")


@pytest.fixture(scope="module")
def straight(folders: Path) -> Any:
    return course(None, folders / "straight", UNTIL)["state"]


@pytest.fixture(scope="module")
def on_two(folders: Path) -> list[Any]:
    course(None, folders / "one", SAVED)
    begin = [(str(folders / placement), SAVED, placement) for placement in PLACEMENTS]
    return run_ranks(2, "rank_checkpoints:run_courses", arguments={"tasks": begin, "refused": folders / "one"})


def test_two_go_on_as_three(folders: Path, on_two: list[Any], straight: Any) -> None:
    tasks = []
    for placement, other in zip(PLACEMENTS, (*PLACEMENTS[1:], PLACEMENTS[0]), strict=True):
        target = folders / f"{placement} to three"
        shutil.copytree(folders / placement, target)
        tasks.append((str(target), UNTIL, other))
    for found in run_ranks(3, "rank_checkpoints:run_courses", arguments={"tasks": tasks, "refused": folders / "one"}):
        for folder, _, _ in tasks:
            assert found[folder]["from"] == f"step-{SAVED:08d}.safetensors"
            assert_close_trees(found[folder]["state"], straight, 1e-9)


def test_every_rank_is_told(on_two: list[Any]) -> None:
    for rank, found in enumerate(on_two):
        folder, plan, file = found["refusals"]
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
