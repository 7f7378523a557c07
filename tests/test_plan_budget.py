"""Size targets: met from below, split by numel^(1/3), cut into the fewest tiles; what cannot be met is named."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import gbfunc as gb
from gbfunc.formats import genome_file_bytes
from gbfunc.hypernets import Hypernet, ensemble_params
from gbfunc.plan import Plan
from gbfunc.plan.slots import Slot
from gbfunc.storage.genome_file import load_dtype
from tests.support.strategies import Conv1D, pnets

api: Any = gb
SHARED = (gb.periodic(share="layers"), gb.periodic(share="shapes"))
SIZABLE = (gb.periodic(), gb.bilinear(), *SHARED, gb.gnet(), gb.stochastic(), gb.low_rank(), gb.xox())
hypernets = st.sampled_from(SIZABLE)
tiles = st.sampled_from([None, None, 16, (8, 32)])


def mnist() -> nn.Sequential:
    return nn.Sequential(nn.Linear(784, 800), nn.ReLU(), nn.Linear(800, 10))


def slots(plan: Plan) -> dict[str, Slot]:
    return {t.name: t.slots[0] for t in plan.generated}


def sizes(plan: Plan) -> dict[str, int | None]:
    return {name: slot.hypernet.size for name, slot in slots(plan).items()}


def number(words: str, error: BaseException) -> int:
    found = re.search(rf"{words} ([\d,]+)", str(error))
    assert found, str(error)
    return int(found[1].replace(",", ""))


def a_finer_step(plan: Plan, left: int) -> str | None:
    """A tensor whose tiles could all have one size more for what is left of the target, by the plan's own rules."""
    for tensor in plan.generated:
        for slot in tensor.slots:
            net, dims, limit = slot.hypernet, slot.dims, slot.hypernet.max_size(slot.dims)
            assert net.size is not None
            cost, now = (ensemble_params(n, dims, slot.grid.n_tiles, 0) for n in (net.with_size(net.size + 1), net))
            if (limit is None or net.size < limit) and cost <= slot.grid.numel and cost - now <= left:
                return tensor.name
    return None


@settings(max_examples=60)
@given(pnets(), hypernets, st.sampled_from([1.5, 3, 5, 10, 20, 50, 100]), tiles)
def test_a_target_is_met_from_below_or_the_smallest_genome_is_named(
    pnet: nn.Module, hypernet: Hypernet, ratio: float, max_tile: Any
) -> None:
    total = sum(p.numel() for p in pnet.parameters())
    target = int(total / ratio)
    assume(target >= 1)
    try:
        plan = gb.make_plan(pnet, hypernet, genome_params=target, max_tile=max_tile)
    except ValueError as error:
        least = number("the smallest possible genome here has", error)
        assert target < least
        if least < total:
            assert gb.make_plan(pnet, hypernet, genome_params=least, max_tile=max_tile).genome_params <= least
            with pytest.raises(ValueError, match="the smallest possible genome"):
                gb.make_plan(pnet, hypernet, genome_params=least - 1, max_tile=max_tile)
        return
    assert plan.genome_params <= target
    if plan.genome_params < 0.98 * target and not hypernet.shares:
        assert a_finer_step(plan, target - plan.genome_params) is None


@settings(max_examples=12)
@given(pnets(), hypernets, st.integers(600, 20_000), tiles)
def test_a_target_in_bytes_is_met_from_below(pnet: nn.Module, hypernet: Hypernet, limit: int, max_tile: Any) -> None:
    try:
        plan = gb.make_plan(pnet, hypernet, genome_bytes=limit, max_tile=max_tile)
    except ValueError as error:
        least = number("the smallest genome's file has", error)
        assert limit < least
        plan = gb.make_plan(pnet, hypernet, genome_bytes=least, max_tile=max_tile)
        assert genome_file_bytes(plan) <= least
        return
    assert genome_file_bytes(plan) <= limit
    assert plan.target == f"at most {limit:,} bytes"


@pytest.mark.parametrize("ratio", [5, 20, 100])
@pytest.mark.parametrize("hypernet", SIZABLE, ids=repr)
def test_the_mnist_net_comes_within_two_per_cent(hypernet: Hypernet, ratio: int) -> None:
    plan = gb.make_plan(mnist(), hypernet, compression=ratio)
    assert plan.ratio_params >= ratio
    # One rank more of the first matrix costs 1,584, a quarter of the target at 100x.
    coarse = ratio == 100 and hypernet.type in ("low_rank", "xox")
    assert plan.ratio_params <= ratio * (1.15 if coarse else 1.02)


