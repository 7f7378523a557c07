"""Codes with steps of their own: what a file gives back, what it takes, and where the bits go."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.formats import Steps, allocate, as_stored, file_bytes
from gbfunc.formats.statistics import counter_entries, read_counters
from gbfunc.formats.step_stream import code_bits
from gbfunc.formats.steps import parts_of, quantise
from gbfunc.formats.symbols import NARROWEST, PIECE, WIDEST, Reader, Run, geometric, join, most_runs_bytes, pack_runs
from gbfunc.trees import flat_genome, flatten_tree, like_genome
from gbfunc.types import Genome, Params
from tests.support.step_cases import random_steps
from tests.support.trees_equal import same_bits, torch_defaults

EACH = (gb.periodic(6), gb.bilinear(2), gb.gnet((5, 3)), gb.stochastic((4,)), gb.low_rank(2), gb.xox(3))
TYPES = {one.type: one for one in EACH} | {"layers": gb.periodic(3, share="layers")}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 12, 3), nn.BatchNorm2d(12), nn.Flatten(), nn.Linear(48, 20), nn.ReLU(), nn.Linear(20, 4)
    )


def made(hypernet: Any = None, **options: Any) -> tuple[gb.Plan, Genome]:
    pnet = net()
    plan = gb.make_plan(pnet, hypernet, **options)
    return plan, gb.init_genome(plan, pnet, seed=1)


def as_read(plan: gb.Plan, genome: Genome, steps: Steps) -> dict[str, Tensor]:
    near, _ = as_stored(plan, flat_genome(genome), steps)
    return gb.generate(plan, like_genome(near, genome))


def with_statistics(genome: Genome, seed: int = 0) -> Genome:
    generator = torch.Generator().manual_seed(seed)

    def drawn(name: str, x: Tensor) -> Tensor:
        if name.endswith("running_mean"):
            return 3 * torch.randn(x.shape, generator=generator)
        return 10 ** (2 * torch.randn(x.shape, generator=generator)) if x.ndim else torch.tensor(70_200)

    return genome._replace(buffers={k: drawn(k, x) for k, x in genome.buffers.items()})


@pytest.mark.parametrize("max_tile", [None, 7])
@pytest.mark.parametrize("name", TYPES)
def test_a_file_gives_back_what_training_sees(tmp_path: Path, name: str, max_tile: int | None) -> None:
    plan, genome = made(TYPES[name], max_tile=max_tile)
    for each in (2.0, 6.0):
        steps = random_steps(plan, genome, each)
        size = gb.save(tmp_path / "g", plan, genome, steps, {"about": name})
        assert size == (tmp_path / "g").stat().st_size == sum(file_bytes(plan, steps, genome, {"about": name}).values())
        again, loaded = gb.load(tmp_path / "g")
        assert again.to_json() == plan.to_json() and gb.load_metadata(tmp_path / "g") == {"about": name}
        torch.testing.assert_close(gb.generate(again, loaded), as_read(plan, genome, steps), rtol=0, atol=0)
        # What is rounded once is not rounded again, and takes as many bytes.
        assert gb.save(tmp_path / "h", again, loaded, steps, {"about": name}) == size
        assert (tmp_path / "h").read_bytes() == (tmp_path / "g").read_bytes()


def test_statistics_of_norms_are_in_codes(tmp_path: Path) -> None:
    """Means to so many deviations, deviations to such a ratio; counters exactly; all as evaluation sees them."""
    plan, genome = made(gb.periodic(6))
    genome = with_statistics(genome)
    genome.buffers["1.running_var"][3] = 0.0
    genome.buffers["1.running_mean"][3] = 0.002
    steps = random_steps(plan, genome, 6.0)
    size = gb.save(tmp_path / "g", plan, genome, steps)
    _, loaded = gb.load(tmp_path / "g")
    found = {name: 2 ** (index / 8) for name, (index, *_) in steps.indices}
    near, _ = as_stored(plan, flatten_tree(genome), steps)
    for name, x in loaded.buffers.items():
        torch.testing.assert_close(x, near[f"buffers/{name}"], rtol=0, atol=0)
    mean, variance, count = (loaded.buffers[f"1.{k}"] for k in ("running_mean", "running_var", "num_batches_tracked"))
    held = genome.buffers
    assert count == 70_200
    ratios = ((variance + 2**-16) / (held["1.running_var"] + 2**-16)).log().abs() / 2
    assert float(ratios.max()) <= 0.5001 * found["buffers/1.running_var"]
    errors = (mean - held["1.running_mean"]).abs() / (variance + 2**-16).sqrt()
    assert 0 < float(errors.max()) <= 0.5001 * found["buffers/1.running_mean"]
    # 16 bits each, and 64 of the counter, were 56 bytes.
    steps = Steps(tuple((k, v) for k, v in steps.indices if not k.startswith("buffers/")))
    assert gb.save(tmp_path / "h", plan, genome, steps) > size + 20


@pytest.mark.parametrize("broken", [("running_mean", 1e4), ("running_var", math.nan), ("running_var", -1.0)])
def test_statistics_of_broken_norms_stay_as_they_are(tmp_path: Path, broken: tuple[str, float]) -> None:
    plan, genome = made(gb.periodic(6))
    genome = with_statistics(genome)
    name, value = broken
    genome.buffers[f"1.{name}"][0] = value
    steps = random_steps(plan, genome)
    assert not steps.statistics
    if math.isfinite(value):
        gb.save(tmp_path / "g", plan, genome, steps)
        loaded = gb.load(tmp_path / "g")[1].buffers
        torch.testing.assert_close(loaded, genome.buffers, rtol=5e-3, atol=0)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5))
@settings(max_examples=60)
def test_counters_are_read_back(counters: list[int]) -> None:
    entries = [entry for own in counter_entries(map(torch.tensor, counters)) for entry in own]
    reader = Reader(join(entries) if entries else b"", len(entries))
    assert [int(x) for x in read_counters(reader, map(str, range(len(counters)))).values()] == counters
    reader.close()


@given(width=st.integers(NARROWEST, WIDEST), most=st.integers(0, 60), seed=st.integers(0, 9))
@settings(max_examples=60)
def test_geometric_integers_are_read_back(width: int, most: int, seed: int) -> None:
    reach, limits = geometric(width, most)
    assert reach <= most and len(limits) == 2 * reach + 2 and limits == sorted(set(limits))
    drawn = np.random.default_rng(seed).integers(-reach, reach + 1, 50).tolist()
    entries = [(limits[q + reach], limits[q + reach + 1] - limits[q + reach], limits[-1]) for q in drawn]
    reader = Reader(join(entries), 50)
    assert [reader.next(limits) - reach for _ in drawn] == drawn
    reader.close()


def test_integers_take_the_bits_of_their_distribution(tmp_path: Path) -> None:
    """0.1 bits more than the entropy of normal numbers, whatever the step: 0.07 as their tails are others."""
    plan = gb.make_plan(nn.Linear(200, 100, bias=False), rules=[(".", None)])
    genome = Genome({}, {"weight": torch.randn(100, 200, generator=torch.Generator().manual_seed(0))}, {})
    for index in (-24, -8):
        steps = Steps((("direct/weight", (index,)),))
        entropy = 0.5 * math.log2(2 * math.pi * math.e) - index / 8
        assert code_bits(plan, flat_genome(genome), steps) / 20_000 == pytest.approx(entropy + 0.09, abs=0.03)
        assert gb.save(tmp_path / "g", plan, genome, steps) * 8 / 20_000 == pytest.approx(entropy + 0.1, rel=0.02)


def test_large_amplitudes_get_finer_codes() -> None:
    plan = gb.make_plan(nn.Linear(32, 32, bias=False), gb.periodic(3))
    genome = gb.init_genome(plan, nn.Linear(32, 32, bias=False), seed=0)
    (name,) = genome.gnets
    genome.gnets[name]["amplitude"] = torch.tensor([[0.01, 1.0, 8.0]])
    amplitude = f"gnets/{name}/amplitude"
    steps = random_steps(plan, genome, 6.0)
    steps = replace(steps, indices=tuple((k, (-16,) if k == amplitude else v) for k, v in steps.indices))
    found = {q.part.leaf.rpartition("/")[2]: q for q in (one for one, _ in quantise(plan, flat_genome(genome), steps))}
    assert found["amplitude"].integers.tolist() == [[0, 4, 32]]
    for leaf in ("row_weight", "col_weight", "phase"):
        sizes = found[leaf].steps.reshape(-1, 3)[0]
        alive = found[leaf].mask
        assert alive is not None and alive.flatten().tolist() == [False, True, True]
        assert float(sizes[1] / sizes[2]) == pytest.approx(8)
    sizes = file_bytes(plan, steps, genome)
    genome.gnets[name]["amplitude"][0, 2] = 0.0
    assert sum(file_bytes(plan, steps, genome).values()) < sum(sizes.values()) - 5


def test_codes_that_are_larger_get_finer_weights() -> None:
    own = torch.tensor([[1.0, 8.0]]) * (-1.0) ** torch.arange(32)[:, None]
    plan = gb.make_plan(nn.Linear(32, 32, bias=False), gb.periodic(3), encodings={"weight": (own, None)})
    (part,) = [part for part in parts_of(plan) if part.leaf.endswith("row_weight")]
    assert part.finer == (0, 6)


def by_hand(plan: gb.Plan, leaves: Params, steps: Steps) -> Tensor:
    """The bits that the rate's gradient is of, by the definition, for autograd."""
    total = torch.zeros((), dtype=torch.float64)
    for (part, _, step, _, alive), _ in quantise(plan, leaves, steps):
        if part.period is not None:
            continue
        x = part.of(leaves[part.leaf])
        live = torch.ones_like(x) if alive is None else alive.to(x).expand(x.shape)
        mean = (x.abs() * live).sum() / live.sum().clamp(min=1)
        total = total + (torch.log2(1 + math.e * mean / step.double()) * live).sum() / 1.0
    return total


