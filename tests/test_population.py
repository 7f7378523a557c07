"""Populations: n genomes in one vmapped step, each trained as the single step trains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.train import Optimizer, Population, StepInfo, TrainStep
from gbfunc.trees import flatten_tree
from tests.support.trees_equal import copy_tree, same_bits
from tests.support.zoo import ZOO, Animal, dtype_of, loss_fn

DRAWING = ("dropout", "transformer")
"""Animals that draw numbers in their forward pass."""

CLASSES: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": lambda step: 0.02 / (step + 1)},
    "AdamW": {"lr": 0.02, "weight_decay": 0.1, "direct": {"lr": 0.2}},
    "NAdam": {"lr": 0.02},
    "RAdam": {"lr": 0.02},
    "Adamax": {"lr": 0.02},
    "Adadelta": {"lr": 1.0},
    "RMSprop": {"lr": 0.02, "momentum": 0.5, "centered": True},
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.1},
}


def adam(lr: Any = 0.02, **options: Any) -> Optimizer:
    return gb.torch_optimizer(torch.optim.Adam, lr=lr, **options)


def exact(animal: Animal) -> tuple[nn.Module, gb.Plan, Tensor, float]:
    """An animal in float64 with its plan, a batch and a tolerance; one of half precision as it is."""
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
    """Every member trained by itself."""
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


def test_single_precision_to_1e_5() -> None:
    """With momentum: a step of Adam's is near its sign where a gradient is near 0, whatever the rounding made of it."""
    # So is a unit near 0 on or off: of 40 seeds this befell one.
    torch.manual_seed(0)
    pnet = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10))
    plan = gb.make_plan(pnet, gb.periodic(8))
    batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 10

    def loss(net: Any, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        logits = net(batch[0])
        return nn.functional.cross_entropy(logits, batch[1]), {"hits": (logits.argmax(1) == batch[1]).sum(), "n": 32}

    sgd = gb.torch_optimizer(torch.optim.SGD, lr=3e-2, momentum=0.9)
    step = gb.make_train_step(plan, pnet, loss, sgd, clip_norm=1.0)
    many = gb.population(step, 16)
    states, info = together(many, many.init(), batch, 5)
    members, infos = alone([step] * 16, [step.init(i) for i in range(16)], [batch] * 16, 5)
    assert_members(many, states, members, 1e-5)
    assert info.aux["hits"].tolist() == [int(i.aux["hits"]) for i in infos]
    assert info.aux["n"].tolist() == [32] * 16


@pytest.mark.parametrize("name", DRAWING)
def test_members_draw_other_numbers(name: str) -> None:
    pnet, plan, batch, _ = exact(ZOO[name])
    step = gb.make_train_step(plan, pnet, loss_fn, adam())
    many = gb.population(step, 3)
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


@pytest.mark.parametrize("cls", ["Adam", "Adagrad"])
@pytest.mark.parametrize("when", [0, 2])
def test_a_member_that_is_not_finite_stays_as_it_was(when: int, cls: str) -> None:
    optimizer = gb.torch_optimizer(getattr(torch.optim, cls), **CLASSES[cls])
    step, good = mlp_step(optimizer, donate=True)
    many = gb.population(step, 3, same_batch=False)
    batch = torch.stack([good] * 3)
    bad = batch.clone()
    bad[1] = torch.nan
    states = many.init()
    states, _ = together(many, states, batch, when)
    before = copy_tree(many.member(states, 1))
    states, info = many(states, bad)
    assert info.finite.tolist() == [True, False, True]
    after = many.member(states, 1)
    assert same_bits((before.gnets, before.direct, before.buffers), (after.gnets, after.direct, after.buffers))
    states, info = many(states, batch)
    assert bool(info.finite.all()) and not same_bits(many.member(states, 1).gnets, after.gnets)
    others, _ = alone([step] * 2, [step.init(0), step.init(2)], [good] * 2, when + 2)
    for i, member in zip((0, 2), others, strict=True):
        torch.testing.assert_close(many.member(states, i).gnets, member.gnets, rtol=1e-9, atol=1e-9)
    assert all(bool(x.isfinite().all()) for x in flatten_tree(states).values())


def test_a_member_that_is_not_finite_raises_if_asked() -> None:
    step, batch = mlp_step(on_nonfinite="raise")
    many = gb.population(step, 3, same_batch=False)
    bad = torch.stack([batch] * 3)
    bad[2] = torch.inf
    with pytest.raises(FloatingPointError, match=r"members \[2\]"):
        many(many.init(), bad)


def test_flags_are_for_all_members() -> None:
    def loss(net: Any, batch: Any) -> Tensor:
        return net(batch["x"]).square().mean() * (3 if batch["return_loss"] else 1)

    pnet = nn.Linear(6, 3)
    step = gb.make_train_step(gb.make_plan(pnet, gb.periodic(features=1)), pnet, loss, adam())
    many, x = gb.population(step, 2, same_batch=False), torch.ones(2, 5, 6)
    _, info = many(many.init(), {"x": x, "return_loss": True})
    one = [step(step.init(i), {"x": x[i], "return_loss": True})[1].loss for i in range(2)]
    torch.testing.assert_close(info.loss, torch.stack(one))
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 6), torch.ones(1, 6)])
    with pytest.raises(ValueError, match="PackedSequence has no rows to split, and no vmap"):
        many(many.init(), {"x": packed, "return_loss": True})


