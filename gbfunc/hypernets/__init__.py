"""The types of g-net, and what a new one is made of; a new one is one class and one entry in `HYPERNETS`."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from gbfunc.encoding import UNKNOWN
from gbfunc.hypernets.base import Hypernet, Leaf, Sized, draw, ensemble_params
from gbfunc.hypernets.codeless import constant, low_rank, xox
from gbfunc.hypernets.mlp import gnet, stochastic
from gbfunc.hypernets.module import from_module
from gbfunc.hypernets.periodic import bilinear, periodic
from gbfunc.types import Factors, MatrixDims, TileDims

__all__ = [
    "HYPERNETS",
    "Factors",
    "Hypernet",
    "Leaf",
    "MatrixDims",
    "Sized",
    "TileDims",
    "bilinear",
    "constant",
    "draw",
    "ensemble_params",
    "from_module",
    "gnet",
    "hypernet_from_json",
    "low_rank",
    "periodic",
    "stochastic",
    "xox",
]

TYPES: dict[str, Callable[..., Hypernet]] = {
    t.type: t for t in (periodic, bilinear, constant, gnet, stochastic, low_rank, xox, from_module)
}
"""`gb.register` adds to it."""
HYPERNETS: Mapping[str, Callable[..., Hypernet]] = MappingProxyType(TYPES)
"""Every hypernetwork by its type."""


def hypernet_from_json(data: dict[str, Any], factories: Mapping[str, Callable[..., Any]]) -> Hypernet:
    """Read what `Hypernet.to_json` wrote; `factories` of `from_module` by import path, as no file alone makes one run.

    Raises:
        ValueError: for an unknown type, options that do not fit it, or a factory that is not given.
    """
    try:
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k != "type"}
        if data["type"] == "module":
            path: Any = options.pop("factory")
            if path not in factories:
                raise ValueError(f"the file needs the g-net factory {path!r}: pass it as load(..., factories=[...])")
            options["factory"] = factories[path]
        return HYPERNETS[data["type"]](**options)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"not a hypernetwork: {reprlib.repr(data)}; known types are {sorted(HYPERNETS)}; {UNKNOWN}"
        ) from error
