"""Checkpoints know the training that they are of, and hold whatever the loop must know."""

import math
import random
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import gbfunc as gb
from gbfunc.train.optimizers import Optimizer
from gbfunc.train.step import TrainStep
from tests.support.trees_equal import same_bits
from tests.support.zoo import loss_fn, mlp, step_of

PLAN = gb.make_plan(mlp(), gb.periodic(2), max_tile=4)


def step_with(optimizer: Optimizer, **options: Any) -> TrainStep:
    return gb.make_train_step(PLAN, mlp(), loss_fn, optimizer, **options)


def adam(lr: Any = 0.1, **options: Any) -> Optimizer:
    return gb.torch_optimizer(torch.optim.Adam, lr=lr, **options)


def one_cycle(steps: int, lr: float = 0.1) -> Any:
    return gb.torch_schedule(OneCycleLR, lr, steps)


def saved(folder: Path, step: TrainStep, extra: Any = None) -> gb.TrainState:
    state, _ = step(step.init(seed=3), step_of("mlp")[1])
    with gb.Checkpointer(folder, step) as checkpointer:
        checkpointer.save(state, extra)
    return state


LATE = gb.torch_schedule(StepLR, 0.1, 500, step_size=300)
OTHER = {
    "rate": (adam(0.1), adam(0.05), r"\(lr 0.1, now 0.05\)"),
    "length": (adam(one_cycle(100)), adam(one_cycle(101)), r"\(lr 0.004\d* at step 1 \(schedule \w{8}\), now 0.004"),
    "course": (adam(lambda i: 0.1 / (i + 1)), adam(lambda i: 0.1 / (i + 2)), r"lr 0.05 at step 1 .*now 0.0333333 at"),
    "late": (adam(LATE), adam(lambda i: 0.1), "lr 0.1 at step 1 .*, now 0.1 at"),
    "betas": (adam(), adam(betas=(0.8, 0.999)), r"\(betas \[0.9, 0.999\], now \[0.8, 0.999\]\)"),
    "decay": (adam(weight_decay=0.1), adam(), r"\(weight_decay 0.1, now 0.0\)"),
    "role": (adam(direct={"lr": 0.01}), adam(), r"\(direct.lr 0.01, now 0.1\)"),
}


@pytest.mark.parametrize(("before", "after", "words"), OTHER.values(), ids=OTHER)
def test_another_training_is_refused_unless_it_is_allowed(
    before: Optimizer, after: Optimizer, words: str, tmp_path: Path
) -> None:
    state, now = saved(tmp_path, step_with(before)), step_with(after)
    with pytest.raises(ValueError, match=f"step-00000001.safetensors cannot be .* with other options .*{words}"):
        gb.load_checkpoint(tmp_path, now, now.init())
    told: list[str] = []
    found = gb.load_checkpoint(tmp_path, now, now.init(), changed=told.append)
    assert same_bits(found.state, state) and len(told) == 1
    assert re.search(words.removeprefix(r"\(").removesuffix(r"\)"), told[0])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (adam(1, weight_decay=0), adam(1.0, weight_decay=0.0, betas=[0.9, 0.999], foreach=True)),
        (adam(one_cycle(50)), adam(one_cycle(50), fused=False)),
        (adam(direct={"lr": 0.1}), adam()),
    ],
)
def test_the_same_training_in_other_words_goes_on(before: Optimizer, after: Optimizer, tmp_path: Path) -> None:
    state, now = saved(tmp_path, step_with(before)), step_with(after, donate=True, microbatches=2)
    assert same_bits(gb.load_checkpoint(tmp_path, now, now.init()).state, state)


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    step = step_with(adam())
    extra: dict[Any, Any] = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "means": [torch.tensor([1.5, math.nan], dtype=torch.bfloat16), torch.zeros(0, 3)],
        "bits": b"\0\xff",
        3: {"by": {1: "one", (2, True): None}, "$type": "mine"},
        "order": OrderedDict(b=1.5, a=math.inf),
        "strided": torch.arange(6).reshape(2, 3).t(),
    }
    saved(tmp_path, step, extra)
    found: Any = gb.load_checkpoint(tmp_path, step, step.init()).extra
    assert found["python"] == extra["python"] and same_bits(found["torch"], extra["torch"])
    assert same_bits(found["means"], extra["means"]) and found["bits"] == b"\0\xff"
    assert found[3] == extra[3] and list(found) == list(extra)
    assert found["order"] == {"b": 1.5, "a": math.inf} and list(found["order"]) == ["b", "a"]
    assert torch.equal(found["strided"], extra["strided"])
