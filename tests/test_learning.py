"""Every type of g-net learns at the first try: digits at 20x, all defaults, a constant rate, and what starts it so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.hypernets import HYPERNETS, Hypernet
from gbfunc.tasks.images import digits

EACH = (gb.periodic, gb.bilinear, gb.gnet, gb.stochastic, gb.low_rank, gb.xox)
TYPES = {make().type: make for make in EACH}


def mlp() -> nn.Module:
    """The net of torchGB's example."""
    torch.manual_seed(0)
    sizes = (64, 256, 256, 64, 10)
    layers = [x for i in range(4) for x in (nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def loss_fn(net: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


def accuracy(hypernet: Hypernet, factor: float, seed: int, steps: int) -> float:
    """Test accuracy of the mean weights after a training at a multiple of the suggested rate."""
    task, pnet = digits(), mlp()
    plan = gb.make_plan(pnet, hypernet, compression=20.0)
    assert plan.ratio_params >= 20
    optimizer = gb.torch_optimizer(torch.optim.Adam, lr=factor * plan.suggested_lr(torch.optim.Adam))
    train_step = gb.make_train_step(plan, pnet, loss_fn, optimizer, donate=True)
    state, generator = train_step.init(seed=seed), torch.Generator().manual_seed(seed)
    x, y = task.train.x.flatten(1), task.train.y
    for _ in range(steps):
        rows = torch.randint(len(x), (128,), generator=generator)
        state, _ = train_step(state, (x[rows], y[rows]))
    with torch.no_grad():
        guesses = gb.materialize(plan, state, pnet)(task.test.x.flatten(1)).argmax(1)
    return 100 * float((guesses == task.test.y).float().mean())


def test_every_type_that_a_plan_sizes_is_here() -> None:
    assert set(TYPES) == {name for name, of in HYPERNETS.items() if name not in ("constant", "module", "new_rows")}


@pytest.mark.parametrize("name", TYPES)
def test_every_type_learns_at_the_suggested_rate(name: str) -> None:
    assert accuracy(TYPES[name](), 1.0, seed=0, steps=40) > 40


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("factor", "least"), [(0.5, 60), (1.0, 90), (2.0, 60)])
@pytest.mark.parametrize("name", [*TYPES, "tanh", "gelu", "sin"])
def test_every_type_learns_in_300_steps(name: str, factor: float, least: float, seed: int) -> None:
    hypernet = TYPES[name]() if name in TYPES else gb.gnet(activation=name)
    assert accuracy(hypernet, factor, seed, steps=300) >= least


@pytest.mark.parametrize("hypernet", [gb.gnet(), gb.stochastic(), gb.low_rank(), gb.xox()], ids=repr)
def test_types_of_little_rank_spread_over_small_tiles(hypernet: Any) -> None:
    plan = gb.make_plan(mlp(), hypernet, compression=20.0)
    assert sum(e.n_tiles for e in plan.ensembles) > 50 and 20 <= plan.ratio_params <= 20.4
    first = plan.tensors[0].slots[0]
    assert first.hypernet.size == 1 and max(first.dims[:2]) < 64


SMALL = [(gb.gnet(), 20.0), (gb.xox(), 20.0), (gb.periodic(), 400.0)]
TOO_SMALL = [(gb.gnet(), 200.0), (gb.low_rank(), 50.0)]


@pytest.mark.parametrize(("hypernet", "ratio"), SMALL + TOO_SMALL)
def test_a_plan_says_where_a_type_may_not_learn(hypernet: Any, ratio: float) -> None:
    said = (hypernet, ratio) in TOO_SMALL
    report = gb.make_plan(mlp(), hypernet, compression=ratio).report()
    assert ("too few tiles to learn" in report) == said
    assert not said or "2.weight (" in report


def small(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu"])
def test_rows_and_columns_interact_from_the_start(activation: str) -> None:
    """Without it the means of rows and columns are most of a whole matrix of 32 units, and it never trains."""
    pnet = mlp()
    plan = gb.make_plan(pnet, gb.gnet(hidden=(32,), activation=activation))
    weight = gb.generate(plan, gb.init_genome(plan, pnet))["2.weight"]
    means = weight.mean(0).square().mean() + weight.mean(1).square().mean()
    assert float(means / weight.square().mean()) < 0.5  # 0.75 to 0.86 as drawn


def test_a_rate_is_suggested_by_types_optimizer_and_base() -> None:
    plan = gb.make_plan(mlp(), rules=[(r"2\.weight", gb.from_module(small))])
    assert plan.suggested_lr() == plan.suggested_lr(torch.optim.AdamW) == gb.from_module(small).rate
    plan = gb.make_plan(mlp())
    assert [plan.suggested_lr(cls) for cls in (torch.optim.Adam, torch.optim.SGD)] == [2e-2, 1e-1]
    with pytest.raises(ValueError, match="rates are known for .*, got .*RMSprop"):
        plan.suggested_lr(torch.optim.RMSprop)
    small_delta, large = (gb.make_plan(mlp(), base="own", genome_params=n) for n in (2_000, 20_000))
    assert small_delta.suggested_lr() == pytest.approx(3e-2)
    assert large.suggested_lr() == pytest.approx(3e-2 * 5_400 / large.genome_params)
