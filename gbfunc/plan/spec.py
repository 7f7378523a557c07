"""The static plan: generated tensors, their g-nets and their tiles."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn, optim

from gbfunc.base import Base, BaseTensors
from gbfunc.formats.steps import AUTO, Stored
from gbfunc.plan.ensembles import Ensemble, ensembles_of
from gbfunc.plan.report import report
from gbfunc.plan.serial import plan_from_json, plan_to_json
from gbfunc.plan.slots import BufferPlan, TensorPlan, old_rows
from gbfunc.trees import BUFFERS, DIRECT, GNET, differentiable
from gbfunc.types import DTYPES, GenomeLike, Params, dtype_name

# Learning rates of optimizers, divided by Adam's. The oldest supported torch has no `Muon`.
_LIKE_ADAM = optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, getattr(optim, "Muon", optim.Adam)
_RATES: dict[Any, float] = dict.fromkeys(_LIKE_ADAM, 1.0) | {optim.SGD: 5.0}


def base_rate(genome_params: float) -> float:
    """Return Adam's rate for deltas. Above 5,400 parameters the rate falls, because each step changes deltas more."""
    return 3e-2 * min(1.0, 5_400 / max(1, genome_params))


@dataclass(frozen=True)
class Plan:
    """A static, hashable description of how a p-net is generated from a genome. `make_plan` makes plans.

    Attributes:
        tensors: every parameter of the p-net (tied parameters once). With a base, only changed and new parameters.
        buffers: every buffer of the p-net. With a base, only buffers that the genome contains.
        target: the size target in words, or "".
        base: the base of the genome's deltas, or None.
        left_out: `{layer: reason}` for layers of the base that cannot have deltas; not stored in files.
        stored: the dtype in which a target in bytes is counted, and the default of `save`; not stored in files.
    """

    tensors: tuple[TensorPlan, ...]
    buffers: tuple[BufferPlan, ...] = ()
    target: str = field(default="", compare=False)
    base: Base | None = None
    left_out: Mapping[str, str] = field(default_factory=dict, compare=False)
    stored: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        names = [n for t in self.tensors for n in (t.name, *t.aliases)] + [b.name for b in self.buffers]
        if len(set(names)) != len(names):
            raise ValueError(f"the tensors of a plan must have different names, got {names}")
        if self.base is None and (deltas := [t.name for t in self.tensors if t.base]):
            raise ValueError(f"a plan with deltas must have a base, got none for the deltas {deltas}")

    @cached_property
    def ensembles(self) -> tuple[Ensemble, ...]:
        """The ensembles of all slots, in the order of the slots."""
        return ensembles_of(self.tensors)

    @property
    def generated(self) -> tuple[TensorPlan, ...]:
        """The parameters that g-nets generate."""
        return tuple(t for t in self.tensors if t.slots)

    @property
    def direct(self) -> tuple[TensorPlan, ...]:
        """The parameters that are trained directly."""
        return tuple(t for t in self.tensors if not t.slots)

    @property
    def pnet_params(self) -> int:
        """Number of parameters of the dense p-net; tied parameters count once."""
        return sum(t.numel for t in self._new) + (self.base.params if self.base else 0)

    @property
    def _new(self) -> tuple[TensorPlan, ...]:
        return tuple(t for t in self.tensors if not t.base)

    @cached_property
    def genome_params(self) -> int:
        """Number of trained parameters: of all g-nets, and all direct parameters."""
        return sum(map(math.prod, self.leaf_shapes.values()))

    @property
    def ratio_params(self) -> float:
        """Number of the dense p-net's parameters, divided by the number of the genome's parameters."""
        return self.pnet_params / max(1, self.genome_params)

    @property
    def buffer_bytes(self) -> int:
        """Total bytes of the buffers."""
        return sum(math.prod(b.shape) * DTYPES[b.dtype].itemsize for b in self.buffers)

    @property
    def averaged(self) -> tuple[BufferPlan, ...]:
        """The buffers that are averaged over ranks: persistent floating-point buffers, such as running statistics."""
        return tuple(b for b in self.buffers if b.persistent and differentiable(DTYPES[b.dtype]))

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense state dict in the p-net's dtypes; tied parameters count once."""
        parameters = sum(t.numel * DTYPES[t.dtype].itemsize for t in self._new)
        buffers = sum(math.prod(b.shape) * DTYPES[b.dtype].itemsize for b in self.buffers if b.persistent)
        return parameters + buffers + (self.base.bytes if self.base else 0)

    def suggested_lr(self, optimizer: type[torch.optim.Optimizer] = torch.optim.Adam) -> float:
        """Suggest a constant learning rate; the peak of a one-cycle or cosine schedule may be twice this rate.

        The rate of Adam is the lowest `rate` of the plan's types of g-nets (see the guide "Shrink a network"), or at
        most 3e-2 with a base. SGD with momentum 0.9 takes five times this rate. The rates were chosen on validation
        data of digits, MNIST and (with a base) TREC, where half and twice the rate also work. In a transformer from
        random weights, direct matrices and embeddings need the rate of the dense network, such as 1e-3, instead.

        Raises:
            ValueError: for optimizers other than Adam, AdamW, NAdam, RAdam, Muon and SGD.
        """
        if (factor := _RATES.get(optimizer)) is None:
            got = getattr(optimizer, "__name__", f"{type(optimizer).__name__}: pass a class, such as torch.optim.Adam")
            names = ", ".join(cls.__name__ for cls in _RATES)
            raise ValueError(f"rates are known for {names}; try several rates on validation data for others, got {got}")
        if self.base is not None:
            return factor * base_rate(self.genome_params)
        return factor * min((slot.hypernet.rate for t in self.tensors for slot in t.slots), default=1e-3)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of the g-nets: float64 if any parameter of the p-net is float64, otherwise float32."""
        return torch.float64 if any(t.dtype == "float64" for t in self.tensors) else torch.float32

    @cached_property
    def leaf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every trained leaf: `gnets/<ensemble>/<leaf>` and `direct/<name>`."""
        shapes = {f"{GNET}{e.name}/{k}": shape for e in self.ensembles for k, shape in e.shapes.items()}
        return shapes | {f"{DIRECT}{t.name}": t.shape for t in self.direct}

    @cached_property
    def stochastic(self) -> bool:
        """True if any g-net has noise as an input."""
        return any(e.hypernet.stochastic for e in self.ensembles)

    @cached_property
    def leaves(self) -> Params:
        """All tensors of a genome, on the meta device: `gnets/<ensemble>/<leaf>`, `direct/<name>`, `buffers/<name>`."""
        dtypes = {f"{DIRECT}{t.name}": DTYPES[t.dtype] for t in self.direct}
        specs = {k: (shape, dtypes.get(k, self.dtype)) for k, shape in self.leaf_shapes.items()}
        specs |= {f"{BUFFERS}{b.name}": (b.shape, DTYPES[b.dtype]) for b in self.buffers}
        return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in specs.items()}

    def to_json(self) -> str:
        """Return the plan as JSON for `Plan.from_json`."""
        return plan_to_json(self.tensors, self.buffers, self.target, self.base)

    def base_tensors(self, pnet: nn.Module) -> BaseTensors | None:
        """Return the base's frozen tensors, None if there is no base; ValueError if `pnet` is not this base."""
        if self.base is None:
            return None
        old = {t.name: old_rows(t, t.new_rows) for t in self.tensors if t.new_rows}
        tensors = BaseTensors(pnet, {t.name for t in self._new} | {b.name for b in self.buffers}, old)
        found = tensors.describe()
        if found.digest != self.base.digest:
            named = "" if not self.base.name else f" {self.base.name!r} (revision {self.base.revision or 'unknown'})"
            now = {name: dtype_name(x.dtype) for name, x in pnet.named_parameters()}
            pairs = {(t.dtype, now.get(t.name, t.dtype)) for t in self.tensors if t.base}
            cure = "load the weights that the plan was made for"
            for planned, got in (pair for pair in pairs if pair[0] != pair[1]):
                cure = f"the plan was made for weights in {planned}, these are in {got}: load them in {planned}, and "
                cure += f"convert the materialized p-net, gb.materialize(plan, genome, pnet).to(torch.{got})"
            raise ValueError(
                f"the genome's base{named} has digest {self.base.digest} ({self.base.params:,} parameters), this p-net "
                f"has {found.digest} ({found.params:,}): {cure}"
            )
        return tensors

    @staticmethod
    def from_json(text: str, factories: tuple = ()) -> Plan:
        """Read the text of `to_json`. `factories` are those of `from_module` g-nets. ValueError for any other text."""
        return Plan(*plan_from_json(text, factories))

    def report(self, dtype: Stored | None = None, genome: GenomeLike | None = None, metadata: Any = None) -> str:
        """Return a text table with the role, tiles, parameters and bytes of all tensors, and totals.

        The bytes of the rows add up to the size of the genome's file. The rows `(plan)`, `(metadata)`, `(scales)` (of
        quantized numbers) and `(container)` have bytes that belong to no tensor.

        Args:
            dtype: the dtype of `gb.save`. None means the dtype of a target in bytes, if any, or the p-net's dtypes.
            genome: a genome, whose values determine the bytes of integer dtypes. None reports the largest size.
            metadata: the metadata of `gb.save`.

        Raises:
            ValueError: if `dtype` is not supported, or `genome` belongs to a different plan.
        """
        return report(self, self.default_dtype(genome is None) if dtype is None else dtype, genome, metadata)

    def default_dtype(self, expected: bool = False) -> str | None:
        """Return the plan's dtype of files, or None; `"auto"`, which needs a training, only if it is `expected`."""
        return None if not self.stored or (self.stored == AUTO and not expected) else self.stored

    def digest(self) -> str:
        """Return the SHA-256 of the plan's JSON text."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()
