"""`--config FILE`: options from a file, and the file that holds those of a training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import Field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gbfunc.files import replace_file

_OF_ONE_RUN = ("config", "out", "log", "log_every", "checkpoint_every", "keep", "resume")
_OF_ONE_RUN += ("allow_changes", "overwrite", "profile", "peak_flops")
"""Options that decide nothing of a training: whence they come, and what of it is kept."""

_ALTERNATIVES: tuple[Set[str], ...] = ({"epochs", "steps"}, {"genome_params", "genome_bytes", "compression"})
"""Options of which a training takes one: one on the command line is in the place of another in the file."""


def options_of(command: Any) -> dict[str, Field[Any]]:
    """Every option of a command or a group of options by its name, those of its groups too."""
    named: dict[str, Field[Any]] = {}
    for field in fields(command):
        named |= options_of(field.default) if is_dataclass(field.default) else {field.name: field}
    return named


def values_of(options: Any) -> Iterator[tuple[str, Any]]:
    """Name and value of every option of a command."""
    for field in fields(options):
        value = getattr(options, field.name)
        yield from values_of(value) if is_dataclass(value) else [(field.name, value)]


def config_words(path: Path, command: Any, training: Any, said: Set[str] = frozenset()) -> list[str]:
    """The options in a file as words of a command line, without alternatives to those that are `said` there.

    A file is written for a `training`. Another command takes those options of it that it shares, and leaves the rest.
    """
    known, trained = options_of(command), options_of(training)
    groups = {field.name for field in fields(training) if is_dataclass(field.default)}
    given: dict[str, Any] = {}
    for key, value in read_config(path).items():
        # A table may have the name of a subject of the help.
        given |= value if key in groups and isinstance(value, dict) else {key: value}
    replaced = {name for names in _ALTERNATIVES if names & said for name in names - said}
    words = []
    for key, value in given.items():
        name = key.replace("-", "_")
        if name in trained and value is not None and isinstance(value, bool) != isinstance(trained[name].default, bool):
            such = "true or false" if isinstance(trained[name].default, bool) else "neither true nor false"
            raise ValueError(f"{path}: {key} must be {such}, got {value!r}")
        if name in replaced:
            continue
        # Another option may have the same name: a device is a file where ranks are planned.
        if name in known and (name == "task" or trained.get(name, known[name]) is known[name]):
            words += _words(f"--{name.replace('_', '-')}", value)
        elif name not in trained:
            near = get_close_matches(name, known, 3)
            hint = f" (did you mean {' or '.join(near)}?)" if near else ""
            raise ValueError(f"{path}: there is no option {key!r}{hint}")
    return words


def _words(option: str, value: Any) -> list[str]:
    """An option with a value of TOML, YAML or JSON, as words of a command line."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [option if value else f"--no-{option.removeprefix('--')}"]
    if isinstance(value, list):
        return [option, *map(str, value)]
    return [f"{option}={json.dumps(value) if isinstance(value, dict) else value}"]


def read_config(path: Path, option: str = "--config") -> dict[str, Any]:
    """What the file of an option holds; raises as `config_words`."""
    if not path.is_file():
        raise FileNotFoundError(f"{option}: no such file: {path}")
    try:
        text, suffix = path.read_text(encoding="utf-8-sig"), path.suffix.lower()
        if suffix == ".toml":
            found: Any = _read_toml(text)
        elif suffix in (".yaml", ".yml"):
            import yaml

            found = yaml.safe_load(text)
            found = {} if found is None else found  # as an empty file is
        elif suffix == ".json":
            found = json.loads(text)
        else:
            raise ValueError("its name must end in .toml, .yaml, .yml or .json")
    except ImportError as error:
        raise ImportError(f"{option} {path} needs {error.name}: pip install 'gbfunc[cli]'") from error
    except Exception as error:
        # Each reader has its own errors.
        raise ValueError(f"{option} {path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{option} {path} must hold options by their names, got {found!r}")
    return found


def _read_toml(text: str) -> dict[str, Any]:
    """What a TOML text holds; `ValueError` names the line where what cannot be read begins."""
    import tomlkit
    from tomlkit.exceptions import ParseError

    try:
        return tomlkit.parse(text).unwrap()
    except ParseError as error:
        lines, reason = text.splitlines(), str(error).partition(" at line ")[0]

    def reads(n: int) -> bool:
        try:
            tomlkit.parse("\n".join(lines[:n]))
        except ParseError:
            return False
        return True

    # Not where the parser gave up: what is not closed goes on to the end of the file.
    first = next(n for n in reversed(range(len(lines))) if reads(n))
    reason = "a bracket or a quote is not closed" if "\\x00" in reason or "end of file" in reason else reason
    raise ValueError(f"line {first + 1}, {lines[first].strip()!r}: {reason}")


def settings_of(options: Any, resolved: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides a training: the user's options, and in place of what was left open what was `resolved`."""
    every = {name: value for name, value in values_of(options) if name not in _OF_ONE_RUN} | dict(resolved)
    return {name: _plain(value) for name, value in every.items() if value not in (None, (), "{}")}


def _plain(value: Any) -> Any:
    """A value as TOML and JSON have it."""
    if isinstance(value, str) and value.startswith("{") and "null" not in value:
        return json.loads(value)
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value


def write_config(path: Path, settings: Mapping[str, Any]) -> None:
    """The settings of a training as TOML, which `gbfunc train --config` takes."""
    import tomlkit

    head = "# The whole training; gbfunc train --config FILE repeats it, gbfunc train --help says what is what.\n\n"
    replace_file(path, (head + tomlkit.dumps(settings)).encode())