@pytest.mark.parametrize("name", ["low_rank", "gnet", "layers"])
def test_gradient_of_the_rate(name: str) -> None:
    plan, genome = made(TYPES[name], max_tile=7)
    steps = replace(random_steps(plan, genome, 4.0), rate=3.0)
    leaves = {k: x.double().requires_grad_() for k, x in flat_genome(genome).items()}
    bits = by_hand(plan, leaves, steps)
    expected = torch.autograd.grad(bits, list(leaves.values()), allow_unused=True)
    _, got = as_stored(plan, leaves, steps)
    for (leaf, x), gradient in zip(got.items(), [expected[list(leaves).index(k)] for k in got], strict=True):
        torch.testing.assert_close(x, 3.0 * gradient, rtol=1e-4, atol=1e-6, msg=leaf)


def test_amplitudes_pay_for_what_their_features_take() -> None:
    """A gradient step on the rate makes files smaller, and drives small amplitudes to zero first."""
    pnet = nn.Linear(64, 64, bias=False)
    plan = gb.make_plan(pnet, gb.periodic(12))
    genome = gb.init_genome(plan, pnet, seed=0)
    steps, leaves = replace(random_steps(plan, genome, 5.0), rate=1.0), flat_genome(genome)
    before = code_bits(plan, leaves, steps)
    for _ in range(200):
        _, slopes = as_stored(plan, leaves, steps)
        leaves = {k: x - 4e-5 * slopes[k] for k, x in leaves.items()}
    assert code_bits(plan, leaves, steps) < 0.95 * before
    (amplitude,) = [k for k in leaves if k.endswith("amplitude")]
    start = flat_genome(genome)[amplitude].abs()[0]
    lost = leaves[amplitude][0].abs() < 0.5 * start
    assert bool(lost.any()) and float(start[lost].max()) <= float(start[~lost].max())


