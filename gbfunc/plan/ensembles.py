"""Ensembles: the g-nets whose tiles one vmapped call generates together."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gbfunc.encoding import Array, Device, Encoding
from gbfunc.hypernets import Hypernet, Leaf
from gbfunc.plan.slots import Slot, TensorPlan
from gbfunc.types import TileDims


class TileSpan(NamedTuple):
    """The tiles of an ensemble that generate one matrix of a tensor: `first .. first + slot.grid.n_tiles - 1`."""

    tensor: int
    matrix: int
    first: int
    slot: Slot


@dataclass(frozen=True)
class Ensemble:
    """All g-nets of equal type, size, tile shape and code widths. One vmap call evaluates them from stacked leaves.

    `name` is the ensemble's name in the genome. `spans` has each generated matrix's range of tiles, in ascending order.
    """

    name: str
    hypernet: Hypernet
    dims: TileDims
    spans: tuple[TileSpan, ...]

    @property
    def n_tiles(self) -> int:
        return self.spans[-1].first + self.spans[-1].slot.grid.n_tiles

    @cached_property
    def n_groups(self) -> int:
        return int(self.groups.max()) + 1 if self.hypernet.shares else self.n_tiles

    @cached_property
    def groups(self) -> NDArray[np.int64]:
        """Index of every tile's group, [tiles]. Group: tiles whose g-nets share some parameters, or one tile."""
        if not self.hypernet.shares:
            return np.arange(self.n_tiles)
        numbers: dict[str, NDArray[np.int64]] = {}
        taken, groups = 0, []
        for slot in (span.slot for span in self.spans):
            known = numbers.get(slot.group, np.empty(0, dtype=np.int64))
            new = np.arange(taken, taken + slot.grid.n_tiles - len(known))
            numbers[slot.group] = known = np.append(known, new)
            groups.append(known[: slot.grid.n_tiles])
            taken += len(new)
        return np.concatenate(groups)

    @cached_property
    def leaves(self) -> dict[str, Leaf]:
        """Shape and role (`Leaf`) of the parameters of ONE g-net, except empty ones (weights of codes of width 0)."""
        return {k: leaf for k, leaf in self.hypernet.leaves(self.dims).items() if 0 not in leaf.shape}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the stacked leaves: [tiles, ...], or [groups, ...] if the tiles of a group share the parameter."""
        counts = {"tile": self.n_tiles, "group": self.n_groups}
        return {k: (counts[leaf.scope], *leaf.shape) for k, leaf in self.leaves.items()}

    @cached_property
    def codes(self) -> tuple[Array, Array]:
        """Codes of rows and of columns, [tiles, tile length, code width]. If all tiles have equal codes, [1, ...]."""
        row, col = (codes.double() for codes in self.codes_on("cpu"))
        try:
            return row.numpy(), col.numpy()
        except RuntimeError:  # Inside `torch.func`, a tensor cannot be converted to NumPy without a copy
            return np.array(row.tolist()).reshape(row.shape), np.array(col.tolist()).reshape(col.shape)

    def codes_on(self, device: Device) -> tuple[Tensor, Tensor]:
        """Return the codes as tensors on a device, using only operations that can be exported."""
        grids = [(span.slot, span.slot.grid) for span in self.spans]
        rows = [(slot.row_code, grid.rows, grid.tile_rows) for slot, grid in grids]
        cols = [(slot.col_code, grid.cols, grid.tile_cols) for slot, grid in grids]
        return self._of_tiles(rows, device, 1), self._of_tiles(cols, device, 0)

    def _of_tiles(self, sides: list[tuple[Encoding, int, int]], device: Device, other: int) -> Tensor:
        keys = [(code, 0 if code.local else n, tile) for code, n, tile in sides]
        by_key = {key: side[0].tile_codes(*side[1:], device) for key, side in zip(keys, sides, strict=True)}
        if len(by_key) == 1 and len(by_key[keys[0]]) == 1:
            return by_key[keys[0]]
        full = []
        for key, span in zip(keys, self.spans, strict=True):
            codes_utk, grid = by_key[key], span.slot.grid
            codes = codes_utk[:, None] if other else codes_utk[None]
            codes = codes.broadcast_to(grid.n_rows, grid.n_cols, *codes_utk.shape[1:])
            full.append(codes.reshape(grid.n_tiles, *codes_utk.shape[1:]))
        return full[0] if len(full) == 1 else torch.cat(full)


def ensembles_of(tensors: Sequence[TensorPlan]) -> tuple[Ensemble, ...]:
    alike: dict[tuple[Hypernet, TileDims], list[TileSpan]] = {}
    for index, tensor in enumerate(tensors):
        for matrix, slot in enumerate(tensor.slots):
            spans = alike.setdefault((slot.hypernet, slot.dims), [])
            first = spans[-1].first + spans[-1].slot.grid.n_tiles if spans else 0
            spans.append(TileSpan(index, matrix, first, slot))
    ensembles: dict[str, Ensemble] = {}
    for (hypernet, dims), spans in alike.items():
        name = base = f"{hypernet.type}{hypernet.size or ''}_{dims.rows}x{dims.cols}"
        while name in ensembles:
            name = f"{base}_{len(ensembles)}"
        ensembles[name] = Ensemble(name, hypernet, dims, tuple(spans))
    return tuple(ensembles.values())
