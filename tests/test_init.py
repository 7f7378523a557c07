"""The names of `gbfunc` itself: those that left it are found where they are now, with a warning."""

from __future__ import annotations

import importlib

import pytest

import gbfunc as gb

MOVED = [(name, place) for place, names in gb._MOVED.items() for name in names]


@pytest.mark.parametrize(("name", "place"), MOVED)
def test_a_moved_name_is_found_with_a_warning(name: str, place: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"gbfunc.{name} is now {place}.{name}") as caught:
        found = getattr(gb, name)
    assert found is getattr(importlib.import_module(place), name)
    assert caught[0].filename == __file__


def test_a_moved_name_is_imported_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"gbfunc.tile_grid is now gbfunc\.tiling\.tile_grid") as caught:
        from gbfunc import tile_grid
    assert tile_grid is gb.tiling.tile_grid
    assert caught[0].filename == __file__


def test_names_at_the_top_are_there_without_a_warning() -> None:
    assert all(getattr(gb, name) is not None for name in gb.__all__)
    assert not {name for name, _ in MOVED} & set(gb.__all__)


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="module 'gbfunc' has no attribute 'tile_gird'"):
        gb.tile_gird  # noqa: B018