@pytest.mark.parametrize("bits", [0.0, 300.0, 2000.0, 1e9])
def test_integers_take_at_most_what_is_asked_for(bits: float) -> None:
    plan, genome = made(gb.periodic(6))
    leaves = flat_genome(genome)
    steps = allocate(plan, leaves, {k: torch.ones_like(x) for k, x in leaves.items()}, bits, examples=8)
    assert code_bits(plan, leaves, steps) <= bits and steps.rate > 0
    if bits == 2000.0:
        assert code_bits(plan, leaves, steps) > 0.97 * bits


@pytest.mark.parametrize("size", [1e-6, 1e9])
def test_what_is_not_trained_and_fits_no_steps_is_refused(size: float) -> None:
    plan, genome = made(gb.periodic(4))
    leaves = flat_genome(genome) | {"direct/3.bias": torch.full((20,), -size)}
    squares = {k: torch.ones_like(x) for k, x in leaves.items() if k != "direct/3.bias"}
    with pytest.raises(ValueError, match="'direct/3.bias' is not trained and holds .*, too extreme for codes"):
        allocate(plan, leaves, squares, 200.0)


def test_a_file_of_more_codes_than_load_accepts_says_what_loads_it(tmp_path: Path) -> None:
    plan = gb.make_plan(nn.Linear(1000, 400, bias=False), rules=[(".", None)])
    genome = Genome({}, {"weight": torch.zeros(400, 1000)}, {})
    genome.direct["weight"][0, 0] = 1.0
    with pytest.warns(UserWarning, match="gb.load accepts 27.,... in .* max_params=400000$"):
        gb.save(tmp_path / "g", plan, genome, Steps((("direct/weight", (0,)),)))
    with pytest.raises(ValueError, match="declares .* symbols"):
        gb.load(tmp_path / "g")
    assert torch.equal(gb.load(tmp_path / "g", max_params=400_000)[1].direct["weight"], genome.direct["weight"])


