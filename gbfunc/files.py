"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` in the place of a file, also after a loss of power; only a kill leaves `.<name>.<random>` beside it.

    Raises:
        OSError: if it cannot be written; what was there before is intact.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    # The new name is on disk only when its folder is; not every system can open folders, nor flush them.
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
