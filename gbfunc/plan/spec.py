"""The static plan: which tensors are generated, by which g-nets, over which tiles."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn, optim

from gbfunc.base import Base, BaseTensors
from gbfunc.hypernets import ensemble_params
from gbfunc.plan.ensembles import Ensemble, ensembles_of
from gbfunc.plan.file_layout import compact_bytes, file_header, stored_leaves
from gbfunc.plan.rounding import BITS, StoredDtype, stored_name
from gbfunc.plan.serial import plan_from_json, plan_to_json
from gbfunc.plan.slots import DTYPES, BufferPlan, TensorPlan, dtype_name
from gbfunc.pnet import parameter_infos
from gbfunc.trees import BUFFERS, DIRECT, GNET
from gbfunc.types import Params


@dataclass(frozen=True)
class Plan:
    """How a p-net grows from a genome: static, hashable, JSON-able. Made by `make_plan`.

    Attributes:
        tensors: every parameter of the p-net, tied ones once; with a base, those that the genome changes or adds.
        buffers: every buffer; with a base, those that the genome holds.
        target: the size target it was made for, in words, or "".
        base: whose deltas the genome holds, None where it holds all of the p-net.
    """

    tensors: tuple[TensorPlan, ...]
    buffers: tuple[BufferPlan, ...] = ()
    target: str = field(default="", compare=False)
    base: Base | None = None

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
        """The parameters that are not the base's."""
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
    def dense_bytes(self) -> int:
        """Bytes of the dense state dict in the p-net's dtypes, tied parameters once."""
        parameters = sum(t.numel * DTYPES[t.dtype].itemsize for t in self._new)
        buffers = sum(math.prod(b.shape) * DTYPES[b.dtype].itemsize for b in self.buffers if b.persistent)
        return parameters + buffers + (self.base.bytes if self.base else 0)

    def suggested_lr(self, optimizer: type[torch.optim.Optimizer] = torch.optim.Adam) -> float:
        """A constant learning rate to begin with: the least of those of the types of g-net.

        Chosen on validation images of digits, for a 64-256-256-64-10 MLP at 20x and 300 steps. Half and twice the rate
        learn too; long runs do better with a warm-up and a decay.

        Args:
            optimizer: Adam, or a class that takes steps of its size: AdamW, NAdam or RAdam.

        Raises:
            ValueError: for any other class, whose steps have another size.
        """
        if optimizer not in (known := (optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam)):
            names = [cls.__name__ for cls in known]
            raise ValueError(f"rates are known for {names}, got {optimizer!r}: try some on validation data")
        return min((slot.hypernet.rate for t in self.tensors for slot in t.slots), default=1e-3)

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
        """The frozen tensors that the genome's deltas belong to; None for a plan without a base.

        Args:
            pnet: the base.

        Raises:
            ValueError: if it is another one.
        """
        if self.base is None:
            return None
        tensors = BaseTensors(pnet, {t.name for t in self._new} | {b.name for b in self.buffers})
        given = tensors.describe()
        if given.digest != self.base.digest:
            named = "" if not self.base.name else f" {self.base.name!r} (revision {self.base.revision or 'unknown'})"
            now = {info.name: dtype_name(info.tensor.dtype) for info in parameter_infos(pnet)}
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
        """Read what `to_json` wrote.

        Args:
            text: the JSON.
            factories: the factories of `from_module` that the plan needs.

        Raises:
            ValueError: for anything that is not a valid plan.
        """
        return Plan(*plan_from_json(text, factories))

    def report(self, dtype: StoredDtype | None = None) -> str:
        """Every tensor with its role, tiles, parameters and bytes, and the whole model's sizes, as a text table.

        Args:
            dtype: what the file stores, of which its size is then; None is the p-net's own.

        Raises:
            ValueError: for another dtype.
        """
        stored = "" if dtype is None else f" as {stored_name(dtype)}"
        try:
            size = genome_file_bytes(self, dtype)
            on_disk = f"{size:,} bytes on disk{stored} (header and buffers included)"
            in_bytes = f", {self.dense_bytes / size:.1f}x in bytes"
        except (ValueError, RuntimeError) as error:
            # A g-net from a function that has no import path trains, but has no file; nor has a size beyond torch's.
            on_disk, in_bytes = f"not to be saved: {error}", ""
        lines = [
            *_table(self),
            "",
            f"whole model  dense {self.pnet_params:,} parameters, {self.dense_bytes:,} bytes",
            f"             genome {self.genome_params:,} parameters, {on_disk}",
            f"             ratio {self.ratio_params:.1f}x in parameters{in_bytes}"
            + ", beside the base" * (self.base is not None),
            *self._parts(),
            *([f"asked for    {self.target}"] if self.target else []),
            *([f"little rank  {', '.join(poor)}: may not learn; gb.periodic() does"] if (poor := self._poor()) else []),
        ]
        return "\n".join(lines)

    def _poor(self) -> list[str]:
        """Large tensors in few tiles of a type that gives each little rank (measured: notebooks/results/types.md)."""
        return [
            f"{t.name} ({slot.hypernet.type}, {slot.grid.n_tiles} tiles)"
            for t in self.tensors
            for slot in t.slots
            if slot.hypernet.spreads and not t.base and min(slot.dims[:2]) >= _LARGE_TILE
            if slot.grid.n_tiles < (_FEW_FACTORED if slot.hypernet.factorised else _FEW_TILES)
        ]

    def _parts(self) -> list[str]:
        """What base, delta and head are, where there is a base."""
        if self.base is None:
            return []
        named, sizes = f"{self.base.name}, " * bool(self.base.name), f"{self.base.params:,} parameters"
        head = sum(s.tile_params for t in self._new for s in t.slots) + sum(t.numel for t in self.direct)
        rest = f"deltas of {sum(t.base for t in self.tensors)} tensors {self.genome_params - head:,} parameters"
        return [
            f"base         {named}{sizes}, {self.base.bytes:,} bytes: frozen, and not in the genome",
            f"genome       {rest}; {len(self._new)} new tensors {head:,}",
        ]

    def digest(self) -> str:
        """SHA-256 of the JSON form."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def genome_file_bytes(plan: Plan, dtype: StoredDtype | None = None) -> int:
    """Bytes of `genome.safetensors`, header included, with trained leaves stored in `dtype`, as `save` has it.

    Of codes (`"int2"` to `"int8"`) the most bytes: how far they can be packed is for their values to say.

    Raises:
        ValueError: if the plan cannot be saved, or for another dtype.
    """
    name = None if dtype is None else stored_name(dtype)
    if name in BITS:
        return compact_bytes(plan.to_json(), plan.leaves, BITS[name])
    stored = stored_leaves(plan.leaves, name)
    header = file_header(plan.to_json(), plan.leaves, stored)
    return len(header) + sum(x.nbytes for x in stored.values())


_FEW_TILES, _FEW_FACTORED, _LARGE_TILE = 25, 9, 48
_COLUMNS = ("tensor", "shape", "role", "by", "tiles", "parameters", "bytes", "note")


def _table(plan: Plan) -> list[str]:
    """Every tensor with its role, tiles, parameters and bytes, under a head and a rule; [] without tensors."""
    rows: list[dict[str, str | int]] = []

    def add(name: str, role: str, count: int, itemsize: int, **cells: str) -> None:
        rows.append({"tensor": name, "role": role, "parameters": count, "bytes": count * itemsize, **cells})

    for t in plan.tensors:
        if t.slots:
            types = {f"{s.hypernet.type}({s.hypernet.size})" if s.hypernet.size else s.hypernet.type for s in t.slots}
            grids = {f"{s.grid.n_tiles} of {s.grid.tile_rows}x{s.grid.tile_cols}" for s in t.slots}
            parts = f"{len(t.slots)} x " if len(t.slots) > 1 else ""
            made = {"by": ", ".join(sorted(types)), "tiles": parts + ", ".join(sorted(grids))}
            count, itemsize = sum(s.tile_params for s in t.slots), plan.dtype.itemsize
        else:
            made, count, itemsize = {}, t.numel, DTYPES[t.dtype].itemsize
        add(t.name, t.role, count, itemsize, shape=_dims(t), note=t.note, **made)
        for alias in t.aliases:
            add(alias, "tied", 0, 0, by=f"to {t.name}")
    for e in plan.ensembles:
        if e.hypernet.shares:
            count = ensemble_params(e.hypernet, e.dims, 0, e.n_groups)
            add(f"({e.name})", "shared", count, plan.dtype.itemsize, by="code weights")
    for b in plan.buffers:
        numel = math.prod(b.shape)
        add(b.name, "buffer", numel, DTYPES[b.dtype].itemsize, shape=_dims(b), parameters=f"({numel:,})")
    columns = []
    for name in _COLUMNS:
        cells = [f"{x:,}" if isinstance(x, int) else x for x in (row.get(name, "") for row in rows)]
        if any(cells) or name in _COLUMNS[:4]:
            width = max(map(len, [name, *cells]))
            place = str.rjust if name in ("parameters", "bytes") else str.ljust
            columns.append([place(cell, width) for cell in (name, "-" * width, *cells)])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)] if rows else []


def _dims(tensor: TensorPlan | BufferPlan) -> str:
    return "x".join(map(str, tensor.shape)) or "1"
