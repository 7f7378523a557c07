"""Placements of the genome on a mesh: replicated, or split so that each rank has a range of every ensemble's tiles.

`placement="auto"` chooses the placement with the shortest estimated time to send and to compute. There are N ranks: S
along the g-net axis and D along the data axis. The genome has G bytes, the weights have W bytes, and their factors have
F bytes. In each step, a rank sends these bytes and performs these operations to generate weights:

* replicated: 2 (N-1)/N G bytes; all operations;
* sharded: 2 (S-1)/S W bytes, plus 2 (D-1)/D times the bytes of split leaves on the rank, plus 2 (N-1)/N times the bytes
  of leaves that are not split; 1/S of the operations;
* factors: as sharded, but with F instead of W; 1/S of the operations to generate factors, and all products of factors.

If layers apply factors instead of weights (`lazy`), products of factors count only in the placement "sharded".
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
    """The placement of a genome. In a step, ranks gather tiles ("sharded"), factors ("factors"), or nothing."""

    def __init__(self, plan: Plan, mesh: Mesh, placement: Placement) -> None:
        self.plan, self.mesh = plan, mesh
        self.placement: Placement = placement
        self.sharded = placement != "replicated" and mesh.gnets > 1
        self.sizes = tile_shares(plan, mesh.gnets)  # Number of tiles on every rank, by name of the ensemble

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
        """This rank's range of tiles in each leaf that is split over the g-net axis, by the leaf's name."""
        leaves = ((e, k, leaf) for e in self.plan.ensembles for k, leaf in e.leaves.items() if self.sharded)
        return {f"{GNET}{e.name}/{k}": self.span(e) for e, k, leaf in leaves if leaf.scope == "tile"}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape that every trained leaf has on this rank, by name."""
        rows = {k: span.stop - span.start for k, span in self.split.items()}
        return {k: (rows[k], *shape[1:]) if k in rows else shape for k, shape in self.plan.leaf_shapes.items()}


def tile_shares(plan: Plan, gnets: int) -> dict[str, Sizes]:
    """Return {ensemble with leaves: its number of tiles on every rank along the axis `gnets`}."""
    sizes, turn = {}, 0
    for e in plan.ensembles:
        if e.leaves:
            sizes[e.name] = shares_of(e.n_tiles, gnets, turn)
            # Give surplus tiles of the next ensemble to the ranks after those that got surplus tiles of this ensemble.
            turn = (turn + e.n_tiles) % gnets
    return sizes


def gather_bytes(
    plan: Plan, gnets: int, placement: Placement, itemsize: int, names: Collection[str] | None = None
) -> list[tuple[int, int]]:
    """Return what each rank sends for the ensembles `names`: (bytes to gather tiles, bytes to sum tiles' gradients)."""
    shares, sent = tile_shares(plan, gnets), [(0, 0)] * gnets
    for e in plan.ensembles:
        if e.leaves and (names is None or e.name in names):
            tile = _tile_bytes(plan, e, placement == "factors" and e.hypernet.factorised, itemsize)
            pairs = zip(sent, shares[e.name], strict=True)
            sent = [(a + mine * tile * (gnets - 1), b + (e.n_tiles - mine) * tile) for (a, b), mine in pairs]
    return sent


def shares_of(n_tiles: int, ranks: int, turn: int) -> Sizes:
    """Divide tiles equally over ranks. Surplus tiles go to rank `turn` and the ranks after `turn` (cyclically).

    >>> shares_of(7, 3, 0), shares_of(7, 3, 1), shares_of(1, 4, 2)
    ((3, 2, 2), (2, 3, 2), (0, 0, 1, 0))
    """
    base, more = divmod(n_tiles, ranks)
    return tuple(base + ((rank - turn) % ranks < more) for rank in range(ranks))


def sent_dtype(plan: Plan, e: Ensemble, as_factors: bool) -> torch.dtype | None:
    """Return the weights' dtype if tiles are sent in this dtype, to save bytes. None: in the genome's dtype."""
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
    """The bytes that a rank sends and the operations by which it generates weights, per step (forward and backward)."""

    bytes: float
    operations: float


def placement_cost(plan: Plan, data: int, gnets: int, placement: Placement, lazy: bool = False) -> Cost:
    """Return the cost of a placement on `data` x `gnets` ranks. With `lazy`, layers may apply factors, not weights."""
    item, total = plan.dtype.itemsize, plan.genome_params
    ensembles = [e for e in plan.ensembles if e.leaves]
    flops = sum(map(flops_of, ensembles))
    if lazy and placement != "sharded":
        flops -= sum(map(products, ensembles))
    ranks, shards = data * gnets, 1 if placement == "replicated" else gnets  # Number of shards of the g-nets
    factored = {e.name for e in ensembles if placement == "factors" and e.hypernet.factorised}
    sent = sum(e.n_tiles * _tile_bytes(plan, e, e.name in factored, item) for e in ensembles)
    multiplied = sum(products(e) for e in ensembles if e.name in factored and not lazy)
    tiles = sum(math.prod(s) for e in ensembles for k, s in e.shapes.items() if e.leaves[k].scope == "tile")
    genome = all_reduce_bytes(tiles / shards * item, ranks // shards) + all_reduce_bytes((total - tiles) * item, ranks)
    return Cost(all_reduce_bytes(sent, shards) + genome, (flops - multiplied) / shards + multiplied)


def make_layout(plan: Plan, mesh: Mesh, placement: Placement | str, *, lazy: bool = False) -> Layout:
    """Return the layout of a placement; `"auto"` chooses the fastest. With `lazy`, layers may apply factors."""
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
