"""What a proof of many genomes must find although the first batch does not show it, and what it compares."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gbfunc as gb
from tests.support.forms import assert_close
from tests.test_many import INDEX, genomes_of, one_by_one
from tests.test_many_rows import Sorting, X, planned


class Asking(nn.Module):
    """Goes another branch where a question of all rows says so."""

    ask: Callable[[Tensor], Any]

    def __init__(self, ask: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.ask = nn.Linear(8, 8), nn.Linear(8, 4), ask

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(h.tanh() if self.ask(x) else -h)


QUESTIONS: dict[str, Callable[[Tensor], Any]] = {
    "any": lambda x: (x > 8).any(),
    "all": lambda x: (x < 8).all(),
    "count": lambda x: (x < 8).sum() == x.numel(),
    "first": lambda x: (x < 8)[0].all(),
    "flag": lambda x: (x[:, 0] < 8)[0],
    "equal": lambda x: torch.equal(x, x.clamp(max=8)),
    "allclose": lambda x: torch.allclose(x, x.clamp(max=8)),
    "list": lambda x: max(x[:, 0].tolist()) > 8,
    "counted list": lambda x: (x > 8).sum().tolist(),
    "array": lambda x: x.numpy().max() > 8,
    "as array": lambda x: np.max(np.asarray(x)) > 8,
    "exchanged array": lambda x: np.from_dlpack(x).max() > 8,
}


@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.filterwarnings("ignore:run one row after the other")
def test_rows_that_alone_go_another_branch(name: str) -> None:
    pnet, plan, genomes = planned(partial(Asking, QUESTIONS[name]), [])
    net, calm, wild = gb.materialize_many(plan, genomes, pnet), X.clamp(-3, 3), X.clamp(-3, 3)
    wild[1] = 9
    for x in (calm, wild + 9, calm, wild, wild.flip(0), calm):
        assert_close(net(INDEX, x), one_by_one(plan, genomes, pnet, INDEX, x)[0], 1e-10)


class Centred(nn.Module):
    """Takes the rows together where an input for all of them says so."""

    def __init__(self, ask: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.ask = nn.Linear(8, 8), nn.Linear(8, 4), ask

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(h - h.mean(0) if self.ask(t) else h)


@pytest.mark.parametrize(
    "ask",
    [
        lambda t: t > 1,
        lambda t: float(t) > 1,
        lambda t: (t > 1).any(),
        lambda t: t.tolist() > 1,
        lambda t: t.numpy() > 1,
        lambda t: torch.equal(t, torch.tensor(2)),
    ],
)
def test_an_input_for_all_rows_decides_a_branch(ask: Callable[[Tensor], Any]) -> None:
    pnet, plan, genomes = planned(partial(Centred, ask), [])
    net, nets = gb.materialize_many(plan, genomes, pnet), [gb.materialize(plan, g, pnet) for g in genomes]
    for t in map(torch.tensor, (0, 2, 0)):
        rows = [nets[i](X[b : b + 1], t) for b, i in enumerate(INDEX.tolist())]
        assert_close(net(INDEX, X, t), torch.cat(rows), 1e-10)


class Masked(nn.Module):
    """Leaves a mask out that masks nothing, in whichever way it is asked."""

    def __init__(self, ask: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.ask = nn.Linear(8, 8), nn.Linear(8, 4), ask

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.second(self.first(x) if self.ask(mask) else self.first(x).where(mask, 0))


@pytest.mark.parametrize("ask", [lambda m: m.all(), lambda m: m.sum() == m.numel(), lambda m: not (~m).any()])
def test_questions_that_spare_work_need_no_loop(ask: Callable[[Tensor], Any]) -> None:
    pnet, plan, genomes = planned(partial(Masked, ask), [])
    net, mask = gb.materialize_many(plan, genomes, pnet), torch.arange(8) < torch.tensor([[8], [3], [8], [1], [8]])
    nets = [gb.materialize(plan, g, pnet) for g in genomes]
    for m in (mask | True, mask, mask & False, mask.flip(0)):
        rows = [nets[i](X[b : b + 1], m[b : b + 1]) for b, i in enumerate(INDEX.tolist())]
        assert_close(net(INDEX, X, m), torch.cat(rows), 1e-10)
        assert net.row_wise == ["first", "second"] and not net.looped


ALONG: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda flags: flags.cumsum(0),
    "cummax": lambda flags: flags.cummax(0).values,
    "softmax": lambda flags: (99 * flags).softmax(0) * len(flags),
    "roll": lambda flags: flags.roll(1, 0),
    "flip": lambda flags: flags.flip(0),
}


@pytest.mark.parametrize("name", ALONG)
def test_what_goes_along_rows_is_found_before_it_shows(name: str) -> None:
    class Along(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) + ALONG[name]((x[:, :1] > 8).to(x)))

    pnet, plan, genomes = planned(Along, [])
    net, calm = gb.materialize_many(plan, genomes, pnet), X.clamp(-3, 3)
    for x in (calm, calm + 9 * (torch.arange(5) == 1)[:, None]):
        assert_close(net(INDEX, x), one_by_one(plan, genomes, pnet, INDEX, x)[0], 1e-10)


class Rolled(nn.Module):
    """Moves rows on in what it returns."""

    def __init__(self, last: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 4), last

    def forward(self, x: Tensor) -> Any:
        return self.last(self.second(self.first(x))[[*range(1, len(x)), 0]])


def test_objects_and_masked_outputs_are_compared() -> None:
    mask = torch.tensor([False, False, False, True])
    pnet, plan, genomes = planned(partial(Rolled, lambda y: y.masked_fill(mask, -1e9)), [])
    assert_close(
        gb.materialize_many(plan, genomes, pnet)(INDEX, X), one_by_one(plan, genomes, pnet, INDEX, X)[0], 1e-10
    )
    pnet, plan, genomes = planned(partial(Rolled, lambda y: SimpleNamespace(y=y)), [])
    with pytest.raises(TypeError, match="is a SimpleNamespace, of one row"):
        gb.materialize_many(plan, genomes, pnet)(INDEX, X)


@pytest.mark.filterwarnings("ignore:run one row after the other")
def test_autocast() -> None:
    pnet = Sorting().eval()
    plan = gb.make_plan(pnet, gb.periodic(1))
    genomes = genomes_of(plan, pnet)
    net, x = gb.materialize_many(plan, genomes, pnet), X.float()
    with torch.autocast("cpu", torch.bfloat16):
        out, rows = net(INDEX, x), one_by_one(plan, genomes, pnet, INDEX, x)[0]
    assert out.dtype == torch.bfloat16
    assert_close(out, rows, 2e-2)


@pytest.mark.filterwarnings("ignore:run one row after the other", "ignore::DeprecationWarning")
def test_compiled_calls_ask_too() -> None:
    pnet, plan, genomes = planned(partial(Asking, QUESTIONS["any"]), [])
    net = gb.materialize_many(plan, genomes, pnet)
    compiled: Any = torch.compile(lambda x: net(INDEX, x) + 1, backend="eager")
    wild = X.clamp(-3, 3)
    wild[1] = 9
    for x in (X.clamp(-3, 3), wild):
        rows = one_by_one(plan, genomes, pnet, INDEX, x)[0]
        assert_close(compiled(x), rows + 1, 1e-10)
        assert_close(torch.compile(net, backend="eager")(INDEX, x), rows, 1e-10)
