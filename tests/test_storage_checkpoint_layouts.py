"""A checkpoint goes from any layout of ranks to any other: the same state, bit by bit, and the same genome file."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.rank_layouts import LAYOUTS, Course, take
from tests.support.ranks import run_ranks
from tests.support.versions import needs_pipelines
from tests.test_storage_checkpoint_ranks import assert_close_trees

pytestmark = pytest.mark.process

UNTIL, SAVED = 5, 3
ON_TWO = tuple(name for name in LAYOUTS if " and " not in name)
ON_FOUR = tuple(name for name in LAYOUTS if " and " in name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def straight(folder: Path) -> Any:
    return take(None, Course("", folder / "none", folder / "straight", UNTIL))["state"]


@pytest.fixture(scope="module")
def begun(folder: Path) -> dict[str, Any]:
    return take(None, Course("", folder / "none", folder / "one", SAVED))


def run(world: int, layouts: tuple[str, ...], folder: Path) -> dict[str, dict[str, Any]]:
    """What ranks have, all the same, of each training by its folder.

    Trainings are begun in each layout, each is gone on with by the next layout, and one process's by all of them.
    """
    begin = [(name, "none", name, SAVED) for name in layouts]
    later = [(name, layouts[i - 1], f"{name} after another", UNTIL) for i, name in enumerate(layouts)]
    of_one = [(name, "one", f"{name} after one", UNTIL) for name in layouts]
    courses = begin + later + of_one
    places = [(name, str(folder / a), str(folder / b), n) for name, a, b, n in courses]
    ranks = run_ranks(world, "rank_layouts:run_courses", arguments={"courses": places}, timeout=170)
    for i, (_, _, name, _) in enumerate(courses):
        for other in ranks[1:]:
            assert other[i]["genome"] == ranks[0][i]["genome"], name
            assert_close_trees(other[i]["state"], ranks[0][i]["state"], 0.0)
    return {name: taken for (_, _, name, _), taken in zip(courses, ranks[0], strict=True)}


@needs_pipelines
@pytest.mark.parametrize(("world", "layouts"), [(2, ON_TWO), pytest.param(4, ON_FOUR, marks=pytest.mark.slow)])
@pytest.mark.timeout(300)
def test_any_layout_goes_on_from_any(
    world: int, layouts: tuple[str, ...], folder: Path, begun: dict[str, Any], straight: Any
) -> None:
    made = run(world, layouts, folder)
    for i, name in enumerate(layouts):
        # What ranks have written one process reads, and the reverse: the same numbers, and the same genome file.
        read = take(None, Course("", folder / name, folder / f"{name} read", SAVED))
        assert_close_trees(read["loaded"], made[name]["state"], 0.0)
        assert read["genome"] == made[name]["genome"]
        assert_close_trees(made[f"{name} after one"]["loaded"], begun["state"], 0.0)
        assert_close_trees(made[f"{name} after another"]["loaded"], made[layouts[i - 1]]["state"], 0.0)
        # Sums of other orders differ in their last bits.
        assert_close_trees(made[name]["state"], begun["state"], 1e-9)
        assert_close_trees(
            take(None, Course("", folder / name, folder / f"one after {name}", UNTIL))["state"], straight, 1e-9
        )
        for end in ("after one", "after another"):
            assert_close_trees(made[f"{name} {end}"]["state"], straight, 1e-9)
