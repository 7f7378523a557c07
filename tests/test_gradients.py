"""Loss and gradient of one batch: random numbers, precision, microbatches, what is not finite, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from trees_equal import copy_tree, same_bits
from zoo import BUFFERS_ONLY, ZOO, dtype_of, loss_fn, mlp

import gbfunc as gb

SGD = gb.torch_optimizer(torch.optim.SGD, lr=0.1)
STILL = gb.torch_optimizer(torch.optim.SGD, lr=0.0)
ADAM = gb.torch_optimizer(torch.optim.Adam, lr=0.01)


def step_of(
    name: str, loss: Any = loss_fn, optimizer: gb.Optimizer = SGD, **options: Any
) -> tuple[gb.TrainStep, Tensor]:
    pnet = ZOO[name].pnet()
    step = gb.make_train_step(ZOO[name].plan(pnet), pnet, loss, optimizer, **options)
    return step, ZOO[name].batch(dtype_of(pnet))


# --- random numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dropout", "transformer", "stochastic"])
@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"remat": "generate"}, {"remat": "layer"}], ids=str)
def test_random_numbers_come_from_seed_and_step_alone(name: str, options: dict[str, Any]) -> None:
    step, batch = step_of(name, optimizer=STILL, **options)

    def losses(seed: int, steps: int = 4) -> list[float]:
        state, found = step.init(0)._replace(seed=torch.tensor(seed)), []
        for _ in range(steps):
            state, info = step(state, batch)
            found.append(float(info.loss))
        return found

    first = losses(1)
    torch.manual_seed(99)
    assert losses(1) == first
    assert len({*first, *losses(2)}) == 8


def test_noise_and_dropout_are_not_the_same_numbers() -> None:
    """One stochastic tile on an identity batch shows its weights, and with them its noise."""
    pnet = nn.Linear(4, 4, bias=False)
    plan = gb.make_plan(pnet, gb.stochastic((3,)))

    def loss(net: Callable[..., Tensor], batch: Tensor) -> tuple[Tensor, Any]:
        out = net(batch)
        return out.square().mean(), {"weight": out.mT, "drawn": torch.randn(4, 4)}

    step = gb.make_train_step(plan, pnet, loss, STILL)
    state = step.init()
    mean = gb.generate(plan, state)["weight"]
    sigma = math.exp(-3) * plan.tensors[0].slots[0].scale
    noises = []
    for _ in range(3):
        state, info = step(state, torch.eye(4))
        noises.append((info.aux["weight"] - mean) / sigma)
        assert (noises[-1] - info.aux["drawn"]).abs().min() > 1e-4
        assert 0.4 < float(noises[-1].std()) < 1.8
    assert min(float((a - b).abs().min()) for a, b in zip(noises, noises[1:], strict=False)) > 1e-4


@pytest.mark.parametrize("name", ["dropout", "conv_bn"])
def test_threads_can_share_one_step(name: str) -> None:
    step, batch = step_of(name, optimizer=ADAM)
    states = [step.init(seed) for seed in range(6)]
    expected = [step(state, batch) for state in states]
    random = torch.get_rng_state()
    with ThreadPoolExecutor(6) as pool:
        for _ in range(5):
            assert same_bits(list(pool.map(lambda state: step(state, batch), states)), expected)
    assert torch.equal(torch.get_rng_state(), random)


# --- precision -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"remat": "layer"}, {"lazy": True}], ids=str)
def test_amp_runs_the_pnet_narrow_and_keeps_the_genome_wide(dtype: torch.dtype, options: dict[str, Any]) -> None:
    def loss(net: Callable[..., Tensor], batch: Tensor) -> tuple[Tensor, Any]:
        out = net(batch)
        assert out.dtype == dtype
        return 1e-4 * F.mse_loss(out.float(), torch.ones_like(out, dtype=torch.float32)), {}

    def wide(net: Callable[..., Tensor], batch: Tensor) -> Tensor:
        out = net(batch)
        return 1e-4 * F.mse_loss(out, torch.ones_like(out))

    narrow, batch = step_of("mlp", loss, ADAM, amp=dtype, **options)
    plain, _ = step_of("mlp", wide, ADAM)
    state = narrow.init()
    new, info = narrow(state, batch)
    _, expected = plain(state, batch)
    assert info.finite and info.grad_norm.dtype == torch.float32
    assert float(info.loss) == pytest.approx(float(expected.loss), rel=0.02)
    assert float(info.grad_norm) == pytest.approx(float(expected.grad_norm), rel=0.03)
    leaves = [leaf for e in new.gnets.values() for leaf in e.values()] + list(new.direct.values())
    assert {leaf.dtype for leaf in leaves} == {torch.float32}


def test_a_step_is_the_same_whatever_mode_it_is_called_in() -> None:
    step, batch = step_of("mlp", optimizer=ADAM)
    state = step.init()
    expected = step(state, batch)
    with torch.no_grad():
        assert same_bits(step(state, batch), expected)


# --- microbatches and what the loss returns ------------------------------------------------------------------------


def test_what_the_loss_returns_beside_is_averaged_over_microbatches() -> None:
    def loss(net: Callable[..., Tensor], batch: Any) -> tuple[Tensor, Any]:
        out = net(batch["x"])
        right = (out.argmax(1) == batch["y"]).sum()
        return F.cross_entropy(out, batch["y"]), {"right": right, "mean": (out.mean(), None)}

    batch = {"x": ZOO["mlp"].batch(), "y": torch.arange(8) % 3}
    whole, _ = step_of("mlp", loss)
    parts, _ = step_of("mlp", loss, microbatches=4)
    state = whole.init()
    (_, a), (_, b) = whole(state, batch), parts(state, batch)
    assert a.aux["right"].dtype == torch.int64 and float(b.aux["right"]) == float(a.aux["right"]) / 4
    torch.testing.assert_close(b.aux["mean"][0], a.aux["mean"][0])
    assert not a.aux["mean"][0].requires_grad and a.aux["mean"][1] is None


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((torch.ones(6, 6), torch.ones(5)), r"microbatches=2 must divide .* got a tensor of \(5,\)"),
        (torch.tensor(1.0), r"got a tensor of \(\)"),
        ((torch.ones(6, 6), "label"), "got 'label'"),
    ],
    ids=["odd", "scalar", "text"],
)
def test_batches_that_cannot_be_split_are_refused(batch: Any, words: str) -> None:
    step, _ = step_of("mlp", microbatches=2)
    with pytest.raises(ValueError, match=words):
        step(step.init(), batch)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda net, x: net(x), r"must return a scalar tensor.* got \(8, 3\)"),
        (lambda net, x: 1.0, "must return a scalar tensor.* got float"),
        (lambda net, x: (net(x).mean().item(), {}), "got float"),
        (lambda net, x: net(x).mean().detach(), "the loss does not depend on any trained leaf"),
        (lambda net, x: x.mean(), "the loss does not depend on any trained leaf"),
    ],
    ids=["matrix", "number", "number and aux", "detached", "constant"],
)
@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"lazy": False}, {"remat": "generate"}], ids=str)
def test_losses_that_cannot_be_trained_are_refused(loss: Any, words: str, options: dict[str, Any]) -> None:
    step, batch = step_of("mlp", loss, **options)
    if options.get("microbatches"):
        words = words.replace("8, 3", "4, 3")
    with pytest.raises(ValueError, match=words):
        step(step.init(), batch)


def test_a_pnet_without_parameters_has_nothing_to_train() -> None:
    pnet = BUFFERS_ONLY.pnet()
    step = gb.make_train_step(gb.make_plan(pnet), pnet, loss_fn, SGD)
    with pytest.raises(ValueError, match="the loss does not depend on any trained leaf"):
        step(step.init(), BUFFERS_ONLY.batch())


def test_leaves_that_the_loss_does_not_use_get_no_gradient() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    pnet = Half()
    plan = gb.make_plan(pnet, gb.periodic(2))
    for options in ({}, {"microbatches": 2}, {"remat": "generate"}, {"remat": "layer"}, {"lazy": True}):
        step = gb.make_train_step(plan, pnet, loss_fn, SGD, **options)
        state = step.init()
        new, info = step(state, ZOO["mlp"].batch())
        before, after = gb.generate(plan, state), gb.generate(plan, new)
        assert info.finite and not torch.equal(before["used.weight"], after["used.weight"])
        assert all(torch.equal(before[f"unused.{k}"], after[f"unused.{k}"]) for k in ("weight", "bias"))


# --- what is not finite --------------------------------------------------------------------------------------------


NAN = torch.full((8, 2, 6, 6), math.nan)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"remat": "generate"}], ids=str)
def test_what_is_not_finite_is_skipped_and_training_goes_on(donate: bool, options: dict[str, Any]) -> None:
    step, batch = step_of("conv_bn", optimizer=ADAM, donate=donate, **options)
    reference, _ = step_of("conv_bn", optimizer=ADAM, **options)
    state, _ = step(step.init(), batch)
    before = copy_tree(state)
    skipped, info = step(state, NAN)
    assert not info.finite and bool(info.loss.isnan())
    assert same_bits(skipped, before._replace(step=before.step + 1))
    after, info = step(skipped, batch)
    assert info.finite
    assert same_bits(after, reference(before._replace(step=before.step + 1), batch)[0])


def test_what_is_not_finite_can_raise() -> None:
    step, batch = step_of("conv_bn", optimizer=ADAM, on_nonfinite="raise")
    state, _ = step(step.init(), batch)
    before = copy_tree(state)
    with pytest.raises(FloatingPointError, match="step 1: loss nan, .*the state is as it was"):
        step(state, NAN)
    assert same_bits(state, before)
    assert step(state, batch)[1].finite


def test_a_finite_loss_with_a_gradient_that_is_not_finite_counts_too() -> None:
    def root(net: Callable[..., Tensor], batch: Tensor) -> Tensor:
        return (net(batch) * 0).sum().sqrt() + 1

    step, batch = step_of("mlp", root)
    state = step.init()
    new, info = step(state, batch)
    assert float(info.loss) == 1.0 and not info.finite and not bool(info.grad_norm.isfinite())
    assert same_bits(new, state._replace(step=state.step + 1))


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"microbatches": 0}, "microbatches must be an int >= 1, got 0"),
        ({"microbatches": True}, "microbatches must be an int >= 1, got True"),
        ({"microbatches": 2.0}, "microbatches must be an int >= 1, got 2.0"),
        ({"clip_norm": 0.0}, "clip_norm must be a number > 0 or None, got 0.0"),
        ({"clip_norm": math.nan}, "clip_norm must be a number > 0 or None, got nan"),
        ({"amp": torch.float32}, "amp must be None, torch.bfloat16 or torch.float16, got torch.float32"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite must be .*'skip'.*'raise'.*got 'ignore'"),
        ({"kernel": "fast"}, "kernel must be .*'auto'.*got 'fast'"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        step_of("mlp", **options)


def test_what_does_not_fit_together_is_refused_at_once() -> None:
    pnet = mlp()
    plan = ZOO["mlp"].plan(pnet)
    with pytest.raises(ValueError, match="the plan was made for another p-net"):
        gb.make_train_step(plan, nn.Linear(6, 7), loss_fn, SGD)
    with pytest.raises(ValueError, match=r"wrapped in DataParallel.*pass the module inside it \(\.module\)"):
        gb.make_train_step(plan, nn.DataParallel(pnet), loss_fn, SGD)
    with pytest.raises(TypeError, match="optimizer must come from gb.torch_optimizer, got SGD"):
        gb.make_train_step(plan, pnet, loss_fn, torch.optim.SGD(pnet.parameters(), 0.1))  # pyright: ignore
    step, other = gb.make_train_step(plan, pnet, loss_fn, SGD), step_of("conv1d")[0]
    with pytest.raises(ValueError, match="the genome does not fit the plan: missing .*unknown"):
        step(other.init()._replace(direct={}), ZOO["mlp"].batch())


def test_a_state_without_its_buffers_is_refused() -> None:
    step, batch = step_of("conv_bn")
    with pytest.raises(ValueError, match="buffers do not fit the p-net: missing .*running_mean"):
        step(step.init()._replace(buffers={}), batch)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_belongs_around_the_net_not_into_it(reentrant: bool) -> None:
    class Inside(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            return checkpoint(super().forward, input, use_reentrant=reentrant)  # type: ignore[return-value]

    def around(net: Callable[..., Tensor], batch: Tensor) -> Tensor:
        return loss_fn(lambda x: checkpoint(net, x, use_reentrant=False), batch)

    pnet = ZOO["dropout"].pnet()
    plan, batch = gb.make_plan(pnet, gb.periodic(2)), ZOO["dropout"].batch()
    step = gb.make_train_step(plan, Inside(*pnet), loss_fn, SGD)
    with pytest.raises(ValueError, match="calls torch.utils.checkpoint inside its forward"):
        step(step.init(), batch)
    plain, saving = (gb.make_train_step(plan, pnet, loss, SGD) for loss in (loss_fn, around))
    torch.testing.assert_close(saving(plain.init(), batch), plain(plain.init(), batch))
