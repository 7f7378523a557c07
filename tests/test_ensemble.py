"""Ensembles: many g-nets in one call are a loop over single ones, and slots start at the p-net's own deviation."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.encoding import Encoding
from gbfunc.genome import codes_of, init_leaves
from gbfunc.hypernets import Hypernet
from gbfunc.hypernets.codeless import LowRank
from gbfunc.hypernets.ensemble import Constants, Evaluation, dense_tiles
from gbfunc.plan.ensembles import Ensemble, TileSpan
from gbfunc.plan.slots import Slot
from gbfunc.tiling import TileGrid, join_tiles, tile_grid
from gbfunc.types import Params, TileDims
from tests.support import oracles
from tests.support.strategies import ALL_EXAMPLES, EXAMPLES, encodings, matrices, named

contract = pytest.mark.parametrize("hypernet", ALL_EXAMPLES, ids=named)
standardised = pytest.mark.parametrize("hypernet", [h for h in ALL_EXAMPLES if h.standardised], ids=named)


def stacked(hypernet: Hypernet, dims: TileDims, n_tiles: int, n_groups: int) -> Params:
    generator = torch.Generator().manual_seed(0)
    drawn = hypernet.init(dims, n_tiles, n_groups, generator)
    return {k: v.double() + 0.1 * torch.randn(v.shape, generator=generator) for k, v in drawn.items()}


def tiles_of(
    hypernet: Hypernet, dims: TileDims, leaves: Params, row: Tensor, col: Tensor, noise: Params | None = None
) -> Tensor:
    return dense_tiles(Evaluation(Constants.make(hypernet, dims, "auto", row, col), leaves, noise).tiles())


@contract
@pytest.mark.parametrize("row_blocks", [1, 3])
@pytest.mark.parametrize("col_blocks", [1, 3])
def test_an_ensemble_equals_a_loop_over_gnets(hypernet: Hypernet, row_blocks: int, col_blocks: int) -> None:
    dims = TileDims(4, 5, 2, 3)
    generator = torch.Generator().manual_seed(1)
    row = torch.randn(row_blocks, 4, 2, generator=generator, dtype=torch.float64)
    col = torch.randn(col_blocks, 5, 3, generator=generator, dtype=torch.float64)
    groups = torch.tensor([0, 1, 0])
    leaves = stacked(hypernet, dims, 3, 2)
    shapes = hypernet.noise_shapes(dims)
    noise = {k: torch.randn(3, *s, generator=generator, dtype=torch.float64) for k, s in shapes.items()}
    specs = hypernet.leaves(dims)
    own = {k: v[groups] if specs[k].scope == "group" else v for k, v in leaves.items()}
    for drawn in (None, noise or None):
        tiles = tiles_of(hypernet, dims, own, row, col, drawn)
        if not leaves:
            tiles = tiles.expand(3, -1, -1)
        for t in range(3):
            one, its = ({k: v[t, None] for k, v in x.items()} for x in (own, drawn or {}))
            single = tiles_of(hypernet, dims, one, row[t % row_blocks, None], col[t % col_blocks, None], its or None)
            torch.testing.assert_close(tiles[t], single[0], rtol=1e-12, atol=1e-12)


@contract
def test_leaves_of_no_numbers_may_be_left_out(hypernet: Hypernet) -> None:
    """A column of a vector has a code of width 0: its weights are not stored."""
    dims, row = TileDims(6, 1, 3, 0), torch.from_numpy(gb.binary().codes(6))[None]
    col = torch.zeros(1, 1, 0, dtype=torch.float64)
    leaves = stacked(hypernet, dims, 2, 2)
    kept = {k: v for k, v in leaves.items() if v.numel()}
    found = tiles_of(hypernet, dims, kept, row, col)
    assert torch.equal(found, tiles_of(hypernet, dims, leaves, row, col))


def test_tiles_of_one_weight_may_have_other_codes() -> None:
    """No code of an axis of one has any width, and none has a row that could be counted by it."""
    pnet = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    plan = gb.make_plan(pnet, gb.gnet((3,)), encodings={"0.weight": (gb.gray(), gb.grid(1))})
    assert [codes.shape for codes in plan.ensembles[0].codes] == [(2, 1, 0)] * 2
    weights = gb.generate(plan, gb.init_genome(plan, pnet))
    assert all(weights[f"{i}.weight"].isfinite() for i in range(2))


def slot_of(hypernet: Hypernet, grid: TileGrid, row: Encoding, col: Encoding, seed: int = 0) -> Tensor:
    slot = Slot(hypernet, grid, row, col, scale=1.0)
    ensemble = Ensemble("one", hypernet, slot.dims, (TileSpan(0, 0, 0, slot),))
    leaves = init_leaves(ensemble, torch.float32, torch.Generator().manual_seed(seed))
    tiles = tiles_of(hypernet, slot.dims, leaves, *codes_of(ensemble, torch.float32, torch.device("cpu")))
    return join_tiles(tiles, grid)


@st.composite
def slots(draw: st.DrawFn) -> tuple[TileGrid, Encoding, Encoding]:
    rows = draw(st.sampled_from([2, 10, 25, 40, 300]))
    cols = -(-1000 // rows) + draw(st.integers(0, 9))
    grid = tile_grid((rows, cols), draw(st.sampled_from([None, 40, (64, 17)])))
    codes = [draw(st.sampled_from([gb.binary(), gb.gray(), gb.grid(n)])) for n in (rows, cols)]
    return grid, codes[0], codes[1]


@standardised
@settings(max_examples=5)
@given(slots(), st.integers(0, 99))
def test_slots_start_at_unit_deviation_and_zero_mean(hypernet: Hypernet, slot: tuple, seed: int) -> None:
    matrix = slot_of(hypernet, *slot, seed=seed)
    assert bool(torch.isfinite(matrix).all())
    assert abs(float(matrix.std()) - 1) < 0.05
    assert abs(float(matrix.mean())) < 0.01


UNIT = [(h, TileGrid(1000, 1, 1000, 1)) for h in ALL_EXAMPLES if h.standardised]
UNIT += [(h, tile_grid((30, 30), 1)) for h in (gb.gnet((3,)), gb.stochastic((3,)), gb.periodic(2), gb.low_rank(1))]


@pytest.mark.parametrize(("hypernet", "grid"), UNIT, ids=named)
def test_long_vectors_and_tiles_of_one_weight_too(hypernet: Hypernet, grid: TileGrid) -> None:
    matrix = slot_of(hypernet, grid, gb.binary(), gb.binary())
    assert abs(float(matrix.std()) - 1) < 0.05
    assert abs(float(matrix.mean())) < 0.01


@standardised
@given(matrices(6), st.integers(0, 99))
@settings(max_examples=5)
def test_the_smallest_slots_are_finite(hypernet: Hypernet, matrix: tuple[int, int], seed: int) -> None:
    found = slot_of(hypernet, tile_grid(matrix), gb.binary(), gb.binary(), seed=seed)
    assert bool(torch.isfinite(found).all())
    assert float(found.abs().max()) < 1e3


def test_rectifiers_that_are_off_everywhere_are_drawn_again() -> None:
    """Two narrow layers of rectifiers are dead in a few draws in a hundred."""
    for draw in range(200):
        matrix = slot_of(gb.gnet((2, 2)), TileGrid(6, 5, 6, 5), gb.binary(), gb.binary(), seed=draw)
        assert abs(float(matrix.std(correction=0)) - 1) < 0.05


def test_every_slot_of_an_ensemble_is_standardised_by_itself() -> None:
    pnet = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 40), nn.Linear(40, 50))
    for name, examples in EXAMPLES.items():
        plan = gb.make_plan(pnet, examples[-1], max_tile=20)
        weights = gb.generate(plan, gb.init_genome(plan, pnet, 3))
        for tensor in plan.generated:
            if examples[-1].standardised:
                ratio = float(weights[tensor.name].std() / tensor.slots[0].scale)
                assert abs(ratio - 1) < 0.05, (name, tensor.name)


@given(st.data())
@settings(max_examples=15)
def test_any_codes_and_tiles(data: st.DataObject) -> None:
    pnet = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6), nn.Linear(6, 4)).double()
    codes = {f"{i}.weight": (data.draw(encodings(n)), data.draw(encodings(m))) for i, n, m in ((0, 4, 6), (1, 6, 4))}
    max_tile = data.draw(st.sampled_from([None, 2, 3, (2, 6), (4, 3)]))
    hypernet = data.draw(
        st.sampled_from([gb.periodic(2), gb.periodic(2, "layers"), gb.gnet((2,)), gb.stochastic((2,))])
    )
    try:
        plan = gb.make_plan(pnet, hypernet, max_tile=max_tile, encodings=codes)
    except ValueError as error:
        assert "kernel positions" in str(error)  # A per-axis code whose positions do not fill a tile.
        return
    genome = gb.init_genome(plan, pnet)
    found, expected = gb.generate(plan, genome), oracles.weights(plan, genome)
    for name in expected:
        np.testing.assert_allclose(found[name].detach().numpy(), expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "hypernet", [gb.periodic(8), gb.periodic(8, "layers"), gb.low_rank(3, "layers"), gb.xox(4)], ids=repr
)
def test_a_large_slot_is_measured_by_its_factors_as_by_its_weights(
    hypernet: Hypernet, monkeypatch: pytest.MonkeyPatch
) -> None:
    pnet = nn.Linear(203, 150)
    plan = gb.make_plan(pnet, hypernet, max_tile=20)
    by_weight = gb.init_genome(plan, pnet, 2)
    monkeypatch.setattr("gbfunc.genome._LARGE", 0)
    monkeypatch.setattr("gbfunc.genome._Slot.matrix", None)  # What measures by weights.
    torch.testing.assert_close(gb.init_genome(plan, pnet, 2), by_weight, rtol=1e-5, atol=1e-6)


def test_linear_leaves_must_scale_the_tile() -> None:
    @dataclass(frozen=True)
    class Squared(LowRank):
        type = "squared"

        def tiles(self, leaves: Any, *unused: Any) -> Any:
            return super().tiles({**leaves, "left": leaves["left"] ** 2})

    net = nn.Linear(30, 20)
    plan = gb.make_plan(net, Squared(2))
    with pytest.raises(ValueError, match="doubling its leaves of role 'linear' must double the tile"):
        gb.init_genome(plan, net, 0)