def test_an_average_by_count_is_refused() -> None:
    pnet = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3))
    step = gb.make_train_step(gb.make_plan(pnet, gb.periodic(features=1)), pnet, lambda net, x: net(x).sum(), adam())
    with pytest.raises(ValueError, match="^1 has momentum=None"):
        gb.population(step, 2)


def test_what_vmap_cannot_run_is_refused_in_one_line() -> None:
    def loss(net: Any, x: Tensor) -> Tensor:
        return net(x).square().mean() * (2 if net.weight.sum() > 0 else 1)

    pnet = nn.Linear(6, 3)
    step = gb.make_train_step(gb.make_plan(pnet, gb.periodic(features=1)), pnet, loss, adam())
    for same in (True, False):
        many, x = gb.population(step, 2, same_batch=same), torch.ones(4, 6)
        with pytest.raises(ValueError, match=r"^the p-net or the loss function works with one genome, but not in .*"):
            many(many.init(), x if same else torch.stack([x, x]))
        with pytest.raises(RuntimeError, match="^mat1 and mat2 shapes"):
            many(many.init(), x[:, :5] if same else torch.ones(2, 4, 5))


def test_members_on_a_base_are_trained_as_alone() -> None:
    """Under `torch.func.grad`, in which the base's tensors have no memory; a `GenomeModule` so, too."""
    pnet = ZOO["mlp"].pnet().double()
    plan = gb.make_plan(pnet, gb.periodic(2), base="own")
    step, batch = gb.make_train_step(plan, pnet, loss_fn, adam()), ZOO["mlp"].batch(torch.float64)
    many = gb.population(step, 2)
    states, members = many.init([3, 4]), [step.init(3), step.init(4)]
    assert_members(many, together(many, states, batch)[0], alone([step] * 2, members, [batch] * 2)[0], 1e-9)
    module = gb.GenomeModule(plan, pnet)
    leaves = {k: x.detach() for k, x in module.named_parameters()}
    found = torch.func.grad(lambda p: loss_fn(lambda x: torch.func.functional_call(module, p, (x,)), batch))(leaves)
    loss_fn(module, batch).backward()
    for k, x in module.named_parameters():
        torch.testing.assert_close(found[k], x.grad)


def test_an_aux_keeps_what_a_donating_step_changes_and_what_is_no_number() -> None:
    step, batch = mlp_step(loss=lambda net, x: (loss_fn(net, x), {"b": net[0].bias, "phase": "warm"}), donate=True)
    many = gb.population(step, 2)
    states = many.init()
    before = states.direct["0.bias"].clone()
    _, info = many(states, batch)
    assert torch.equal(info.aux["b"], before) and info.aux["phase"] == "warm"


