"""The contract of a hypernetwork, over every type in the table, and what is special to each."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.encoding import Encoding
from gbfunc.hypernets import HYPERNETS, Hypernet, ensemble_params, hypernet_from_json
from gbfunc.hypernets.ensemble import Constants, Evaluation, dense_tiles
from gbfunc.types import Factors, Params, TileDims
from tests.support import oracles
from tests.support.strategies import ALL_EXAMPLES, EXAMPLES, FACTORIES, linear_end, named
from tests.support.trees_equal import torch_defaults

api: Any = gb
BINARY = gb.binary()
contract = pytest.mark.parametrize("hypernet", ALL_EXAMPLES, ids=named)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tile_dims(rows: int = 6, cols: int = 5, row_code: Encoding = BINARY, col_code: Encoding = BINARY) -> TileDims:
    return TileDims(rows, cols, row_code.width(rows), col_code.width(cols))


def case(row_code: Encoding = BINARY, col_code: Encoding = BINARY) -> tuple[TileDims, Tensor, Tensor]:
    codes = torch.from_numpy(row_code.codes(6)), torch.from_numpy(col_code.codes(5))
    return tile_dims(6, 5, row_code, col_code), *codes


def one_gnet(hypernet: Hypernet, dims: TileDims, seed: int = 0) -> Params:
    generator = seeded(seed)
    drawn = hypernet.init(dims, 1, 1, generator)
    return {k: v[0].double() + 0.1 * torch.randn(v[0].shape, generator=generator) for k, v in drawn.items()}


def noise_of(hypernet: Hypernet, dims: TileDims) -> Params:
    shapes = hypernet.noise_shapes(dims)
    return {k: torch.randn(s, generator=seeded(1), dtype=torch.float64) for k, s in shapes.items()}


def tile_of(hypernet: Hypernet, leaves: Params, row: Tensor, col: Tensor, noise: Params | None = None) -> Tensor:
    dims = TileDims(len(row), len(col), row.shape[1], col.shape[1])
    constants = Constants.make(hypernet, dims, "auto", row[None], col[None])
    one = [{k: v[None] for k, v in x.items()} for x in (leaves, noise or {})]
    return dense_tiles(Evaluation(constants, one[0], one[1] or None).tiles())[0]


def test_every_type_has_examples() -> None:
    assert set(EXAMPLES) == set(HYPERNETS)
    for name, examples in EXAMPLES.items():
        assert {h.type for h in examples} == {name}


@contract
@settings(max_examples=10)
@given(n=st.integers(2, 9), m=st.integers(2, 9), n_tiles=st.integers(1, 4), n_groups=st.integers(1, 3))
def test_init_draws_what_leaves_announce(hypernet: Hypernet, n: int, m: int, n_tiles: int, n_groups: int) -> None:
    dims = tile_dims(n, m, gb.binary(), gb.gray())
    leaves = hypernet.leaves(dims)
    drawn = hypernet.init(dims, n_tiles, n_groups, seeded())
    count = {"tile": n_tiles, "group": n_groups}
    assert {k: tuple(v.shape) for k, v in drawn.items()} == {
        k: (count[leaf.scope], *leaf.shape) for k, leaf in leaves.items()
    }
    assert all(v.dtype == torch.float32 and bool(torch.isfinite(v).all()) for v in drawn.values())
    assert sum(v.numel() for v in drawn.values()) == ensemble_params(hypernet, dims, n_tiles, n_groups)


@contract
def test_a_seed_gives_the_same_genome_whatever_torchs_defaults(hypernet: Hypernet) -> None:
    pnet = nn.Sequential(nn.Linear(9, 8), nn.Linear(8, 3), nn.Embedding(5, 4, device="meta"))
    plan = gb.make_plan(pnet, hypernet, max_tile=4)
    expected = gb.init_genome(plan, pnet, 1), gb.sample_noise(plan, seeded())
    for device, dtype in (("cpu", torch.float64), ("meta", torch.float32)):
        with torch_defaults(device, dtype):
            found = gb.init_genome(plan, pnet, 1), gb.sample_noise(plan, seeded())
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@contract
@pytest.mark.parametrize("axes", [(gb.binary(), gb.gray()), (gb.grid(3, 2), gb.one_hot())], ids=["bits", "grid"])
def test_a_tile_equals_a_loop_over_weights(hypernet: Hypernet, axes: tuple[Encoding, Encoding]) -> None:
    dims, row, col = case(*axes)
    leaves, noise = one_gnet(hypernet, dims), noise_of(hypernet, dims)
    numpy = {k: v.numpy() for k, v in leaves.items()}
    for own in (None, noise or None):
        found = tile_of(hypernet, leaves, row, col, own)
        drawn = {k: v.numpy() for k, v in (own or {}).items()}
        expected = oracles.tile(hypernet, numpy, row.numpy(), col.numpy(), drawn)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-12)


@contract
def test_factors_come_where_they_are_announced(hypernet: Hypernet) -> None:
    dims, row, col = case()
    constants = Constants.make(hypernet, dims, "auto", row[None].float(), col[None].float())
    tile = Evaluation(constants, hypernet.init(dims, 1, 1, seeded())).tiles()
    assert isinstance(tile, Factors) == hypernet.factorised
    if isinstance(tile, Factors):
        assert tile.left.shape == (1, 6, hypernet.factor_width) and tile.right.shape == (1, 5, hypernet.factor_width)
    assert dense_tiles(tile).shape == (1, 6, 5)


@contract
def test_a_tile_is_jointly_linear_in_its_linear_leaves(hypernet: Hypernet) -> None:
    dims, row, col = case()
    first, second = (one_gnet(hypernet, dims, s) for s in (0, 1))
    linear = [k for k, leaf in hypernet.leaves(dims).items() if leaf.role == "linear"]
    assert bool(linear) == (hypernet.standardised or hypernet.type == "new_rows")

    def tile(values: Params) -> Tensor:
        return tile_of(hypernet, first | values, row, col)

    if linear:
        u, v = ({k: leaves[k] for k in linear} for leaves in (first, second))
        both = tile({k: 2 * u[k] - 3 * v[k] for k in linear})
        torch.testing.assert_close(both, 2 * tile(u) - 3 * tile(v), rtol=1e-9, atol=1e-9)


@contract
def test_json_round_trip(hypernet: Hypernet) -> None:
    by_path = {f"{f.__module__}:{f.__qualname__}": f for f in FACTORIES}
    again = hypernet_from_json(json.loads(json.dumps(hypernet.to_json())), by_path)
    assert again == hypernet
    assert hash(again) == hash(hypernet)


@contract
def test_size_and_with_size(hypernet: Hypernet) -> None:
    assert isinstance(hypernet.size, int)
    if not hypernet.sizable:
        return
    assert hypernet.with_size(hypernet.size) == hypernet
    bigger = hypernet.with_size(hypernet.size + 3)
    assert bigger.size == hypernet.size + 3
    sizes = [ensemble_params(hypernet.with_size(s), tile_dims(12), 2, 1) for s in range(1, 12)]
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("name", sorted(set(HYPERNETS) - {"constant", "module", "new_rows"}))
def test_without_a_size_a_plan_must_choose(name: str) -> None:
    hypernet = HYPERNETS[name]()
    assert hypernet.size is None
    assert hypernet.with_size(3).size == 3
    assert hypernet_from_json(hypernet.to_json(), {}) == hypernet
    with pytest.raises(ValueError, match="no size yet"):
        hypernet.leaves(TileDims(3, 3, 2, 2))


def test_stochastic_noise_is_reparameterised() -> None:
    hypernet, (dims, row, col) = gb.stochastic((4,)), case()
    leaves, noise = one_gnet(hypernet, dims), noise_of(hypernet, dims)["weight"]
    plain = {k: leaves[k] for k in gb.gnet((4,)).leaves(dims)}
    mean = tile_of(gb.gnet((4,)), plain, row, col)
    zero, once, twice = (tile_of(hypernet, leaves, row, col, {"weight": s * noise}) - mean for s in (0, 1, 2))
    torch.testing.assert_close(zero, torch.zeros_like(mean))
    torch.testing.assert_close(twice, 2 * once)
    assert bool((once.sign() == noise.sign()).all())
    drawn = {k: v[0].double() for k, v in hypernet.init(dims, 1, 1, seeded()).items()}
    spread = tile_of(hypernet, drawn, row, col, {"weight": torch.ones_like(noise)}) - tile_of(hypernet, drawn, row, col)
    torch.testing.assert_close(spread, torch.full_like(noise, float(np.exp(-3.0))))


def test_shared_periodic_tiles_own_two_coefficients_a_feature() -> None:
    dims = TileDims(128, 128, 7, 7)
    own, shared = gb.periodic(10), gb.periodic(10, "layers")
    assert ensemble_params(own, dims, 3, 3) == 3 * 10 * (7 + 7 + 2)
    assert ensemble_params(shared, dims, 12, 2) == 2 * 10 * (7 + 7) + 12 * 10 * 2
    assert shared.shares and not own.shares


def test_periodic_frequencies_of_rows_and_columns() -> None:
    dims = TileDims(128, 128, 7, 7)
    one, two = (gb.periodic(10, frequency=f).init(dims, 3, 3, seeded()) for f in (1.0, (0.5, 4.0)))
    for leaf, factor in {"row_weight": 0.5, "col_weight": 4.0, "phase": 1.0, "amplitude": 1.0}.items():
        torch.testing.assert_close(two[leaf], factor * one[leaf], rtol=0, atol=0)


def test_sizes_end_at_the_shorter_side_and_scale_all_layers() -> None:
    dims = TileDims(6, 4, 0, 0)
    assert [net.max_size(dims) for net in (gb.low_rank(), gb.xox(), gb.periodic())] == [4, 4, None]
    assert gb.gnet((8, 4)).with_size(16) == gb.gnet((16, 8))
    assert gb.gnet((8, 1)).with_size(1) == gb.gnet((1, 1))


def test_from_module_draws_as_the_module_does() -> None:
    leaves = gb.from_module(linear_end).init(TileDims(4, 3, 2, 2), 50, 50, seeded())
    # nn.Linear draws uniformly within 1 / sqrt(fan_in).
    assert 0.45 < float(leaves["0.weight"].abs().max()) <= 0.5
    assert not torch.equal(leaves["0.weight"][0], leaves["0.weight"][1])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: api.periodic(0), ValueError, "features must be an int >= 1"),
        (lambda: api.periodic(2.5), ValueError, "features must be an int >= 1"),
        (lambda: api.periodic(True), ValueError, "features must be an int >= 1"),
        (lambda: api.periodic(3, "all"), ValueError, "share must be 'none', 'layers' or 'shapes', got 'all'"),
        (lambda: api.periodic(3, frequency=0.0), ValueError, "frequency must be a positive number"),
        (lambda: api.periodic(3, frequency=(1.0, -1.0)), ValueError, "two of them or None, got"),
        (lambda: api.periodic(3, frequency=(1.0, 1.0, 1.0)), ValueError, "two of them or None, got"),
        (lambda: api.constant(float("nan")), ValueError, "finite number"),
        (lambda: api.constant("0"), ValueError, "finite number"),
        (lambda: api.gnet(()), ValueError, "one or more widths"),
        (lambda: api.gnet(32), ValueError, "tuple of one or more widths"),
        (lambda: api.gnet((32, 0)), ValueError, "hidden width must be an int >= 1"),
        (lambda: api.gnet((32,), "swish"), ValueError, r"one of \['gelu', 'relu', 'sin', 'tanh'\], got 'swish'"),
        (lambda: api.stochastic((None,)), ValueError, "hidden width"),
        (lambda: api.low_rank(-1), ValueError, "rank must be an int >= 1"),
        (lambda: api.xox(0), ValueError, "genes must be an int >= 1"),
        (lambda: api.from_module(3), TypeError, "expects a callable"),
        (lambda: api.from_module(lambda n: nn.Linear(n, 2)), ValueError, r"\[3, 2\] gave \[3, 2\]"),
        (lambda: api.from_module(lambda n: nn.BatchNorm1d(n)), ValueError, "no buffers"),
        (lambda: api.from_module(lambda n: nn.Linear(n, 1).requires_grad_(False)), ValueError, r"'bias'\] are frozen"),
        (lambda: api.from_module(lambda n: nn.Sequential(nn.Linear(n, 1), nn.Dropout())), ValueError, "no random"),
        (lambda: api.from_module(lambda n: n), ValueError, "must return an nn.Module, got int"),
        (lambda: api.from_module(lambda n: nn.Linear(n, 1)).to_json(), ValueError, "importable by name"),
    ],
)
def test_errors_say_what_was_expected(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize(
    "data",
    [{}, [], None, "periodic", {"type": "swish"}, {"type": ["periodic"]}, {"type": "periodic", "features": "3"}]
    + [{"type": "periodic", "width": 3}, {"type": "gnet", "hidden": 3}, {"type": "gnet", "hidden": [3, [4]]}]
    + [{"type": "module"}, {"type": "module", "factory": "os:system"}, {"type": "constant", "value": None}]
    + [
        {"type": "periodic", "features": 3, "frequency": "1"},
        {"type": "periodic", "frequency": [1.0, "1"]},
        {"type": "module", "factory": ["os:system"]},
    ],
)
def test_json_of_anything_else_is_refused(data: Any) -> None:
    with pytest.raises(ValueError):
        hypernet_from_json(data, {})
