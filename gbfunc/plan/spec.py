"""The static plan: which tensors are generated, by which g-nets, over which tiles. No tensors live here."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch

from gbfunc.encoding import Array, Encoding
from gbfunc.hypernets import Hypernet, Leaf, n_params
from gbfunc.layers import KINDS
from gbfunc.tiling import TileGrid
from gbfunc.types import MatrixDims, TileDims

DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


@dataclass(frozen=True)
class Slot:
    """One matrix of a tensor, and what generates it: `offset + scale * g`.

    Attributes:
        hypernet: the g-nets' type, with its size.
        grid: the tiles.
        row_code: code of the rows.
        col_code: code of the columns.
        scale: standard deviation of the p-net's own initialisation.
        offset: its mean, for vectors; 0 otherwise.
        group: tiles at the same place of slots of the same group share leaves, where the hypernetwork shares any.
    """

    hypernet: Hypernet
    grid: TileGrid
    row_code: Encoding
    col_code: Encoding
    scale: float
    offset: float = 0.0
    group: str = ""

    def __post_init__(self) -> None:
        g = self.grid
        for code, length, tile in ((self.row_code, g.rows, g.tile_rows), (self.col_code, g.cols, g.tile_cols)):
            code.check(length)
            if code.local:
                code.check(tile)
        for code, length in ((self.row_code, self.grid.tile_rows), (self.col_code, self.grid.tile_cols)):
            if code.local:
                code.check(length)
        if not (math.isfinite(self.scale) and math.isfinite(self.offset)):
            raise ValueError(f"scale and offset must be finite, got {self.scale} and {self.offset}")
        if self.hypernet.size is None:
            raise ValueError(f"a slot's hypernetwork must have a size, got {self.hypernet}")

    @property
    def dims(self) -> TileDims:
        """The tile as its g-net sees it."""
        g = self.grid
        p = self.row_code.tile_width(g.rows, g.tile_rows)
        return TileDims(g.tile_rows, g.tile_cols, p, self.col_code.tile_width(g.cols, g.tile_cols))

    @property
    def n_params(self) -> int:
        """Parameters of the slot's tiles, shared leaves not counted."""
        return n_params(self.hypernet, self.dims, self.grid.n_tiles, 0)


@dataclass(frozen=True)
class TensorPlan:
    """One parameter of the p-net.

    Attributes:
        name: its name.
        shape: its shape.
        dtype: its dtype, such as `"float32"`.
        kind: layer kind, a key of `gbfunc.layers.KINDS`.
        slots: its matrices where it is generated, `()` where it is direct.
        aliases: other names of the same (tied) parameter.
        note: why it is what it is, where that needs a word.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    slots: tuple[Slot, ...] = ()
    aliases: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.dtype not in DTYPES:
            raise ValueError(f"{self.name}: unknown kind {self.kind!r} or dtype {self.dtype!r}")
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in self.shape):
            raise ValueError(f"{self.name}: a shape holds ints >= 0, got {self.shape}")
        found = [(s.grid.rows, s.grid.cols) for s in self.slots]
        # A shape that no layer of the kind has (three in-projections in 7 rows) may have matrices that do not fill it.
        fits = self.slots and found == [m[:2] for m in self.matrices] and sum(r * c for r, c in found) == self.numel
        if self.slots and not fits:
            raise ValueError(f"{self.name}: slots of {found} do not fold to a {self.kind} of shape {self.shape}")
        if self.slots and sum(s.grid.numel for s in self.slots) != self.numel:
            raise ValueError(f"{self.name}: a {self.kind} cannot have shape {self.shape}")

    @property
    def matrices(self) -> tuple[MatrixDims, ...]:
        """The matrices it folds from."""
        return KINDS[self.kind].matrices(self.shape)

    @property
    def role(self) -> Literal["generated", "direct"]:
        """Whether g-nets generate it."""
        return "generated" if self.slots else "direct"

    @property
    def numel(self) -> int:
        """Its entries."""
        return math.prod(self.shape)


class BufferPlan(NamedTuple):
    """One buffer of the p-net: saved with the genome, never generated; the dense state dict has persistent ones."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    persistent: bool = True


class Placement(NamedTuple):
    """Where the tiles of one slot stand in their ensemble: tiles `first .. first + grid.n_tiles - 1`."""

    tensor: int
    part: int
    first: int
    slot: Slot


