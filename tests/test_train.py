"""The training step: equal to a loop written by hand, whatever its options, and a pure function of state and batch."""

import math
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import gbfunc as gb
from gbfunc.train.step import TrainStep
from tests.support.trees_equal import copy_tree, photograph, same_bits, torch_defaults
from tests.support.zoo import SGD, ZOO, dtype_of, loss_fn, mlp, small, step_of

EACH = pytest.mark.parametrize("name", ZOO)
ADAM = gb.torch_optimizer(torch.optim.Adam, lr=0.01)


def run(step: TrainStep, state: gb.TrainState, batch: Any, steps: int = 3) -> tuple[gb.TrainState, list[Tensor]]:
    losses = []
    for _ in range(steps):
        state, info = step(state, batch)
        losses.append(info.loss)
    return state, losses


def trained(state: gb.TrainState) -> Any:
    return state.gnets, state.direct


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
}
HAND = [(name, "SGD", 1) for name in ("mlp", "conv_bn", "attention")]
HAND += [(name, "Adam", 1) for name in ("tied", "lstm", "weight_norm", "shared", "frozen", "running", "only_direct")]
HAND += [("conv_bn", optimizer, 2) for optimizer in OPTIMIZERS]


@pytest.mark.parametrize(("name", "optimizer", "microbatches"), HAND)
def test_a_step_equals_the_loop_that_one_writes_by_hand(name: str, optimizer: str, microbatches: int) -> None:
    """Leaf tensors, `backward` on each microbatch, torch's own optimizer, the module called functionally."""
    animal, (cls, options) = ZOO[name], OPTIMIZERS[optimizer]
    # In float64: a gradient that is zero but for rounding (a bias before a batch norm) is the whole step of Adam.
    pnet = animal.pnet().double()
    plan, batch = animal.plan(pnet), animal.batch(torch.float64)
    made = gb.torch_optimizer(cls, **options)
    step = gb.make_train_step(plan, pnet, loss_fn, made, microbatches=microbatches)
    state = step.init(3)

    leaves = copy_tree(trained(state))
    own = dict(pnet.named_parameters())
    frozen = {n for n in leaves[1] if not own[n].requires_grad}
    params = tree_leaves((leaves[0], {k: v for k, v in leaves[1].items() if k not in frozen}))
    by_hand = cls([p.requires_grad_() for p in params], **options)
    buffers = copy_tree(state.buffers)
    for _ in range(4):
        by_hand.zero_grad()
        for part in batch.chunk(microbatches):
            tensors = gb.generate(plan, gb.Genome(leaves[0], leaves[1], {})) | buffers
            loss = loss_fn(lambda x, tensors=tensors: functional_call(pnet, tensors, (x,)), part)
            (loss / microbatches).backward()
            buffers = {k: tensors[k].detach() for k in buffers}
        by_hand.step()
        state, _ = step(state, batch)
    torch.testing.assert_close(trained(state), copy_tree(leaves), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state.buffers, buffers, rtol=1e-6, atol=1e-6)


@EACH
def test_donation_gives_the_same_values(name: str) -> None:
    kept, batch = step_of(name, optimizer=ADAM)
    donating, _ = step_of(name, optimizer=ADAM, donate=True)
    expected, losses = run(kept, kept.init(2), batch)
    state, found = run(donating, donating.init(2), batch)
    assert same_bits((state, found), (expected, losses))
    places = [leaf.data_ptr() for leaf in tree_leaves(trained(state))]
    state, _ = donating(state, batch)
    assert [leaf.data_ptr() for leaf in tree_leaves(trained(state))] == places


@given(st.floats(1e-3, 1.0), st.integers(0, 5))
def test_clipping_scales_the_gradient_to_the_norm(clip: float, seed: int) -> None:
    pnet, plan, _ = small(gb.periodic(2))
    batch = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
    free, clipped = (
        gb.make_train_step(plan, pnet, loss_fn, gb.torch_optimizer(torch.optim.SGD, lr=1.0), clip_norm=c)
        for c in (None, clip)
    )
    state = free.init(seed)
    (a, info_a), (b, info_b) = free(state, batch), clipped(state, batch)

    def moved(new: gb.TrainState) -> Tensor:
        pairs = zip(tree_leaves(trained(new)), tree_leaves(trained(state)), strict=True)
        return torch.cat([(x - y).flatten() for x, y in pairs])

    assert torch.equal(info_a.grad_norm, info_b.grad_norm)
    torch.testing.assert_close(info_a.grad_norm, moved(a).norm())
    factor = min(1.0, clip / (float(info_a.grad_norm) + 1e-6))
    torch.testing.assert_close(moved(b), moved(a) * factor, rtol=1e-9, atol=1e-12)


