"""Ranks that share files: one prepares them, the others find them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gbfunc as gb
from gbfunc.cli.ranks import in_turn
from gbfunc.parallel import Mesh
from tests.support.ranks import PATIENCE


def prepare_files(init_method: str, folder: str) -> dict[str, Any]:
    """Write a file that is not there, slowly, or read it; then fail on one rank or another."""
    with gb.mesh(init_method=init_method, timeout=20 * PATIENCE) as mesh:
        path, written = Path(folder) / "cache", False

        def read() -> str:
            nonlocal written
            if not path.exists():
                # The others would be first.
                time.sleep(0.5 if mesh.rank == 0 else 0.0)
                written = True
                path.write_text(f"by rank {mesh.rank}")
            return path.read_text()

        def fail(rank: int, error: OSError) -> Callable[[], None]:
            def prepare() -> None:
                if mesh.rank == rank:
                    raise error

            return prepare

        return {
            "read": in_turn(mesh, read),
            "written": written,
            "without data": words_of(mesh, fail(0, FileNotFoundError("no data"))),
            "without room": words_of(mesh, fail(2, OSError("no room"))),
        }


def words_of(mesh: Mesh, prepare: Callable[[], None]) -> str:
    try:
        in_turn(mesh, prepare)
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
