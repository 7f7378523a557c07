"""Writes files atomically: a file appears complete or not at all."""

import contextlib
import os
import secrets
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no fcntl
    fcntl = None


def replace_file(path: Path, data: bytes) -> None:
    """Replace the content of a file by `data`, atomically even if power fails. The file keeps its permissions.

    If `path` is a symbolic link, the file that the link names is replaced. If the process is killed, a temporary file
    `.<name>.<random>` may be left.

    Raises:
        OSError: if the file cannot be written; an existing file is then unchanged.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(f"{path} must be a regular file, got a device or a pipe, which writing would replace")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no such folder: {path.parent}; expected a folder for {path.name}: make it first")
    # Shorten the name, because file systems limit names to 255 bytes.
    temporary = path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            if path.exists():
                temporary.chmod(path.stat().st_mode & 0o7777)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # The error names the temporary file, or, if the disk is full, no file
        raise
    # Flush the folder too, so that the new name is on disk. Ignore errors: some systems cannot open or flush folders.
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
