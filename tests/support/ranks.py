"""Real ranks for tests: so many processes that meet at a file, run one function, and hand back what it returns.

As a script it is the server of a test process, which has imported what takes seconds: for each line of its input it
forks a process of its own session, which forks the ranks. A function `before_fork` of the module of the cases is called
before, with the arguments: what it imports is imported once.
"""

import atexit
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
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
    """What `function` ("module:name", of a module in tests) returns on every rank, which `torch.save` must hold.

    It is called as `function(init_method, **arguments)`; after `timeout` seconds all are killed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ended = launch(world, function, folder, timeout, arguments or {})
        failed = [f"rank {r} ended with {code}:\n{text}" for r, (code, text) in enumerate(ended) if code]
        if failed:
            raise RuntimeError("\n".join(failed))
        return [torch.load(folder / f"result-{r}.pt", weights_only=False) for r in range(world)]


def said(case: Callable[..., Any], *given: Any, **named: Any) -> Any:
    from gbfunc.parallel import CollectiveError

    try:
        return case(*given, **named)
    except CollectiveError:
        raise
    except Exception:
        return traceback.format_exc()


def launch(
    world: int, function: str, folder: Path, timeout: float, arguments: dict[str, Any]
) -> list[tuple[int | str, str]]:
    """Run the ranks to their end: exit code (a signal's is negative) and output of each; killed when the time is up."""
    torch.save(arguments, folder / "arguments.pt")
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    own = {"WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"}
    server.stdin.write(json.dumps([function, str(folder), world, {**os.environ, **own}]) + "\n")
    server.stdin.flush()
    child = int(server.stdout.readline())
    if not select.select([server.stdout], [], [], timeout * PATIENCE)[0]:
        os.killpg(child, signal.SIGKILL)
    server.stdout.readline()
    words = (folder / "log").read_text()
    codes = folder / "ended.json"
    ended = json.loads(codes.read_text()) if codes.exists() else [words or "time is up"] * world
    logs = [folder / f"log-{r}" for r in range(world)]
    return [(code, path.read_text()[-4000:] if path.exists() else "") for code, path in zip(ended, logs, strict=True)]


@lru_cache
def _server() -> subprocess.Popen[str]:
    """The server of this process, which ends when its input does."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)])}
    command = [sys.executable, str(Path(__file__).resolve())]
    server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)  # Closes its input.
    return server


def serve() -> None:
    """Answer each request by the id of the process that starts the ranks, and by another line when it has ended."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What an import prints is no answer.
    for line in sys.stdin:
        function, place, world, environment = json.loads(line)
        folder = Path(place)
        with suppress(Exception):  # It fails again in the child, and is reported there.
            prepare(function, folder)
        gc.freeze()  # The ranks' collector leaves alone, and so shared, what was made before them.
        if child := os.fork():
            print(child, file=answers, flush=True)
            os.waitpid(child, 0)
            print("ended", file=answers, flush=True)
            continue
        try:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            with (folder / "log").open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            os.environ.clear()
            os.environ.update(environment)
            (folder / "ended.json").write_text(json.dumps(fork_ranks(world, function, folder)))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def prepare(function: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    name, attribute = function.split(":")
    module = importlib.import_module(name)
    arguments = torch.load(folder / "arguments.pt", weights_only=False)
    getattr(module, "before_fork", lambda **arguments: None)(**arguments)
    return getattr(module, attribute), arguments


def fork_ranks(world: int, function: str, folder: Path) -> list[int]:
    call, arguments = prepare(function, folder)
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
    serve()
