"""The static plan: which tensors are generated, by which g-nets, over which tiles."""

from __future__ import annotations

import hashlib
import math
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
from gbfunc.plan.slots import BufferPlan, TensorPlan
from gbfunc.trees import BUFFERS, DIRECT, GNET, differentiable
from gbfunc.types import DTYPES, GenomeLike, Params, dtype_name

_RATES: dict[Any, float] = dict.fromkeys((optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam), 1.0) | {optim.SGD: 5.0}
# Younger than the oldest torch that is supported.
_RATES |= {optim.Muon: 1.0} if hasattr(optim, "Muon") else {}
"""Rates of optimizers in those of Adam."""


def base_rate(genome_params: float) -> float:
    """Adam's rate for the deltas of a base: Adam moves the sum of more features further."""
    return 3e-2 * min(1.0, 5_400 / max(1, genome_params))


@dataclass(frozen=True)
class Plan:
    """How a p-net grows from a genome: static, hashable, JSON-able. Made by `make_plan`.

    Attributes:
        tensors: every parameter of the p-net, tied ones once; with a base, those that the genome changes or adds.
        buffers: every buffer; with a base, those of the genome.
        target: the size target in words, or "".
        base: the base of the genome's deltas, None without one.
        left_out: layers of a base without a delta because of the class or dtype of their weights; not in files.
        stored: the dtype in the file that a target in bytes is of, which `save` takes by default; not in files.
    """

    tensors: tuple[TensorPlan, ...]
    buffers: tuple[BufferPlan, ...] = ()
    target: str = field(default="", compare=False)
    base: Base | None = None
    left_out: tuple[str, ...] = field(default=(), compare=False)
    stored: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        names = [n for t in self.tensors for n in (t.name, *t.aliases)] + [b.name for b in self.buffers]
        if len(set(names)) != len(names):
            raise ValueError("every tensor of a plan needs a name of its own")
        if self.base is None and (deltas := [t.name for t in self.tensors if t.base]):
            raise ValueError(f"{deltas} are deltas of a base, and the plan names none")

    @cached_property
    def ensembles(self) -> tuple[Ensemble, ...]:
        """The ensembles, derived from the slots in order."""
        return ensembles_of(self.tensors)

    @property
    def generated(self) -> tuple[TensorPlan, ...]:
        """The parameters that g-nets generate."""
        return tuple(t for t in self.tensors if t.slots)

    @property
    def direct(self) -> tuple[TensorPlan, ...]:
        """The parameters that are trained as they are."""
        return tuple(t for t in self.tensors if not t.slots)

    @property
    def tiles(self) -> int:
        """All tiles, which is all g-nets."""
        return sum(e.n_tiles for e in self.ensembles)

    @property
    def pnet_params(self) -> int:
        """Parameters of the dense p-net, tied ones once."""
        return sum(t.numel for t in self._new) + (self.base.params if self.base else 0)

    @property
    def _new(self) -> tuple[TensorPlan, ...]:
        return tuple(t for t in self.tensors if not t.base)

    @cached_property
    def genome_params(self) -> int:
        """Trained parameters: all g-nets and all direct parameters."""
        return sum(map(math.prod, self.leaf_shapes.values()))

    @property
    def ratio_params(self) -> float:
        """Parameters of the dense p-net over those of the genome, whole model."""
        return self.pnet_params / max(1, self.genome_params)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(math.prod(b.shape) * DTYPES[b.dtype].itemsize for b in self.buffers)

    @property
    def averaged(self) -> tuple[BufferPlan, ...]:
        """Buffers that are means over ranks: running statistics. Caches, which are not persistent, are each rank's."""
        return tuple(b for b in self.buffers if b.persistent and differentiable(DTYPES[b.dtype]))

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense state dict in the p-net's dtypes, tied parameters once."""
        parameters = sum(t.numel * DTYPES[t.dtype].itemsize for t in self._new)
        buffers = sum(math.prod(b.shape) * DTYPES[b.dtype].itemsize for b in self.buffers if b.persistent)
        return parameters + buffers + (self.base.bytes if self.base else 0)

    def suggested_lr(self, optimizer: type[torch.optim.Optimizer] = torch.optim.Adam) -> float:
        """Suggest a constant learning rate; a one-cycle or cosine schedule takes up to twice the rate as its peak.

        | g-nets | Adam, AdamW, NAdam, RAdam, Muon | SGD with momentum 0.9 |
        |---|---|---|
        | periodic, low rank, XOX | 2e-2 | 1e-1 |
        | MLPs, stochastic, bilinear | 1e-2 | 5e-2 |
        | `from_module` | 3e-3 | 1.5e-2 |
        | deltas of a base, up to 5,400 parameters | 3e-2 | 1.5e-1 |

        Several types take the least rate. Larger genomes with a base take less, in inverse proportion. SGD without
        momentum takes ten times the rate. Chosen on validation images of digits and MNIST, and on TREC for a base; half
        and twice the rate learn too.

        Raises:
            ValueError: for any other optimizer.
        """
        if (factor := _RATES.get(optimizer)) is None:
            names = [cls.__name__ for cls in _RATES]
            raise ValueError(f"rates are known for {names}, got {optimizer!r}: try some on validation data")
        if self.base is not None:
            return factor * base_rate(self.genome_params)
        return factor * min((slot.hypernet.rate for t in self.tensors for slot in t.slots), default=1e-3)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of the g-nets: float64 for a p-net of float64, else float32."""
        return torch.float64 if any(t.dtype == "float64" for t in self.tensors) else torch.float32

    @cached_property
    def leaf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every trained leaf: `gnets/<ensemble>/<leaf>` and `direct/<name>`."""
        shapes = {f"{GNET}{e.name}/{k}": shape for e in self.ensembles for k, shape in e.shapes.items()}
        return shapes | {f"{DIRECT}{t.name}": t.shape for t in self.direct}

    @cached_property
    def stochastic(self) -> bool:
        """Whether any g-net takes noise."""
        return any(e.hypernet.stochastic for e in self.ensembles)

    @cached_property
    def leaves(self) -> Params:
        """All tensors of a genome, on the meta device: `gnets/<ensemble>/<leaf>`, `direct/<name>`, `buffers/<name>`."""
        dtypes = {f"{DIRECT}{t.name}": DTYPES[t.dtype] for t in self.direct}
        specs = {k: (shape, dtypes.get(k, self.dtype)) for k, shape in self.leaf_shapes.items()}
        specs |= {f"{BUFFERS}{b.name}": (b.shape, DTYPES[b.dtype]) for b in self.buffers}
        return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in specs.items()}

    def to_json(self) -> str:
        """The plan as JSON; `Plan.from_json` reads it back."""
        return plan_to_json(self.tensors, self.buffers, self.target, self.base)

    def base_tensors(self, pnet: nn.Module) -> BaseTensors | None:
        """The frozen tensors of a base, None for a plan without one; raises ValueError for another base."""
        if self.base is None:
            return None
        tensors = BaseTensors(pnet, {t.name for t in self._new} | {b.name for b in self.buffers})
        given = tensors.describe()
        if given.digest != self.base.digest:
            named = "" if not self.base.name else f" {self.base.name!r} (revision {self.base.revision or 'unknown'})"
            now = {name: dtype_name(x.dtype) for name, x in pnet.named_parameters()}
            pairs = {(t.dtype, now.get(t.name, t.dtype)) for t in self.tensors if t.base}
            differing = [pair for pair in pairs if pair[0] != pair[1]]
            cure = "its weights must be those that the plan was made for"
            if differing:
                made, got = min(differing)
                cure = f"the plan was made for weights in {made}, these are in {got}: load them in {made}, and convert "
                cure += f"what is made of them, gb.materialize(plan, genome, pnet).to(torch.{got})"
            raise ValueError(
                f"the genome's base{named} has digest {self.base.digest} ({self.base.params:,} parameters), this p-net "
                f"has {given.digest} ({given.params:,}): {cure}"
            )
        return tensors

    @staticmethod
    def from_json(text: str, factories: tuple = ()) -> Plan:
        """Reads the text of `to_json`, with the factories of `from_module`; raises ValueError for anything else."""
        return Plan(*plan_from_json(text, factories))

    def report(self, dtype: Stored | None = None, genome: GenomeLike | None = None, metadata: Any = None) -> str:
        """Returns a text table of all tensors: role, tiles, parameters and bytes of the genome's file.

        All bytes together are the file's: plan, metadata, scales of codes, and container have rows of their own.

        Args:
            dtype: the dtype of `gb.save`; None is that of a target in bytes, otherwise the p-net's own.
            genome: a genome, whose values decide the bytes of codes; without one the most bytes that any genome needs.
            metadata: the metadata of `gb.save`.

        Raises:
            ValueError: for another dtype, or a genome of another plan.
        """
        return report(self, self.default_dtype(genome is None) if dtype is None else dtype, genome, metadata)

    def default_dtype(self, expected: bool = False) -> str | None:
        """The dtype of a file where none is given; `"auto"` without the steps of a genome for `expected` bytes only."""
        return None if not self.stored or (self.stored == AUTO and not expected) else self.stored

    def digest(self) -> str:
        """SHA-256 of the JSON form."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()
