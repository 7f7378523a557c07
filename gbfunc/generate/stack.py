"""An ensemble with its constants at hand: from its leaves to the matrices that it makes.

Suffixes: T tiles, r rows and c columns of a tile, R and C of a matrix, k rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gbfunc.genome import codes_of
from gbfunc.hypernets.ensemble import Run, dense_tiles, is_exporting
from gbfunc.layers.forms import Needs
from gbfunc.parallel import Gather, Layout, no_tiles
from gbfunc.plan import Ensemble
from gbfunc.tiling import Cut, join_all, join_tiles
from gbfunc.trees import GNET
from gbfunc.types import Factors, Kernel, Params

_RUN_BYTES = 2**22
"""Tiles from which on slots are generated apart: fewer cost calls, more cost fresh memory (2 x 17 MB: 15 ms)."""


class Made(NamedTuple):
    """The matrix of a slot, or the factors of its tiles (`gbfunc.layers.forms.Source`)."""

    value: Tensor | Factors
    cut: Cut

    def matrix(self) -> Tensor:
        """The matrix [R, C], or the block of it that is cut out."""
        value = self.value if isinstance(self.value, Tensor) else join_tiles(dense_tiles(self.value), self.cut.grid)
        return self.cut.crop(value)

    def factors(self) -> Factors:
        """Factors [T, r, k] and [T, c, k] of its tiles."""
        assert isinstance(self.value, Factors)
        return self.value

    def inputs(self) -> Sequence[Tensor]:
        """Nothing: its g-nets were evaluated with others."""
        return ()


class Local(NamedTuple):
    """The g-nets of a slot, which are evaluated when something is asked of them."""

    run: Run
    cut: Cut

    def matrix(self) -> Tensor:
        """The matrix [R, C], or the block of it that is cut out."""
        return self.cut.crop(self.run.matrix(self.cut.grid))

    def factors(self) -> Factors:
        """Factors of its tiles."""
        return Made(self.run.tiles(), self.cut).factors()

    def inputs(self) -> Sequence[Tensor]:
        """Leaves and noise."""
        return *self.run.leaves.values(), *(self.run.noise or {}).values()


class Remote(NamedTuple):
    """The g-nets of a slot of which each rank holds some; all ranks evaluate them together, and gather."""

    run: Run
    cut: Cut
    gathered: Callable[[Run], Tensor | Factors]

    def matrix(self) -> Tensor:
        """The matrix [R, C], or the block of it that is cut out."""
        return self.cut.crop(join_tiles(dense_tiles(self.gathered(self.run)), self.cut.grid))

    def factors(self) -> Factors:
        """Factors of its tiles."""
        return Made(self.gathered(self.run), self.cut).factors()

    def inputs(self) -> Sequence[Tensor]:
        """Leaves and noise of this rank's tiles."""
        return Local(self.run, self.cut).inputs()


Slot = Made | Local | Remote


