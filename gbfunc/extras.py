"""Imports of optional packages."""

import importlib
from typing import Any


def import_extra(module: str, needed_by: str, package: str) -> Any:
    """Import a module of an optional package. If the package is missing, raise ImportError with the pip command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        install = f"'{package}'" if "[" in package else package
        name = module.partition(".")[0]
        raise ImportError(f"{error}: {needed_by} needs the package {name}: pip install {install}") from error
