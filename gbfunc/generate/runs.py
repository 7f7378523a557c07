"""Runs: what g-nets that are generated together are made of, and what can be made of it.

Suffixes: T tiles, r rows and c columns of a tile, R and C of a matrix, k rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gbfunc.genome import codes_of
from gbfunc.hypernets import Hypernet
from gbfunc.hypernets.ensemble import apply_matrix, apply_tiles, dense_tiles
from gbfunc.parallel import Gather, Layout, Sizes, no_tiles
from gbfunc.plan import Ensemble
from gbfunc.tiling import TileGrid, join_all, join_tiles
from gbfunc.types import Factors, Kernel, Params, TileDims

_RUN_BYTES = 2**22
"""Tiles from which on slots are generated apart: fewer would cost calls, more cost fresh memory, which a CPU pays for
page by page (2 x 17 MB at once took 15 ms longer than one after the other)."""


class Run(NamedTuple):
    """G-nets that are generated together.

    Attributes:
        hypernet: their type.
        dims: their tile.
        kernel: implementation of ReLU g-nets.
        row: row codes [U, r, p], U = 1 where all tiles share them.
        col: column codes [U, c, q].
        scale: scale of every tile's slot [T]; None where it is in the leaves, or there is none.
        leaves: leaf of every tile: `{name: [T, ...]}`; {} for a type without any.
        noise: `{name: [T, ...]}` for stochastic types, None for the mean.
    """

    hypernet: Hypernet
    dims: TileDims
    kernel: Kernel
    row: Tensor
    col: Tensor
    scale: Tensor | None
    leaves: Params
    noise: Params | None

    def tiles(self) -> Tensor | Factors:
        """Scaled tiles [T, r, c], or their factors."""
        made = apply_tiles(
            self.hypernet, self.dims, self.leaves, self.row, self.col, noise=self.noise, kernel=self.kernel
        )
        return made if self.scale is None else dense_tiles(made) * self.scale[:, None, None]

    def matrix(self, grid: TileGrid) -> Tensor:
        """The one matrix [R, C] that all tiles make."""
        if self.scale is not None or not self.leaves:
            tiles = dense_tiles(self.tiles())
            return join_tiles(tiles if self.leaves else tiles.expand(grid.n_tiles, -1, -1), grid)
        parts = (self.hypernet, self.dims, self.leaves, self.row, self.col, grid)
        return apply_matrix(*parts, noise=self.noise, kernel=self.kernel)

    def matrices(self, grids: Sequence[TileGrid]) -> tuple[Tensor, ...]:
        """The matrices [R, C] that the tiles make, one grid after the other."""
        if len(grids) == 1 or not self.leaves:
            return tuple(self.matrix(grid) for grid in grids)
        return join_all(dense_tiles(self.tiles()), grids)

    def split(self, counts: Sequence[int]) -> list[Run]:
        """So many tiles each, in order."""
        if len(counts) == 1:
            return [self]
        ends = list(accumulate(counts, initial=0))
        # One split node has one backward; slices would each fill a gradient of all tiles.
        leaves = {k: v.split(list(counts)) for k, v in self.leaves.items()}
        return [
            self.of(slice(*ends[i : i + 2]))._replace(leaves={k: v[i] for k, v in leaves.items()})
            for i in range(len(counts))
        ]

    @property
    def n_tiles(self) -> int:
        """Tiles that it makes; those of a type without leaves are all alike, and count as none."""
        return len(next(iter(self.leaves.values()), ()))

    def filled(self, leaves: Params, noise: Params | None) -> Run:
        """The same with other leaves and noise."""
        return self._replace(leaves=leaves, noise=noise)

    def of(self, span: slice) -> Run:
        """The codes, scales and noise of some tiles, with the leaves as they are."""
        row = self.row if len(self.row) == 1 else self.row[span]
        col = self.col if len(self.col) == 1 else self.col[span]
        noise = self.noise and {k: v[span] for k, v in self.noise.items()}
        return self._replace(row=row, col=col, scale=None if self.scale is None else self.scale[span], noise=noise)

    def select(self, index_T: Tensor) -> Run:
        """Some tiles, by number."""
        row = self.row if len(self.row) == 1 else self.row[index_T]
        col = self.col if len(self.col) == 1 else self.col[index_T]
        leaves = {k: v[index_T] for k, v in self.leaves.items()}
        noise = self.noise and {k: v[index_T] for k, v in self.noise.items()}
        scale = None if self.scale is None else self.scale[index_T]
        return self._replace(row=row, col=col, scale=scale, leaves=leaves, noise=noise)

    def piece(self, grid: TileGrid, rows: slice, cols: slice) -> Tensor:
        """Rows a..b and columns c..d of the matrix, from the tiles alone that they meet: [b - a, d - c]."""
        (a, b, _), (c, d, _) = rows.indices(grid.rows), cols.indices(grid.cols)
        r, q = grid.tile_rows, grid.tile_cols
        i, j = slice(a // r, -(-b // r)), slice(c // q, -(-d // q))
        index_ij = torch.arange(grid.n_tiles, device=self.row.device).reshape(grid.n_rows, grid.n_cols)[i, j]
        cut = TileGrid(index_ij.shape[0] * r, index_ij.shape[1] * q, r, q)
        whole = self.select(index_ij.reshape(-1)).matrix(cut)
        return whole[a - i.start * r : b - i.start * r, c - j.start * q : d - j.start * q]


class GatheredRun(NamedTuple):
    """A run of which each rank holds some tiles; all ranks evaluate it together, and gather.

    Attributes:
        run: of this rank's tiles.
        stack: the ensemble that it is of.
        sizes: tiles of every rank.
    """

    run: Run
    stack: Stack
    sizes: Sizes

    @property
    def leaves(self) -> Params:
        """This rank's."""
        return self.run.leaves

    @property
    def noise(self) -> Params | None:
        """Of this rank's tiles."""
        return self.run.noise

    def filled(self, leaves: Params, noise: Params | None) -> GatheredRun:
        """The same with other leaves and noise."""
        return self._replace(run=self.run.filled(leaves, noise))

    def tiles(self) -> Tensor | Factors:
        """Scaled tiles [T, r, c] of all ranks, or their factors."""
        gather, e = self.stack.gather(), self.stack.ensemble
        assert gather is not None
        some = self.sizes[gather.layout.mesh.gnets_index]
        mine = self.run.tiles() if some else no_tiles(gather.layout, e, self.leaves)
        return gather.slot(e, mine, self.sizes)

    def matrix(self, grid: TileGrid) -> Tensor:
        """The one matrix [R, C] that all tiles make."""
        return join_tiles(dense_tiles(self.tiles()), grid)


