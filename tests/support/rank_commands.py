"""Commands on ranks, as torchrun would start them, without its seconds of imports."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

import torch.distributed as dist

from gbfunc.cli import main


class Ended(NamedTuple):
    """Exit code and words of one rank's command."""

    code: object
    out: str
    err: str


def run(init_method: str, argv: Sequence[str]) -> tuple[object, str, str]:
    """Run `gbfunc` with these arguments: what an `Ended` holds."""
    rank, world = (int(os.environ.pop(name)) for name in ("RANK", "WORLD_SIZE"))
    if world > 1:
        dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code: object = main(argv)
        except SystemExit as end:
            code = end.code
    if world > 1:
        dist.destroy_process_group()
    return code, out.getvalue(), err.getvalue()