@pytest.mark.parametrize(("target", "features"), [(613, (35, 7)), (1353, (77, 16)), (1973, (115, 22))])
def test_the_mnist_split(target: int, features: tuple[int, int]) -> None:
    """Pixels by their coordinates, hidden biases left at zero: findings on this net, 35 and 7 features at 613."""
    codes, rules = {"0.weight": (None, gb.grid(28, 28))}, [(r"0\.bias", gb.constant(0.0))]
    plan = gb.make_plan(mnist(), genome_params=target, encodings=codes, rules=rules)
    found = sizes(plan)
    assert 0.98 * target <= plan.genome_params <= target
    assert found["0.weight"] == pytest.approx(features[0], abs=4)
    assert found["2.weight"] == pytest.approx(features[1], abs=4)
    if target == 613:
        assert (found["0.weight"], found["2.weight"], plan.genome_params) == (35, 7, 612)
    assert [slots(plan)[n].grid.n_tiles for n in ("0.weight", "2.weight")] == [1, 1]


@given(st.integers(200, 20_000))
def test_direct_vectors_take_at_most_a_quarter(target: int) -> None:
    pnet = nn.Sequential(nn.Linear(100, 300), nn.LayerNorm(300), nn.Linear(300, 80))
    plan = gb.make_plan(pnet, genome_params=target)
    assert sum(t.numel for t in plan.direct) <= target / 4
    spilled = [t.numel for t in plan.generated if len(t.shape) == 1]
    assert not spilled or min(spilled) >= max((t.numel for t in plan.direct), default=0)


def test_an_impossible_target_says_what_stands_in_the_way() -> None:
    with torch.device("meta"):
        net = nn.ModuleDict({"wte": nn.Embedding(50_257, 768), "wpe": nn.Embedding(1024, 768)})
        net["h"] = nn.Sequential(*(Conv1D(768, 768) for _ in range(4)))
    with pytest.raises(ValueError) as caught:
        gb.make_plan(net, compression=20.0, exclude=[r"w.e\.weight"])
    assert "are wte.weight (38,597,376, excluded), wpe.weight (786,432, excluded)" in str(caught.value)
    with pytest.raises(ValueError, match=r"generate them too: include=\['weight_ih_l0', 'weight_hh_l0'\]"):
        gb.make_plan(nn.LSTM(32, 32), compression=20.0)
    plan = gb.make_plan(net, compression=20.0, include=[r"wte\.weight", r"wpe\.weight"])
    assert 20.0 <= plan.ratio_params <= 20.4


@pytest.mark.parametrize("dtype", [None, "float32", "float16", torch.bfloat16, "int8", "int7", "int2"])
def test_bytes_are_those_of_the_dtype_that_is_stored(dtype: Any, tmp_path: Path) -> None:
    pnet = mnist()
    plan = gb.make_plan(pnet, genome_bytes=3_000, stored=dtype)
    # The plan's dtype is that of its report and file.
    size = gb.save(tmp_path / "genome", plan, gb.init_genome(plan, pnet))
    name = "float16" if dtype is None else str(dtype).removeprefix("torch.")
    assert load_dtype(tmp_path / "genome") in (name, None) and f"bytes on disk as {name}" in plan.report()
    most = genome_file_bytes(plan, dtype)
    # What is coded takes fewer bytes than it may.
    assert 0.98 * 3_000 <= most <= 3_000 and 0.84 * 3_000 <= size <= most


def test_embeddings_are_factors_where_they_would_take_too_much() -> None:
    layers = nn.Sequential(nn.Linear(128, 512), *(nn.Linear(512, 512) for _ in range(3)))
    net = nn.ModuleDict({"tokens": nn.Embedding(65, 128), "layers": layers})
    large = gb.make_plan(net, genome_params=40_000)
    assert {t.name for t in large.direct} >= {"tokens.weight"}
    plan = gb.make_plan(net, genome_params=20_000, max_tile=64)
    (tokens,) = [t for t in plan.generated if t.name == "tokens.weight"]
    assert tokens.slots[0].hypernet == gb.low_rank(25) and tokens.slots[0].grid.n_tiles == 1
    assert "too much of the target" in tokens.note
    assert 0.98 * 20_000 <= plan.genome_params <= 20_000
    kept = gb.make_plan(net, genome_params=20_000, exclude=["tokens"])
    assert "tokens.weight" in {t.name for t in kept.direct}
    # Mostly embeddings: they get the part of the target that they are of the p-net.
    net = nn.ModuleDict({"tokens": nn.Embedding(10_000, 64), "head": nn.Linear(64, 64)})
    plan = gb.make_plan(net, compression=10.0)
    assert 10 <= plan.ratio_params <= 10.3
    assert {t.name: t.slots[0].hypernet.size for t in plan.generated}["tokens.weight"] == 6


