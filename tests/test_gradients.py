"""Loss and gradient of one batch: random numbers, precision, microbatches, what is not finite, and what is refused."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.train.gradients.loss import StepInputs
from gbfunc.train.gradients.proof import Proof, gradient_and_changes, plain_gradients
from gbfunc.train.step import TrainStep
from gbfunc.trees import flat_genome
from tests.support.strategies import Net
from tests.support.trees_equal import copy_tree, same_bits
from tests.support.zoo import SGD, ZOO, loss_fn, step_of

STILL = gb.torch_optimizer(torch.optim.SGD, lr=0.0)
ADAM = gb.torch_optimizer(torch.optim.Adam, lr=0.01)


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


def inputs_of(step: TrainStep, batch: Any) -> tuple[Any, StepInputs]:
    leaves = {k: x.requires_grad_() for k, x in flat_genome(step.init()).items()}
    return step._objective.strategy.loss, StepInputs(leaves, None, {}, batch, 3, True)


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand_like(x)


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_a_proof_of_what_is_random_in_eval_mode_too_says_that_it_is_none(shift: float) -> None:
    pnet, batch = (Noisy(4, 4) if not shift else nn.Linear(4, 4)), (torch.randn(3, 4), torch.randn(3, 4))
    step = gb.make_train_step(
        gb.make_plan(pnet, gb.periodic(2)), pnet, lambda net, b: F.mse_loss(net(b[0]), b[1]), STILL
    )
    loss, inputs = inputs_of(step, batch)

    def part(inputs: StepInputs, wanted: list[Tensor]) -> Any:
        torch.manual_seed(1 + torch.initial_seed())
        inputs = inputs._replace(batch=(inputs.batch[0], inputs.batch[1] + shift))
        return plain_gradients(loss)(inputs, wanted)

    proof = Proof(lambda: loss, part, lambda: loss, lambda batch: batch, ("tensor",), "the part")
    if shift:
        with pytest.raises(ValueError, match="from those of the p-net on one rank: the part"):
            proof.compare(step._layout, inputs, inputs.leaves)
    else:
        with pytest.warns(UserWarning, match="over tensor ranks was not compared"):
            proof.compare(step._layout, inputs, inputs.leaves)


def test_what_a_comparison_runs_leaves_the_batch_as_it_was() -> None:
    class Halving(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(0.5))

    pnet, batch = Halving(4, 4), torch.ones(3, 4)
    step = gb.make_train_step(gb.make_plan(pnet, gb.periodic(2)), pnet, loss_fn, STILL)
    loss, inputs = inputs_of(step, batch)
    gradient_and_changes(plain_gradients(loss), inputs, [*inputs.leaves.values()], 0)
    assert torch.equal(batch, torch.ones(3, 4))
    step(step.init(), batch)
    assert torch.equal(batch, torch.full((3, 4), 0.5))


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
    ("loss", "words"),
    [
        (lambda net, x: net(x), r"must return a scalar tensor.* got \(8, 3\), torch.float32"),
        (lambda net, x: net(x).mean() * 1j, r"a scalar tensor of real numbers.* got \(\), torch.complex64"),
        (lambda net, x: 1.0, "must return a scalar tensor.* got float"),
        (lambda net, x: (net(x).mean().item(), {}), "got float"),
        (lambda net, x: (net(x).mean(), {}, 1), r"of real numbers, or \(scalar tensor, aux\), got a tuple of 3"),
        (lambda net, x: [net(x).mean(), {}], "got list"),
        (lambda net, x: net(x).mean().detach(), "the loss does not depend on any trained leaf"),
        (lambda net, x: x.mean(), "the loss does not depend on any trained leaf"),
    ],
    ids=["matrix", "complex", "number", "number and aux", "three", "list", "detached", "constant"],
)
@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"remat": "layer"}], ids=str)
def test_losses_that_cannot_be_trained_are_refused(loss: Any, words: str, options: dict[str, Any]) -> None:
    step, batch = step_of("mlp", loss, **options)
    if options.get("microbatches"):
        words = words.replace("8, 3", "4, 3")
    with pytest.raises(ValueError, match=words):
        step(step.init(), batch)


def test_leaves_that_the_loss_does_not_use_get_no_gradient() -> None:
    pnet = Net(lambda net, x: net.used(x), used=nn.Linear(6, 3), unused=nn.Linear(6, 5))
    plan = gb.make_plan(pnet, gb.periodic(2))
    every: tuple[dict[str, Any], ...] = ({}, {"microbatches": 2}, {"remat": "generate"}, {"remat": "layer"})
    for options in every:
        step = gb.make_train_step(plan, pnet, loss_fn, SGD, **options)
        state = step.init()
        new, info = step(state, ZOO["mlp"].batch())
        before, after = gb.generate(plan, state), gb.generate(plan, new)
        assert info.finite and not torch.equal(before["used.weight"], after["used.weight"])
        assert all(torch.equal(before[f"unused.{k}"], after[f"unused.{k}"]) for k in ("weight", "bias"))


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
    raising, _ = step_of("conv_bn", optimizer=ADAM, donate=donate, on_nonfinite="raise", **options)
    before = copy_tree(after)
    with pytest.raises(FloatingPointError, match="step 3: expected finite .*loss nan, .*state is unchanged"):
        raising(after, NAN)
    assert same_bits(after, before) and raising(after, batch)[1].finite


def test_a_finite_loss_with_a_gradient_that_is_not_finite_counts_too() -> None:
    def root(net: Callable[..., Tensor], batch: Tensor) -> Tensor:
        return (net(batch) * 0).sum().sqrt() + 1

    step, batch = step_of("mlp", root)
    state = step.init()
    new, info = step(state, batch)
    assert float(info.loss) == 1.0 and not info.finite and not bool(info.grad_norm.isfinite())
    assert same_bits(new, state._replace(step=state.step + 1))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_gradient_inside_of_a_compiled_random_loss_is_taken_by_torch_func(graphs_alone: None) -> None:
    def by_autograd(net: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        return net(x).square().mean() + gradient.square().mean()

    def by_func(net: Any, x: Tensor) -> Tensor:
        return net(x).square().mean() + torch.func.grad(lambda x: net(x).sum())(x).square().mean()

    pnet = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(), nn.Linear(5, 1)).double()
    plan, x = gb.make_plan(pnet, gb.low_rank(1)), ZOO["mlp"].batch(torch.float64)
    step = gb.make_train_step(plan, pnet, by_func, SGD, compile=True)
    step(step.init(), x)
    step = gb.make_train_step(plan, pnet, by_autograd, SGD, compile=True)
    with pytest.raises(ValueError, match="compiled by torch.compile, the gradient differs by .* pass compile=False"):
        step(step.init(), x)
