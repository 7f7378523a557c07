"""Fused kernels in every dtype, classes that torch does not ship, schedules; states that do not fit are refused."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler

import gbfunc as gb
from gbfunc.train.optimizers import OptState
from tests.support.trees_equal import copy_tree, same_bits

OPTIM: Any = torch.optim
ROLES = {"w": "code", "b": "direct", "more": "direct"}


class Lion(torch.optim.Optimizer):
    """A class that torch does not ship, after Chen et al. (2023); it changes the gradient in place."""

    def __init__(self, params: Any, lr: float = 1e-4, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(calls=torch.tensor(0), rate=torch.tensor(1.0), momentum=torch.zeros_like(p))
                state["calls"] += 1
                state["rate"] *= 0.5
                p.grad.add_(p, alpha=group["weight_decay"])
                update = (0.9 * state["momentum"] + 0.1 * p.grad).sign()
                p.sub_(update, alpha=group["lr"] * float(1 + state["calls"] * state["rate"]))
                state["momentum"].lerp_(p.grad, 0.01)


class Plain(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])
        self.remember()

    def remember(self) -> None:
        pass


class InAttribute(Plain):
    def remember(self) -> None:
        self.calls += 1


class InGroup(Plain):
    def remember(self) -> None:
        self.param_groups[0]["k"] += 1


class InNumber(Plain):
    def remember(self) -> None:
        state = self.state[self.param_groups[0]["params"][0]]
        state["calls"] = state.get("calls", 0) + 1


def params_and_grads(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    first, second = ({"w": torch.randn(2, 3, generator=rng), "b": torch.randn(3, generator=rng)} for _ in range(2))
    return first, second


@pytest.mark.parametrize("cls", [Lion, Plain, type("MyAdam", (torch.optim.Adam,), {})])
def test_a_class_that_torch_does_not_ship_is_pure_and_equal_to_its_own_loop(cls: Any) -> None:
    options: dict[str, Any] = {} if cls is Plain else {"weight_decay": 0.1}
    optimizer = gb.torch_optimizer(cls, lr=0.1, **options)
    params, _ = params_and_grads(0)
    expected = copy_tree(params)
    state = optimizer.init(params, ROLES)
    reference = cls(expected.values(), lr=0.1, **options)
    for step in range(1, 6):
        _, grads = params_and_grads(step)
        before = copy_tree((grads, state, params))
        new = optimizer.update(grads, state, params, ROLES)
        assert same_bits((grads, state, params), before)
        params, state = new
        for k, g in copy_tree(grads).items():
            expected[k].grad = g
        reference.step()
        assert same_bits(params, {k: p.detach() for k, p in expected.items()})


SCHEDULES: list[tuple[Any, dict[str, Any]]] = [
    (lr_scheduler.OneCycleLR, {"pct_start": 0.3}),
    (lr_scheduler.OneCycleLR, {"total_steps": 20, "cycle_momentum": False}),
    (lr_scheduler.CyclicLR, {"base_lr": 0.3, "max_lr": 1.0, "step_size_up": 3, "cycle_momentum": False}),
    (lr_scheduler.CosineAnnealingLR, {"T_max": 9, "eta_min": 0.01}),
    (lr_scheduler.CosineAnnealingWarmRestarts, {"T_0": 4}),
    (lr_scheduler.LinearLR, {"start_factor": 0.1, "total_iters": 5}),
    (lr_scheduler.LambdaLR, {"lr_lambda": lambda step: 1 / (1 + step)}),
]


@pytest.mark.parametrize(("cls", "options"), SCHEDULES)
def test_a_schedule_is_what_torch_does_step_by_step(cls: Any, options: dict[str, Any]) -> None:
    steps, lr = 12, 0.3
    one_cycle = {"max_lr": lr, "total_steps": steps, "cycle_momentum": False}
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr, momentum=0.9)
    reference = cls(optimizer, **((one_cycle if cls is lr_scheduler.OneCycleLR else {}) | options))
    schedule = gb.torch_schedule(cls, lr, steps, **options)
    for step in range(steps):
        assert schedule(step) == optimizer.param_groups[0]["lr"]
        optimizer.step()
        if step < steps - 1:
            reference.step()
    assert schedule(steps) == schedule(10**9) == schedule(steps - 1)


def options_error(**options: Any) -> Callable[[], Any]:
    return lambda: gb.torch_optimizer(**({"cls": torch.optim.AdamW, "lr": 0.1} | options))


def adam_state(step: int, leaves: Any = None, like: Tensor | None = None) -> OptState:
    params = {"w": torch.ones(2) if like is None else like}
    state = gb.torch_optimizer(torch.optim.Adam, lr=0.1).init(params, {"w": "direct"})
    return state._replace(step=torch.tensor(step), leaves=state.leaves if leaves is None else leaves)


def update_error(**changed: Any) -> Callable[[], Any]:
    params = {"w": torch.ones(2)}
    roles = {"w": "direct"}
    optimizer = gb.torch_optimizer(torch.optim.Adam, lr=lambda step: 0.1 - step)
    given_: dict[str, Any] = {"grads": params, "state": optimizer.init(params, roles), "params": params, "roles": roles}
    return lambda: optimizer.update(**(given_ | changed))


def init_error(cls: Any) -> Callable[[], Any]:
    return lambda: gb.torch_optimizer(cls, lr=0.1).init(params_and_grads(0)[0], ROLES)


def schedule_error(**changed: Any) -> Callable[[], Any]:
    return lambda: gb.torch_schedule(**({"scheduler_cls": lr_scheduler.OneCycleLR, "lr": 0.1, "steps": 5} | changed))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (init_error(InAttribute), ValueError, "InAttribute must keep everything that changes"),
        (init_error(InGroup), ValueError, "InGroup must keep everything that changes"),
        (init_error(InNumber), TypeError, "state of InNumber must be tensors, got calls of type int"),
        (schedule_error(scheduler_cls=torch.optim.SGD), TypeError, "scheduler_cls must be a subclass of LRScheduler"),
        (schedule_error(scheduler_cls=lr_scheduler.ReduceLROnPlateau), TypeError, "metrics"),
        (schedule_error(steps=0), ValueError, "steps must be an int >= 1, got 0"),
        (schedule_error(lr=-0.1), ValueError, "lr must be finite and >= 0, got -0.1"),
        (schedule_error(cycle_momentum=True), ValueError, "only the learning rate"),
        (options_error(cls=torch.optim.LBFGS), ValueError, "LBFGS.*closure"),
        (options_error(cls=torch.optim.Optimizer), TypeError, "must be a subclass of torch.optim.Optimizer"),
        (options_error(cls="adam"), TypeError, "Optimizer, got an object of str: pass torch.optim.Adam"),
        (options_error(lr=-1.0), ValueError, "lr must be finite and >= 0, got -1.0"),
        (options_error(lr="fast"), TypeError, "lr of all leaves must be a number or a function"),
        (options_error(lr=lambda step: -1.0), ValueError, "got -1.0 at step 0"),
        (options_error(direct={"lr": -2.0}), ValueError, "got -2.0"),
        (options_error(direct=0.1), TypeError, "direct must be a dict of options"),
        (options_error(momentum=0.9), ValueError, "AdamW refuses the options of all leaves.*momentum.*betas"),
        (options_error(code={"betas": (2.0, 0.9)}), ValueError, "AdamW refuses the options of code leaves.*beta"),
        (options_error(fused=True, foreach=True), ValueError, "cannot be .True. together"),
        (options_error(differentiable=True), ValueError, "no graph"),
        (update_error(grads={}), ValueError, r"grads do not fit params: missing \['w'\]"),
        (update_error(grads={"w": torch.ones(1)}), ValueError, r"w is \(1,\), expected \(2,\)"),
        (update_error(grads={"w": torch.ones(2).double()}), ValueError, "w is .*float64, expected .*float32"),
        (update_error(grads={"w": torch.ones(2, device="meta")}), ValueError, "w is meta, expected cpu"),
        (update_error(roles={}), ValueError, "role of leaf 'w' must be one of .*got None"),
        (update_error(state={}), TypeError, "state must be an OptState .* got dict"),
        (update_error(state=adam_state(0, {})), ValueError, "does not fit Adam and the parameters: missing .*exp_avg"),
        (update_error(state=adam_state(1)), ValueError, "got -0.9 at step 1"),
        *(
            (update_error(state=adam_state(1, like=other)), ValueError, "does not fit Adam and the parameters: .*w/exp")
            for other in (torch.ones(1), torch.ones(3), torch.ones(2).double())
        ),
    ],
)
def test_clear_errors(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_tile_needs_a_leading_dimension() -> None:
    optimizer = gb.torch_optimizer(torch.optim.Adafactor, lr=0.1)
    with pytest.raises(ValueError, match="'w' of role 'code' must have a leading dimension of tiles"):
        optimizer.init({"w": torch.tensor(1.0)}, {"w": "code"})


CLASSES = [k for k in OPTIM.__all__ if isinstance(getattr(OPTIM, k), type)]
TAKES_FUSED = [k for k in CLASSES if "fused" in inspect.signature(getattr(OPTIM, k)).parameters]
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
    "Adam": [{"amsgrad": True, "weight_decay": 0.01}],
    "AdamW": [{"amsgrad": True}],
    "Adagrad": [{"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1}],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("asked", [{}, {"fused": True}], ids=["default", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", TAKES_FUSED)
def test_an_update_equals_the_plain_step_in_every_dtype(name: str, dtype: Any, asked: Any, device: str) -> None:
    cls = getattr(OPTIM, name)
    for options in ({}, {"maximize": True}, *OPTIONS.get(name, [])):
        rng = torch.Generator().manual_seed(0)
        start = {str(n): torch.randn(n, generator=rng, dtype=torch.float64) for n in (1, 7, 16, 40, 1000)}
        start["transposed"] = torch.randn(8, 24, generator=rng, dtype=torch.float64).T
        start["strided"] = torch.randn(6, 40, generator=rng, dtype=torch.float64)[:, ::2]
        params = {k: p.to(device, dtype) for k, p in start.items()}
        expected = {k: p.clone() for k, p in params.items()}
        reference = cls(expected.values(), lr=0.1, fused=False, **options)
        roles = dict.fromkeys(params, "direct")
        optimizer = gb.torch_optimizer(cls, lr=0.1, **options, **asked)
        state = optimizer.init(params, roles)
        for _ in range(3):
            # Away from 0: the plain step squares small gradients to 0 in float16, and divides 0 by 0.
            grads = {k: (0.1 + torch.rand(p.shape, generator=rng)).to(device, dtype) for k, p in params.items()}
            for k, p in expected.items():
                p.grad = grads[k]
            reference.step()
            params, state = optimizer.update(grads, state, params, roles)
        for k, p in expected.items():
            assert not torch.equal(p, start[k].to(p))
            # Fused kernels round a half type once per step, the plain ones after every operation.
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(params[k], p.detach(), rtol=4 * eps, atol=4 * eps)


def test_a_stateless_class_needs_the_names_of_its_leaves() -> None:
    optimizer = gb.torch_optimizer(torch.optim.SGD, lr=0.1)
    params = {"w": torch.ones(2), "b": torch.ones(3)}
    with pytest.raises(ValueError, match=r"SGD .* expected the leaves \['b', 'w'\], got \['w'\]"):
        optimizer.update(params, optimizer.init({"w": params["w"]}, ROLES), params, ROLES)
