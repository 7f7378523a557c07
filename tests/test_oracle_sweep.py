"""Every p-net x hypernetwork x tiling x mode and option of a step, against dense generation, in float64.

The whole product is `pytest -m slow`, with one test for each plan; the default run takes a fixed sample. The oracle is
that of `tests/support/dense_oracle.py`; stochastic g-nets, whose noise only the step knows, are compared with the plain
step (`lazy=False, remat="none"`) instead.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import pytest
from torch import nn

import gbfunc as gb
from tests.support.dense_oracle import Answer, assert_same, dense_answer, step_answer
from tests.support.sweep_nets import HYPERNETS, NETS, OPTIONS, SETTINGS, TILINGS, Setting, sample
from tests.support.zoo import loss_fn

SAMPLE = sample(each=2)
COMPILED = [
    (Setting("mlp", "periodic", 2), {"lazy": False}),
    (Setting("mlp", "gnet", 0), {"lazy": True}),
    (Setting("conv2d", "low_rank", 3), {"lazy": True}),
    (Setting("residual", "periodic_shared", 2), {"lazy": "auto"}),
    (Setting("encoder", "low_rank", 0), {"lazy": True}),
    (Setting("tied", "xox", 2), {"lazy": False}),
]


@lru_cache(maxsize=8)
def planned(setting: Setting) -> tuple[nn.Module, gb.Plan]:
    pnet = setting.pnet()
    return pnet, setting.plan(pnet)


def step(setting: Setting, **options: Any) -> Answer:
    pnet, plan = planned(setting)
    return step_answer(plan, pnet, loss_fn, setting.batch(), **options)


@lru_cache(maxsize=8)
def expected(setting: Setting, microbatches: int) -> Answer:
    pnet, plan = planned(setting)
    if plan.stochastic:
        return step(setting, lazy=False, microbatches=microbatches)
    answer = dense_answer(plan, setting.pnet(), loss_fn, setting.batch(), microbatches=microbatches)
    assert max(float(g.abs().max()) for g in answer.gradients.values()) > 1e-4
    return answer


def check(setting: Setting, options: Mapping[str, Any]) -> None:
    assert_same(step(setting, **options), expected(setting, options.get("microbatches", 1)), setting.tolerance)


def test_the_sample_has_everything() -> None:
    settings, options = zip(*SAMPLE, strict=True)
    assert {s.net for s in settings} == set(NETS) and {s.hypernet for s in settings} == set(HYPERNETS)
    assert {s.tiling for s in settings} == set(range(len(TILINGS))) and set(options) == set(OPTIONS)


@pytest.mark.parametrize(("setting", "options"), SAMPLE, ids=str)
def test_sample(setting: Setting, options: str) -> None:
    check(setting, OPTIONS[options])


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_whole_product(setting: Setting) -> None:
    failures = []
    for name, options in OPTIONS.items():
        try:
            check(setting, options)
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}"[:300])
    assert not failures, f"{len(failures)} of {len(OPTIONS)}:\n" + "\n".join(failures)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")  # dynamo's
@pytest.mark.parametrize(("setting", "options"), COMPILED, ids=lambda x: f"lazy_{x['lazy']}" if "lazy" in x else str(x))
def test_compiled(setting: Setting, options: dict[str, Any]) -> None:
    check(setting, {**options, "compile": True})
