"""Ranks as processes, and the links between them: the loopback, or a switch of limited rate between network namespaces.

Processes belong together: when one fails or the time is up, all are ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

_PREFIX = "gbfunc"
_SUBNET = "10.213.77"
# Of credit that an idle link saves up: a large burst would let a small message pass as if there were no limit.
_BURST_SECONDS = 1e-3
_LEAST_BURST = 3_028
_QUEUE = "50ms"


class Port(NamedTuple):
    """Where one rank sits."""

    prefix: tuple[str, ...]  # words before its command, which put it there
    interface: str  # its network interface
    sharing: int  # ranks that send through this same interface
    ends: tuple[tuple[str, str], ...] = ()  # of its cable to the switch, as (namespace, interface); not on the loopback

    def limit(self, mbit: float | None) -> None:
        """Limit the cable to 10^6 bit/s each way (`man tc-tbf`), Ethernet headers counted; None lifts the limit."""
        for name, interface in self.ends:
            queue = "pfifo"
            if mbit is not None:
                burst = max(_LEAST_BURST, int(mbit * 1e6 / 8 * _BURST_SECONDS))
                queue = f"tbf rate {mbit}mbit burst {burst} latency {_QUEUE}"
            _run(f"tc -n {name} qdisc replace dev {interface} root {queue}")


def can_make_links() -> bool:
    """Whether this process may make network namespaces and limit their rate: root, with `ip` and `tc` (iproute2)."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return False
    try:
        with open_switch(1) as (port,):
            port.limit(100.0)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def open_loopback(ranks: int) -> Iterator[tuple[Port, ...]]:
    """The loopback for some ranks, where possible in a new namespace, in which nothing else is counted."""
    if not can_make_links():
        yield (Port((), "lo", ranks),) * ranks
        return
    with _namespaces(1) as (name,):
        yield (Port(("ip", "netns", "exec", name), "lo", ranks),) * ranks


@contextlib.contextmanager
def open_switch(ranks: int) -> Iterator[tuple[Port, ...]]:
    """A namespace for every rank, each joined by a veth pair to one switch; deleted at the end, whatever happens.

    Nothing delays a packet but the queue before its cable, once that is limited (`Port.limit`).
    """
    with _namespaces(ranks + 1) as (switch, *names):
        _run(f"ip -n {switch} link add dev switch type bridge", f"ip -n {switch} link set dev switch up")
        yield tuple(_plug(switch, name, i) for i, name in enumerate(names))


def _plug(switch: str, name: str, rank: int) -> Port:
    """Join a rank's namespace to the switch."""
    inside, outside = "wire", f"port{rank}"
    _run(
        f"ip -n {switch} link add dev {outside} type veth peer name {inside} netns {name}",
        f"ip -n {switch} link set dev {outside} master switch",
        f"ip -n {name} address add {_SUBNET}.{rank + 1}/24 dev {inside}",
    )
    ends = ((switch, outside), (name, inside))
    for where, interface in ends:
        # One packet at a time, as on a real wire: else the counters see 64 KiB under a single header.
        _run(f"ip -n {where} link set dev {interface} gso_max_segs 1 up")
    return Port(("ip", "netns", "exec", name), inside, 1, ends)


@contextlib.contextmanager
def _namespaces(n: int) -> Iterator[tuple[str, ...]]:
    """New network namespaces, named after this process, with their loopback up."""
    for name in _present():
        # Of a process that was killed before it could delete it.
        match = re.fullmatch(rf"{_PREFIX}-(\d+)-\d+", name)
        if match and not Path("/proc", match[1]).exists():
            _run(f"ip netns delete {name}")
    taken = set(_present())
    free = (f"{_PREFIX}-{os.getpid()}-{i}" for i in range(len(taken) + n))
    names = tuple(name for name in free if name not in taken)[:n]
    try:
        for name in names:
            _run(f"ip netns add {name}", f"ip -n {name} link set dev lo up")
        yield names
    finally:
        for name in set(names) & set(_present()):
            _run(f"ip netns delete {name}")


def _present() -> list[str]:
    """Names of the network namespaces that there are."""
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _run(*commands: str) -> None:
    """Run commands one after the other."""
    for command in commands:
        done = subprocess.run(command.split(), capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            raise OSError(f"{command}: {done.stderr.strip() or f'exit code {done.returncode}'}")


def sent_bytes(interface: str) -> int:
    """Bytes that an interface of this process's namespace has sent, headers included."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


_POLL_SECONDS = 0.02
_TAIL = 2_000


class RankError(OSError):
    """A rank that failed, or that took too long."""


def run_ranks(commands: Sequence[Sequence[str]], *, timeout: float, env: Mapping[str, str] | None = None) -> None:
    """Run one process a rank until all have ended well; none outlives this call.

    Raises:
        RankError: for the rank that failed first, with the end of what it wrote on standard error, or after the
            timeout, naming the ranks that were still running.
    """
    processes: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="gbfunc-ranks-") as name, contextlib.ExitStack() as stack:
        stack.callback(_end, processes)
        files = [Path(name, f"{rank}.err") for rank in range(len(commands))]
        for command, path in zip(commands, files, strict=True):
            with path.open("wb") as errors:
                process = subprocess.Popen(
                    command,
                    env={**os.environ, **(env or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    start_new_session=True,  # so that all that a rank starts ends with it
                )
            processes.append(process)
        while None in (codes := [process.poll() for process in processes]) or any(codes):
            if any(codes):
                failed = next(rank for rank, code in enumerate(codes) if code)
                said = files[failed].read_text(errors="replace").strip()[-_TAIL:]
                raise RankError(f"rank {failed} of {len(codes)} ended with exit code {codes[failed]}: {said}")
            if time.monotonic() > deadline:
                late = [rank for rank, code in enumerate(codes) if code is None]
                raise RankError(f"ranks {late} of {len(codes)} had not ended after {timeout:g} s")
            time.sleep(_POLL_SECONDS)


def run_module(
    module: str,
    order: Mapping[str, Any],
    ranks: int,
    timeout: float,
    place: Callable[[int], AbstractContextManager[tuple[Port, ...]]] = open_loopback,
) -> list[Any]:
    """Run a module on ranks, each of one thread and given the order, its `rank` and `port` and a `folder` as JSON.

    Returns:
        What each has written to `RANK.json` in the folder.
    """
    with tempfile.TemporaryDirectory(prefix="gbfunc-ranks-") as folder, place(ranks) as ports:
        given = [json.dumps({**order, "folder": folder, "rank": i, "port": port}) for i, port in enumerate(ports)]
        commands = [[*p.prefix, sys.executable, "-m", module, text] for p, text in zip(ports, given, strict=True)]
        env = {"GLOO_SOCKET_IFNAME": ports[0].interface, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        run_ranks(commands, timeout=timeout, env=env)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill what still runs, and what it has started."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()
