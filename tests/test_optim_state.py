"""Fused kernels equal the plain step in every dtype; a state that does not fit is refused before the step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gbfunc as gb
from tests.support.trees_equal import copy_tree, same_bits

OPTIM: Any = torch.optim
ROLES = {"w": "code", "b": "direct", "more": "direct"}


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
    if name == "Adagrad" and device == "cuda" and asked:
        pytest.skip("its CUDA kernel is younger than the oldest torch that is supported")
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
        optimizer = gb.torch_optimizer(cls, 0.1, **options, **asked)
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


OTHER: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "fewer tiles": lambda params: {k: p[:-1] for k, p in params.items()},
    "more tiles": lambda params: {k: torch.cat([p, p]) for k, p in params.items()},
    "another dtype": lambda params: {k: p.double() for k, p in params.items()},
    "fewer leaves": lambda params: {"w": params["w"]},
    "more leaves": lambda params: {**params, "more": torch.ones(1)},
}


@pytest.mark.parametrize("other", OTHER)
@pytest.mark.parametrize("name", [k for k in CLASSES if k not in ("LBFGS", "SparseAdam", "Optimizer")])
def test_the_state_of_other_parameters_is_refused_before_the_step(name: str, other: str) -> None:
    options: Any = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = gb.torch_optimizer(getattr(OPTIM, name), 0.1, **options)
    params = {"w": torch.ones(9, 40, 40), "b": torch.ones(3)}
    grads, before = copy_tree(params), copy_tree(params)
    state = optimizer.init(OTHER[other](params), ROLES)
    for step in (0, 1):
        with pytest.raises(ValueError, match=f"the state does not fit {name} and the parameters: "):
            optimizer.update(grads, state._replace(step=torch.tensor(step)), params, ROLES, donate=True)
        assert same_bits((params, grads), (before, before))


def test_a_stateless_class_needs_the_names_of_its_leaves() -> None:
    optimizer = gb.torch_optimizer(torch.optim.SGD, 0.1)
    params = {"w": torch.ones(2), "b": torch.ones(3)}
    with pytest.raises(ValueError, match=r"SGD .* expected the leaves \['b', 'w'\], got \['w'\]"):
        optimizer.update(params, optimizer.init({"w": params["w"]}, ROLES), params, ROLES)


def test_the_state_of_another_class_is_refused() -> None:
    params = {"w": torch.ones(2, 4), "b": torch.ones(3)}
    adam, adamw, mine = (
        gb.torch_optimizer(cls, 0.1)
        for cls in (torch.optim.Adam, torch.optim.AdamW, type("MyAdam", (torch.optim.Adam,), {}))
    )
    for optimizer, name in ((adam, "Adam"), (mine, "another class")):
        state = optimizer.init(params, ROLES)
        for given in (state, optimizer.update(params, state, params, ROLES)[1]):
            with pytest.raises(ValueError, match=f"the state must be one of AdamW, got one of {name}: make a new one"):
                adamw.update(params, given, params, ROLES)
    # Options may change at any time.
    other = gb.torch_optimizer(torch.optim.Adam, 0.7, code={"lr": 0.2}, betas=(0.5, 0.6))
    other.update(params, adam.init(params, ROLES), params, ROLES)
