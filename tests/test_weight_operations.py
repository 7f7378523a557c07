"""Whatever a forward does with a weight, every mode gives the loss and the gradients of the dense weight.

One test for each operation of the table and each mode of a training step: float64, a tolerance of 1e-9, and the oracle
of `tests/support/dense_oracle.py`. Where a step refuses a p-net it says so; it never trains it wrongly. By default each
operation has the default mode, lazy weights and one of the other modes in turn; the whole product is `pytest -m slow`.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from itertools import cycle
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

import gbfunc as gb
from tests.support.dense_oracle import Answer, assert_same, dense_answer, step_answer
from tests.support.operation_layers import LAYERS
from tests.support.operation_stock import STOCK
from tests.support.operations import READS, Operation

OPERATIONS: Mapping[str, Operation] = MappingProxyType({**READS, **LAYERS, **STOCK})
MODES: dict[str, dict[str, Any]] = {"default": {}, "dense": {"lazy": False}, "lazy": {"lazy": True}}
MODES |= {remat: {"remat": remat} for remat in ("generate", "layer")}
MODES |= {"microbatches": {"microbatches": 2}, "lazy_microbatches": {"lazy": True, "microbatches": 2}}
WALKS = {"named_parameters", "parameters_to_vector", "state_dict", "func_call_of_layer"}
"""Go through the parameters by name or number: a module that keeps factors has other ones."""
CHANGES = {"apply", "state_between_calls", "weight_kept_on_module", "calls_counted"}
"""What a forward may do with its own module, and a loss function with `net` may not, by the contract."""
ERRORS = (RuntimeError, TypeError, ValueError)
RANDOM = [name for name, operation in OPERATIONS.items() if operation.random]
CASES = [
    pytest.param(name, id=name, marks=[pytest.mark.slow] if operation.slow else [])
    for name, operation in OPERATIONS.items()
]


@cache
def planned(name: str) -> tuple[nn.Module, gb.Plan]:
    pnet = OPERATIONS[name].pnet()
    return pnet, OPERATIONS[name].plan(pnet, name)


@cache
def oracle(name: str, microbatches: int) -> Answer:
    operation = OPERATIONS[name]
    return dense_answer(
        planned(name)[1], operation.pnet(), operation.loss, operation.batch(), microbatches=microbatches
    )


def step_cases(always: tuple[str, ...], names: Iterable[str] = OPERATIONS) -> Any:
    cases, others = [], [mode for mode in MODES if mode not in always]
    for name, turn in zip(names, cycle(others)):
        for mode in MODES:
            slow = OPERATIONS[name].slow or mode not in (*always, turn)
            cases.append(pytest.param(name, mode, id=f"{name}-{mode}", marks=[pytest.mark.slow] if slow else []))
    return pytest.mark.parametrize(("name", "mode"), cases)


def check(name: str, mode: str, loss_fn: Callable[..., Any]) -> None:
    operation, options = OPERATIONS[name], MODES[mode]
    pnet, plan = planned(name)
    expected = oracle(name, options.get("microbatches", 1))
    with suppress(*(ERRORS if operation.may_refuse else ())):
        actual = step_answer(plan, pnet, loss_fn, operation.batch(), **options)
        assert_same(actual, expected, operation.tolerance)


@step_cases(("default", "lazy"))
def test_a_step_equals_the_dense_oracle(name: str, mode: str) -> None:
    check(name, mode, OPERATIONS[name].loss)


# Dynamo looks at the gradient of every tensor that it is given.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@step_cases((), [name for name in OPERATIONS if name not in CHANGES])
def test_the_loss_function_may_do_what_a_forward_does(name: str, mode: str) -> None:
    operation = OPERATIONS[name]

    def loss_fn(net: Any, batch: Any) -> Any:
        return operation.loss(lambda *args, **kwargs: operation.forward(net, *args, **kwargs), batch)

    check(name, mode, loss_fn)


@pytest.mark.parametrize("name", CASES)
def test_the_oracle_sees_the_weights(name: str) -> None:
    """Every ensemble gets a gradient that rounding cannot make: no comparison above is of zeros."""
    gradients = oracle(name, 1).gradients
    for ensemble in planned(name)[1].ensembles:
        largest = [float(g.abs().max()) for k, g in gradients.items() if k.startswith(f"gnets/{ensemble.name}/")]
        assert max(largest) > 1e-5


@pytest.mark.parametrize("name", [case for case in CASES if case.id not in WALKS])
def test_a_materialized_net_equals_the_dense_oracle(name: str) -> None:
    operation = OPERATIONS[name]
    # What a property multiplies out anew at each reading keeps no change, as in torch's parametrised modules.
    kept = name != "in_place_without_grad"
    pnet = operation.pnet()
    # Few enough factors for them to be kept.
    plan = operation.plan(pnet, hypernet=gb.low_rank(1), max_tile=8)
    genome = gb.init_genome(plan, pnet, 0)
    expected = dense_answer(plan, operation.pnet(), operation.loss, operation.batch()).loss
    for factored in (False, True) if kept else (False,):
        net = gb.materialize(plan, genome, pnet, factored=factored)
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(operation.train):
            with suppress(*(ERRORS if operation.may_refuse else ())):
                loss = operation.loss(net, operation.batch()).detach()
                torch.testing.assert_close(loss, expected, rtol=operation.tolerance, atol=operation.tolerance)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RANDOM)
def test_every_mode_draws_the_same_masks(name: str, mode: str) -> None:
    operation, options = OPERATIONS[name], MODES[mode]
    pnet, plan = planned(name)

    def answer(seed: int, **options: Any) -> Answer:
        return step_answer(plan, pnet, operation.unseeded, operation.batch(), seed=seed, **options)

    dense = {"lazy": False, "microbatches": options.get("microbatches", 1)}
    assert_same(answer(3, **options), answer(3, **dense), operation.tolerance)
