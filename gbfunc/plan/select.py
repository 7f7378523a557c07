"""Which modules of a pretrained p-net an adapter changes, and which it adds: in PEFT's terms."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from gbfunc.layers import LayerKind
from gbfunc.pnet import ParameterInfo

ALL_LINEAR = "all-linear"
_ALL_LINEAR_KINDS = frozenset({"linear", "transposed_linear"})


class Targets(NamedTuple):
    """What changes, and what is new.

    Attributes:
        modules: names or last parts of names of the modules that change, a regular expression for whole names,
            `"all-linear"`, or None for the default selection.
        new: names or last parts of names of the modules that are not the base's.
    """

    modules: str | tuple[str, ...] | None
    new: tuple[str, ...]

    def saved(self, name: str) -> bool:
        """Whether a parameter or buffer lies in a module that is not the base's."""
        parts = name.split(".")[:-1]
        return any(_names(self.new, ".".join(parts[:n])) for n in range(1, len(parts) + 1))

    def changes(self, info: ParameterInfo, kind: LayerKind) -> bool:
        """Whether a parameter of the base gets a delta."""
        if not kind.selected and (self.modules is None or kind.name != "embedding"):
            return False
        if self.modules is None:
            return True
        if self.modules == ALL_LINEAR:
            return kind.name in _ALL_LINEAR_KINDS
        layers = [name.rpartition(".")[0] for name in (info.name, *info.aliases)]
        return any(_names(self.modules, layer.partition(".parametrizations")[0]) for layer in layers)


def _names(patterns: str | tuple[str, ...], module: str) -> bool:
    """Whether names or last parts, or a regular expression for all of it, say a module."""
    if isinstance(patterns, str):
        return re.fullmatch(patterns, module) is not None
    return any(module == p or module.endswith(f".{p}") for p in patterns)


def check_targets(
    pnet: nn.Module, base: str | None, modules: str | Sequence[str] | None, new: Sequence[str]
) -> Targets | None:
    """Targets as `make_plan` takes them, None for a p-net without a base.

    Raises:
        TypeError: for arguments of a wrong type.
        ValueError: for a base or modules that there are not, and for targets without a base.
    """
    if base not in (None, "own"):
        raise ValueError(f"base must be None or 'own' (the p-net's present weights), got {base!r}")
    if isinstance(new, str) or not all(isinstance(n, str) for n in new):
        raise TypeError(f"modules_to_save must be a list of names of modules, got {new!r}")
    if not (modules is None or isinstance(modules, str) or all(isinstance(n, str) for n in modules)):
        raise TypeError(f"target_modules must be a list of names, a regular expression or None, got {modules!r}")
    if base is None:
        if modules is not None or new:
            raise ValueError("target_modules and modules_to_save are of an adapter: they need base='own'")
        return None
    modules = modules if modules is None or isinstance(modules, str) else tuple(modules)
    names = [name for name, _ in pnet.named_modules(remove_duplicate=False) if name]
    asked: list[tuple[str, str | tuple[str, ...]]] = [("modules_to_save", (n,)) for n in new]
    if isinstance(modules, tuple):
        asked += [("target_modules", (n,)) for n in modules]
    elif modules not in (None, ALL_LINEAR):
        asked.append(("target_modules", modules))
    for what, pattern in asked:
        try:
            found = any(_names(pattern, name) for name in names)
        except re.error as error:
            raise ValueError(f"{what} {pattern!r} is not a regular expression: {error}") from error
        if not found:
            word = pattern if isinstance(pattern, str) else pattern[0]
            raise ValueError(f"{what} {word!r} names no module; the p-net has {names}")
    return Targets(modules, tuple(new))
