"""From arguments to a command; what cannot be parsed is answered in one line, with the nearest name."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import re
import sys
from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from operator import or_
from pathlib import Path
from typing import Annotated, Any

try:
    import tyro
except ImportError as _error:
    raise ImportError("the command line needs its extra packages: pip install 'gbfunc[cli]'") from _error

from gbfunc import __version__
from gbfunc.cli.commands import COMMANDS, Train
from gbfunc.cli.config import config_words, options_of


def parse(argv: Sequence[str]) -> Any:
    """The command that the arguments ask for, as one of the dataclasses of `COMMANDS`.

    Raises:
        SystemExit: after `--help` and `--version` (0), and for arguments that are none, reported on standard error (2).
        ValueError: for a file of `--config` that cannot be read, or holds an option that there is not; for a path "".
        OSError: if there is no such file.
    """
    if list(argv) == ["--version"]:
        print(f"gbfunc {__version__}")
        raise SystemExit(0)
    name, path = next(iter(argv), ""), config_of(argv)
    said = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in argv if word.startswith("--")}
    given = [] if path is None else config_words(path, COMMANDS[name], Train, said)
    words = [*argv[:1], *given, *argv[1:]]
    _check_paths(name, words)
    message = io.StringIO()
    commands: Any = reduce(or_, (Annotated[command, tyro.conf.subcommand(name)] for name, command in COMMANDS.items()))
    try:
        with contextlib.redirect_stderr(message):
            return tyro.cli(
                commands,
                prog="gbfunc",
                description="Train neural networks through a genomic bottleneck.",
                args=words,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
            )
    except SystemExit as end:
        if end.code in (0, None):
            raise
        wrong = explain(words, message.getvalue())
        option = re.search(r"--[\w-]+", wrong)
        # What the arguments say too wins: the file is not to blame.
        where = [[word.partition("=")[0] for word in some] for some in (given, argv)]
        blame = option is not None and option[0] in where[0] and option[0] not in where[1]
        print(f"gbfunc: error: {f'{path}: ' if blame else ''}{wrong}", file=sys.stderr)
        raise SystemExit(2) from None


def _check_paths(name: str, words: Sequence[str]) -> None:
    """Raise `ValueError` for an empty path, which would be read as the present folder."""
    options = options_of(COMMANDS[name]) if name in COMMANDS else {}
    paths = {f"--{option.replace('_', '-')}" for option, field in options.items() if "Path" in str(field.type)}
    parts = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for option, value in pairwise(parts):
        if not value and option.replace("_", "-") in paths:
            raise ValueError(f"{option} must be a path, got '': the present folder is '.'")


def config_of(argv: Sequence[str]) -> Path | None:
    """The file that `--config` names, whose options go before those of the arguments, which win."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", nargs="?", type=Path)
    takes = argv and argv[0] in COMMANDS and "config" in options_of(COMMANDS[argv[0]])
    return finder.parse_known_args(argv[1:])[0].config if takes else None


def explain(argv: Sequence[str], message: str) -> str:
    """What is wrong with arguments that the parser refused, in one line."""
    name = next(iter(argv), None)
    if name not in COMMANDS:
        got = "a command is missing" if name is None else f"no command {name!r}{_nearest(name, COMMANDS)}"
        return f"{got}: choose one of {', '.join(COMMANDS)}"
    known = {option.replace("_", "-"): field.type for option, field in options_of(COMMANDS[name]).items()}
    options = [f"--{option}" for option in known] + [f"--no-{option}" for option in known if known[option] == "bool"]
    for word in argv[1:]:
        option = word.partition("=")[0].replace("_", "-")
        if option.startswith("--") and option not in options:
            return f"{name} has no option {option}{_nearest(option, options)}: see gbfunc {name} --help"
    return f"{_first_paragraph(message)}: see gbfunc {name} --help"


def _first_paragraph(message: str) -> str:
    """What stands in a box above its first empty line or rule, help texts (which are indented further) left out."""
    lines = [line.strip("│")[1:].rstrip() for line in message.splitlines()[1:]]
    lines = [line.removeprefix(" ") if "│" not in message else line for line in lines]
    rules = [i for i, line in enumerate(lines) if not line.strip("─-╰╯ ")]
    # Without a box (where the terminal knows no such characters) the title stands above a rule too.
    lines, rules = (lines[1:], [i - 1 for i in rules[1:]]) if rules[:1] == [0] else (lines, rules)
    end = next(iter(rules), None)
    words = " ".join(line.strip() for line in lines[:end] if not line.startswith(" " * 8)).removesuffix(".")
    if match := re.search(r"(--[\w-]+): no type matching (.+) could be instantiated from \[(.*)\]", words):
        expected = re.sub(r"[{}\[\]]", "", match[2].replace("{None}|", ""))
        return f"{match[1]} must be {expected}, got {match[3]}"
    return words.replace("'None', ", "").replace(", 'None'", "")


def _nearest(word: str, known: Sequence[str] | dict[str, Any]) -> str:
    near = difflib.get_close_matches(word, list(known), 1)
    return f" (did you mean {near[0]}?)" if near else ""
