"""The diagnostic of a genome's update against dense weights and autograd."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import gbfunc as gb
from gbfunc.train.gradients.loss import noise_of
from gbfunc.train.optimizers import Optimizer
from gbfunc.train.step import TrainStep, step_seed

BATCH = torch.randn(16, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.drop = nn.Linear(12, 20, bias=False), nn.BatchNorm1d(20), nn.Dropout(0.3)
        self.down, self.again = nn.Linear(20, 12), nn.Linear(12, 20)
        self.again.weight = self.up.weight
        torch.nn.utils.parametrizations.weight_norm(self.down)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.tanh(self.norm(self.up(x))))
        return self.down(hidden + self.again(x))


def reconstruction(net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return F.mse_loss(net(x), x)


def make(hypernet: Any, optimizer: Optimizer) -> tuple[gb.Plan, nn.Module, TrainStep]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pnet = Tied().double()
    plan = gb.make_plan(pnet, hypernet)
    return plan, pnet, gb.make_train_step(plan, pnet, reconstruction, optimizer)


@pytest.mark.parametrize("hypernet", [gb.periodic(features=3), gb.stochastic(hidden=(4,))])
def test_cosines_of_dense_weights(hypernet: Any) -> None:
    plan, pnet, train_step = make(hypernet, gb.torch_optimizer(torch.optim.AdamW, lr=1e-2))
    first, _ = train_step(train_step.init(3), BATCH)
    second, _ = train_step(first, BATCH)
    found = gb.update_alignment(plan, pnet, reconstruction, first, second, BATCH)

    seed = step_seed(int(first.seed), int(first.step))
    noise = noise_of(plan, seed, first.direct["again.bias"])
    old, new = ({k: w.detach() for k, w in gb.generate(plan, s, noise=noise).items()} for s in (first, second))
    weights = {k: w.clone().requires_grad_() for k, w in old.items()}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        out = functional_call(pnet, {**weights, **{k: b.clone() for k, b in first.buffers.items()}}, (BATCH,))
    F.mse_loss(out, BATCH).backward()
    dots = squares = lengths = 0.0
    for name, weight in weights.items():
        assert weight.grad is not None
        moved, down = (new[name] - old[name]).flatten().tolist(), (-weight.grad).flatten().tolist()
        dot = math.fsum(a * b for a, b in zip(moved, down, strict=True))
        norms = [math.fsum(a * a for a in x) for x in (moved, down)]
        assert found.tensors[name] == pytest.approx(dot / math.sqrt(norms[0] * norms[1]), rel=1e-9)
        dots, squares, lengths = dots + dot, squares + norms[0], lengths + norms[1]
    assert found.tensors.keys() == weights.keys() and "again.weight" not in weights
    assert found.overall == pytest.approx(dots / math.sqrt(squares * lengths), rel=1e-9)


def test_what_does_not_move_has_no_direction() -> None:
    plan, pnet, train_step = make(gb.periodic(features=3), gb.torch_optimizer(torch.optim.SGD, lr=1e-2))
    pnet.get_parameter("down.bias").requires_grad_(False)
    state = train_step.init(0)
    found = gb.update_alignment(plan, pnet, reconstruction, state, state, BATCH)
    assert math.isnan(found.overall) and "down.bias" not in found.tensors and "again.bias" in found.tensors


def test_deltas_of_a_base() -> None:
    pnet = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 12)).double()
    plan = gb.make_plan(pnet, gb.periodic(features=2), base="own", target_modules=["0"])
    train_step = gb.make_train_step(plan, pnet, reconstruction, gb.torch_optimizer(torch.optim.SGD, lr=1e-3))
    state = train_step.init(0)
    after, _ = train_step(state, BATCH)
    found = gb.update_alignment(plan, pnet, reconstruction, state, after, BATCH)
    assert set(found.tensors) == {"0.weight"} and 0.0 < found.overall <= 1.0
