"""Types of g-net. A new type is one class and one entry in `TYPES`."""

import reprlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from gbfunc.encoding import UNKNOWN
from gbfunc.hypernets.base import Hypernet
from gbfunc.hypernets.base import Leaf as Leaf
from gbfunc.hypernets.base import Sized as Sized
from gbfunc.hypernets.base import ensemble_params as ensemble_params
from gbfunc.hypernets.codeless import constant, low_rank, new_rows, xox
from gbfunc.hypernets.mlp import gnet, stochastic
from gbfunc.hypernets.module import from_module
from gbfunc.hypernets.periodic import bilinear, periodic
from gbfunc.types import Factors as Factors
from gbfunc.types import TileDims as TileDims

TYPES: dict[str, Callable[..., Hypernet]] = {
    t.type: t for t in (periodic, bilinear, constant, gnet, stochastic, low_rank, xox, new_rows, from_module)
}
"""Types of g-net by name. `gb.register` adds types."""
HYPERNETS: Mapping[str, Callable[..., Hypernet]] = MappingProxyType(TYPES)
"""Read-only view of `TYPES`."""


def hypernet_from_json(data: dict[str, Any], factories: Mapping[str, Callable[..., Any]]) -> Hypernet:
    """Undo `Hypernet.to_json`. `factories` maps import paths to the factories of `from_module`."""
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
            f"expected a g-net of a type in {sorted(HYPERNETS)}, got {reprlib.repr(data)}: {UNKNOWN}"
        ) from error
