"""Parses arguments and the file of `--config`. Writes `config.toml`, the file with the options of a training."""

import contextlib
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any

try:
    import tyro
except ImportError as _error:
    raise ImportError("the command line needs its extra packages: pip install 'gbfunc[cli]'") from _error

from gbfunc import __version__
from gbfunc.cli.commands import COMMANDS, Train
from gbfunc.cli.options import ALTERNATIVES, HELP_TASK, check_values, options_of, values_of
from gbfunc.files import replace_file


def parse(argv: Sequence[str]) -> Any:
    """Parse arguments into an instance of a class in `COMMANDS`. Errors for an unknown option name similar options."""
    name, *words = argv or [""]
    if name == "--version":
        print(f"gbfunc {__version__}")
        raise SystemExit(0)
    if name in ("", "-h", "--help"):
        print("usage: gbfunc COMMAND [OPTIONS]\n\nTrain neural networks through a genomic bottleneck.")
        print("A small genome generates the weights of a network, which is called the p-net.\n")
        print(*(f"  {command:<10} {kind.__doc__}" for command, kind in COMMANDS.items()), sep="\n")
        print("\nOptions of a command: gbfunc COMMAND --help. Version: gbfunc --version.")
        raise SystemExit(0)
    if name not in COMMANDS:
        raise ValueError(f"no command {name!r}{_nearest(name, COMMANDS)}: choose one of {', '.join(COMMANDS)}")
    message, style = io.StringIO(), (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
    words = [*config_words(name, words), *words]
    try:
        with contextlib.redirect_stderr(message):
            command = tyro.cli(COMMANDS[name], prog=f"gbfunc {name}", args=words, config=style)
    except SystemExit as end:
        if end.code in (0, None):
            raise
        words = re.sub(r"(Unrecognized options: --[\w-]+), [^-]\S*", r"\1", _reason(message.getvalue()))
        if words.startswith("Missing from") and argv[1:] and argv[1][0] != "-":
            words += f" (got {argv[1]!r} without the name of an option)"
        if "did you mean" not in words and (option := re.match(r"Unrecognized options: (--[\w-]+)", words)):
            words += _nearest(option[1], [f"--{key.replace('_', '-')}" for key in options_of(COMMANDS[name])], 3)
        raise ValueError(f"{words}: see gbfunc {name} --help") from None
    check_values(command)
    return command


def _reason(message: str) -> str:
    lines = [line.strip("│ ") for line in message.splitlines()[1:]]
    blocks = " ".join(line if line.strip("─-╰╯") else "\n" for line in lines).split("\n")
    words = next(block for block in blocks if block.strip()).strip().removesuffix(".")
    words = re.sub(r"(--[\w-]+ [A-Z]+\b).*?\(required\)", r"\1", words)  # drop a missing option's help
    if match := re.search(r"(--[\w-]+): no type matching (.+) could be instantiated from \[(.*)\]", words):
        expected = re.sub(r"[{}\[\]]", "", match[2].replace("{None}|", ""))
        return f"{match[1]} must be {expected}, got {match[3]}"
    near = re.search(r"Perhaps you meant:\s+(--[\w-]+)", " ".join(blocks))
    return words.replace("'None', ", "").replace(", 'None'", "") + (f" (did you mean {near[1]}?)" if near else "")


def _nearest(word: str, known: Iterable[str], most: int = 1) -> str:
    near = get_close_matches(word, known, most)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def config_words(command: str, argv: Sequence[str]) -> list[str]:
    """Write the options in the file of `--config` as arguments: `["--steps=100", ...]`; [] without `--config`.

    The file may have all options of `gbfunc train`; other commands ignore options that they do not have. If an argument
    in `argv` excludes an option of the file, the option is ignored: `--steps` overrides `epochs`.
    """
    known, trained = options_of(COMMANDS[command]), options_of(Train)
    tokens = [token for word in argv for token in (word.split("=", 1) if word.startswith("--") else [word])]
    following = dict(pairwise(tokens))
    for option, value in following.items():
        if option.startswith("--") and option != "--prompt" and not value:
            raise ValueError(f"{option} needs a value, got '' (the current folder is '.')")
    HELP_TASK.set(following.get("--task", "text" if command == "sample" else "digits"))
    if "--config" not in following or "config" not in known:
        return []
    path, in_file = Path(following["--config"]), {}
    for key, value in read_config(path).items():
        # A table whose name is no option is only a group of options.
        is_table = isinstance(value, dict) and key.replace("-", "_") not in trained
        in_file |= value if is_table else {key: value}
    passed = {token.removeprefix("--").replace("-", "_") for token in tokens if token.startswith("--")}
    replaced = {name for names in ALTERNATIVES if passed & {*names} for name in names if name not in passed}
    words: list[str] = []
    for key, value in in_file.items():
        name, option = key.replace("-", "_"), f"--{key.replace('_', '-')}"
        if name not in known and name not in trained:
            raise ValueError(f"{path}: there is no option {key!r}{_nearest(name, known, 3)}")
        # Ignore an option that has another meaning here than in `train`: `--device` of `gbfunc plan` is a file.
        same = name in known and (name == "task" or trained.get(name, known[name]) is known[name])
        if value is None or name in replaced or not same:
            continue
        if isinstance(value, bool) != isinstance(known[name].default, bool):
            raise ValueError(f"{path}: {key} must {'not ' * isinstance(value, bool)}be true or false, got {value!r}")
        if isinstance(value, bool):
            words.append(option if value else f"--no-{option[2:]}")
        elif isinstance(value, list):
            words += [option, *map(str, value)]
        else:
            words.append(f"{option}={json.dumps(value) if isinstance(value, dict) else value}")
    return words


def read_config(path: Path) -> dict[str, Any]:
    import tomlkit
    import yaml

    readers = {".toml": lambda text: tomlkit.parse(text).unwrap(), ".json": json.loads}
    readers |= dict.fromkeys((".yaml", ".yml"), lambda text: yaml.safe_load(text) or {})
    if not path.is_file():
        raise FileNotFoundError(f"--config: no such file: {path}")
    if (suffix := path.suffix.lower()) not in readers:
        raise ValueError(f"--config {path} cannot be read: its name must end in .toml, .yaml, .yml or .json")
    try:
        found = readers[suffix](path.read_text(encoding="utf-8-sig"))
    except Exception as error:  # The parsers raise errors of many types.
        raise ValueError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"--config {path} must have options by name, got {found!r}")
    return found


def settings_of(options: Any, resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a training: the user's options, and the values in `resolved` for options not given."""
    # These options do not change the trained genome.
    others = "config out log log_every checkpoint_every keep resume allow_changes overwrite profile peak_flops".split()
    every = {name: value for name, value in values_of(options).items() if name not in others} | {**resolved}
    return {name: _plain(value) for name, value in every.items() if value not in (None, (), "{}")}


def _plain(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("{") and "null" not in value:
        return json.loads(value)
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value


def write_config(path: Path, settings: Mapping[str, Any]) -> None:
    import tomlkit

    head = "# All settings of a training. gbfunc train --config FILE repeats it; gbfunc train --help explains them.\n\n"
    replace_file(path, (head + tomlkit.dumps(settings)).encode())
