"""What others send: torch's parallelism and torchGB's scheme on dense weights, and what any collective must move.

Outside `gbfunc.parallel` this is the only file that uses `torch.distributed`: for the dense baselines, not the library.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import gbfunc as gb
from gbfunc.generate import make_generator
from gbfunc.lab.bench.cases import Genes
from gbfunc.lab.bench.variants import Batch, Step, loss_fn, plain_step, plan_of
from gbfunc.parallel.styles import tensor_styles
from gbfunc.parallel.tensor import PackedColwiseParallel, Styles, resolve
from gbfunc.trees import GNET, flat_genome
from gbfunc.types import Params

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.5
    from torch.distributed._composable.fsdp import fully_shard  # pyright: ignore[reportPrivateImportUsage]

# Public, although torch does not list them among its exports.
_FileStore: Any = dist.FileStore  # pyright: ignore[reportPrivateImportUsage]
_PrefixStore: Any = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]


class Group:
    """The ranks of a measurement, which meet in a file: what they send on their links is the collectives' alone."""

    def __init__(self, rank: int, ranks: int, store: Path) -> None:
        self.rank, self.ranks = rank, ranks
        self._store = _FileStore(str(store), ranks)
        self._meetings = 0

    @contextlib.contextmanager
    def joined(self, timeout: float) -> Iterator[None]:
        """Have a default process group on gloo; an operation that takes longer than the timeout (s) raises."""
        limit = timedelta(seconds=timeout)
        dist.init_process_group(
            "gloo", store=_PrefixStore("group", self._store), rank=self.rank, world_size=self.ranks, timeout=limit
        )
        try:
            yield
            self.meet()
        finally:
            dist.destroy_process_group()

    def meet(self) -> None:
        """Wait for all ranks, without a byte on their links."""
        self._meetings += 1
        keys = [f"meeting {self._meetings} of rank {rank}" for rank in range(self.ranks)]
        self._store.set(keys[self.rank], "here")
        self._store.wait(keys)

    def agree(self, value: int) -> int:
        """The value that rank 0 has."""
        self._meetings += 1
        key = f"value {self._meetings}"
        if self.rank == 0:
            self._store.set(key, str(value))
        return int(self._store.get(key))


class CollectiveBytes(TorchDispatchMode):
    """Counts what collectives must move while it is active, from the sizes of their tensors.

    A ring moves no more (Patarasuk and Yuan, 2009): of a tensor of n bytes on N ranks, each rank sends (N - 1) / N n
    to gather or to reduce-scatter it and 2 (N - 1) / N n to all-reduce it. A broadcast is (N - 1) n in all, the mean
    over ranks (N - 1) / N n. In an exchange (all-to-all) a rank sends all but its share;
    what ranks send each other by themselves counts as it is.

    Attributes:
        sent: bytes that this rank sends.
        busiest: the same, but for a broadcast those that its root sends down a binary tree, while others wait.
        by_ranks: bytes that this rank sends, by the ranks that take part.
        of_dtensors: those of them that DTensors send by themselves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent = self.busiest = self.of_dtensors = 0.0
        self.by_ranks: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count the operation and run it."""
        if DTensor in types:
            return NotImplemented  # It calls operations on plain tensors, which come here.
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional") and name not in _SILENT:
            key = name if space == "c10d" else f"functional {name}"
            if key not in _COUNTED:
                raise NotImplementedError(
                    f"no count for the collective {key!r}; expected all-reduce, gather, exchange or broadcast"
                )
            ranks = _ranks_of(func._schema, args)
            sent = _sent(key, args, ranks)
            self.sent += sent
            self.of_dtensors += sent if space == "_c10d_functional" else 0
            self.by_ranks[ranks] += round(sent)
            steps = (len(ranks) - 1).bit_length() if name == "broadcast_" else 0
            self.busiest += steps * _nbytes(args[0]) if steps else sent
        return func(*args, **(kwargs or {}))


