"""The static plan: which tensors are generated, by which g-nets, over which tiles."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from functools import cached_property

import torch

from gbfunc.hypernets import ensemble_params
from gbfunc.plan.ensembles import Ensemble, ensembles_of
from gbfunc.plan.slots import DTYPES, BufferPlan, TensorPlan


@dataclass(frozen=True)
class Plan:
    """How a p-net grows from a genome: static, hashable, JSON-able. Made by `make_plan`.

    Attributes:
        tensors: every parameter of the p-net, tied ones once.
        buffers: every buffer.
        target: the size target it was made for, in words, or "".
    """

    tensors: tuple[TensorPlan, ...]
    buffers: tuple[BufferPlan, ...] = ()
    target: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        names = [n for t in self.tensors for n in (t.name, *t.aliases)] + [b.name for b in self.buffers]
        if len(set(names)) != len(names):
            raise ValueError("every tensor of a plan needs a name of its own")

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
        return sum(t.numel for t in self.tensors)

    @cached_property
    def genome_params(self) -> int:
        """Trained parameters: all g-nets and all direct parameters."""
        gnets = sum(ensemble_params(e.hypernet, e.dims, e.n_tiles, e.n_groups) for e in self.ensembles)
        return gnets + sum(t.numel for t in self.direct)

    @property
    def ratio_params(self) -> float:
        """Parameters of the dense p-net over those of the genome, whole model."""
        return self.pnet_params / max(1, self.genome_params)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(math.prod(b.shape) * DTYPES[b.dtype].itemsize for b in self.buffers)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense state dict in the p-net's own dtypes, tied parameters once."""
        own = sum(t.numel * DTYPES[t.dtype].itemsize for t in self.tensors)
        return own + sum(math.prod(b.shape) * DTYPES[b.dtype].itemsize for b in self.buffers if b.persistent)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of the g-nets: float64 for a p-net of float64, else float32."""
        wide = any(t.dtype == "float64" for t in self.tensors)
        return torch.float64 if wide else torch.float32

    @cached_property
    def leaf_shapes(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """Shape of every trained leaf, by (ensemble, leaf) for g-nets and ("direct", name) for direct parameters."""
        shapes = {(e.name, k): shape for e in self.ensembles for k, shape in e.shapes.items()}
        return shapes | {("direct", t.name): t.shape for t in self.direct}

    @property
    def stochastic(self) -> bool:
        """Whether any g-net takes noise."""
        return any(e.hypernet.stochastic for e in self.ensembles)

    def to_json(self) -> str:
        """The plan as JSON; `Plan.from_json` reads it back."""
        from gbfunc.plan.serial import plan_to_json

        return plan_to_json(self)

    @staticmethod
    def from_json(text: str, factories: tuple = ()) -> Plan:
        """Read what `to_json` wrote.

        Args:
            text: the JSON.
            factories: the factories of `from_module` that the plan needs.

        Raises:
            ValueError: for anything that is not a sound plan.
        """
        from gbfunc.plan.serial import plan_from_json

        return plan_from_json(text, factories)

    def report(self) -> str:
        """Every tensor with its role, tiles, parameters and bytes, and the whole model's sizes, as a text table."""
        from gbfunc.plan.report import plan_report

        return plan_report(self)

    def digest(self) -> str:
        """SHA-256 of the JSON form."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()
