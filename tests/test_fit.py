"""The genome nearest to given weights: exact where it can be, optimal where the optimum is known, never worse."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.plan import Plan
from gbfunc.tiling import split_tiles
from tests.support import oracles
from tests.support.strategies import linear_end, named
from tests.support.trees_equal import same_bits

FITTED = [gb.periodic(4), gb.periodic(2, "layers"), gb.gnet((6,)), gb.gnet((4, 4), "tanh"), gb.stochastic((5,))]
FITTED += [gb.low_rank(2), gb.low_rank(2, "layers"), gb.xox(3), gb.from_module(linear_end)]
EACH = pytest.mark.parametrize("hypernet", FITTED, ids=named)


def mlp(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 12))


def relative(made: Tensor, given: Tensor) -> float:
    made, given = made.detach().double(), given.detach().double()
    return float((made - given).norm() / given.norm())


def genome_of(hypernet: Any, seed: int = 0, **options: Any) -> tuple[nn.Module, Plan, gb.Genome]:
    pnet = mlp()
    plan = gb.make_plan(pnet, hypernet, **options)
    return pnet, plan, gb.init_genome(plan, pnet, seed)


@EACH
def test_the_error_is_reported_and_smaller_than_at_the_start(hypernet: Any) -> None:
    pnet, plan, start = genome_of(hypernet)
    genome, errors = gb.fit_genome(plan, mlp(1), start=start, steps=15)
    given, first = mlp(1).state_dict(), gb.generate(plan, start)
    exact = oracles.weights(plan, genome, None)
    assert list(errors) == [t.name for t in plan.generated]
    for name, error in errors.items():
        oracle = torch.from_numpy(np.array(exact[name]))
        assert error == pytest.approx(relative(oracle, given[name]), rel=1e-4)
        assert error < min(1.0, relative(first[name], given[name]))
    # More of it is better, or as good.
    longer = gb.fit_genome(plan, mlp(1), start=start, steps=45).errors
    assert sum(e**2 for e in longer.values()) <= sum(e**2 for e in errors.values()) + 1e-3


@EACH
def test_a_genome_is_its_own_fit(hypernet: Any) -> None:
    pnet, plan, start = genome_of(hypernet)
    trained = gb.materialize(plan, start, pnet)
    errors = gb.fit_genome(plan, trained, start=start, steps=5).errors
    assert all(error < 1e-5 for error in errors.values())


@pytest.mark.parametrize("max_tile", [None, 8])
@pytest.mark.parametrize("rank", [1, 3])
def test_low_rank_is_the_best_there_is(rank: int, max_tile: int | None) -> None:
    """Eckart and Young: what is left of a tile are its singular values past the rank."""
    pnet = mlp()
    plan = gb.make_plan(pnet, gb.low_rank(rank), max_tile=max_tile)
    generator = torch.Generator().manual_seed(3)
    weights = {k: torch.randn(v.shape, generator=generator) for k, v in pnet.named_parameters()}
    errors = gb.fit_genome(plan, weights | dict(pnet.named_buffers())).errors
    for tensor in plan.generated:
        tiles = split_tiles(weights[tensor.name].double(), tensor.slots[0].grid)
        best = torch.linalg.svdvals(tiles)[:, rank:].norm() / weights[tensor.name].double().norm()
        assert errors[tensor.name] == pytest.approx(float(best), rel=1e-5)


def test_direct_parameters_and_buffers_are_copied() -> None:
    pnet, plan, _ = genome_of(gb.periodic(2))
    trained = mlp(1)
    with torch.no_grad():
        trained.get_buffer("1.running_mean").add_(0.3)
    genome = gb.fit_genome(plan, trained, steps=2).genome
    state = trained.state_dict()
    assert genome.direct and all(same_bits(x, state[name]) for name, x in genome.direct.items())
    assert genome.buffers and all(same_bits(x, state[name]) for name, x in genome.buffers.items())
    held = {x.data_ptr() for x in state.values()}
    assert not held & {x.data_ptr() for x in (*genome.direct.values(), *genome.buffers.values())}
    gb.materialize(plan, genome, pnet)(torch.ones(2, 30))


def test_the_same_seed_gives_the_same_genome_and_nothing_is_changed() -> None:
    _, plan, _ = genome_of(gb.periodic(2))
    trained = mlp(1)
    before = {k: v.clone() for k, v in trained.state_dict().items()}
    first = gb.fit_genome(plan, trained, seed=5, steps=10)
    second = gb.fit_genome(plan, trained, seed=5, steps=10)
    assert same_bits(first, second)
    assert not same_bits(first.genome.gnets, gb.fit_genome(plan, trained, seed=6, steps=10).genome.gnets)
    assert same_bits(before, dict(trained.state_dict()))


def test_every_layout_of_weights() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pnet = nn.ModuleList(
            [nn.MultiheadAttention(8, 2), nn.Conv2d(3, 9, 3), conv1d(7, 12), nn.ConvTranspose2d(4, 6, 2)]
        )
    pnet = pnet.double()
    plan = gb.make_plan(pnet, gb.low_rank(2))
    trained = gb.materialize(plan, gb.init_genome(plan, pnet, 1), pnet)
    errors = gb.fit_genome(plan, trained, steps=0).errors
    assert len(errors) == 5 and all(error < 1e-6 for error in errors.values())


def test_deltas_of_a_base() -> None:
    pnet = mlp().double()
    plan = gb.make_plan(pnet, gb.low_rank(2), base="own", target_modules=["0"], modules_to_save=["3"])
    genome = gb.init_genome(plan, pnet)
    moved = {
        e: {k: v + 0.1 * torch.arange(v.numel()).reshape(v.shape).cos() for k, v in leaves.items()}
        for e, leaves in genome.gnets.items()
    }
    trained = gb.materialize(plan, genome._replace(gnets=moved), pnet)
    fit = gb.fit_genome(plan, trained, pnet=pnet)
    assert set(fit.errors) == {t.name for t in plan.generated} and fit.errors["0.weight"] < 1e-6
    delta = trained.get_parameter("0.weight") - pnet.get_parameter("0.weight")
    made = gb.materialize(plan, fit.genome, pnet).get_parameter("0.weight") - pnet.get_parameter("0.weight")
    assert relative(made, delta) == pytest.approx(fit.errors["0.weight"], abs=1e-9)
    # Nothing was changed, nothing is generated.
    assert gb.fit_genome(plan, pnet, pnet=pnet, steps=3).errors["0.weight"] == 0
    with pytest.raises(ValueError, match="has a base: pass it as pnet="):
        gb.fit_genome(plan, trained)
    with pytest.raises(ValueError, match="digest"):
        gb.fit_genome(plan, trained, pnet=mlp(2).double())


def test_refuses() -> None:
    pnet, plan, genome = genome_of(gb.periodic(2))
    state: dict[str, Tensor] = dict(pnet.state_dict())
    rest = {k: v for k, v in state.items() if k != "0.bias"}
    cases: list[tuple[Plan, Any, dict[str, Any], str]] = [
        (gb.make_plan(pnet, gb.constant()), pnet, {}, "g-nets that have parameters, got none"),
        (plan, nn.Linear(3, 2), {}, "another p-net"),
        (plan, rest, {}, r"expected \{'0.bias': \(20,\)\}, got \{'0.bias': None\}"),
        (plan, state | {"0.weight": torch.full((20, 30), float("nan"))}, {}, r"finite, got .* in .'0.weight'"),
        (plan, [state], {}, "module or tensors by name, got list"),
        (plan, pnet, {"steps": -1}, "steps must be >= 0 and lr > 0, got -1 and"),
        (plan, pnet, {"pnet": pnet}, "no base: leave out pnet="),
        (plan, pnet, {"start": genome._replace(gnets={})}, "does not fit the plan"),
    ]
    for of, weights, options, words in cases:
        with pytest.raises((ValueError, TypeError), match=words):
            gb.fit_genome(of, weights, **options)
