"""An ensemble with its constants at hand: from its leaves to what each of its slots is made of.

Suffixes: T tiles, r rows and c columns of a tile, R and C of a matrix, k rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gbfunc.genome import codes_of
from gbfunc.hypernets.ensemble import Run, dense_tiles, is_exporting
from gbfunc.parallel import Gather, Layout, Sizes, no_tiles
from gbfunc.plan import Ensemble
from gbfunc.tiling import Cut, join_all, join_tiles
from gbfunc.trees import GNET
from gbfunc.types import Factors, Kernel, Params

_RUN_BYTES = 2**22
"""Tiles from which on slots are generated apart: fewer cost calls, more cost fresh memory (2 x 17 MB: 15 ms)."""


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

    def tiles(self) -> Tensor | Factors:
        """Scaled tiles [T, r, c] of all ranks, or their factors."""
        gather = self.stack.gather()
        assert gather is not None
        return gather.slot(self.stack.ensemble, self.stack.mine(self.run), self.sizes)


Part = Tensor | Factors | Run | GatheredRun
"""What one slot of a tensor is made of: its matrix, its factors, or what makes either."""


class Stack:
    """An ensemble with its constants at hand: from its leaves to what each of its slots is made of.

    Attributes:
        ensemble: the ensemble.
        layout: whose tiles are whose; None where all are this rank's.
        slots: numbers of those of its slots that are made: all, where they are spread over ranks.
        cuts: the tiles of each of them that are made.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        kernel: Kernel,
        layout: Layout | None,
        gather: Callable[[], Gather | None],
        cuts: Mapping[int, Cut],
    ) -> None:
        self.ensemble, self.layout, self.gather = ensemble, layout, gather
        self._kernel: Kernel = kernel
        grids = [p.slot.grid for p in ensemble.spans]
        if layout is not None:
            cuts = {i: cuts.get(i, Cut(grid)) for i, grid in enumerate(grids)}
        self.slots, self.cuts = [*cuts], [*cuts.values()]
        self.grids = [cut.grid for cut in self.cuts]
        self._counts = [grid.n_tiles for grid in self.grids]
        # Tiles of each slot that every rank has, and that this one has.
        self._sizes = [layout.sizes_of(ensemble, i) for i in range(len(self.grids))] if layout else None
        self._held = [s[layout.mesh.gnets_index] for s in self._sizes] if layout and self._sizes else self._counts
        specs = ensemble.leaves
        self._names = {k: f"{GNET}{ensemble.name}/{k}" for k in specs}
        self._shared = tuple(k for k, leaf in specs.items() if leaf.scope == "group")
        self._span: slice | Tensor = layout.span(ensemble) if layout and specs else slice(0, ensemble.n_tiles)
        self._some = len(cuts) < len(grids) or any(cut.tiles is not None for cut in self.cuts)
        if self._some:
            numbers = [(i, range(grids[i].n_tiles) if cut.tiles is None else cut.tiles) for i, cut in cuts.items()]
            tiles = [ensemble.spans[i].first + n for i, ns in numbers for n in ns]
            self._span = torch.tensor(tiles, dtype=torch.int64, device="cpu")
        self._built: dict[tuple[torch.dtype, torch.device], Run] = {}

    def constants(self, dtype: torch.dtype, device: torch.device) -> Run:
        """The run of this rank's tiles without leaves."""
        key = (dtype, device)
        if is_exporting():
            return self._constants(dtype, device)
        if key not in self._built:
            self._built[key] = self._constants(dtype, device)
        return self._built[key]

    def _constants(self, dtype: torch.dtype, device: torch.device) -> Run:
        e = self.ensemble
        row, col = codes_of(e, dtype, device)
        first, scales = [p.first for p in e.spans], [p.slot.scale for p in e.spans]
        scale = _of_spans(first, scales, e.n_tiles, dtype, device) if e.hypernet.standardised else None
        groups = self._groups(device) if self._shared else None
        return Run.bare(e.hypernet, e.dims, self._kernel, row, col, scale, groups).of(self._span)

    def _groups(self, device: torch.device) -> Tensor:
        """Group of every tile [T]; in an exported graph by spans of consecutive numbers, not as a table."""
        groups = self.ensemble.groups
        if not is_exporting():
            return torch.from_numpy(groups).to(device, torch.int64)
        first = np.flatnonzero(np.diff(groups, prepend=-2) != 1)
        offsets = (groups[first] - first).tolist()
        return _of_spans(first.tolist(), offsets, len(groups), torch.int64, device) + torch.arange(
            len(groups), device=device
        )

    def run(self, leaves: Params, noise: Params | None, dtype: torch.dtype, device: torch.device) -> Run:
        """This rank's tiles, from its leaves, among others flat by name, and the noise of all tiles."""
        bare = self.constants(dtype, device)
        leaves = {k: leaves[name] for k, name in self._names.items()}
        if self._some:
            leaves = {k: v if k in self._shared else v[self._span] for k, v in leaves.items()}
        return bare.filled(leaves, noise and {k: v[self._span] for k, v in noise.items()})

    def matrix(self, slot: int, leaves: Params, noise: Params | None) -> Tensor:
        """The matrix of one slot, from what this rank's tiles of it are made of."""
        like, first = next(iter(leaves.values())), sum(self._held[:slot])
        bare = self.constants(like.dtype, like.device).of(slice(first, first + self._held[slot]))
        return matrix_of(self._of_all(bare.filled(leaves, noise), slot), self.cuts[slot])

    def _of_all(self, run: Run, slot: int) -> Run | GatheredRun:
        """What makes one slot on all ranks, of what makes this rank's tiles of it."""
        return run if self._sizes is None else GatheredRun(run, self, self._sizes[slot])

    def runs(self, run: Run) -> list[Part]:
        """What makes each slot."""
        return [self._of_all(part, slot) for slot, part in enumerate(run.split(self._held))]

    def mine(self, run: Run) -> Tensor | Factors:
        """This rank's tiles or factors, to be gathered; it may hold none."""
        return run.tiles() if run.n_tiles or not self.layout else no_tiles(self.layout, self.ensemble, run.leaves)

    def factors(self, run: Run) -> list[Part]:
        """The factors of each slot."""
        return self.parts(run.tiles())

    def matrices(self, run: Run) -> list[Tensor]:
        """The matrix of each slot; large ones one after the other, which spares memory and the time to get it."""
        dims = self.ensemble.dims
        spans = _spans([n * dims.rows * dims.cols * run.row.itemsize for n in self._counts])
        parts = run.split([sum(self._counts[span]) for span in spans])
        # Not `zip(strict=True)`, at which torch.compile of torch 2.5 fails.
        return [m for i, part in enumerate(parts) for m in part.matrices(self.grids[spans[i]])]

    def parts(self, tiles: Tensor | Factors) -> list[Part]:
        """The matrix or the factors of each slot, from all tiles."""
        if isinstance(tiles, Tensor):
            return list(join_all(tiles, self.grids))
        left, right = (x.split(self._counts) if len(self._counts) > 1 else (x,) for x in tiles)
        return [Factors(*both) for both in zip(left, right, strict=True)]