@dataclass(frozen=True)
class Ensemble:
    """All g-nets of one (hypernetwork with its size, tile shape, code widths): stacked leaves, one vmapped call.

    Attributes:
        name: its name in the genome.
        hypernet: their type, with its size.
        dims: their tile.
        placements: the slots they fill, in order of their tiles.
        groups: group of every tile.
    """

    name: str
    hypernet: Hypernet
    dims: TileDims
    placements: tuple[Placement, ...]
    groups: tuple[int, ...]

    @property
    def n_tiles(self) -> int:
        """Tiles."""
        return len(self.groups)

    @property
    def n_groups(self) -> int:
        """Groups that share leaves."""
        return max(self.groups) + 1

    @property
    def leaves(self) -> dict[str, Leaf]:
        """Leaves of ONE g-net, by name; those without numbers (weights of a code of width 0) are left out."""
        return {k: leaf for k, leaf in self.hypernet.leaves(self.dims).items() if 0 not in leaf.shape}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Stacked shapes of the leaves: [T or G, ...]."""
        counts = {"tile": self.n_tiles, "group": self.n_groups}
        return {k: (counts[leaf.scope], *leaf.shape) for k, leaf in self.leaves.items()}

    @cached_property
    def codes(self) -> tuple[Array, Array]:
        """Row codes [U, r, p] and column codes [U, c, q]: U is 1 where all tiles share them, else the tiles."""
        rows, cols = [], []
        for placement in self.placements:
            slot, grid = placement.slot, placement.slot.grid
            shape = (grid.n_rows, grid.n_cols)
            rows.append(_spread(slot.row_code.tile_codes(grid.rows, grid.tile_rows), 1, shape))
            cols.append(_spread(slot.col_code.tile_codes(grid.cols, grid.tile_cols), 0, shape))
        return _shared(rows), _shared(cols)


def _spread(codes: Array, axis: int, shape: tuple[int, int]) -> Array:
    """Codes of a slot's tiles along one axis, for all its tiles: [u, t, k] -> [n_tiles, t, k]; views where u is 1."""
    if len(codes) == 1:
        return np.broadcast_to(codes, (math.prod(shape), *codes.shape[1:]))
    full = np.broadcast_to(np.expand_dims(codes, axis), (*shape, *codes.shape[1:]))
    return full.reshape(math.prod(shape), *codes.shape[1:])


def _shared(codes: list[Array]) -> Array:
    """All slots' codes, once where all tiles have the same: [1, t, k], else [T, t, k]."""
    first = codes[0][:1]
    # A view of stride 0 repeats one code in all its tiles.
    distinct = [c[:1] if c.strides[0] == 0 else c for c in codes]
    if all(len(c) == 1 and np.array_equal(c, first) for c in distinct):
        return first
    return np.concatenate(codes)


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
        found: dict[tuple[Hypernet, TileDims], list[Placement]] = {}
        counts: dict[tuple[Hypernet, TileDims], int] = {}
        for index, tensor in enumerate(self.tensors):
            for part, slot in enumerate(tensor.slots):
                key = (slot.hypernet, slot.dims)
                first = counts.get(key, 0)
                found.setdefault(key, []).append(Placement(index, part, first, slot))
                counts[key] = first + slot.grid.n_tiles
        ensembles, taken = [], set()
        for (hypernet, dims), placements in found.items():
            name = base = f"{hypernet.type}{hypernet.size or ''}_{dims.rows}x{dims.cols}"
            while name in taken:
                name = f"{base}_{len(taken)}"
            taken.add(name)
            ensembles.append(Ensemble(name, hypernet, dims, tuple(placements), _groups(placements, hypernet)))
        return tuple(ensembles)

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
        gnets = sum(n_params(e.hypernet, e.dims, e.n_tiles, e.n_groups) for e in self.ensembles)
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


def _groups(placements: list[Placement], hypernet: Hypernet) -> tuple[int, ...]:
    """Group of every tile: its own, or one for each place within slots of the same group."""
    numbers: dict[tuple[str, int], int] = {}
    groups = []
    for placement in placements:
        for tile in range(placement.slot.grid.n_tiles):
            key = (placement.slot.group, tile) if hypernet.shares else ("", placement.first + tile)
            groups.append(numbers.setdefault(key, len(numbers)))
    return tuple(groups)
