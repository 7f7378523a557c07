"""Commands and scripts on ranks, as torchrun would start them, without its seconds of imports."""

import io
import os
import runpy
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from gbfunc.cli import main


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def run(init_method: str, argv: Sequence[str]) -> tuple[int, str, str]:
    rank, world = (int(os.environ.pop(name)) for name in ("RANK", "WORLD_SIZE"))
    if world > 1:
        dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([word.replace("@rank", str(rank)) for word in argv])
    if world > 1:
        dist.destroy_process_group()
    return code, out.getvalue(), err.getvalue()


def run_script(init_method: str, script: str) -> str:
    rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)
    os.chdir(Path(script).parent)
    with redirect_stdout(io.StringIO()) as out:
        runpy.run_path(script, run_name="__main__")
    dist.destroy_process_group()
    return out.getvalue()
