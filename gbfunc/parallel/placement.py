"""Placements of the genome on a mesh: replicated, or split so that each rank has a range of every ensemble's tiles.

`placement="auto"` chooses the fastest placement, estimated from bytes and operations. With N ranks in a ring, S along
the g-net axis and D along the data axis, a rank sends these bytes and performs these operations in each step:

* replicated: 2 (N-1)/N G bytes, for a genome of G bytes; all operations of generation;
* sharded: 2 (S-1)/S W bytes for weights of W bytes, 2 (D-1)/D G/S for the split leaves, and 2 (N-1)/N of the bytes of
  other leaves; 1/S of the operations;
* factors: as sharded, with W the bytes of the factors; 1/S of the operations, but all products of factors.

If weights stay factors (`lazy`), only the sharded placement multiplies factors, for the tiles that are sent.
"""

import math
from collections.abc import Collection, Mapping
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, cast

import torch

from gbfunc.costs import OPERATIONS_PER_BYTE, all_reduce_bytes, generation_flops, product_flops
from gbfunc.parallel.collectives import Sizes
from gbfunc.parallel.mesh import Mesh
from gbfunc.plan import DTYPES, Ensemble, Plan
from gbfunc.trees import GNET

Placement = Literal["replicated", "sharded", "factors"]
PLACEMENTS: tuple[Placement, ...] = ("replicated", "sharded", "factors")


class Layout:
    """The placement of a plan's genome on a mesh: `"replicated"`, `"sharded"` (tiles are gathered) or `"factors"`."""

    def __init__(self, plan: Plan, mesh: Mesh, placement: Placement) -> None:
        self.plan, self.mesh = plan, mesh
        self.placement: Placement = placement
        self.sharded = placement != "replicated" and mesh.gnets > 1
        self.sizes = tile_shares(plan, mesh.gnets)  # Number of tiles on every rank, by ensemble with leaves

    def span(self, e: Ensemble) -> slice:
        if not self.sharded:
            return slice(0, e.n_tiles)
        sizes, index = self.sizes[e.name], self.mesh.gnets_index
        first = sum(sizes[:index])
        return slice(first, first + sizes[index])

    def sizes_of(self, e: Ensemble, slot: int) -> Sizes:
        p = e.spans[slot]
        ends = [0, *accumulate(self.sizes[e.name])]
        return tuple(max(0, min(b, p.first + p.slot.grid.n_tiles) - max(a, p.first)) for a, b in pairwise(ends))

    def as_factors(self, e: Ensemble) -> bool:
        return self.placement == "factors" and e.hypernet.factorised and bool(e.leaves)

    @cached_property
    def split(self) -> Mapping[str, slice]:
        """This rank's range of tiles in the leaves that are split over the g-net axis, by flat name."""
        leaves = ((e, k, leaf) for e in self.plan.ensembles for k, leaf in e.leaves.items() if self.sharded)
        return {f"{GNET}{e.name}/{k}": self.span(e) for e, k, leaf in leaves if leaf.scope == "tile"}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every trained leaf on this rank, by flat name."""
        rows = {k: span.stop - span.start for k, span in self.split.items()}
        return {k: (rows[k], *shape[1:]) if k in rows else shape for k, shape in self.plan.leaf_shapes.items()}


def tile_shares(plan: Plan, gnets: int) -> dict[str, Sizes]:
    """Return the number of tiles on every rank along the g-net axis, by ensemble with leaves."""
    sizes, turn = {}, 0
    for e in plan.ensembles:
        if e.leaves:
            sizes[e.name] = shares_of(e.n_tiles, gnets, turn)
            # The next ensemble's remainder starts after the ranks that have one more tile of this ensemble.
            turn = (turn + e.n_tiles) % gnets
    return sizes


def gather_bytes(
    plan: Plan, gnets: int, placement: Placement, itemsize: int, names: Collection[str] | None = None
) -> list[tuple[int, int]]:
    """Return the bytes that each rank sends to gather the outputs of ensembles (None: all), and to reduce gradients."""
    shares, sent = tile_shares(plan, gnets), [(0, 0)] * gnets
    for e in plan.ensembles:
        if e.leaves and (names is None or e.name in names):
            tile = _tile_bytes(plan, e, placement == "factors" and e.hypernet.factorised, itemsize)
            pairs = zip(sent, shares[e.name], strict=True)
            sent = [(a + mine * tile * (gnets - 1), b + (e.n_tiles - mine) * tile) for (a, b), mine in pairs]
    return sent


def shares_of(n_tiles: int, ranks: int, turn: int) -> Sizes:
    """Divide tiles over ranks, equally to within one tile. The ranks with one more tile start at rank `turn`.

    >>> shares_of(7, 3, 0), shares_of(7, 3, 1), shares_of(1, 4, 2)
    ((3, 2, 2), (2, 3, 2), (0, 0, 1, 0))
    """
    base, more = divmod(n_tiles, ranks)
    return tuple(base + ((rank - turn) % ranks < more) for rank in range(ranks))


def sent_dtype(plan: Plan, e: Ensemble, as_factors: bool) -> torch.dtype | None:
    """Return the dtype in which tiles are gathered: the dtype of their tensors if narrower, otherwise None.

    Rounding before the gather instead of after gives the same tensors, unless an offset is added in between.
    """
    narrow = {DTYPES[plan.tensors[p.tensor].dtype] for p in e.spans}
    added = any(p.slot.offset for p in e.spans)
    if as_factors or added or len(narrow) > 1 or next(iter(narrow)).itemsize >= plan.dtype.itemsize:
        return None
    return narrow.pop()


def _tile_bytes(plan: Plan, e: Ensemble, as_factors: bool, itemsize: int) -> int:
    rows, cols, *_ = e.dims
    dtype = sent_dtype(plan, e, as_factors)
    numbers = (rows + cols) * e.hypernet.factor_width if as_factors else rows * cols
    return numbers * (dtype.itemsize if dtype else itemsize)


class Cost(NamedTuple):
    """The bytes that a rank sends in a step, and the rank's operations for generation, forward and backward."""

    bytes: float
    operations: float


