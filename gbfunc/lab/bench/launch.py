"""Processes that belong together: when one fails or the time is up, all are ended."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

_POLL_SECONDS = 0.02
_TAIL = 2_000


class RankError(OSError):
    """A rank that failed, or that took too long."""


def run_ranks(commands: Sequence[Sequence[str]], *, timeout: float, env: Mapping[str, str] | None = None) -> None:
    """Run one process a rank until all have ended well; none outlives this call.

    Args:
        commands: the ranks' commands, rank 0 first.
        timeout: most seconds.
        env: variables beside those of this process.

    Raises:
        RankError: for the rank that failed first, with the end of what it wrote on standard error, or after the
            timeout, naming the ranks that were still running.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gbfunc-ranks-")))
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, processes)
        deadline = time.monotonic() + timeout
        for rank, command in enumerate(commands):
            with (folder / f"{rank}.err").open("wb") as errors:
                # A group of its own, so that all that a rank starts ends with it.
                processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=errors,
                        stderr=errors,
                        env={**os.environ, **(env or {})},
                        start_new_session=True,
                    )
                )
        while True:
            codes = [process.poll() for process in processes]
            failed = next((rank for rank, code in enumerate(codes) if code), None)
            if failed is not None:
                said = (folder / f"{failed}.err").read_text(errors="replace").strip()[-_TAIL:]
                raise RankError(f"rank {failed} of {len(codes)} ended with exit code {codes[failed]}: {said}")
            if all(code == 0 for code in codes):
                return
            if time.monotonic() > deadline:
                late = [rank for rank, code in enumerate(codes) if code is None]
                raise RankError(f"ranks {late} of {len(codes)} had not ended after {timeout:g} s")
            time.sleep(_POLL_SECONDS)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill what still runs, and what it has started."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


__all__ = ["RankError", "run_ranks"]
