"""Objects of the user's own, by import path: `package.module:name`."""

from __future__ import annotations

import importlib
import os
import re
import sys
from typing import Any

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_import_path(name: str) -> bool:
    """Whether `name` has the form `package.module:name`."""
    return _PATH.fullmatch(name) is not None


def import_object(path: str) -> Any:
    """What `package.module:name` names; the present folder counts as a place of modules.

    Raises:
        ImportError: if there is no such module, or it cannot be imported.
        ValueError: if it has no such name.
    """
    module_name, _, name = path.partition(":")
    folder = os.getcwd()
    added = folder not in sys.path and "" not in sys.path
    if added:
        # As `python -m` does; a console script leaves it out.
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ImportError(f"cannot import {module_name} of {path}: {error}") from error
    finally:
        if added:
            sys.path.remove(folder)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module_name} has no {name!r} ({path})")
        found = getattr(found, part)
    return found
