"""Populations: n genomes in one vmapped step, each trained as the single step trains it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.train.optimizers import Optimizer
from gbfunc.train.population import Population
from gbfunc.train.step import StepInfo, TrainStep
from gbfunc.trees import flatten_tree
from tests.support.trees_equal import copy_tree, same_bits
from tests.support.zoo import ZOO, Animal, dtype_of, loss_fn

DRAWING = ("dropout", "transformer")
"""Animals that draw numbers in their forward pass."""

CLASSES: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": lambda step: 0.02 / (step + 1)},
    "AdamW": {"lr": 0.02, "weight_decay": 0.1, "direct": {"lr": 0.2}},
    "Adadelta": {"lr": 1.0},
    "RMSprop": {"lr": 0.02, "momentum": 0.5, "centered": True},
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.1},
}


def adam(lr: Any = 0.02, **options: Any) -> Optimizer:
    return gb.torch_optimizer(torch.optim.Adam, lr=lr, **options)


def exact(animal: Animal) -> tuple[nn.Module, gb.Plan, Tensor, float]:
    pnet = animal.pnet()
    half = dtype_of(pnet) == torch.bfloat16
    pnet = pnet if half else pnet.double()
    return pnet, animal.plan(pnet), animal.batch(dtype_of(pnet)), 2e-2 if half else 1e-9


def mlp_step(optimizer: Optimizer | None = None, loss: Any = loss_fn, **options: Any) -> tuple[TrainStep, Tensor]:
    pnet, plan, batch, _ = exact(ZOO["mlp"])
    return gb.make_train_step(plan, pnet, loss, optimizer or adam(), **options), batch


def alone(
    steps: Sequence[TrainStep], states: Sequence[gb.TrainState], batches: Sequence[Any], rounds: int = 3
) -> tuple[list[gb.TrainState], list[StepInfo]]:
    made, infos = list(states), []
    for _ in range(rounds):
        both = [step(state, batch) for step, state, batch in zip(steps, made, batches, strict=True)]
        made, infos = [state for state, _ in both], [info for _, info in both]
    return made, infos


def together(many: Population, states: gb.TrainState, batch: Any, rounds: int = 3) -> Any:
    info = None
    for _ in range(rounds):
        states, info = many(states, batch)
    return states, info


def assert_members(many: Population, states: gb.TrainState, members: Sequence[gb.TrainState], tol: float) -> None:
    for i, member in enumerate(members):
        got, expected = flatten_tree(many.member(states, i)), flatten_tree(member)
        assert got.keys() == expected.keys()
        for name, x in expected.items():
            torch.testing.assert_close(got[name], x, rtol=tol, atol=tol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # Weight norm has no batching rule.
@pytest.mark.parametrize("name", [name for name in ZOO if name not in DRAWING])
def test_each_member_is_trained_as_alone(name: str) -> None:
    pnet, plan, batch, tol = exact(ZOO[name])
    step = gb.make_train_step(plan, pnet, loss_fn, adam(), clip_norm=0.1)
    many, seeds = gb.population(step, 3), [0, 5, 7]
    members, infos = alone([step] * 3, [step.init(seed) for seed in seeds], [batch] * 3)
    start = many.init(seeds)
    before = copy_tree(start)
    states, info = together(many, start, batch)
    assert_members(many, states, members, tol)
    assert same_bits(start, before)
    for field in ("loss", "grad_norm"):
        expected = torch.stack([getattr(i, field) for i in infos])
        torch.testing.assert_close(getattr(info, field), expected, rtol=tol, atol=tol)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("cls", CLASSES)
def test_each_member_has_its_learning_rate(cls: str, donate: bool) -> None:
    options, factors = CLASSES[cls], [0.3, 1.0, 2.0]

    def made(factor: float) -> Optimizer:
        def times(lr: Any) -> Callable[[int], float]:
            return lambda step: factor * float(lr(step) if callable(lr) else lr)  # pyright: ignore[reportArgumentType]

        scaled: dict[str, Any] = options | {"lr": times(options["lr"])}
        if "direct" in options:
            scaled["direct"] = {"lr": times(options["direct"]["lr"])}
        return gb.torch_optimizer(getattr(torch.optim, cls), **scaled)

    steps = [mlp_step(made(factor))[0] for factor in factors]
    step, batch = mlp_step(made(1.0), donate=donate)
    members, _ = alone(steps, [s.init(3) for s in steps], [batch] * 3, rounds=6)
    many = gb.population(step, 3, lr_factors=factors)
    states, _ = together(many, many.init([3, 3, 3]), batch, rounds=6)
    assert_members(many, states, members, 1e-9)


@pytest.mark.parametrize("lazy", [True, False])
def test_each_member_has_its_batch(lazy: bool) -> None:
    step, _ = mlp_step(lazy=lazy, donate=True)
    batches = [ZOO["mlp"].batch(torch.float64, seed) for seed in range(3)]
    members, _ = alone([step] * 3, [step.init(seed) for seed in range(3)], batches)
    many = gb.population(step, 3, same_batch=False)
    states, _ = together(many, many.init(), torch.stack(batches))
    assert_members(many, states, members, 1e-9)


@pytest.mark.parametrize("name", DRAWING)
def test_members_draw_other_numbers(name: str) -> None:
    pnet, plan, batch, _ = exact(ZOO[name])
    many = gb.population(gb.make_train_step(plan, pnet, loss_fn, adam()), 3)
    states = many.init([1, 1, 1])
    _, info = many(states, batch)
    _, again = many(states, batch)
    assert len(set(info.loss.tolist())) == 3
    assert info.loss.tolist() == again.loss.tolist()


def test_a_member_goes_on_alone_and_comes_back(tmp_path: Any) -> None:
    step, batch = mlp_step()
    many = gb.population(step, 2)
    states, _ = together(many, many.init(), batch)
    members, _ = alone([step] * 2, [many.member(states, i) for i in range(2)], [batch] * 2)
    both, _ = together(many, states, batch)
    assert_members(many, both, members, 1e-9)
    assert same_bits(many.stack(members), together(many, many.stack(members), batch, 0)[0])
    gb.save(tmp_path / "genome.safetensors", step.plan, members[1])
    assert same_bits(gb.load(tmp_path / "genome.safetensors")[1].gnets, many.member(many.stack(members), 1).gnets)


@pytest.mark.parametrize("cls", ["SGD", "Adam", "Adagrad", "RMSprop"])
@pytest.mark.parametrize("when", [0, 2])
def test_a_member_that_is_not_finite_stays_as_it_was(when: int, cls: str) -> None:
    step, good = mlp_step(gb.torch_optimizer(getattr(torch.optim, cls), **CLASSES[cls]), donate=True)
    many = gb.population(step, 3, same_batch=False)
    batch = torch.stack([good] * 3)
    bad = batch.clone()
    bad[1] = torch.nan
    states, _ = together(many, many.init(), batch, when)
    before = copy_tree(many.member(states, 1))
    states, info = many(states, bad)
    after = copy_tree(many.member(states, 1))
    assert info.finite.tolist() == [True, False, True]
    assert same_bits((before.gnets, before.direct, before.buffers), (after.gnets, after.direct, after.buffers))
    states, info = together(many, states, batch, 2)
    assert bool(info.finite.all()) and not same_bits(many.member(states, 1).gnets, after.gnets)
    members, _ = alone([step] * 2, [step.init(0), step.init(2)], [good] * 2, when + 3)
    for i, member in zip((0, 2), members, strict=True):
        torch.testing.assert_close(many.member(states, i).gnets, member.gnets, rtol=1e-9, atol=1e-9)
    assert all(bool(x.isfinite().all()) for x in flatten_tree(states).values())


def test_a_member_that_is_not_finite_raises_if_asked() -> None:
    step, batch = mlp_step(on_nonfinite="raise")
    many = gb.population(step, 3, same_batch=False)
    bad = torch.stack([batch] * 3)
    bad[2] = torch.inf
    with pytest.raises(FloatingPointError, match=r"members \[2\]"):
        many(many.init(), bad)


def test_members_on_a_base_are_trained_as_alone() -> None:
    pnet, batch = ZOO["mlp"].pnet().double(), ZOO["mlp"].batch(torch.float64)
    step = gb.make_train_step(gb.make_plan(pnet, gb.periodic(2), base="own"), pnet, loss_fn, adam())
    many = gb.population(step, 2)
    states, members = many.init([3, 4]), [step.init(3), step.init(4)]
    assert_members(many, together(many, states, batch)[0], alone([step] * 2, members, [batch] * 2)[0], 1e-9)


def test_an_aux_holds_tensors_and_numbers() -> None:
    def loss(net: Any, x: Tensor) -> Any:
        return loss_fn(net, x), {"b": net[0].bias, "numbers": (2, net(x).sum())}

    step, batch = mlp_step(loss=loss, donate=True)
    many = gb.population(step, 2)
    states = many.init()
    before = states.direct["0.bias"].clone()
    aux, expected = many(states, batch)[1].aux, step(step.init(1), batch)[1].aux
    assert torch.equal(aux["b"], before) and aux["numbers"][0].tolist() == [2, 2]
    torch.testing.assert_close(aux["numbers"][1][1], expected["numbers"][1])


def test_refusals() -> None:
    step, batch = mlp_step()
    many, pnet = gb.population(step, 2), nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=None))
    states, own = many.init(), gb.population(step, 2, same_batch=False)
    half_pnet, half_plan, *_ = exact(ZOO["bfloat16"])
    half = gb.make_train_step(half_plan, half_pnet, loss_fn, adam())
    average = gb.make_train_step(gb.make_plan(pnet, gb.periodic(1)), pnet, loss_fn, adam())
    unrelated, _ = mlp_step(loss=lambda net, batch: batch.square().mean())
    rprop = gb.torch_optimizer(torch.optim.Rprop, lr=0.1)
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: many(gb.population(step, 3).init(), batch), "population of 2"),
        (lambda: many(step.init(), batch), "population of 2"),
        (lambda: many.init([4]), "expected 2 members, got 1"),
        (lambda: many(many.stack([step.init(), step(step.init(), batch)[0]]), batch), "same number of steps"),
        (lambda: own(states, torch.randn(3, 8, 6)), "failed under .* in the mapped dimension"),
        (lambda: many(states, nn.utils.rnn.pack_sequence([batch])), "rows to split or vmap, got a PackedSequence"),
        (lambda: gb.population(unrelated, 2)(states, batch), "does not depend on any trained leaf"),
        (lambda: gb.population(step.plan, 2), "made of a train step"),  # pyright: ignore
        (lambda: gb.population(half, 2, lr_factors=[1.0, 2.0]), "which torch.bfloat16 rounds away"),
        (lambda: gb.population(step, 2, lr_factors=[1.0, -1.0]), "lr_factors must be 2 finite"),
        (lambda: gb.population(mlp_step(microbatches=2)[0], 2), "microbatches=1"),
        (lambda: gb.population(mlp_step(local_steps=2)[0], 2), "local_steps=None"),
        (lambda: gb.population(mlp_step(rprop)[0], 2), "Rprop"),
        (lambda: gb.population(average, 2)(gb.population(average, 2).init(), batch), "failed under .*vmap"),
        (lambda: gb.population(step, 0), "n >= 1"),
    ]
    for call, words in refused:
        with pytest.raises((ValueError, TypeError), match=words):
            call()
