"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no such locks: there, leftovers of killed processes stay.
    fcntl = None


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` in the place of a file, also after a loss of power.

    The file that a symbolic link names is replaced, not the link; one that was there keeps its permissions. A kill
    leaves `.<name>.<random>` beside it (of a long name its digest), which the next call for the same file removes.

    Raises:
        OSError: if it cannot be written; what was there before is intact.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(f"{path} is no regular file (a device, a pipe), and would be replaced by one")
    with contextlib.suppress(OSError):
        remove_leftovers(path.parent, re.escape(_short(path.name)))
    temporary, descriptor = _open_beside(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if path.exists():
                os.chmod(temporary, path.stat().st_mode & 0o7777)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
            # While it is locked; Windows, where nothing is, renames no open file.
            if fcntl is not None:
                os.replace(temporary, path)
        if fcntl is None:
            os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # A full disk does not say it.
        raise
    # The new name is on disk only when its folder is; not every system can open folders, nor flush them.
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def remove_leftovers(folder: Path, pattern: str) -> None:
    """Remove the temporary files that killed processes left of files whose names match a regular expression.

    One that a process is writing is locked, and stays. Raises `OSError` if the folder cannot be read.
    """
    if fcntl is None:
        return
    leftover = re.compile(rf"\.(?:{pattern})\.[0-9a-f]{{16}}")
    for name in filter(leftover.fullmatch, os.listdir(folder)):
        # A lock that a file system does not have is an error, and the file stays.
        with contextlib.suppress(OSError), open(folder / name, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(folder / name)


def _short(name: str) -> str:
    """The name, or its digest where a temporary name made of it would be too long for a file system."""
    return name if len(os.fsencode(name)) < 200 else hashlib.sha256(os.fsencode(name)).hexdigest()


def _open_beside(path: Path) -> tuple[Path, int]:
    """A new temporary file beside a file, and its descriptor, locked until it is closed."""
    while True:
        temporary = path.with_name(f".{_short(path.name)}.{secrets.token_hex(8)}")
        file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        if fcntl is None:
            return temporary, file
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        # Another process may have removed it before it was locked.
        if os.fstat(file).st_nlink:
            return temporary, file
        os.close(file)
