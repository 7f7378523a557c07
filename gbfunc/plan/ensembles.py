"""Ensembles: the tiles of all slots, sorted by what one vmapped call can generate together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from gbfunc.encoding import Array
from gbfunc.hypernets import Hypernet, Leaf
from gbfunc.plan.slots import Slot, TensorPlan
from gbfunc.types import TileDims


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


def ensembles_of(tensors: Sequence[TensorPlan]) -> tuple[Ensemble, ...]:
    """The ensembles of all slots, in the order of their first tiles."""
    found: dict[tuple[Hypernet, TileDims], list[Placement]] = {}
    counts: dict[tuple[Hypernet, TileDims], int] = {}
    for index, tensor in enumerate(tensors):
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


def _groups(placements: list[Placement], hypernet: Hypernet) -> tuple[int, ...]:
    """Group of every tile: its own, or one for each place within slots of the same group."""
    numbers: dict[tuple[str, int], int] = {}
    groups = []
    for placement in placements:
        for tile in range(placement.slot.grid.n_tiles):
            key = (placement.slot.group, tile) if hypernet.shares else ("", placement.first + tile)
            groups.append(numbers.setdefault(key, len(numbers)))
    return tuple(groups)
