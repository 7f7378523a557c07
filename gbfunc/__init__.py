"""gbfunc trains neural networks through a genomic bottleneck, as pure functions on PyTorch.

The weights of a p-net (any `nn.Module`) are generated, tile by tile, by tiny g-nets that see only the coordinates of a
weight; only the genome, which is the g-nets' parameters and the few direct ones, is trained, saved and shipped.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# Names are imported at their first use, since torch takes seconds; no public name is also the name of a room.
_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULES = {x.name: str(of.module) for of in _STUB.body if isinstance(of, ast.ImportFrom) for x in of.names}
__all__ = sorted(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if any(f"{module}.".startswith(f"gbfunc.{name}.") for module in _MODULES.values()):
        return import_module(f"gbfunc.{name}")
    raise AttributeError(f"module 'gbfunc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
