"""Who owns which tiles, and which placement costs least."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gbfunc as gb
from gbfunc.parallel import Mesh
from gbfunc.parallel.placement import PLACEMENTS, gather_bytes, make_layout, placement_cost, shares_of


def grid(data: int, gnets: int, rank: int) -> Mesh:
    """A mesh as seen from one of its ranks, without the others: for what is computed and not sent."""
    return Mesh({"data": data, "gnets": gnets}, rank)


def plan_of(hypernet: object = None, width: int = 14, **options: object) -> gb.Plan:
    pnet = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 5))
    return gb.make_plan(pnet, hypernet or gb.periodic(2), **{"max_tile": (4, 4), **options})  # pyright: ignore


@given(st.integers(0, 50), st.integers(1, 9), st.integers(0, 20))
def test_shares_are_equal_to_within_one_tile(tiles: int, ranks: int, turn: int) -> None:
    shares = shares_of(tiles, ranks, turn)
    assert sum(shares) == tiles and len(shares) == ranks and max(shares) - min(shares) <= 1


@given(st.integers(1, 3), st.integers(1, 6), st.sampled_from(PLACEMENTS))
def test_every_row_has_one_owner_along_the_gnet_axis(data: int, gnets: int, placement: str) -> None:
    plan = plan_of(rules=[(r"2\.", gb.gnet((3,)))])
    layouts = [make_layout(plan, grid(data, gnets, r), placement) for r in range(data * gnets)]
    for name, (total, *_) in plan.leaf_shapes.items():
        held = [range(total)[layout.split.get(name, slice(None))] for layout in layouts]
        assert [layout.shapes[name][0] for layout in layouts] == [len(rows) for rows in held]
        if name not in layouts[0].split:
            assert all(rows == range(total) for rows in held)
            continue
        for line in (held[d * gnets : (d + 1) * gnets] for d in range(data)):
            assert [row for rows in line for row in rows] == list(range(total))
    tiles = [sum(sizes[i] for sizes in layouts[0].sizes.values()) for i in range(gnets)]
    assert max(tiles) - min(tiles) <= 1, "what is over in one ensemble is made up for in the next"


def test_costs_are_the_counts_of_the_documentation() -> None:
    """One 4 x 6 tile of 2 features: leaves v [2], W_r, W_c, phase; factors of 4 columns."""
    plan = gb.make_plan(nn.Linear(6, 4, bias=False), gb.periodic(2), max_tile=None)
    genome = 4 * plan.genome_params
    assert placement_cost(plan, 1, 4, "replicated").bytes == pytest.approx(2 * 3 / 4 * genome)
    assert placement_cost(plan, 1, 4, "sharded").bytes == pytest.approx(2 * 3 / 4 * 4 * 24)
    assert placement_cost(plan, 1, 4, "factors").bytes == pytest.approx(2 * 3 / 4 * 4 * (4 + 6) * 4)
    assert placement_cost(plan, 2, 2, "sharded").bytes == pytest.approx(2 * 1 / 2 * (4 * 24 + genome / 2))
    products = 3 * 2 * 24 * 4
    whole = placement_cost(plan, 1, 2, "replicated").operations
    assert placement_cost(plan, 1, 2, "sharded").operations == pytest.approx(whole / 2)
    assert placement_cost(plan, 1, 2, "factors").operations == pytest.approx((whole - products) / 2 + products)
    assert placement_cost(plan, 1, 2, "factors", lazy=True).operations == pytest.approx((whole - products) / 2)
    assert placement_cost(plan, 1, 2, "replicated", lazy=True).operations == pytest.approx(whole - products)
    assert placement_cost(plan, 1, 2, "sharded", lazy=True).operations == pytest.approx(whole / 2)


def test_auto_follows_bytes_and_operations() -> None:
    compressed, heavy = plan_of(width=400, max_tile=64), plan_of(gb.gnet((256, 256)), width=400, max_tile=100)
    assert make_layout(compressed, grid(1, 4, 0), "auto").placement == "replicated"
    assert make_layout(heavy, grid(1, 4, 0), "auto").placement == "sharded"
    assert make_layout(heavy, grid(4, 1, 0), "auto").placement == "replicated"


def test_bytes_of_a_gather_are_those_of_the_tiles() -> None:
    plan = plan_of()
    tiles = sum(e.n_tiles * math.prod(e.dims[:2]) for e in plan.ensembles)
    for gnets in (2, 3, 4):
        assert sum(map(sum, gather_bytes(plan, gnets, "sharded", 4))) == 2 * 4 * tiles * (gnets - 1)