class Stack:
    """An ensemble with its constants at hand: from its leaves to each of its slots, all tiles on this rank.

    Args:
        ensemble: the ensemble.
        kernel: implementation of the g-nets (`gbfunc.types.Kernel`).
        cuts: the tiles to make, by number of slot.
        needs: what is asked of the slots.

    Attributes:
        ensemble: the ensemble.
        slots: numbers of those of its slots that are made.
        cuts: the tiles of each of them that are made.
        needs: what is asked of the slots.
    """

    def __init__(self, ensemble: Ensemble, kernel: Kernel, cuts: Mapping[int, Cut], needs: Needs = "matrix") -> None:
        self.ensemble, self.needs = ensemble, needs
        self._kernel: Kernel = kernel
        grids = [p.slot.grid for p in ensemble.spans]
        self.slots, self.cuts = [*cuts], [*cuts.values()]
        self._grids = [cut.grid for cut in self.cuts]
        self._counts = [grid.n_tiles for grid in self._grids]
        specs = ensemble.leaves
        self._names = {k: f"{GNET}{ensemble.name}/{k}" for k in specs}
        self._shared = tuple(k for k, leaf in specs.items() if leaf.scope == "group")
        self._tiles: slice | Tensor = self._mine()
        self._some = len(cuts) < len(grids) or any(cut.tiles is not None for cut in self.cuts)
        if self._some:
            numbers = [(i, range(grids[i].n_tiles) if cut.tiles is None else cut.tiles) for i, cut in cuts.items()]
            tiles = [ensemble.spans[i].first + n for i, ns in numbers for n in ns]
            self._tiles = torch.tensor(tiles, dtype=torch.int64, device="cpu")
        self._built: dict[tuple[torch.dtype, torch.device], Run] = {}
        self._split = {"matrix": self._matrices, "factors": self._factors, "leaves": self._apart}[needs]

    def _mine(self) -> slice:
        """Numbers of the tiles that this rank holds."""
        return slice(0, self.ensemble.n_tiles)

    @property
    def _held(self) -> Sequence[int]:
        """Tiles of each slot that this rank holds."""
        return self._counts

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
        return Run.bare(e.hypernet, e.dims, self._kernel, row, col, scale, groups).of(self._tiles)

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
            leaves = {k: v if k in self._shared else v[self._tiles] for k, v in leaves.items()}
        return bare.filled(leaves, noise and {k: v[self._tiles] for k, v in noise.items()})

    def split(self, run: Run) -> Sequence[Slot]:
        """Each slot, as its form needs it."""
        return self._split(run)

    def slot(self, number: int, leaves: Params, noise: Params | None) -> Slot:
        """One slot, from the leaves and noise of this rank's tiles of it (`Slot.inputs`)."""
        like, first = next(iter(leaves.values())), sum(self._held[:number])
        bare = self.constants(like.dtype, like.device).of(slice(first, first + self._held[number]))
        return self._source(number, bare.filled(leaves, noise))

    def _source(self, number: int, run: Run) -> Slot:
        """A slot by what makes this rank's tiles of it."""
        return Local(run, self.cuts[number])

    def _apart(self, run: Run) -> list[Slot]:
        """Each slot evaluated by itself."""
        return [self._source(number, part) for number, part in enumerate(run.split(self._held))]

    def _factors(self, run: Run) -> list[Made]:
        """All slots evaluated at once, as factors where the type has some."""
        return self._of_tiles(run.tiles())

    def _matrices(self, run: Run) -> list[Made]:
        """The matrix of each slot; large ones one after the other, which spares memory and the time to get it."""
        dims = self.ensemble.dims
        spans = _spans([n * dims.rows * dims.cols * run.row.itemsize for n in self._counts])
        parts = run.split([sum(self._counts[span]) for span in spans])
        # Not `zip(strict=True)`, at which torch.compile of torch 2.5 fails.
        matrices = [m for i, part in enumerate(parts) for m in part.matrices(self._grids[spans[i]])]
        return [Made(m, self.cuts[i]) for i, m in enumerate(matrices)]

    def _of_tiles(self, tiles: Tensor | Factors) -> list[Made]:
        """Each slot, from all tiles."""
        if isinstance(tiles, Tensor):
            return [Made(m, cut) for m, cut in zip(join_all(tiles, self._grids), self.cuts, strict=True)]
        if len(self._counts) == 1:
            return [Made(tiles, self.cuts[0])]
        left, right = tiles.left.split(self._counts), tiles.right.split(self._counts)
        return [Made(Factors(a, b), cut) for a, b, cut in zip(left, right, self.cuts, strict=True)]


class RankStack(Stack):
    """An ensemble of which each rank holds some tiles: outputs of all ranks are gathered.

    Args:
        layout: whose tiles are whose.
        gather: from this rank's outputs to those of all.
        ensemble: as for `Stack`; all of its slots are made.
        kernel: as for `Stack`.
        cuts: the blocks to cut out, by number of slot.
        needs: as for `Stack`.
    """

    def __init__(
        self,
        layout: Layout,
        gather: Callable[[], Gather],
        ensemble: Ensemble,
        kernel: Kernel,
        cuts: Mapping[int, Cut],
        needs: Needs = "matrix",
    ) -> None:
        self._layout, self._gather = layout, gather
        every = {i: cuts.get(i, Cut(p.slot.grid)) for i, p in enumerate(ensemble.spans)}
        # Tiles of each slot that every rank has.
        self._sizes = [layout.sizes_of(ensemble, i) for i in every]
        super().__init__(ensemble, kernel, every, needs)

    def _mine(self) -> slice:
        return self._layout.span(self.ensemble)

    @property
    def _held(self) -> Sequence[int]:
        return [sizes[self._layout.mesh.gnets_index] for sizes in self._sizes]

    def _source(self, number: int, run: Run) -> Slot:
        def gathered(run: Run) -> Tensor | Factors:
            return self._gather().slot(self.ensemble, self.tiles(run), self._sizes[number])

        return Remote(run, self.cuts[number], gathered)

    def tiles(self, run: Run) -> Tensor | Factors:
        """This rank's tiles or factors, to be gathered; it may hold none."""
        return run.tiles() if run.n_tiles else no_tiles(self._layout, self.ensemble, run.leaves)

    def of_all(self, tiles: Tensor | Factors) -> Sequence[Slot]:
        """Each slot, from the gathered tiles or factors of all ranks."""
        return self._of_tiles(tiles)


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