@EACH
def test_a_step_is_a_pure_function_of_state_and_batch(name: str) -> None:
    animal = ZOO[name]
    pnet = animal.pnet()
    batch = animal.batch(dtype_of(pnet))
    step = gb.make_train_step(animal.plan(pnet), pnet, loss_fn, ADAM)
    states = [step.init(4)]
    for _ in range(2):
        states.append(step(states[-1], batch)[0])
    picture, random = photograph(pnet), torch.get_rng_state()
    for state in states:
        before = copy_tree((state, batch))
        first = step(state, batch)
        torch.rand(7)  # Whatever else draws random numbers has no say.
        random_now = torch.get_rng_state()
        second = step(state, batch)
        assert torch.equal(torch.get_rng_state(), random_now)
        assert same_bits(first, second) and same_bits((state, batch), before)
        assert first[1].finite and bool(first[1].loss.isfinite())
        leaves = tree_leaves(first)
        assert not any(x.requires_grad for x in leaves if isinstance(x, Tensor))
        assert optree.tree_structure(first[0]) == optree.tree_structure(state)  # pyright: ignore[reportArgumentType]
        assert first[0].step == state.step + 1 and first[0].seed == 4
        assert (first[0].step.dtype, first[0].seed.dtype) == (torch.int64, torch.int64)
    assert same_bits(photograph(pnet), picture)
    assert not torch.equal(torch.get_rng_state(), random)  # The draws above, and nothing else.


def test_the_step_keeps_the_mode_that_the_pnet_had() -> None:
    pnet = ZOO["dropout"].pnet().eval()
    step = gb.make_train_step(ZOO["dropout"].plan(pnet), pnet, loss_fn, gb.torch_optimizer(torch.optim.SGD, lr=0.0))
    pnet.train()
    _, losses = run(step, step.init(), ZOO["dropout"].batch())
    assert len({float(loss) for loss in losses}) == 1


def test_frozen_direct_parameters_stay() -> None:
    step, batch = step_of("frozen", optimizer=gb.torch_optimizer(torch.optim.SGD, lr=0.1, weight_decay=0.1))
    state = step.init()
    assert not any("direct" in name for name in state.opt.leaves)
    end, _ = run(step, state, batch)
    assert same_bits(end.direct, state.direct) and not same_bits(end.gnets, state.gnets)


