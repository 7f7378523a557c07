"""The command line: `gbfunc demo`, `plan`, `train`, `eval`, `sample`, `compare`, `bench`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

try:
    import tyro
except ImportError as _error:
    raise ImportError("the command line needs its extra packages: pip install 'gbfunc[cli]'") from _error

from gbfunc.cli.bench import Bench
from gbfunc.cli.checkpoints import Stopped
from gbfunc.cli.compare import Compare
from gbfunc.cli.demo import Demo
from gbfunc.cli.eval import Eval
from gbfunc.cli.plan import Plan
from gbfunc.cli.sample import Sample
from gbfunc.cli.train import Train

__all__ = ["main"]

Command = (
    Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[Plan, tyro.conf.subcommand("plan")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Eval, tyro.conf.subcommand("eval")]
    | Annotated[Sample, tyro.conf.subcommand("sample")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
)
"""A new command is one file and one entry here."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name, by default those of the process.

    Returns:
        Exit code: 0; 2 after an error that the user can mend, told in one line on standard error; 128 + the number
        of the signal that ended it.

    Raises:
        SystemExit: from the parser, for `--help` (0) and for options that it refuses (2).
    """
    command = tyro.cli(
        Command,  # pyright: ignore[reportArgumentType]
        prog="gbfunc",
        description="Train neural networks through a genomic bottleneck.",
        args=argv,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )
    try:
        command.run()
    except BrokenPipeError:
        # The reader (`| head`) has had enough; what is still buffered must not raise at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Stopped as stopped:
        print(f"gbfunc: {stopped}", file=sys.stderr)
        return 128 + stopped.signum
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        # One line, whatever the message holds.
        print(f"gbfunc: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gbfunc: interrupted", file=sys.stderr)
        return 130
    return 0
