"""`placement="auto"`: which placement takes the least time, by bytes on the wire and operations.

Per rank and step, with N ranks, S of them along the g-net axis and D along the data axis, in a ring:

* replicated: 2 (N-1)/N G bytes, for a genome of G bytes; all of generation's operations;
* sharded: 2 (S-1)/S W for weights of W bytes, 2 (D-1)/D G/S for the split leaves, 2 (N-1)/N of the others' bytes;
  1/S of the operations;
* factors: the same with the factors' bytes for W; 1/S of what makes factors, but all of the products of factors.

Where weights may stay factors (`lazy`), nobody multiplies these, but for tiles that are sent.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gbfunc.parallel.layout import Layout, Placement, sent_dtype
from gbfunc.parallel.mesh import Mesh
from gbfunc.plan import Ensemble, Plan

OPERATIONS_PER_BYTE = {"cpu": 40.0, "cuda": 400.0}
"""Operations in the time of a byte on the wire: 50 Gflop/s (some cores) at 10 Gbit/s, 20 Tflop/s (GPU) at 50 GB/s."""

_PASSES = 3
"""Forward, and backward for both sides of each product."""

PLACEMENTS: tuple[Placement, ...] = ("replicated", "sharded", "factors")


class Cost(NamedTuple):
    """What a step costs one rank beside the p-net.

    Attributes:
        bytes: sent.
        operations: of generation, forward and backward.
    """

    bytes: float
    operations: float

    def seconds(self, operations_per_byte: float) -> float:
        """Time in units of a byte's."""
        return self.bytes + self.operations / operations_per_byte


def placement_cost(plan: Plan, data: int, gnets: int, placement: Placement, lazy: bool = False) -> Cost:
    """The cost of a placement on `data` x `gnets` ranks, where weights may or may not stay factors."""
    item = plan.dtype.itemsize
    ring = _ring(data * gnets)
    shapes = {(e.name, k): (math.prod(s), e.leaves[k].scope) for e in plan.ensembles for k, s in e.shapes.items()}
    tile_params = sum(n for n, scope in shapes.values() if scope == "tile")
    total = plan.genome_params
    made = sum(_operations(e) for e in plan.ensembles)
    if lazy and placement != "sharded":
        made -= sum(_products(e) for e in plan.ensembles if e.leaves and e.hypernet.factorised)
    if placement == "replicated" or gnets == 1:
        return Cost(ring * total * item, made)
    sent = products = 0
    for e in plan.ensembles:
        if not e.leaves:
            continue
        rows, cols, *_ = e.dims
        if placement == "factors" and e.hypernet.factorised:
            sent += e.n_tiles * (rows + cols) * e.hypernet.factor_width * item
            products += 0.0 if lazy else _products(e)
        else:
            dtype = sent_dtype(plan, e, False)
            sent += e.n_tiles * rows * cols * (dtype.itemsize if dtype else item)
    outputs = _ring(gnets) * sent
    genome = _ring(data) * tile_params / gnets * item + ring * (total - tile_params) * item
    return Cost(outputs + genome, (made - products) / gnets + products)


def choose_placement(
    plan: Plan, mesh: Mesh, operations_per_byte: float | None = None, *, lazy: bool = False
) -> Placement:
    """The cheapest placement on a mesh; the first of `PLACEMENTS` among equals.

    Args:
        plan: the plan.
        mesh: the ranks.
        operations_per_byte: the machine's balance; None is `OPERATIONS_PER_BYTE` of the mesh's type of device.
        lazy: whether weights may stay factors.
    """
    balance = operations_per_byte or OPERATIONS_PER_BYTE.get(mesh.device.type, OPERATIONS_PER_BYTE["cpu"])
    costs = {p: placement_cost(plan, mesh.data, mesh.gnets, p, lazy).seconds(balance) for p in PLACEMENTS}
    return min(PLACEMENTS, key=lambda p: costs[p])


def make_layout(plan: Plan, mesh: Mesh, placement: Placement | str, *, lazy: bool = False) -> Layout:
    """The layout of a placement by name, `"auto"` among them; `lazy` as for `choose_placement`.

    Raises:
        ValueError: for an unknown name.
    """
    if placement == "auto":
        return Layout(plan, mesh, choose_placement(plan, mesh, lazy=lazy))
    for known in PLACEMENTS:
        if placement == known:
            return Layout(plan, mesh, known)
    raise ValueError(f"placement must be one of {('auto', *PLACEMENTS)}, got {placement!r}")


def _ring(ranks: int) -> float:
    """Bytes that a rank sends per byte of a buffer that is gathered and reduced in a ring."""
    return 2 * (ranks - 1) / ranks


def _products(e: Ensemble) -> float:
    """Operations that multiply an ensemble's factors to tiles."""
    rows, cols, *_ = e.dims
    return _PASSES * 2.0 * e.n_tiles * rows * cols * e.hypernet.factor_width


def _operations(e: Ensemble) -> float:
    """Operations that generate an ensemble: a product of factors, or each g-net once for each of its weights."""
    if not e.leaves:
        return 0.0
    rows, cols, *_ = e.dims
    own = sum(math.prod(leaf.shape) for leaf in e.leaves.values())
    if e.hypernet.factorised:
        return _products(e) + _PASSES * 2.0 * e.n_tiles * (rows + cols) * own
    return _PASSES * 2.0 * e.n_tiles * rows * cols * own
