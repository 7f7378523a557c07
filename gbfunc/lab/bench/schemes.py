"""How the variants of the distributed bench spread a case over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

import gbfunc as gb
from gbfunc.lab.bench.cases import Case
from gbfunc.lab.bench.dense_parallel import (
    CollectiveBytes,
    Group,
    ddp_step,
    fsdp_step,
    in_parallel,
    layer_styles,
    tensor_step,
    torchgb_step,
)
from gbfunc.lab.bench.variants import Batch, Step, first_net, genome_step, plan_of
from gbfunc.parallel.mesh import Traffic

PURPOSES: tuple[str, ...] = ("activations", "weights", "genome")
"""What is sent: activations or their gradients, weights or theirs, the genome's gradient."""


class Scheme(NamedTuple):
    """A way to spread training over ranks."""

    # `"genome"` is the library's, the others train the dense p-net or are torchGB's.
    kind: Literal["ddp", "fsdp2", "torchgb", "tensor", "tensor_fsdp", "genome"]
    tensor: int = 1  # neighbouring ranks that share each layer; 0 is all. The batch is split over the others
    shards: bool = False  # whether the genome's mesh has a g-net axis in the place of a data axis
    options: Mapping[str, Any] = {}  # of `make_train_step`


SCHEMES: Mapping[str, Scheme] = {
    "ddp": Scheme("ddp"),
    "fsdp2": Scheme("fsdp2"),
    "torchgb": Scheme("torchgb"),
    "replicated": Scheme("genome", options={"placement": "replicated"}),
    "sharded": Scheme("genome", shards=True, options={"placement": "sharded"}),
    "factors": Scheme("genome", shards=True, options={"placement": "factors"}),
    "dense_tensor": Scheme("tensor", tensor=0),
    "dense_tensor_fsdp": Scheme("tensor_fsdp", tensor=2),
    "tensor": Scheme("genome", tensor=0, options={"lazy": "auto"}),
    "tensor_data": Scheme("genome", tensor=2, options={"lazy": "auto"}),
    "tensor_data_remat": Scheme("genome", tensor=2, options={"lazy": "auto", "remat": "layer"}),
}
"""Every variant by name. DDP, FSDP2 and `"dense_tensor"` (with FSDP2 over the other ranks) are torch's engines;
`"torchgb"` broadcasts generated weights and all-reduces their gradients."""


class Built(NamedTuple):
    """A variant, ready to run."""

    step: Step  # one step
    ratio_params: float | None  # of its plan, None without one
    # Bytes by purpose that this rank has sent since the last call, from what was counted meanwhile.
    purposes: Callable[[CollectiveBytes], dict[str, float]]


def build(case: Case, variant: str, group: Group, lr: float) -> Built:
    """A variant of a case with this rank's share of the batch."""
    scheme = SCHEMES[variant]
    tensor = scheme.tensor or group.ranks
    (x, target), parts, index = case.batch(), group.ranks // tensor, group.rank // tensor
    share = x.chunk(parts)[index], target.chunk(parts)[index]
    make = _genome if scheme.kind == "genome" else _dense
    return make(case, scheme, share, group, tensor, lr)


def lightest(case: Case, variant: str) -> Case:
    """The case with a p-net without weights, for a variant that generates them; the same case for the others."""
    return replace(case, net=partial(_on_meta, case.net)) if SCHEMES[variant].kind == "genome" else case


def _on_meta(net: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return net()


def _dense(case: Case, scheme: Scheme, share: Batch, group: Group, tensor: int, lr: float) -> Built:
    net, ratio = first_net(case), None
    if scheme.kind == "torchgb":
        assert case.periodic is not None
        step, ratio = torchgb_step(net, case.periodic, share, lr), plan_of(net, case.periodic).ratio_params
    elif scheme.kind in ("tensor", "tensor_fsdp"):
        step = tensor_step(net, share, lr, tensor, sharded=scheme.kind == "tensor_fsdp")
    else:
        step = (ddp_step if scheme.kind == "ddp" else fsdp_step)(net, share, lr)
    first = group.rank // tensor * tensor
    neighbours = tuple(range(first, first + tensor))

    def purposes(counted: CollectiveBytes) -> dict[str, float]:
        activations = counted.by_ranks[neighbours]
        return {"activations": activations, "weights": counted.by_ranks.total() - activations, "genome": 0}

    return Built(step, ratio, purposes)


def _genome(case: Case, scheme: Scheme, share: Batch, group: Group, tensor: int, lr: float) -> Built:
    assert case.periodic is not None
    net, others = first_net(case), group.ranks // tensor
    plan = plan_of(net, case.periodic)
    data, gnets = (1, others) if scheme.shards else (others, 1)
    mesh = gb.mesh(data, gnets, tensor=tensor)
    mesh.traffic = traffic = _Purposes()
    options = {**scheme.options, "parallel": layer_styles(net, tensor)} if tensor > 1 else scheme.options
    step = genome_step(plan, net, share, lr, mesh=mesh, **options)
    return Built(in_parallel(step) if tensor > 1 else step, plan.ratio_params, traffic.take)


class _Purposes(Traffic):
    """Counts by purpose: along the tensor axis go activations; else what is summed is the genome's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes = dict.fromkeys(PURPOSES, 0.0)

    def add(self, kind: str, n_bytes: int, axis: str = "world") -> None:
        super().add(kind, n_bytes, axis)
        purpose = "activations" if axis == "tensor" else "genome" if kind == "all_reduce" else "weights"
        self._bytes[purpose] += n_bytes

    def take(self, counted: CollectiveBytes) -> dict[str, float]:
        """What was counted since the last call, with what a loss of split logits has sent, which is torch's."""
        taken, self._bytes = self._bytes, dict.fromkeys(PURPOSES, 0.0)
        return {**taken, "activations": taken["activations"] + counted.of_dtensors}
