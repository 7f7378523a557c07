"""What a genome's file says of its task and its inputs: `eval`, `sample` and `predict` need no options for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import gbfunc as gb
from gbfunc.cli.options import DataOptions
from gbfunc.tasks import Task
from gbfunc.tasks.pnets import is_import_path
from gbfunc.tasks.pnets.hugging_face import PREFIX
from gbfunc.types import JSON

_OPTIONS = {"task": "", "task_config": "{}", "pnet": None, "pnet_config": "{}", "pretrained": None, "env": None}
"""Options that a file may say, as they are where the user says nothing."""

Options = TypeVar("Options", bound=DataOptions)


def about(task: Task, options: DataOptions) -> JSON:
    """The metadata of a genome: what its task, p-net and inputs are, where that is not as usual."""
    said: JSON = {"task": options.task, "pnet": task.pnet.name}
    for name, usual in _OPTIONS.items():
        if name not in said and (value := getattr(options, name)) != usual:
            said[name] = json.loads(value) if usual == "{}" else value
    interface = list(task.interface)
    while interface[-1] == task.interface._field_defaults.get(task.interface._fields[len(interface) - 1]):
        interface.pop()
    return said | {"interface": interface, **task.about}


def said_by(path: Path) -> Mapping[str, Any]:
    """What a genome's file says; nothing where that is no object."""
    if not path.is_file():
        raise FileNotFoundError(f"no such genome file: {path}")
    said = gb.load_metadata(path)
    return said if isinstance(said, Mapping) else {}


def described(path: Path, options: Options) -> Options:
    """The options, with what a genome's file says where the user says nothing."""
    said = said_by(path)
    # Of another task than the user's, it says nothing.
    said = said if options.task in ("", said.get("task")) else {}
    held = {f.name for f in fields(options)}
    taken: JSON = {}
    for name, usual in _OPTIONS.items():
        if name in held and name in said and getattr(options, name) == usual:
            taken[name] = _option(path, name, said[name], usual)
    return replace(options, **{"task": options.task or "digits"} | taken)


def _option(path: Path, name: str, value: Any, usual: str | None) -> str:
    if isinstance(value, dict) and usual == "{}":
        return json.dumps(value)
    if not isinstance(value, str) or usual == "{}":
        raise ValueError(f"{path} says {name} {value!r}, expected {'an object' if usual == '{}' else 'text'}")
    # A file runs no code: an environment's name may import a module, too.
    code = value.removeprefix(PREFIX) if name == "pnet" else value
    if is_import_path(code) or (name == "env" and ":" in code):
        raise ValueError(f"{path} was trained with --{name} {value}, which is code: pass that option if you trust it")
    return value
