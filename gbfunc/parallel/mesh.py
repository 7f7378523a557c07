"""The mesh: a grid of ranks with named axes and process groups, which counts the bytes that ranks send."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist

from gbfunc.trees import split_rows

AXES = ("data", "pipeline", "gnets", "tensor")
"""The axes of a mesh; ranks along the last axis are next to each other."""

AxisName = Literal["world", "data", "pipeline", "gnets", "tensor", "replicas"]
"""The name of an axis; `"replicas"` are the ranks with the same tiles: all axes except `"gnets"`."""

_GLOO = re.compile(r"\[(enforce fail at )?[^\]\s]*\bgloo[/\\][^\]\s]*:\d+\]|^Application timeout caused pair closure")
"""Matches the messages of gloo's RuntimeErrors. Most have a position in gloo's source, as in
`[.../gloo/transport/tcp/pair.cc:537] Read error` and `[enforce fail at .../gloo/allreduce.cc:80] size > 0`. Only the
message of an operation after a timeout has no position."""


class CollectiveError(ConnectionError):
    """Raised if a collective fails or times out because another rank died or hangs. The mesh is then unusable."""


@contextmanager
def failing(what: str, rank: int, world: int, timeout: float) -> Iterator[None]:
    """Return a context that converts errors of collectives to `CollectiveError`, and lets other errors pass."""
    try:
        yield
    except RuntimeError as error:
        # Convert only errors of gloo, of nccl, or of the store through which ranks find each other.
        if not (isinstance(error, dist.DistError) or _GLOO.search(str(error))):
            raise
        first = (str(error).splitlines() or [""])[0].split(". ")[0]
        raise CollectiveError(
            f"rank {rank} of {world}: {what} failed or timed out (limit {timeout:g} s): another rank died or is stuck "
            f"({first}): read the log of the other ranks"
        ) from error


class Axis(NamedTuple):
    """The ranks with which this rank communicates along an axis: the ranks at the same position on all other axes."""

    name: AxisName
    ranks: tuple[int, ...]  # Global ranks
    rank: int  # Position of this rank in `ranks`
    group: Any  # The process group

    @property
    def size(self) -> int:
        return len(self.ranks)


class Mesh:
    """A grid of ranks: `data` x `pipeline` x `gnets` x `tensor`. `gbfunc.mesh` builds a mesh.

    The rows of a batch are split over the axes `data` and `gnets`. The tiles of a sharded genome are split over the
    axis `gnets`: ranks with the same position on this axis have the same tiles. The blocks of the p-net are split over
    `pipeline`, and every layer is split over `tensor`. Ranks along these two axes process the same rows. A mesh is a
    context manager: its exit waits for all ranks, and destroys the process group if the mesh initialized the group.

    Attributes:
        sizes: number of ranks along each axis, by the axis's name.
        world, rank: number of all ranks, and the number of this rank.
        data, gnets: number of ranks along the data axis and along the g-net axis.
        gnets_index: the position of this rank along the g-net axis.
        shards, shard: number of shards of the global batch, and the index of this rank's shard.
        device: device of tensors that are sent.
        timeout: seconds after which a collective fails.
        traffic: bytes that this rank sent, a `Counter` by axis. Headers of messages (below 1 % on gloo) do not count.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        rank: int = 0,
        device: torch.device | str = "cpu",
        timeout: float = 0.0,
        owns_group: bool = False,
    ) -> None:
        self.sizes = {name: sizes.get(name, 1) for name in AXES}
        self.world, self.rank = math.prod(self.sizes.values()), rank
        self.device, self.timeout = torch.device(device), timeout
        self.traffic = Counter[str]()
        self._owns_group = owns_group
        grid = torch.arange(self.world, device="cpu").reshape([*self.sizes.values()])
        lines = {name: grid.movedim(i, -1).reshape(-1, self.sizes[name]) for i, name in enumerate(AXES)}
        lines |= {"replicas": lines["gnets"].T, "world": grid.reshape(1, -1)}
        # Two axes that consist of the same ranks use the same process group.
        groups: dict[Any, Any] = {}
        self._axes = {name: self._axis(name, line.tolist(), groups) for name, line in lines.items()}
        self.data, self.gnets = self.sizes["data"], self.sizes["gnets"]
        self.gnets_index, self.shards = self._axes["gnets"].rank, self.data * self.gnets
        self.shard = self._axes["data"].rank * self.gnets + self.gnets_index

    def _axis(self, name: str, lines: list[list[int]], groups: dict[Any, Any]) -> Axis:
        ranks, key = next(tuple(line) for line in lines if self.rank in line), str(lines)
        if key not in groups:
            groups[key] = None
            if _initialised() and len(ranks) > 1:  # A single rank sends nothing along this axis
                limit = timedelta(seconds=self.timeout)
                world = len(ranks) == self.world
                groups[key] = dist.group.WORLD if world else dist.new_subgroups_by_enumeration(lines, timeout=limit)[0]
        return Axis(cast(AxisName, name), ranks, ranks.index(self.rank), groups[key])

    def axis(self, name: AxisName) -> Axis:
        return self._axes[name]

    @cached_property
    def tensor_mesh(self) -> Any:
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self._axes["tensor"].group, self.device.type, mesh_dim_names=("tensor",))

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Return a context whose collectives are not counted in `traffic`, for checks that few steps need."""
        before = self.traffic.copy()
        try:
            yield
        finally:
            self.traffic.clear()
            self.traffic.update(before)

    def failing(self, what: str) -> AbstractContextManager[None]:
        return failing(what, self.rank, self.world, self.timeout)

    def shard_batch(self, batch: Any) -> Any:
        """Return this rank's shard of a batch, a pytree of tensors whose first dimension is divided over ranks.

        Ranks along the data and g-net axes get different rows: equally many, or the first shards get one row more.
        Ranks along the tensor and pipeline axes get the same rows. If a shard is empty, a step computes the loss of a
        row of zeros, with weight 0. Scalars and values that are not tensors are copied to every shard.

        Raises:
            ValueError: if the batch has an array that is not a tensor, or an object with tensors as attributes.
        """
        return batch if self.shards == 1 else split_rows(batch, self.shards)[self.shard]

    def barrier(self) -> None:
        """Wait until all ranks have called; raises `CollectiveError` after the timeout."""
        if self.world > 1:
            with self.failing("barrier"):
                dist.barrier()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if _initialised() and self._owns_group:
            try:
                if kind is None:  # After an error, the other ranks may not reach the barrier
                    self.barrier()
            finally:
                dist.destroy_process_group()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={n}" for name, n in self.sizes.items() if n > 1 or name in ("data", "gnets"))
        return f"Mesh({sizes}, rank={self.rank}, device={str(self.device)!r})"


def mesh(
    data: int = 1,
    gnets: int | None = None,
    device: torch.device | str = "cpu",
    *,
    pipeline: int = 1,
    tensor: int = 1,
    timeout: float = 300.0,
    init_method: str = "env://",
) -> Mesh:
    """Build a mesh `data` x `pipeline` x `gnets` x `tensor` of all ranks. All ranks must call, with equal sizes.

    The mesh uses the existing process group. If there is no group and `torchrun` started the ranks (`RANK` is set), the
    mesh initializes a group, with gloo on the CPU and nccl on CUDA. Without `torchrun`, the mesh has one rank.

    Args:
        data: number of ranks over which the batch is split and the genome is replicated.
        gnets: number of ranks over which the batch is split and the genome can be sharded; None: all remaining ranks.
        device: `"cpu"`, `"cuda"` (the GPU with the number `LOCAL_RANK`), or any device.
        pipeline: number of ranks over which the blocks of the p-net are split.
        tensor: number of ranks over which layers are split (see `make_train_step(parallel=)`).
        timeout: seconds after which a collective fails. An existing process group keeps its own timeout.
        init_method: the URL for the ranks' first connection, as in `torch.distributed.init_process_group`.

    Raises:
        ValueError: if the product of the axes is not the number of ranks, or if ranks pass different sizes.
        CollectiveError: if a rank is missing.

    >>> with mesh() as one:
    ...     one.world, one.rank
    (1, 0)
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % max(1, torch.cuda.device_count()))
    world = dist.get_world_size() if _initialised() else int(os.environ.get("WORLD_SIZE", 1)) if _launched() else 1
    sizes = {"data": data, "pipeline": pipeline, "gnets": 1 if gnets is None else gnets, "tensor": tensor}
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an int >= 1, got {value!r} (there are {world} ranks)")
    if gnets is None:
        sizes["gnets"] = max(1, world // math.prod(sizes.values()))
    if math.prod(sizes.values()) != world:
        product = " * ".join(f"{name} {n}" for name, n in sizes.items())
        raise ValueError(f"the axes' product must be the number of ranks, {world}, got {product}")
    if not timeout > 0:
        raise ValueError(f"timeout must be seconds > 0, got {timeout!r}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    owns_group = not _initialised() and _launched()
    if owns_group:
        backend, limit = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout)
        ranks: Any = {"rank": int(os.environ["RANK"]), "world_size": world}
        dist.init_process_group(backend, init_method=init_method, timeout=limit, **ranks)
    rank = dist.get_rank() if _initialised() else 0
    found: list[Any] = [sizes] * world
    if world > 1:
        with failing("gather", rank, world, timeout):
            dist.all_gather_object(found, sizes)
    # Compare sizes: a rank with a different mesh would wait forever for process groups that no other rank creates.
    for other, theirs in enumerate(found):
        if theirs != sizes:
            raise ValueError(f"ranks must make the same mesh, got {sizes} on rank {rank}, {theirs} on rank {other}")
    return Mesh(sizes, rank, device, timeout, owns_group)


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _launched() -> bool:
    return dist.is_available() and "RANK" in os.environ and "WORLD_SIZE" in os.environ
