"""Pure optimizers against torch's own: equal to a hand-written loop, and nothing given is changed."""

from typing import Any, NamedTuple

import optree
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gbfunc as gb
from gbfunc.train.optimizers import Optimizer, OptState
from gbfunc.trees import flatten_tree
from tests.support.trees_equal import copy_tree, same_bits

OPTIM: Any = torch.optim  # Muon is not in every torch.
TREES: Any = optree


class Case(NamedTuple):
    name: str
    options: dict[str, Any] = {}

    @property
    def cls(self) -> Any:
        return getattr(OPTIM, self.name)


ELEMENTWISE = [
    Case("SGD"),
    Case("SGD", {"momentum": 0.9, "dampening": 0.5}),
    Case("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    Case("SGD", {"momentum": 0.9, "maximize": True, "foreach": False}),
    Case("Adam"),
    Case("Adam", {"amsgrad": True, "betas": (0.8, 0.9), "weight_decay": 0.1}),
    Case("Adam", {"foreach": True, "maximize": True, "weight_decay": 0.1}),
    Case("AdamW"),
    Case("AdamW", {"fused": False, "eps": 1e-4}),
    Case("NAdam"),
    Case("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    Case("RAdam"),
    Case("Adamax", {"weight_decay": 0.1}),
    Case("Adagrad", {"initial_accumulator_value": 0.3, "lr_decay": 0.1}),
    Case("Adadelta"),
    Case("RMSprop", {"momentum": 0.9, "centered": True}),
    Case("Rprop", {"maximize": True}),
    Case("ASGD", {"t0": 1}),
    Case("ASGD", {"foreach": True, "weight_decay": 0.1}),
]
MIXING = [Case("Adafactor"), Case("Adafactor", {"foreach": True, "weight_decay": 0.1})]
MIXING += [Case("Muon"), Case("Muon", {"nesterov": False, "weight_decay": 0.5})] if hasattr(OPTIM, "Muon") else []
CASES = ELEMENTWISE + MIXING
REFUSED = ("LBFGS", "SparseAdam", "Optimizer")

ROLES = {"codes": "code", "phase": "code", "amplitude": "linear", "mix": "linear", "bias": "direct", "emb": "direct"}
SHAPES = {"codes": (3, 4, 2), "phase": (3,), "amplitude": (3, 5), "mix": (2, 3, 4), "bias": (5,), "emb": (4, 3)}

cases = st.sampled_from(CASES)


def ids(case: Case) -> str:
    return "-".join([case.name, *(f"{k}={v}" for k, v in case.options.items())])


def normal(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {k: torch.randn(shape, generator=rng, dtype=dtype) for k, shape in SHAPES.items()}


def schedule(step: int) -> float:
    return 0.1 / (1 + step)


def run(optimizer: Optimizer, steps: int, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, OptState]:
    params = normal(0, dtype)
    state = optimizer.init(params, ROLES)
    for step in range(steps):
        params, state = optimizer.update(normal(step + 1, dtype), state, params, ROLES, **options)
    return params, state


def in_layout(t: Tensor, layout: str) -> Tensor:
    if layout == "reversed":
        dims = tuple(reversed(range(t.ndim)))
        return t.permute(dims).contiguous().permute(dims)
    if layout == "strided":
        return t.repeat_interleave(2, dim=-1)[..., ::2]
    return t


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", ELEMENTWISE, ids=ids)
def test_equals_a_hand_written_loop(case: Case, dtype: torch.dtype) -> None:
    own: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.05} if case.name != "Rprop" else {"lr": 0.02}
    params, _ = run(gb.torch_optimizer(case.cls, lr=schedule, direct=own, **case.options), 6, dtype)

    expected = normal(0, dtype)
    direct = {"params": [expected[k] for k in SHAPES if ROLES[k] == "direct"], **own}
    stacked = {"params": [expected[k] for k in SHAPES if ROLES[k] != "direct"]}
    reference = case.cls([stacked, direct], lr=schedule(0), **case.options)
    for step in range(6):
        reference.param_groups[0]["lr"] = schedule(step)
        for k, g in normal(step + 1, dtype).items():
            expected[k].grad = g
        reference.step()
    for k in SHAPES:
        torch.testing.assert_close(params[k], expected[k].detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", MIXING, ids=ids)
def test_classes_that_mix_numbers_act_on_each_tile(case: Case) -> None:
    params, _ = run(gb.torch_optimizer(case.cls, lr=schedule, **case.options), 5)
    for k, start in normal(0).items():
        grads = [normal(step + 1)[k] for step in range(5)]
        units = (
            [(start, grads)] if ROLES[k] == "direct" else [(start[i], [g[i] for g in grads]) for i in range(len(start))]
        )
        for p, unit_grads in units:
            muon_refuses = case.name == "Muon" and p.ndim != 2
            decay = {k: v for k, v in case.options.items() if k == "weight_decay"}
            adamw = torch.optim.AdamW([p], lr=0.1, fused=True, **decay)
            reference = adamw if muon_refuses else case.cls([p], **case.options)
            for step, g in enumerate(unit_grads):
                reference.param_groups[0]["lr"] = schedule(step)
                p.grad = g
                reference.step()
        torch.testing.assert_close(params[k], start, rtol=1e-6, atol=1e-7)


@given(cases, st.lists(st.sampled_from(["plain", "reversed", "strided"]), min_size=4, max_size=4), st.booleans())
def test_pure_whatever_the_layout(case: Case, layouts: list[str], requires_grad: bool) -> None:
    optimizer = gb.torch_optimizer(case.cls, lr=schedule, **case.options)
    params, state = run(optimizer, 2)
    grads = normal(9)
    plain = optimizer.update(grads, state, params, ROLES)
    # A tensor of the state may be laid out as its leaf no longer is: files and other devices keep no strides.
    given_params = {k: in_layout(p, layouts[0]).detach().requires_grad_(requires_grad) for k, p in params.items()}
    given_grads = {k: in_layout(g, layouts[1]) for k, g in grads.items()}
    given_state = TREES.tree_map(lambda t: in_layout(t, layouts[2]) if t.ndim else t, state)
    inputs = (given_grads, given_state, given_params)
    before = copy_tree(inputs)
    versions = [t._version for t in TREES.tree_leaves(inputs)]

    first = optimizer.update(*inputs, ROLES)
    again = optimizer.update(*inputs, ROLES)

    assert same_bits(TREES.tree_map(Tensor.detach, inputs), before)
    assert versions == [t._version for t in TREES.tree_leaves(inputs)]
    assert all(p.grad is None for p in given_params.values())
    assert same_bits(first, again)
    kept = {t.untyped_storage().data_ptr() for t in TREES.tree_leaves(inputs)}
    for t in TREES.tree_leaves(first):
        assert not t.requires_grad and t.grad is None and t.grad_fn is None
        assert t.untyped_storage().data_ptr() not in kept
    for got, expected in zip(TREES.tree_leaves(first), TREES.tree_leaves(plain), strict=True):
        torch.testing.assert_close(got, expected)
    donated = optimizer.update(*copy_tree(before), ROLES, donate=True)
    for got, expected in zip(TREES.tree_leaves(donated), TREES.tree_leaves(plain), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_donation_reuses_buffers_and_changes_no_number(case: Case) -> None:
    optimizer = gb.torch_optimizer(case.cls, lr=schedule, **case.options)
    assert same_bits(run(optimizer, 4, donate=True), run(optimizer, 4))
    params, state = run(optimizer, 1)
    params["bias"].requires_grad_()
    buffers = {k: p.data_ptr() for k, p in params.items()}
    new, _ = optimizer.update(normal(5), state, params, ROLES, donate=True)
    assert {k: p.data_ptr() for k, p in new.items()} == buffers
    assert not any(p.requires_grad for p in new.values())


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_state_is_a_pytree_of_tensors_with_a_fixed_structure(case: Case) -> None:
    optimizer = gb.torch_optimizer(case.cls, lr=schedule, **case.options)
    states = [run(optimizer, steps)[1] for steps in (0, 1, 3)]
    for steps, state in zip((0, 1, 3), states, strict=True):
        assert TREES.tree_structure(state) == TREES.tree_structure(states[0])
        assert list(state.leaves) == list(SHAPES)
        leaves, reference = TREES.tree_leaves(state), TREES.tree_leaves(states[0])
        assert all(isinstance(t, Tensor) for t in leaves)
        assert [(t.shape, t.dtype, t.device) for t in leaves] == [(t.shape, t.dtype, t.device) for t in reference]
        assert state.step.dtype == torch.int64 and int(state.step) == steps
    # Tensors that share memory safetensors refuses to write.
    written = flatten_tree(states[2])
    assert safetensors.torch.load(safetensors.torch.save(written)).keys() == written.keys()


@pytest.mark.parametrize("case", ELEMENTWISE, ids=ids)
def test_leaves_of_several_dtypes_step_as_they_would_alone(case: Case) -> None:
    optimizer = gb.torch_optimizer(case.cls, lr=schedule, **case.options)

    def draw(seed: int) -> dict[str, Tensor]:
        return {k: x.double() if k in ("phase", "emb") else x for k, x in normal(seed).items()}

    params = draw(0)
    state = optimizer.init(params, ROLES)
    for step in range(3):
        params, state = optimizer.update(draw(step + 1), state, params, ROLES)
    for k in SHAPES:
        alone = {k: draw(0)[k]}
        own = optimizer.init(alone, ROLES)
        for step in range(3):
            alone, own = optimizer.update({k: draw(step + 1)[k]}, own, alone, ROLES)
        torch.testing.assert_close((alone[k], own.leaves[k]), (params[k], state.leaves[k]), rtol=3e-7, atol=3e-7)


@given(cases)
def test_goes_on_from_a_copied_state_with_its_names_in_another_order(case: Case) -> None:
    optimizer = gb.torch_optimizer(case.cls, lr=schedule, **case.options)
    params, state = run(optimizer, 2)
    other = state._replace(leaves={k: dict(reversed(state.leaves[k].items())) for k in sorted(state.leaves)})
    params_other = {k: params[k] for k in sorted(params)}
    expected, _ = optimizer.update(normal(7), state, params, ROLES)
    got, _ = optimizer.update(normal(7), other, params_other, ROLES)
    assert list(got) == sorted(SHAPES)
    assert same_bits(got, {k: expected[k] for k in got})


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_no_leaves_and_empty_leaves(case: Case) -> None:
    optimizer = gb.torch_optimizer(case.cls, lr=0.1, **case.options)
    params, state = optimizer.update({}, optimizer.init({}, {}), {}, {})
    assert params == {} and state.leaves == {} and int(state.step) == 1
    empty, roles = {"w": torch.zeros(0, 2, 2), "v": torch.zeros(2, 0)}, {"w": "code", "v": "direct"}
    state = optimizer.init(empty, roles)
    for _ in range(2):
        empty, state = optimizer.update(empty, state, empty, roles)
    assert empty["w"].shape == (0, 2, 2) and empty["v"].shape == (2, 0)


def test_each_role_takes_its_own_options() -> None:
    optimizer = gb.torch_optimizer(
        torch.optim.SGD,
        lr=1.0,
        code={"lr": lambda step: 0.5 * (step == 0)},
        linear={"maximize": True},
        direct={"lr": 0.25},
    )
    params = {k: torch.zeros(2) for k in "abc"}
    roles = {"a": "code", "b": "linear", "c": "direct"}
    grads = {k: torch.ones(2) for k in params}
    state = optimizer.init(params, roles)
    for _ in range(2):
        params, state = optimizer.update(grads, state, params, roles)
    assert [float(params[k][0]) for k in "abc"] == [-0.5, 2.0, -0.5]


def test_every_class_of_torch_has_a_verdict() -> None:
    classes = {k for k in OPTIM.__all__ if isinstance(getattr(OPTIM, k), type)}
    assert classes == {case.name for case in CASES} | set(REFUSED)