@pytest.mark.parametrize("cls", ["SGD", "Adagrad", "RMSprop"])
def test_a_member_whose_first_step_is_not_finite_begins_at_its_second(cls: str) -> None:
    optimizer = gb.torch_optimizer(getattr(torch.optim, cls), **CLASSES[cls], weight_decay=0.1)
    step, batch = mlp_step(optimizer)
    many = gb.population(step, 2, same_batch=False)
    rounds = [torch.stack([batch, batch * factor]) for factor in (torch.inf, 1.0, 2.0)]
    states, member = many.init([0, 1]), step.init(1)
    for both in rounds:
        states, _ = many(states, both)
        member, _ = step(member, both[1])
    found = many.member(states, 1)
    for k, x in member.direct.items():
        torch.testing.assert_close(found.direct[k], x, rtol=1e-9, atol=1e-9)


def test_an_aux_may_have_none_in_it() -> None:
    step, batch = mlp_step(loss=lambda net, batch: (loss_fn(net, batch), {"a": None, "b": (2.0, net(batch).sum())}))
    many = gb.population(step, 2)
    found = many(many.init([0, 1]), batch)[1].aux
    expected = step(step.init(1), batch)[1].aux
    assert found["a"] is None
    torch.testing.assert_close(found["b"][1][1], expected["b"][1])
    none, batch = mlp_step(loss=lambda net, batch: (loss_fn(net, batch), None))
    assert gb.population(none, 2)(gb.population(none, 2).init(), batch)[1].aux is None


def test_refusals() -> None:
    step, batch = mlp_step()
    many = gb.population(step, 2)
    states = many.init()
    with pytest.raises(ValueError, match="population of 2"):
        many(gb.population(step, 3).init(), batch)
    with pytest.raises(ValueError, match="population of 2"):
        many(step.init(), batch)
    with pytest.raises(ValueError, match="expected 2 members, got 1"):
        many.init([4])
    with pytest.raises(ValueError, match="expected 2 members, got 0"):
        many.init([])
    with pytest.raises(TypeError, match=r"a seed for each member, such as range\(2\), got 4"):
        many.init(4)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="same number of steps"):
        many(many.stack([step.init(), step(step.init(), batch)[0]]), batch)
    with pytest.raises(TypeError, match="made of a train step"):
        gb.population(step.plan, 2)  # pyright: ignore[reportArgumentType]
    for own in (torch.randn(3, 8, 6), {"x": batch.expand(2, *batch.shape), "scale": torch.ones(())}):
        with pytest.raises(ValueError, match="same_batch=False takes a batch for each of 2 members"):
            gb.population(step, 2, same_batch=False)(states, own)
    with pytest.raises(ValueError, match="wrong shape"):
        gb.update_alignment(step.plan, step._pnet, loss_fn, states, step.init(), batch)
    half = gb.make_train_step(*reversed(exact(ZOO["bfloat16"])[:2]), loss_fn, adam())
    with pytest.raises(ValueError, match="which torch.bfloat16 rounds away"):
        gb.population(half, 2, lr_factors=[1.0, 2.0])
    with pytest.raises(ValueError, match="lr_factors must be 2 finite"):
        gb.population(step, 2, lr_factors=[1.0, -1.0])
    with pytest.raises(ValueError, match="microbatches=1"):
        gb.population(mlp_step(microbatches=2)[0], 2)
    with pytest.raises(ValueError, match="Rprop"):
        gb.population(mlp_step(gb.torch_optimizer(torch.optim.Rprop, lr=0.1))[0], 2)
    with pytest.raises(ValueError, match="n >= 1"):
        gb.population(step, 0)
    unrelated, _ = mlp_step(loss=lambda net, batch: batch.square().mean())
    with pytest.raises(ValueError, match="does not depend on any trained leaf"):
        gb.population(unrelated, 2)(states, batch)