def test_the_seed_is_all_that_init_depends_on() -> None:
    step, _ = step_of("mlp")
    torch.manual_seed(1)
    a = step.init(5)
    torch.manual_seed(2)
    assert same_bits(step.init(5), a) and not same_bits(step.init(6).gnets, a.gnets)
    assert step.init(2**63 - 1).seed == 2**63 - 1


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW, torch.optim.NAdam])
def test_a_device_chooses_as_the_processor_does(
    cls: type[torch.optim.Optimizer], donate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where reading costs, both states are computed and one is chosen, without a number read back."""
    optimizer = gb.torch_optimizer(cls, lr=0.1)

    def states_of() -> list[Any]:
        step, good = step_of("conv_bn", optimizer=optimizer, donate=donate)
        states, state = [], step.init(seed=0)
        for batch in (good, good * float("nan"), good):
            state, info = step(state, batch)
            assert isinstance(info.finite, Tensor) and bool(info.finite) is bool(batch.isfinite().all())
            states.append(copy_tree((state.gnets, state.direct, state.buffers, state.opt.leaves, state.step)))
        return states

    read = states_of()
    monkeypatch.setattr("gbfunc.train.step._READ", set[str]())
    assert same_bits(states_of(), read)


def test_a_copy_of_what_holds_a_step_has_that_step() -> None:
    step, _ = step_of("mlp")
    assert deepcopy({"step": step})["step"] is step


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"microbatches": 0}, "microbatches must be an int >= 1, got 0"),
        ({"microbatches": True}, "microbatches must be an int >= 1, got True"),
        ({"clip_norm": math.nan}, "clip_norm must be a number > 0 or None, got nan"),
        ({"amp": torch.float32}, "amp must be None, torch.bfloat16 or torch.float16, got torch.float32"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite must be .*'skip'.*'raise'.*got 'ignore'"),
        ({"kernel": "fast"}, "kernel must be .*'auto'.*got 'fast'"),
        ({"lazy": "always"}, "lazy must be .*'auto'.*got 'always'"),
        ({"remat": True}, "remat must be .*'layer'.*got True"),
        ({"compile": True, "microbatches": 2}, "compile=True needs microbatches=1 and remat='none'"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        step_of("mlp", **options)


def test_a_p_net_that_was_cast_after_its_plan_was_made_is_refused() -> None:
    pnet = mlp()
    plan, genome = (made := gb.make_plan(pnet, gb.periodic(2))), gb.init_genome(made, pnet)
    words = "cast after its plan was made: expected '0.weight' in float32, got bfloat16"
    for use in (
        lambda: gb.make_train_step(plan, pnet, loss_fn, SGD),
        lambda: gb.materialize(plan, genome, pnet),
        lambda: gb.GenomeModule(plan, pnet),
        lambda: gb.init_genome(plan, pnet),
    ):
        use()
        pnet.bfloat16()
        with pytest.raises(ValueError, match=words):
            use()
        pnet.float()


def test_a_buffer_that_no_file_holds_is_refused_before_it_is_trained() -> None:
    pnet = mlp()
    pnet.register_buffer("counts", torch.zeros(3, dtype=torch.uint16))
    with pytest.raises(ValueError, match="counts must have a dtype of genome files .*, got uint16"):
        gb.make_plan(pnet, gb.periodic(2))


def test_an_aux_whose_tensors_are_not_seen_is_refused() -> None:
    class Hidden:
        def __init__(self, out: Tensor) -> None:
            self.out = out

    step, batch = step_of("mlp", lambda net, batch: (loss_fn(net, batch), {"a": Hidden(net(batch))}))
    with pytest.raises(ValueError, match="aux has a Hidden with tensors: give them as a dict"):
        step(step.init(0), batch)


def test_what_does_not_fit_together_is_refused_at_once() -> None:
    pnet = mlp()
    plan = ZOO["mlp"].plan(pnet)
    with pytest.raises(ValueError, match="the plan was made for another p-net"):
        gb.make_train_step(plan, nn.Linear(6, 7), loss_fn, SGD)
    with pytest.raises(ValueError, match=r"wrapped in DataParallel.*pass the module inside it \(\.module\)"):
        gb.make_train_step(plan, nn.DataParallel(pnet), loss_fn, SGD)
    with pytest.raises(TypeError, match=r"optimizer must come from gb.torch_optimizer\(.*\), got SGD"):
        gb.make_train_step(plan, pnet, loss_fn, torch.optim.SGD(pnet.parameters(), 0.1))  # pyright: ignore
    with pytest.raises(TypeError, match="no option 'clip': did you mean clip_norm"):
        gb.make_train_step(plan, pnet, loss_fn, SGD, clip=1.0)
    swapped = gb.make_train_step(plan, pnet, lambda batch, net: net(batch[0]).mean(), SGD)
    with pytest.raises(TypeError, match=r"loss_fn must take \(net, batch\), in this order: 'tuple' object is"):
        swapped(swapped.init(), (torch.ones(2, 3), torch.ones(2)))
    step, other = gb.make_train_step(plan, pnet, loss_fn, SGD), step_of("conv1d")[0]
    with pytest.raises(ValueError, match="the genome does not fit the plan: missing .*unknown"):
        step(other.init()._replace(direct={}), ZOO["mlp"].batch())


@pytest.mark.parametrize("compile", [False, True])
def test_a_buffer_that_a_forward_gives_another_shape_is_refused_with_the_cure(
    compile: bool, graphs_alone: None, tmp_path: Path
) -> None:
    class Growing(nn.Sequential):
        places: Tensor

        def forward(self, x: Tensor) -> Tensor:
            if self.places.shape[0] < len(x):
                self.places = torch.arange(len(x), dtype=x.dtype)
            return super().forward(x) + self.places[: len(x), None]

    torch.manual_seed(0)
    torch._dynamo.reset()
    pnet, batch = Growing(nn.Linear(4, 3)).double(), torch.randn(5, 4, dtype=torch.float64)
    pnet.register_buffer("places", torch.zeros(0, dtype=torch.float64), persistent=False)
    plan = gb.make_plan(pnet, gb.periodic(2))
    step = gb.make_train_step(plan, pnet, loss_fn, SGD, compile=compile)
    cure = r"places is \(5,\), expected \(0,\).*run it once, on the longest input, before gb.make_plan"
    with pytest.raises(ValueError, match=cure):
        step(step.init(), batch)
    if not compile:
        many = gb.population(step, 2)
        with pytest.raises(ValueError, match=cure):
            many(many.init(), batch)
    module = gb.GenomeModule(plan, pnet)
    module(batch)
    with pytest.raises(ValueError, match=cure):
        gb.save(tmp_path / "never.genome", plan, module.to_genome())
    assert not [*tmp_path.iterdir()]
    pnet(batch)
    plan = gb.make_plan(pnet, gb.periodic(2))
    step = gb.make_train_step(plan, pnet, loss_fn, SGD, compile=compile)
    state, first = step(step.init(), batch)
    assert step(state, batch)[1].loss < first.loss


def test_a_buffer_that_a_forward_gives_another_dtype_is_refused() -> None:
    class Counting(nn.Sequential):
        count: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.count = self.count + 0.5
            return super().forward(x)

    pnet = Counting(nn.Linear(4, 3))
    pnet.register_buffer("count", torch.tensor(0))
    step = gb.make_train_step(gb.make_plan(pnet), pnet, loss_fn, SGD)
    with pytest.raises(ValueError, match="the dtype torch.int64 of the buffer 'count', got torch.float32"):
        step(step.init(), torch.randn(5, 4))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
def test_reentrant_checkpoints_are_refused() -> None:
    class Inside(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            return checkpoint(super().forward, input, use_reentrant=True)

    pnet = Inside(*ZOO["dropout"].pnet().children())
    step = gb.make_train_step(gb.make_plan(pnet, gb.periodic(2)), pnet, loss_fn, SGD)
    with pytest.raises(ValueError, match="nor from a torch.utils.checkpoint with use_reentrant=True"):
        step(step.init(), ZOO["dropout"].batch())


def test_defaults_of_torch_change_no_genome_and_no_step() -> None:
    pnet, x = mlp(), torch.ones(8, 6)
    plan = gb.make_plan(pnet, gb.periodic(2))
    states = []
    for device, dtype in (("cpu", torch.float32), ("meta", torch.float64)):
        with torch_defaults(device, dtype):
            step = gb.make_train_step(plan, pnet, loss_fn, SGD)
            states.append(step(step.init(seed=3), x)[0])
    assert same_bits(*(state[:3] for state in states))


@pytest.mark.parametrize(
    "kind", ["learns", "learns, few rows", "constant", "labels", "without targets", "constant, no pair"]
)
def test_a_loss_of_a_constant_prediction_is_said(kind: str) -> None:
    pnet = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    plan, generator = gb.make_plan(pnet, gb.periodic(features=4)), torch.Generator().manual_seed(0)
    x = torch.randn(3 if "few" in kind else 32, 8, generator=generator)
    y = (x[:, :3] * 2).argmax(1)
    batch: Any = {"x": x, "labels": y} if kind == "labels" else (x, y, y) if kind == "constant, no pair" else (x, y)

    def loss_fn(net: Any, batch: Any) -> Tensor:
        x, y = (batch["x"], batch["labels"]) if isinstance(batch, dict) else batch[:2]
        logits = net(x) if "learns" in kind or kind == "without targets" else net(0 * x)
        return logits.square().mean() if kind == "without targets" else nn.functional.cross_entropy(logits, y)

    step = gb.make_train_step(plan, pnet, loss_fn, gb.torch_optimizer(torch.optim.Adam, lr=1e-2), donate=True)
    state, said = step.init(), []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i in range(202):
            state, _ = step(state, batch)
            said += [i] * (len(told) - len(said))
    assert said == ([200] if kind in ("constant", "labels") else [])
    assert all("is as large as that of a constant prediction" in str(one.message) for one in told)
