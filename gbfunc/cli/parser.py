"""From arguments, and a file of `--config`, to a command; wrong ones raise `ValueError` with the nearest name."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

try:
    import tyro
except ImportError as _error:
    raise ImportError("the command line needs its extra packages: pip install 'gbfunc[cli]'") from _error

from gbfunc import __version__
from gbfunc.cli.commands import COMMANDS
from gbfunc.cli.config import config_words
from gbfunc.cli.options import check_values

_STYLE = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)


def parse(argv: Sequence[str]) -> Any:
    """Make the command that the arguments ask for, one of the dataclasses of `COMMANDS`.

    Raises:
        SystemExit: after `--help` and `--version`.
        ValueError: for wrong arguments, and for a file of `--config` that cannot be read or has an unknown option.
        OSError: if there is no such file.
    """
    name, *words = argv or [""]
    if name == "--version":
        print(f"gbfunc {__version__}")
        raise SystemExit(0)
    if name in ("-h", "--help"):
        title = "Train neural networks through a genomic bottleneck."
        tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="gbfunc", description=title, args=[name], config=_STYLE)
    if name not in COMMANDS:
        got = f"no command {name!r}{_nearest(name, COMMANDS)}" if name else "a command is missing"
        raise ValueError(f"{got}: choose one of {', '.join(COMMANDS)}")
    parts = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for option, value in pairwise(parts):
        if option.startswith("--") and option != "--prompt" and not value:
            raise ValueError(f"{option} needs a value, got '' (the present folder is '.')")
    path, given = config_words(name, words)
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            command = tyro.cli(COMMANDS[name], prog=f"gbfunc {name}", args=[*given, *words], config=_STYLE)
    except SystemExit as end:
        if end.code in (0, None):
            raise
        wrong = _reason(message.getvalue())
        option = re.search(r"--[\w-]+", wrong)
        # Arguments win over the file, which is then not to blame.
        blames = [option is not None and any(word.startswith(option[0]) for word in some) for some in (given, words)]
        where = f"{path}: " if blames == [True, False] else ""
        raise ValueError(f"{where}{wrong}: see gbfunc {name} --help") from None
    check_values(command)
    return command


def _reason(message: str) -> str:
    """Find the first paragraph in a box of tyro, and the nearest option if there is one."""
    lines = [line.strip("│ ") for line in message.splitlines()[1:]]
    blocks = " ".join(line if line.strip("─-╰╯") else "\n" for line in lines).split("\n")
    words = next(block for block in blocks if block.strip()).strip().removesuffix(".")
    if match := re.search(r"(--[\w-]+): no type matching (.+) could be instantiated from \[(.*)\]", words):
        expected = re.sub(r"[{}\[\]]", "", match[2].replace("{None}|", ""))
        return f"{match[1]} must be {expected}, got {match[3]}"
    near = re.search(r"Perhaps you meant:\s+(--[\w-]+)", " ".join(blocks))
    return words.replace("'None', ", "").replace(", 'None'", "") + (f" (did you mean {near[1]}?)" if near else "")


def _nearest(word: str, known: Iterable[str]) -> str:
    near = get_close_matches(word, known, 1)
    return f" (did you mean {near[0]}?)" if near else ""
