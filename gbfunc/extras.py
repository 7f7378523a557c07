"""Packages that only a part of gbfunc needs."""

import importlib
from typing import Any


def import_extra(module: str, needed_by: str, package: str) -> Any:
    """A module of a package that may be missing; ImportError without it, with what to give to pip."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        install = f"'{package}'" if "[" in package else package
        name = module.partition(".")[0]
        raise ImportError(f"{error}: {needed_by} needs the package {name}: pip install {install}") from error