def _ranks_of(schema: Any, args: Sequence[Any]) -> tuple[int, ...]:
    names = [argument.name for argument in schema.arguments]
    if "process_group" in names:
        boxed = args[names.index("process_group")]
        group: Any = dist.ProcessGroup.unbox(boxed)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        group = args[names.index("group_name")]
        resolve_group: Any = dist.distributed_c10d._resolve_process_group  # pyright: ignore[reportPrivateImportUsage]
        group = resolve_group(group) if isinstance(group, str) else group
    return tuple(dist.get_process_group_ranks(group))


def _sent(name: str, args: Sequence[Any], ranks: Sequence[int]) -> float:
    n = len(ranks)
    if name == "send":
        return _nbytes(args[0])
    if name == "alltoall_base_":
        given, splits = args[1], args[4]
        kept = splits[ranks.index(dist.get_rank())] / len(given) if splits and len(given) else 1 / n
        return given.nbytes * (1 - kept)
    passes, argument = _WHOLE[name]
    # What goes in a functional gather is a rank's part of the whole.
    whole = _nbytes(args[argument]) * (n if name.startswith("functional all_gather") else 1)
    return passes * (n - 1) / n * whole


_SILENT = ("barrier", "check_for_nan", "recv_", "wait_tensor", "_wrap_tensor_autograd")
"""Operations that send nothing that counts."""

_WHOLE = {
    "allreduce_": (2, 0),
    "allreduce_coalesced_": (2, 0),
    "broadcast_": (1, 0),
    "allgather_": (1, 0),
    "allgather_coalesced_": (1, 0),
    "allgather_into_tensor_coalesced_": (1, 0),
    "_allgather_base_": (1, 0),
    "_reduce_scatter_base_": (1, 1),
    "reduce_scatter_tensor_coalesced_": (1, 1),
    "functional all_reduce": (2, 0),
    "functional all_reduce_": (2, 0),
    "functional all_gather_into_tensor": (1, 0),
    "functional reduce_scatter_tensor": (1, 0),
}
"""How often the whole of a collective's tensors goes around, and which argument these tensors are."""

_COUNTED = ("send", "alltoall_base_", *_WHOLE)


def _nbytes(tensors: Any) -> int:
    """Bytes of a tensor, or of all in nested lists."""
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(_nbytes, tensors))


def ddp_step(net: nn.Module, batch: Batch, lr: float) -> Step:
    """The dense p-net in DDP, with its defaults."""
    parallel = DistributedDataParallel(net)
    return plain_step(lambda: loss_fn(parallel, batch), parallel.parameters(), lr)


def fsdp_step(net: nn.Module, batch: Batch, lr: float) -> Step:
    """The dense p-net in FSDP2, with its defaults."""
    _shard(net)
    return plain_step(lambda: loss_fn(net, batch), net.parameters(), lr)


def _shard(net: nn.Module, **options: Any) -> None:
    """FSDP2 on every block, or every layer of a plain sequence, and on the rest."""
    for blocks in (net, *net.children()):
        if isinstance(blocks, nn.Sequential):
            for block in blocks:
                if any(True for _ in block.parameters()):
                    fully_shard(block, **options)
    fully_shard(net, **options)


