"""gbfunc trains neural networks through a genomic bottleneck, as pure functions on PyTorch.

Tiny g-nets generate the weights of a p-net (any `nn.Module`), tile by tile, from the coordinates of each weight. Only
the genome is trained, saved and sent: the parameters of the g-nets, and a few parameters of the p-net itself.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# Import names at first use, as importing torch takes seconds. A submodule of equal name would hide a public name.
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