def test_steps_of_another_plan_are_refused(tmp_path: Path) -> None:
    plan, genome = made(gb.periodic(6))
    other, _ = made(gb.low_rank(2))
    steps = random_steps(plan, genome)
    wrong = replace(steps, indices=tuple((k, tuple(300 for _ in v)) for k, v in steps.indices))
    for one, words in ((other, "for this plan, got those of another"), (plan, "must be -128 to 127")):
        with pytest.raises(ValueError, match=words):
            gb.save(tmp_path / "g", one, gb.init_genome(one, net(), seed=0), steps if one is other else wrong)
    with pytest.raises(ValueError, match=r"pass train_step.stored\(state\), or those of gb.allocate_steps"):
        gb.save(tmp_path / "g", plan, genome, "auto")
    with pytest.raises(ValueError, match=r"pass train_step.stored\(state\), or those of gb.allocate_steps"):
        plan.report("auto", genome)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_files_do_not_depend_on_defaults(dtype: torch.dtype, device: str, tmp_path: Path) -> None:
    plan, genome = made()
    genome = with_statistics(genome)
    steps = random_steps(plan, genome)
    gb.save(tmp_path / "a", plan, genome, steps)
    _, expected = gb.load(tmp_path / "a")
    with torch_defaults(device, dtype):
        _, found = gb.load(tmp_path / "a")
        gb.save(tmp_path / "b", plan, genome, steps)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert same_bits(found, expected)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    bits, n = draw(st.integers(1, 8)), draw(st.sampled_from([0, 1, 7, 300, PIECE + 5]))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    centres = random.integers(0, 2**bits, draw(st.sampled_from([1, n])) or 1)
    near = centres + random.normal(0, draw(st.sampled_from([0.0, 0.5, 9.0, 300.0])), max(n, len(centres)))
    return Run(near[:n].clip(0, 2**bits - 1).astype(np.uint8), bits, centres if len(centres) == 1 else centres[:n])


def counts(every: list[Run]) -> tuple[int, int]:
    return len(every), sum(len(run.symbols) for run in every)


@given(st.lists(runs(), min_size=1, max_size=4))
def test_what_is_packed_is_unpacked(every: list[Run]) -> None:
    data, costs = pack_runs(every)
    reader = Reader(data, sum(counts(every)))
    for run in every:
        np.testing.assert_array_equal(reader.run(len(run.symbols), run.bits, run.centres), run.symbols)
    reader.close()
    bits, plain = sum(costs), sum(len(run.symbols) * run.bits for run in every)
    pieces = math.ceil(sum(counts(every)) / PIECE)
    assert bits <= plain + 1e-6 and len(data) <= most_runs_bytes(plain, *counts(every)[::-1])
    # The integers' beginnings, and the bytes before the pieces.
    assert len(data) <= (bits + 4 * len(every)) / 8 + 5 * pieces


def test_streams_that_are_none() -> None:
    run = Run(np.arange(128), 7, np.array([64]))
    data, _ = pack_runs([run])
    for bad in (b"", b"\0", data[:-1], data + b"\0", data + b"\1", data * 9):
        reader = Reader(bad, 129)
        with pytest.raises(ValueError, match="that end with the data"):
            reader.run(128, 7, run.centres)
            reader.close()
