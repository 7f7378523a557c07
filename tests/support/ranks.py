"""Real ranks for tests: so many processes that meet at a file, run one function, and hand back what it returns.

As a script, `ranks.py MODULE:FUNCTION FOLDER WORLD`, it imports the module once and forks the ranks. A function
`before_fork` of the module is called before, with the arguments: what it imports is imported once.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
PATIENCE = float(os.environ.get("GBFUNC_PATIENCE", "1"))
"""Factor of all time limits, for machines that are busy."""


def run_ranks(
    world: int, function: str, *, timeout: float = 90.0, arguments: dict[str, Any] | None = None
) -> list[Any]:
    """What `function` ("module:name", of a module in tests) returns on every rank.

    Args:
        world: how many ranks.
        function: called as `function(init_method, **arguments)`; returns what `torch.save` can hold.
        timeout: seconds after which all are killed.
        arguments: for the function.

    Raises:
        RuntimeError: with their words, if any rank fails or the time is up.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ended = launch(world, function, folder, timeout, arguments or {})
        failed = [f"rank {r} ended with {code}:\n{text}" for r, (code, text) in enumerate(ended) if code]
        if failed:
            raise RuntimeError("\n".join(failed))
        return [torch.load(folder / f"result-{r}.pt", weights_only=False) for r in range(world)]


def launch(
    world: int, function: str, folder: Path, timeout: float, arguments: dict[str, Any]
) -> list[tuple[int | str, str]]:
    """Run the ranks to their end: exit code (a signal's is negative) and output of each; killed when the time is up."""
    torch.save(arguments, folder / "arguments.pt")
    command = [sys.executable, str(SUPPORT / "ranks.py"), function, str(folder), str(world)]
    own = {"WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)])}
    with (folder / "log").open("w+") as log:
        environment = {**os.environ, **own, **paths}
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            process.wait(timeout * PATIENCE)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        words = log.read()
    codes = folder / "ended.json"
    ended = json.loads(codes.read_text()) if codes.exists() else [words or "time is up"] * world
    logs = [folder / f"log-{r}" for r in range(world)]
    return [(code, path.read_text()[-4000:] if path.exists() else "") for code, path in zip(ended, logs, strict=True)]


def fork_ranks(world: int, function: str, folder: Path) -> list[int]:
    """Fork the ranks and wait for them: their exit codes."""
    name, attribute = function.split(":")
    module = importlib.import_module(name)
    call = getattr(module, attribute)
    arguments = torch.load(folder / "arguments.pt", weights_only=False)
    getattr(module, "before_fork", lambda **arguments: None)(**arguments)
    children = []
    for rank in range(world):
        if child := os.fork():
            children.append(child)
            continue
        code = 1
        try:
            with (folder / f"log-{rank}").open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                os.environ["RANK"] = str(rank)
                found = call(f"file://{folder / 'store'}", **arguments)
                torch.save(found, folder / f"result-{rank}.pt")
                code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.float64):
        torch.sin(torch.ones(1, dtype=dtype))
    target, place, size = sys.argv[1:]
    ended_with = fork_ranks(int(size), target, Path(place))
    (Path(place) / "ended.json").write_text(json.dumps(ended_with))