def layer_styles(net: nn.Module, ranks: int) -> Styles:
    """The styles of a case's p-net, the same for both sides.

    Those of an MLP are by column and by row in turn, an odd last layer whole. A language model has its usual ones;
    where the ranks divide its vocabulary, logits stay split, for a loss in parallel (`in_parallel`).
    """
    if not isinstance(net, nn.Sequential):
        divided = net.get_submodule("head").get_parameter("weight").shape[0] % ranks == 0
        split = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        return {**tensor_styles(net), **({"head": split} if divided else {})}
    layers = [name for name, module in net.named_children() if isinstance(module, nn.Linear)]
    pairs = layers[: len(layers) // 2 * 2]
    return {name: RowwiseParallel() if i % 2 else ColwiseParallel() for i, name in enumerate(pairs)}


def in_parallel(step: Step) -> Step:
    """A step whose loss, of logits that are split over ranks, gathers none of them."""

    def parallel() -> Any:
        with loss_parallel():
            return step()

    return parallel


def tensor_step(net: nn.Module, batch: Batch, lr: float, tensor: int, *, sharded: bool) -> Step:
    """The dense p-net, split by torch over so many neighbouring ranks, which have the same share of the batch.

    With `sharded` FSDP2 shards what they have over all others, as in torch's two-dimensional example.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tensor, tensor), mesh_dim_names=("data", "tensor"))
    _split_layers(net, mesh["tensor"])
    if sharded:
        _shard(net, mesh=mesh["data"])
    return in_parallel(plain_step(lambda: loss_fn(net, batch), _by_mesh(net), lr))


def _split_layers(net: nn.Module, mesh: Any) -> None:
    """Tensor parallelism of torch: rows of packed layers in the ranks' order before, tied weights tied after."""
    styles = layer_styles(net, mesh.size())
    for name, style in resolve(net, styles).items():
        if isinstance(style, PackedColwiseParallel):
            for parameter in net.get_submodule(name).parameters():
                parts = parameter.detach().unflatten(0, (style.parts, mesh.size(), -1))
                parameter.data = parts.transpose(0, 1).flatten(0, 2).contiguous()
    first: dict[int, str] = {}
    tied = {n: first.setdefault(id(p), n) for n, p in net.named_parameters(remove_duplicate=False)}
    parallelize_module(net, mesh, dict(styles))
    for name, owner in tied.items():
        if name != owner:
            parent, _, key = name.rpartition(".")
            setattr(net.get_submodule(parent), key, net.get_parameter(owner))


def _by_mesh(net: nn.Module) -> list[dict[str, Any]]:
    """Groups of parameters for an optimizer that updates a group at once: DTensors of one mesh only."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in net.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": parameters} for parameters in groups.values()]


def torchgb_step(net: nn.Module, genes: Genes, batch: Batch, lr: float) -> Step:
    """The scheme of torchGB: each rank generates whole tensors and broadcasts them, DDP all-reduces dense gradients.

    The g-nets are those of the library, so that only the scheme differs; every tensor belongs to the rank that has
    the fewest weights so far, the largest first.
    """
    owners = _owners({t.name: t.numel for t in plan_of(net, genes).generated}, dist.get_world_size())
    mine = [name for name, owner in owners.items() if owner == dist.get_rank()]
    parallel, parameters = DistributedDataParallel(net), dict(net.named_parameters())
    leaves: list[Tensor] = []
    generate: Callable[[], Params] = dict
    if mine:
        plan = plan_of(net, genes, exclude=[rf"^{re.escape(name)}$" for name in owners if name not in mine])
        genome = gb.init_genome(plan, net, 0)
        flat = flat_genome(genome._replace(direct={t.name: parameters[t.name] for t in plan.direct}))
        leaves = [x.requires_grad_() for k, x in flat.items() if k.startswith(GNET)]
        generate = partial(make_generator(plan), flat)
    trained = leaves + [p for name, p in parameters.items() if name not in owners]
    optimizer = torch.optim.AdamW(trained, lr=lr, fused=True)

    def step() -> Tensor:
        optimizer.zero_grad()
        parallel.zero_grad()
        weights = generate()
        with torch.no_grad():
            for name in mine:
                parameters[name].copy_(weights[name])
        for name, owner in owners.items():
            dist.broadcast(parameters[name].detach(), owner)
        loss = loss_fn(parallel, batch)
        loss.backward()
        torch.autograd.backward([weights[name] for name in mine], [parameters[name].grad for name in mine])
        optimizer.step()
        return loss.detach()

    return step


def _owners(sizes: dict[str, int], ranks: int) -> dict[str, int]:
    """The rank of every tensor, in the tensors' order."""
    loads, owners = [0] * ranks, {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owners[name] = min(range(ranks), key=lambda rank: loads[rank])
        loads[owners[name]] += sizes[name]
    return {name: owners[name] for name in sizes}
