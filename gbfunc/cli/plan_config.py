"""`--plan-config FILE`: what of a p-net is generated, by which g-nets and under which codes, as TOML, YAML or JSON.

include = ["^embedding"]
exclude = ["head"]
[rules]
"norm" = "none"
"fc1" = { type = "low_rank", rank = 4 }
[encodings]
"fc1.weight" = ["binary", { type = "grid", dims = [28, 28] }]
"fc2.weight" = ["default", { type = "table", file = "kinds.npy" }]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gbfunc.cli.config import read_config
from gbfunc.encoding import Encoding, encoding_from_json, table
from gbfunc.hypernets import Hypernet
from gbfunc.tasks.pnets import PlanOptions

_OPTION = "--plan-config"
_KEYS = ("include", "exclude", "rules", "encodings")


def read_plan_config(path: Path, hypernet: Callable[[str, str, Mapping[str, Any]], Hypernet]) -> PlanOptions:
    """What a file adds to the `PlanOptions` of a p-net: patterns, rules and codes.

    `hypernet` makes a g-net from the option, its type and the type's options.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it cannot be read, or holds anything else.
    """
    given = read_config(path, _OPTION)
    if odd := sorted(given.keys() - {*_KEYS}):
        raise ValueError(f"{_OPTION} {path}: there is no {odd[0]!r}; a plan has {', '.join(_KEYS)}")
    include, exclude = given.get("include", []), given.get("exclude", [])
    for key, value in (("include", include), ("exclude", exclude)):
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
            raise ValueError(f"{_OPTION} {path}: {key} must be a list of regular expressions, got {value!r}")
    for key in ("rules", "encodings"):
        if not isinstance(given.get(key, {}), dict):
            raise ValueError(f"{_OPTION} {path}: {key} must be a table, got {given[key]!r}")
    rules = []
    for pattern, value in given.get("rules", {}).items():
        name, options = _typed(f"{_OPTION} {path}: rules, {pattern!r}", value, "periodic, none, ...")
        rules.append((pattern, None if name == "none" else hypernet(f"{_OPTION} {path}", name, options)))
    codes = {name: _pair(path, name, pair) for name, pair in given.get("encodings", {}).items()}
    return PlanOptions(rules=tuple(rules), encodings=codes, include=tuple(include), exclude=tuple(exclude))


def _typed(where: str, value: Any, known: str) -> tuple[str, dict[str, Any]]:
    """A type and its options, from its name or from a table with it."""
    options = {"type": value} if isinstance(value, str) else value
    if not isinstance(options, dict) or not isinstance(options.get("type"), str):
        raise ValueError(f"{where}: expected a type ({known}) or a table with one, got {value!r}")
    return options["type"], {k: v for k, v in options.items() if k != "type"}


def _pair(path: Path, name: str, pair: Any) -> tuple[Encoding | None, Encoding | None]:
    where = f"{_OPTION} {path}: encodings, {name!r}"
    if not isinstance(pair, list) or len(pair) != 2:
        raise ValueError(f"{where}: expected codes of [rows, columns], got {pair!r}")
    rows, columns = (_encoding(where, path.parent, code) for code in pair)
    return rows, columns


def _encoding(where: str, folder: Path, value: Any) -> Encoding | None:
    kind, options = _typed(where, value, "binary, grid, default, ...")
    if kind == "default" and not options:
        return None
    try:
        if kind == "table" and "file" in options:
            return table(np.load(folder / options["file"], allow_pickle=False))
        return encoding_from_json(_nested({"type": kind, **options}))
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _nested(options: dict[str, Any]) -> dict[str, Any]:
    """Options as JSON has them: where an encoding is in another, its name will do."""
    inner = {key: options[key] for key in ("channels", "positions") if key in options}
    named = {key: {"type": code} for key, code in inner.items() if isinstance(code, str)}
    return options | {key: _nested(code) for key, code in inner.items() if isinstance(code, dict)} | named
