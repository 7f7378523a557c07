"""Ranks on a grid: who takes part, with whom each collective is, and how many bytes were sent."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from gbfunc.parallel.faults import Faults
from gbfunc.trees import split_rows

AxisName = Literal["world", "data", "gnets"]


class Axis(NamedTuple):
    """Ranks that talk to each other, where among them this one is, and their process group, None for a single rank."""

    ranks: tuple[int, ...]
    index: int
    group: Any

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)


class Traffic:
    """Payload bytes that this rank sent, by kind of collective: `by_kind`, and in all, `total`.

    `gather` sends this rank's bytes to every other one, `reduce_scatter` the rows of all other ranks, `all_reduce`
    2 (N - 1) / N of the buffer, as a ring does. On gloo the loopback counts the same, headers apart (under 1 %).
    """

    def __init__(self) -> None:
        self.by_kind: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """All bytes so far."""
        return self.by_kind.total()

    def add(self, kind: str, n_bytes: int) -> None:
        """Count a collective."""
        self.by_kind[kind] += n_bytes


class Mesh:
    """Ranks as a grid of `data` x `gnets`, the ranks of one row next to each other (on one node). Made by `mesh`.

    A batch is split over all ranks. Along `gnets` the tiles of the genome are split, where it is sharded; along `data`
    ranks hold the same ones. As a context manager it closes itself.

    Attributes:
        world, rank: ranks in all, and which of them this one is: `data_index * gnets + gnets_index`.
        data, gnets: ranks along each axis.
        data_index, gnets_index: position of this rank along each axis.
        axes: the ranks along each axis that this one talks to, by `AxisName`.
        device: where tensors that are sent live.
        timeout: seconds after which a collective fails.
        traffic: bytes sent by this rank.
    """

    def __init__(
        self, data: int, gnets: int, rank: int, device: torch.device, timeout: float, store: Any, began: bool
    ) -> None:
        self.world, self.rank = data * gnets, rank
        self.data, self.gnets = data, gnets
        self.data_index, self.gnets_index = divmod(self.rank, gnets)
        self.device, self.timeout = device, timeout
        self.traffic = Traffic()
        self.faults = Faults(self.rank, self.world, timeout, store)
        self._began = began
        ranks = torch.arange(self.world, device="cpu").reshape(data, gnets)
        lines = {"world": ranks.reshape(1, -1), "data": ranks.T, "gnets": ranks}
        self.axes: dict[str, Axis] = {name: self._axis(line.tolist()) for name, line in lines.items()}
        if began:
            self.faults.groups = [axis.group for axis in self.axes.values() if axis.size > 1]

    def _axis(self, lines: list[list[int]]) -> Axis:
        """This rank's line of ranks, of several that have no rank in common."""
        ranks = next(tuple(line) for line in lines if self.rank in line)
        group: Any = None
        if len(ranks) == self.world > 1:
            group = dist.group.WORLD
        elif len(ranks) > 1:
            group = dist.new_subgroups_by_enumeration(lines, timeout=timedelta(seconds=self.timeout))[0]
        return Axis(ranks, ranks.index(self.rank), group)

    @cached_property
    def device_mesh(self) -> Any:
        """Torch's `DeviceMesh` over the axes of more than one rank, with their names, for what is built on it."""
        from torch.distributed.device_mesh import DeviceMesh

        axes = {name: self.axes[name] for name in ("data", "gnets") if self.axes[name].size > 1}
        if not axes:
            raise ValueError("a mesh of one rank has no DeviceMesh: it needs no process group")
        groups = [a.group for a in axes.values()]
        grid = torch.arange(self.world).reshape([a.size for a in axes.values()])
        return DeviceMesh.from_group(groups, self.device.type, mesh=grid, mesh_dim_names=tuple(axes))

    @contextmanager
    def sending(self, kind: str, n_bytes: int) -> Iterator[None]:
        """Count a collective, and raise `CollectiveError` where it fails."""
        self.traffic.add(kind, n_bytes)
        with self.faults.named(kind):
            yield

    def shard_batch(self, batch: Any) -> Any:
        """This rank's shard of a global batch: the first dimension split over all ranks, the first ones get the rest.

        Shards can be empty. Scalars and what is no tensor are kept.
        """
        return batch if self.world == 1 else split_rows(batch, self.world)[self.rank]

    def barrier(self) -> None:
        """Wait for all ranks; `CollectiveError` if one does not come within the timeout."""
        if self.world > 1:
            with self.faults.named("barrier"):
                dist.barrier()

    def close(self) -> None:
        """Leave together, and end the process group if this mesh began it. The mesh cannot be used after."""
        self.__exit__(None)

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if _initialised() and self._began:
            if kind is None:  # After an error the others may never come to a barrier.
                self.barrier()
            dist.destroy_process_group()

    def __repr__(self) -> str:
        return f"Mesh(data={self.data}, gnets={self.gnets}, rank={self.rank}, device={str(self.device)!r})"


def single_rank_mesh() -> Mesh:
    """The mesh of one rank, whatever process group there is: nothing is ever sent."""
    return Mesh(1, 1, 0, torch.device("cpu"), 0.0, None, False)


def mesh(
    data: int = 1,
    gnets: int | None = None,
    device: torch.device | str = "cpu",
    *,
    timeout: float = 300.0,
    init_method: str = "env://",
) -> Mesh:
    """The ranks of this run as a grid of `data` x `gnets`: every rank calls it, with the same arguments.

    The process group is the existing one; else one is begun if the environment is that of `torchrun` (`RANK` is set),
    with gloo on the CPU and nccl on CUDA; else this is the only rank.

    Args:
        data: ranks along which the genome is replicated.
        gnets: ranks along which it can be sharded; None is all there are / data.
        device: `"cpu"` or `"cuda"` (this rank's GPU, by `LOCAL_RANK`), or any device.
        timeout: seconds after which a collective fails with `CollectiveError`; an existing process group keeps its
            limit.
        init_method: where ranks meet, as in `torch.distributed.init_process_group`.

    Raises:
        ValueError: if data * gnets is not the number of ranks.

    >>> with mesh() as one:
    ...     one.world, one.rank
    (1, 0)
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % max(1, torch.cuda.device_count()))
    world = dist.get_world_size() if _initialised() else int(os.environ.get("WORLD_SIZE", 1)) if _launched() else 1
    wanted = world // data if gnets is None and data > 0 else gnets
    for name, value in (("data", data), ("gnets", wanted)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an int >= 1, got {value!r} (there are {world} ranks)")
    if wanted is None or data * wanted != world:
        raise ValueError(f"data * gnets must be the number of ranks, {world}, got {data} * {wanted}")
    if not timeout > 0:
        raise ValueError(f"timeout must be seconds > 0, got {timeout!r}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, began = None, not _initialised() and _launched()
    if began:
        rank, limit = int(os.environ["RANK"]), timedelta(seconds=timeout)
        rendezvous: Any = dist.rendezvous  # pyright: ignore[reportPrivateImportUsage]
        store = next(rendezvous(init_method, rank, world, timeout=limit))[0]
        store.set_timeout(limit)
        # torchrun's store outlives its workers: without a name for each attempt, one may read addresses of the dead.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        store = dist.PrefixStore(f"attempt_{attempt}", store)  # pyright: ignore[reportPrivateImportUsage]
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=world)
    return Mesh(data, wanted, dist.get_rank() if _initialised() else 0, device, timeout, store, began)


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _launched() -> bool:
    return dist.is_available() and "RANK" in os.environ and "WORLD_SIZE" in os.environ