def test_tiles_are_the_fewest_that_the_rule_allows() -> None:
    """2 * features <= min(r, c): whole matrices at high compression, small tiles at low."""
    whole = slots(gb.make_plan(mnist(), compression=100.0))["0.weight"]
    small = slots(gb.make_plan(mnist(), compression=5.0))["0.weight"]
    assert whole.grid.n_tiles == 1
    assert small.grid.n_tiles > 500
    for slot in (whole, small):
        assert 2 * (slot.hypernet.size or 0) <= min(slot.grid.tile_rows, slot.grid.tile_cols)


@settings(max_examples=12)
@given(st.integers(1, 60), st.integers(1, 60), st.sampled_from([(3, 3), (1, 1), (2, 5)]), st.sampled_from([2.0, 4.0]))
def test_kernels_are_never_cut(n: int, m: int, kernel: tuple[int, int], ratio: float) -> None:
    pnet = nn.Sequential(nn.Conv2d(n + 20, m + 20, kernel, bias=False), nn.ConvTranspose2d(m + 20, n + 20, kernel))
    for slot in slots(gb.make_plan(pnet, compression=ratio)).values():
        assert slot.grid.tile_cols % (kernel[0] * kernel[1]) == 0


def test_equal_layers_get_equal_sizes_and_one_ensemble() -> None:
    pnet = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12)))
    plan = gb.make_plan(pnet, genome_params=840)
    shared = gb.make_plan(pnet, gb.periodic(share="layers"), genome_params=840)
    # Unshared: 12 * (6 + 6 + 2) = 168 a feature. Shared: 6 + 6 code weights once and 12 * 2 coefficients, 36 a feature.
    assert set(sizes(plan).values()) == {840 // 168}
    assert set(sizes(shared).values()) == {840 // 36}
    assert [len(p.ensembles) for p in (plan, shared)] == [1, 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"genome_params": 100, "compression": 2.0}, "at most one of genome_params, genome_bytes and compression, got"),
        ({"genome_params": 100, "hypernet": gb.periodic(3)}, "genome_params=100 and an explicit size .* drop one"),
        ({"genome_params": 0}, "genome_params must be an int >= 1, got 0"),
        ({"genome_params": True}, "genome_params must be an int >= 1, got True"),
        ({"genome_bytes": -1}, "genome_bytes must be an int >= 1, got -1"),
        ({"compression": 1.0}, "compression must be a number > 1, got 1.0"),
        ({"compression": float("nan")}, "compression must be a number > 1, got nan"),
        ({"compression": 1_000_000}, "a compression of 1,000,000x cannot be reached: the smallest possible genome"),
        ({"genome_params": 636_010}, "genome_params must be below the p-net's 636,010 parameters"),
        ({"genome_bytes": 300}, "at most 300 bytes cannot be reached: the smallest genome's file has"),
        ({"genome_params": 20}, "a genome of 20 parameters cannot be reached"),
        ({"genome_params": 2_000, "stored": "int7"}, "needs a target in bytes, got stored='int7' only"),
        ({"genome_bytes": 2_000, "stored": "int9"}, "must be None or one of"),
    ],
)
def test_errors_say_what_was_expected(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        api.make_plan(mnist(), **options)


@pytest.mark.parametrize("ratio", [pytest.param(3.0, marks=pytest.mark.process), 1000.0])
def test_a_large_model_is_planned_without_a_list_of_its_tiles(ratio: float) -> None:
    """The layers of a Llama of 1.1 billion: 135 million tiles at 3x, in time that does not go with their number."""
    with torch.device("meta"):
        block = ((2048, 2048), (2048, 256), (2048, 256), (2048, 2048), (2048, 5632), (2048, 5632), (5632, 2048))
        layers = [nn.ModuleList(nn.Linear(*sides, bias=False) for sides in block) for _ in range(22)]
        net = nn.ModuleList([nn.Embedding(32_000, 2048), *layers, nn.Linear(2048, 32_000, bias=False)])
    start = time.process_time()
    plan = gb.make_plan(net, gb.periodic(share="layers"), compression=ratio, include=[r"^0\."])
    assert plan.ratio_params >= ratio
    assert time.process_time() - start < 20  # 1.3 s alone, minutes when tiles were listed.


def test_sizes_without_sense_are_warned_of() -> None:
    pnet = nn.Linear(64, 32, bias=False)
    with pytest.warns(UserWarning, match="the genome has 2,.* choose a smaller genome"):
        gb.make_plan(pnet, genome_bytes=99_999)
    with pytest.warns(UserWarning, match="every g-net has its smallest size"):
        gb.make_plan(pnet, genome_params=20)
