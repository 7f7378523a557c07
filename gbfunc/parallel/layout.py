"""Who owns which tiles: contiguous ranges of every ensemble, equal to within one tile, fixed by plan and mesh."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import torch

from gbfunc.parallel.mesh import Mesh
from gbfunc.parallel.wire import Sizes
from gbfunc.plan import DTYPES, Ensemble, Plan
from gbfunc.trees import DIRECT, GNET

Placement = Literal["replicated", "sharded", "factors"]


class Rows(NamedTuple):
    """Part of a leaf: rows `first .. first + count - 1` of `total`."""

    first: int
    count: int
    total: int


def shares_of(n_tiles: int, ranks: int, turn: int) -> Sizes:
    """Tiles of every rank, equal to within one; the ranks with one more begin at `turn`.

    >>> shares_of(7, 3, 0), shares_of(7, 3, 1), shares_of(1, 4, 2)
    ((3, 2, 2), (2, 3, 2), (0, 0, 1, 0))
    """
    base, more = divmod(n_tiles, ranks)
    return tuple(base + ((rank - turn) % ranks < more) for rank in range(ranks))


def sent_dtype(plan: Plan, e: Ensemble, as_factors: bool) -> torch.dtype | None:
    """The dtype in which tiles are gathered: that of the tensors they make, if it is narrower; None is the leaves'.

    Rounded before they are gathered tiles make the same tensors as after it, unless something is added in between.
    """
    narrow = {DTYPES[plan.tensors[p.tensor].dtype] for p in e.spans}
    added = any(p.slot.offset for p in e.spans)
    if as_factors or added or len(narrow) > 1 or next(iter(narrow)).itemsize >= plan.dtype.itemsize:
        return None
    return narrow.pop()


class Layout:
    """The placement of a plan's genome on a mesh.

    Attributes:
        plan: the plan.
        mesh: the ranks.
        placement: `"replicated"`, `"sharded"` (tiles are gathered) or `"factors"` (factors are, where there are any).
        sharded: whether leaves are split at all, which takes more than one rank along the g-net axis.
        sizes: tiles of every rank along the g-net axis, by ensemble; only of ensembles with leaves.
    """

    def __init__(self, plan: Plan, mesh: Mesh, placement: Placement) -> None:
        self.plan, self.mesh = plan, mesh
        self.placement: Placement = placement
        self.sharded = placement != "replicated" and mesh.gnets > 1
        self.sizes: dict[str, Sizes] = {}
        turn = 0
        for e in plan.ensembles:
            if e.leaves:
                self.sizes[e.name] = shares_of(e.n_tiles, mesh.gnets, turn)
                # Who has one tile more in this ensemble has none in the next ones.
                turn = (turn + e.n_tiles) % mesh.gnets

    def own(self, e: Ensemble) -> slice:
        """This rank's tiles of an ensemble."""
        if not self.sharded:
            return slice(0, e.n_tiles)
        sizes, index = self.sizes[e.name], self.mesh.gnets_index
        first = sum(sizes[:index])
        return slice(first, first + sizes[index])

    def sizes_of(self, e: Ensemble, slot: int) -> Sizes:
        """Tiles of one slot of an ensemble that every rank along the g-net axis owns."""
        p = e.spans[slot]
        ends = [0, *accumulate(self.sizes[e.name])]
        return tuple(max(0, min(b, p.first + p.slot.grid.n_tiles) - max(a, p.first)) for a, b in pairwise(ends))

    def as_factors(self, e: Ensemble) -> bool:
        """Whether an ensemble is gathered as factors."""
        return self.placement == "factors" and e.hypernet.factorised and bool(e.leaves)

    def widths(self, e: Ensemble) -> tuple[int, ...]:
        """Numbers that are gathered for each of its tiles, tensor by tensor."""
        rows, cols, *_ = e.dims
        if self.as_factors(e):
            return rows * e.hypernet.factor_width, cols * e.hypernet.factor_width
        return (rows * cols,)

    @cached_property
    def ownership(self) -> Mapping[str, Rows]:
        """The rows of every trained leaf that this rank holds, by flat name (`gnets/ENSEMBLE/LEAF`, `direct/NAME`)."""
        found: dict[str, Rows] = {}
        for e in self.plan.ensembles:
            span = self.own(e) if e.leaves else slice(0, 0)
            for k, leaf in e.leaves.items():
                total = e.shapes[k][0]
                whole = leaf.scope == "group" or not self.sharded
                rows = Rows(0, total, total) if whole else Rows(span.start, span.stop - span.start, total)
                found[f"{GNET}{e.name}/{k}"] = rows
        for t in self.plan.direct:
            rows = t.shape[0] if t.shape else 1
            found[f"{DIRECT}{t.name}"] = Rows(0, rows, rows)
        return found

    @cached_property
    def split(self) -> frozenset[str]:
        """Flat names of the leaves that are split over the g-net axis."""
        if not self.sharded:
            return frozenset()
        leaves = ((e.name, k, leaf) for e in self.plan.ensembles for k, leaf in e.leaves.items())
        return frozenset(f"{GNET}{e}/{k}" for e, k, leaf in leaves if leaf.scope == "tile")

    @cached_property
    def shapes(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """Shape of every leaf as this rank holds it, by (ensemble, leaf) and ("direct", name)."""
        shapes = dict(self.plan.leaf_shapes)
        for e in self.plan.ensembles:
            for k in e.leaves:
                name = f"{GNET}{e.name}/{k}"
                if name in self.split:
                    shapes[e.name, k] = (self.ownership[name].count, *shapes[e.name, k][1:])
        return shapes

    def wire_bytes(self, itemsize: int) -> tuple[int, int]:
        """Bytes that this rank sends to gather all outputs once, and to bring their gradients home.

        `itemsize` is that of the leaves.
        """
        out = back = 0
        if self.sharded:
            for e in self.plan.ensembles:
                if e.leaves:
                    dtype = sent_dtype(self.plan, e, self.as_factors(e))
                    sizes, width = self.sizes[e.name], sum(self.widths(e)) * (dtype.itemsize if dtype else itemsize)
                    own = sizes[self.mesh.gnets_index]
                    out += own * width * (self.mesh.gnets - 1)
                    back += (sum(sizes) - own) * width
        return out, back