def _of_spans(first_S: list[int], values_S: list[float], n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One value for each span of consecutive tiles, for every tile: [T]."""
    if len(set(values_S)) == 1:
        # No `full`: ONNX rounds its number to float32.
        return torch.tensor(values_S[:1], dtype=dtype, device=device).expand(n)
    values, first = torch.tensor(values_S, dtype=dtype, device=device), torch.tensor(first_S, device=device)
    if is_exporting():
        return values[(torch.arange(n, device=device)[:, None] >= first).sum(1) - 1]
    return values.repeat_interleave(torch.diff(first, append=first.new_tensor([n])))


def _spans(sizes: list[int]) -> list[slice]:
    """Cut a sequence of slots into spans of at least `_RUN_BYTES`, the last one maybe smaller."""
    ends, total = [0], 0
    for i, size in enumerate(sizes, 1):
        total += size
        if total >= _RUN_BYTES or i == len(sizes):
            ends.append(i)
            total = 0
    return [slice(a, b) for a, b in pairwise(ends)]


def matrix_of(part: Part, cut: Cut) -> Tensor:
    """The matrix [R, C] of a slot, or the block of it that is cut out."""
    if isinstance(part, Run):
        part = part.matrix(cut.grid)
    elif not isinstance(part, Tensor):
        part = join_tiles(dense_tiles(part if isinstance(part, Factors) else part.tiles()), cut.grid)
    return cut.crop(part)


def factors_of(part: Part) -> Factors:
    """The factors of a slot, whose type has some."""
    made = part if isinstance(part, Tensor | Factors) else part.tiles()
    assert isinstance(made, Factors)
    return made
