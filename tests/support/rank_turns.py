"""Ranks that share files: one prepares them, the others find them."""

import time
from pathlib import Path
from typing import Any, NoReturn

import gbfunc as gb
from gbfunc.cli.ranks import in_turn
from tests.support.ranks import PATIENCE


def prepare_files(init_method: str, folder: str) -> dict[str, Any]:
    """Write a file that is not there, slowly, or read it; then fail on one rank or another."""
    path = Path(folder) / "cache"
    with gb.mesh(init_method=init_method, timeout=20 * PATIENCE) as mesh:

        def read() -> tuple[str, bool]:
            if missing := not path.exists():
                # The others would be first.
                time.sleep(0.5 if mesh.rank == 0 else 0.0)
                path.write_text(f"by rank {mesh.rank}")
            return path.read_text(), missing

        def fail() -> NoReturn:
            raise FileNotFoundError("no data")

        text, written = in_turn(mesh, read)
        said = {"read": text, "written": written}
        for name, rank in (("without data", 0), ("without room", 2)):
            try:
                in_turn(mesh, fail if mesh.rank == rank else lambda: None)
            except (ValueError, OSError) as error:
                said[name] = f"{type(error).__name__}: {error}"
        return said
