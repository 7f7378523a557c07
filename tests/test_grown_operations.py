"""What a loss function does with the layers of `net` equals the dense oracle, whose p-net does it in its forward."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest

from tests.support.dense_oracle import assert_same, step_answer
from tests.test_weight_operations import MODES, OPERATIONS, oracle, planned

# Torch scripts its decompositions for forward mode itself.
pytestmark = [
    # Dynamo looks at the gradient of every tensor that it is given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

CHANGES = {"apply", "state_between_calls", "weight_kept_on_module", "calls_counted"}
"""What a forward may do with its own module, and a loss function with `net` may not, by the contract."""


def step_cases() -> list[Any]:
    """Every operation in every mode, but for one in turn as slow."""
    cases = []
    for (name, operation), turn in zip(OPERATIONS.items(), cycle(MODES)):
        if name in CHANGES:
            continue
        for mode in MODES:
            marks = [pytest.mark.slow] if operation.slow or mode != turn else []
            cases.append(pytest.param(name, mode, id=f"{name}-{mode}", marks=marks))
    return cases


@pytest.mark.parametrize(("name", "mode"), step_cases())
def test_the_loss_function_may_do_what_a_forward_does(name: str, mode: str) -> None:
    operation, options = OPERATIONS[name], MODES[mode]

    def loss_fn(net: Any, batch: Any) -> Any:
        return operation.loss(lambda *args, **kwargs: operation.forward(net, *args, **kwargs), batch)

    pnet, plan = planned(name)
    try:
        actual = step_answer(plan, pnet, loss_fn, operation.batch(), **options)
    except (RuntimeError, TypeError, ValueError):
        if not (operation.refused or operation.may_refuse):
            raise
        return
    if not operation.refused:
        assert_same(actual, oracle(name, options.get("microbatches", 1)), operation.tolerance)
