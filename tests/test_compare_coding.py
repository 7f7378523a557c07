"""Pruned and quantised nets: what is coded comes back, in as few bytes as it should; quantisation against torch's."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gbfunc.lab.compare.base import Problem, in_use, restore, state_of
from gbfunc.tasks import TASKS
from gbfunc.tasks.pnets import find_pnet
from notebooks.results.coded import Levels, decode, encode, nearest_steps, to_levels, vector_levels
from notebooks.results.rivals import RIVALS as METHODS

MATRICES = st.tuples(st.integers(1, 9), st.integers(1, 9), st.floats(0, 1), st.integers(0, 2**31))


def sparse(rows: int, cols: int, density: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, cols, generator=generator)
    return values * (torch.rand(rows, cols, generator=generator) < density)


def levels_of(weight: torch.Tensor, bits: int, by_row: bool = False) -> Levels:
    rows = weight.reshape(len(weight) if by_row else 1, -1)
    return to_levels(weight, nearest_steps(rows, bits), bits)


@settings(deadline=None, max_examples=40)
@given(first=MATRICES, second=MATRICES, bits=st.sampled_from([4, 5]), by_row=st.booleans(), thin=st.booleans())
def test_levels_come_back_from_files(first: tuple, second: tuple, bits: int, by_row: bool, thin: bool) -> None:
    state = {"0.weight": sparse(*first), "0.bias": sparse(1, 5, 0.5, 0)[0], "norm": torch.randn(4)}
    state |= {"n": torch.ones(2).long(), "2.weight": sparse(*second)}
    coded = {name: levels_of(state[name], bits, by_row) for name in ("0.weight", "0.bias", "2.weight")}
    rows = {name: len(of.steps) for name, of in coded.items()}
    back = decode(encode(state, coded, {"rows": 0}, thin), state, rows, bits, thin)
    assert list(back) == list(state) and torch.equal(back["n"], state["n"])
    assert torch.equal(back["norm"], vector_levels(state["norm"]).values())
    assert all(torch.equal(back[name], of.values()) for name, of in coded.items())


def test_the_code_is_about_as_short_as_its_entropy() -> None:
    n, density = 300 * 400, 0.05
    weight = sparse(300, 400, density, 0)
    positions = n * -(density * math.log2(density) + (1 - density) * math.log2(1 - density))
    coded = levels_of(weight, 5)
    entries = int(coded.levels.count_nonzero())
    # Signs, and sizes in at most 4 bits each.
    plain = (positions + 5 * entries) / 8
    assert len(encode({"0.weight": weight}, {"0.weight": coded}, sparse=True)) < plain + 100
    # Normal levels are not all as likely: they take fewer bytes than their bits.
    normal = sparse(64, 64, 1.0, 0)
    assert 0.8 * 64 * 64 < len(encode({"w": normal}, {"w": levels_of(normal, 8)})) < 0.95 * 64 * 64
    # Columns that are never used cost next to nothing.
    weight[:, 200:] = 0
    assert len(encode({"0.weight": weight}, {"0.weight": levels_of(weight, 5)}, sparse=True)) < 0.55 * plain + 200


def test_norms_in_use_are_scales_and_shifts() -> None:
    task = TASKS["digits"]()
    pnet = find_pnet("resnet20", task.interface, {"width": 2})
    net, x = pnet.build(0), task.val.x[:20]
    for _ in range(3):
        net.train()(torch.randn_like(x) + x)
    state = state_of(net)
    fewer = in_use(net)
    assert not [name for name in fewer if "running" in name or "tracked" in name] and fewer.keys() < state.keys()
    assert all(torch.equal(fewer[name], t) for name, t in state.items() if t.ndim > 1)
    again = restore(pnet.build(1), fewer)
    assert torch.allclose(again(x), net.eval()(x), atol=1e-4)


@pytest.mark.parametrize("name", ["int8", "int4", "pruned"])
def test_training_for_the_rounding_fills_the_budget_and_learns(name: str) -> None:
    task = TASKS["digits"]()
    task = task.with_pnet(find_pnet("mlp", task.interface, {"hidden": (100,), "bandwidth": 3.0}))
    problem = Problem(task, 400, 1_600, torch.float32, replace(task.recipe(400), epochs=4))
    method = METHODS[name]
    settings = max(
        method.candidates(problem), key=lambda s: (s["lr"], len(s.get("pnet", {"hidden": "1"})["hidden"]) == 1)
    )
    made = method.train(problem, settings, 0)
    assert 0.85 * 1_600 < len(made.data) <= 1_600
    assert task.evaluate(method.load(made.data, task), task.val)["accuracy"] > 0.8