Part = Tensor | Factors | Run | GatheredRun
"""What one slot of a tensor is made of: its matrix, its factors, or what makes either."""


class Stack:
    """An ensemble with its constants at hand: from its leaves to what each of its slots is made of.

    Attributes:
        ensemble: the ensemble.
        layout: whose tiles are whose; None where all are this rank's.
        grids: tiles of its slots.
    """

    def __init__(
        self, ensemble: Ensemble, kernel: Kernel, layout: Layout | None, gather: Callable[[], Gather | None]
    ) -> None:
        self.ensemble, self.layout, self.gather = ensemble, layout, gather
        self._kernel: Kernel = kernel
        self.grids = [p.slot.grid for p in ensemble.spans]
        self._counts = [grid.n_tiles for grid in self.grids]
        hypernet, specs = ensemble.hypernet, ensemble.leaves
        self._shared = tuple(k for k, leaf in specs.items() if leaf.scope == "group")
        linear = hypernet.standardised and not hypernet.stochastic
        self._linear = tuple(k for k, leaf in specs.items() if linear and leaf.role == "linear")
        self._span = layout.own(ensemble) if layout and specs else slice(0, ensemble.n_tiles)
        self._built: dict[tuple[torch.dtype, torch.device], tuple[Run, Tensor, Tensor | None]] = {}

    def constants(self, dtype: torch.dtype, device: torch.device) -> tuple[Run, Tensor, Tensor | None]:
        """The run of this rank's tiles without leaves, the scale [T] of each, and its group [T] or None."""
        key = (dtype, device)
        if key not in self._built:
            e = self.ensemble
            row, col = codes_of(e, dtype, device)
            counts = torch.tensor(self._counts)
            scales = torch.tensor([p.slot.scale for p in e.spans], dtype=dtype, device="cpu")
            scale = scales.repeat_interleave(counts).to(device)
            groups = torch.from_numpy(e.groups).to(device)[self._span] if self._shared else None
            left = scale if e.hypernet.standardised and not self._linear else None
            whole = Run(e.hypernet, e.dims, self._kernel, row, col, left, {}, None)
            self._built[key] = (whole.of(self._span), scale[self._span], groups)
        return self._built[key]

    def run(self, leaves: Params, noise: Params | None, dtype: torch.dtype, device: torch.device) -> Run:
        """This rank's tiles, from its leaves and the noise of all tiles."""
        bare, scale, groups = self.constants(dtype, device)
        leaves = {k: v[groups] if k in self._shared else v for k, v in leaves.items()}
        # The tile is linear in these leaves, which are small: scaling them spares a copy of every weight.
        leaves |= {k: leaves[k] * scale.reshape(-1, *(1,) * (leaves[k].ndim - 1)) for k in self._linear}
        return bare.filled(leaves, noise and {k: v[self._span] for k, v in noise.items()})

    def bare(self, slot: int, dtype: torch.dtype, device: torch.device) -> Run | GatheredRun:
        """What makes one slot, without leaves."""
        first = self._first(slot)
        run = self.constants(dtype, device)[0].of(slice(first, first + self._tiles(slot)))
        return run if self.layout is None else GatheredRun(run, self, self.layout.sizes_of(self.ensemble, slot))

    def _tiles(self, slot: int) -> int:
        """This rank's tiles of a slot."""
        layout = self.layout
        return self._counts[slot] if layout is None else layout.sizes_of(self.ensemble, slot)[layout.mesh.gnets_index]

    def _first(self, slot: int) -> int:
        return sum(self._tiles(i) for i in range(slot))

    def runs(self, run: Run) -> list[Part]:
        """What makes each slot."""
        counts = [self._tiles(i) for i in range(len(self.grids))]
        parts: Any = run.split(counts)
        if self.layout is None:
            return parts
        sizes = [self.layout.sizes_of(self.ensemble, i) for i in range(len(parts))]
        return [GatheredRun(part, self, s) for part, s in zip(parts, sizes, strict=True)]

    def factors(self, run: Run) -> list[Part]:
        """The factors of each slot."""
        return self.parts(run.tiles())

    def matrices(self, run: Run) -> list[Part]:
        """The matrix of each slot; large ones one after the other, which spares memory and the time to get it."""
        dims = self.ensemble.dims
        spans = _spans([n * dims.rows * dims.cols * run.row.itemsize for n in self._counts])
        parts = run.split([sum(self._counts[span]) for span in spans])
        return [m for part, span in zip(parts, spans, strict=True) for m in part.matrices(self.grids[span])]

    def parts(self, tiles: Tensor | Factors) -> list[Part]:
        """The matrix or the factors of each slot, from all tiles."""
        if isinstance(tiles, Tensor):
            return list(join_all(tiles, self.grids))
        left, right = (x.split(self._counts) if len(self._counts) > 1 else (x,) for x in tiles)
        return [Factors(*both) for both in zip(left, right, strict=True)]


def _spans(sizes: list[int]) -> list[slice]:
    """Cut a sequence of slots into spans of at least `_RUN_BYTES`, the last one maybe smaller."""
    ends, total = [0], 0
    for i, size in enumerate(sizes, 1):
        total += size
        if total >= _RUN_BYTES or i == len(sizes):
            ends.append(i)
            total = 0
    return [slice(a, b) for a, b in pairwise(ends)]


def matrix_of(part: Part, grid: TileGrid) -> Tensor:
    """The matrix [R, C] of a slot."""
    if isinstance(part, Tensor):
        return part
    return join_tiles(dense_tiles(part), grid) if isinstance(part, Factors) else part.matrix(grid)


def factors_of(part: Part) -> Factors:
    """The factors of a slot, whose type has some."""
    made = part if isinstance(part, Tensor | Factors) else part.tiles()
    assert isinstance(made, Factors)
    return made