def placement_cost(plan: Plan, data: int, gnets: int, placement: Placement, lazy: bool = False) -> Cost:
    """Return the cost of a placement on `data` x `gnets` ranks; with `lazy`, weights may stay factors."""
    item, total = plan.dtype.itemsize, plan.genome_params
    ensembles = [e for e in plan.ensembles if e.leaves]
    flops = sum(map(flops_of, ensembles))
    if lazy and placement != "sharded":
        flops -= sum(map(products, ensembles))
    ranks, shards = data * gnets, 1 if placement == "replicated" else gnets  # Number of shards of the tiles
    factored = {e.name for e in ensembles if placement == "factors" and e.hypernet.factorised}
    sent = sum(e.n_tiles * _tile_bytes(plan, e, e.name in factored, item) for e in ensembles)
    multiplied = sum(products(e) for e in ensembles if e.name in factored and not lazy)
    tiles = sum(math.prod(s) for e in ensembles for k, s in e.shapes.items() if e.leaves[k].scope == "tile")
    genome = all_reduce_bytes(tiles / shards * item, ranks // shards) + all_reduce_bytes((total - tiles) * item, ranks)
    return Cost(all_reduce_bytes(sent, shards) + genome, (flops - multiplied) / shards + multiplied)


def make_layout(plan: Plan, mesh: Mesh, placement: Placement | str, *, lazy: bool = False) -> Layout:
    """Return the layout of a placement; `"auto"` chooses the cheapest. With `lazy`, weights may stay factors."""
    if placement == "auto":
        balance = OPERATIONS_PER_BYTE.get(mesh.device.type, OPERATIONS_PER_BYTE["cpu"])
        costs = {p: placement_cost(plan, mesh.data, mesh.gnets, p, lazy) for p in PLACEMENTS}
        placement = min(PLACEMENTS, key=lambda p: costs[p].bytes + costs[p].operations / balance)
    if placement not in PLACEMENTS:
        raise ValueError(f"placement must be one of {('auto', *PLACEMENTS)}, got {placement!r}")
    return Layout(plan, mesh, cast(Placement, placement))


def products(e: Ensemble) -> float:
    return e.n_tiles * product_flops(e.dims.rows, e.dims.cols, e.hypernet.factor_width)


def flops_of(e: Ensemble) -> float:
    params = sum(math.prod(leaf.shape) for leaf in e.leaves.values())
    return e.n_tiles * generation_flops(e.dims.rows, e.dims.cols, params, e.hypernet.factor_width)
