"""Pipelines: stages on ranks train as the whole does in one process, in float64, alone and with the other axes.

By default half of the cases run on one of the smaller meshes each, and two on 8 ranks; `pytest -m slow` has all.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations, cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.parallel.chain import Chain, balanced_stages, find_blocks, trace_chain
from gbfunc.tasks.pnets.gpt import GPT
from tests.support import pipeline_cases, pipeline_nets
from tests.support.rank_cases import TYPES
from tests.support.ranks import PATIENCE, launch, run_ranks
from tests.support.tensor_cases import ADAMW, PIPELINES, Skip, language_model, next_token
from tests.support.versions import needs_pipelines
from tests.test_distributed import assert_equal

pytestmark = needs_pipelines

MESHES = {
    "2 stages": {"pipeline": 2},
    "2 stages, data 2": {"pipeline": 2, "data": 2},
    "2 stages, tensor 2": {"pipeline": 2, "tensor": 2},
    "2 stages, tensor 2, data 2": {"pipeline": 2, "tensor": 2, "data": 2},
}
# Of seven kinds of p-net each is here with every second schedule.
TURNS = dict(zip([*PIPELINES][::2], cycle(("2 stages", "2 stages, data 2", "2 stages", "2 stages, tensor 2"))))
ON_8_RANKS = ("gpt 1f1b periodic", "gpt zbv gnet")


def is_slow(axes: str, name: str) -> bool:
    """Whether the default run leaves a case out; every schedule and kind of p-net meets the smaller meshes."""
    return TURNS.get(name) != axes and not (len(MESHES[axes]) == 3 and name in ON_8_RANKS)


@lru_cache
def by_ranks(axes: str, slow: bool) -> list[dict[str, Any]]:
    """All cases of a mesh on all its ranks, those of the default run or the others: a rank takes seconds to start."""
    names, sizes = [name for name in PIPELINES if is_slow(axes, name) == slow], MESHES[axes]
    return run_ranks(
        2 ** len(sizes), "tensor_cases:run_cases", arguments={"names": names, **sizes}, timeout=300 if slow else 100
    )


@lru_cache
def by_one(name: str) -> Any:
    return PIPELINES[name](None)


@pytest.mark.process
@pytest.mark.parametrize(
    ("axes", "name"),
    [
        pytest.param(axes, name, id=f"{axes}-{name}", marks=[pytest.mark.slow] if is_slow(axes, name) else [])
        for axes in MESHES
        for name in PIPELINES
    ],
)
def test_stages_train_as_the_whole(axes: str, name: str) -> None:
    if name.startswith(("gpt2", "llama")):
        pytest.importorskip("transformers")
    for result in by_ranks(axes, is_slow(axes, name)):
        assert_equal(result[name], by_one(name), 1e-9)


@pytest.mark.process
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_in_a_pipelined_step_is_named_by_all_others(victim: int, tmp_path: Path) -> None:
    # Torch's own timeout is half an hour: who waits for that is ended before.
    arguments = {"victim": victim, "timeout": 15.0 * PATIENCE}
    ended = launch(4, "tensor_cases:die_in_a_pipeline", tmp_path, 100, arguments)
    for rank in set(range(4)) - {victim}:
        assert ended[rank][0] == 0, ended[rank]
        words = torch.load(tmp_path / f"result-{rank}.pt", weights_only=False)
        assert f"rank {rank} of 4" in words, words
        assert f"rank {victim}" in words.partition("another rank died")[2], words


def chain_of(pnet: nn.Module, x: Tensor, stages: int = 2) -> Chain:
    return trace_chain(pnet, find_blocks(pnet, stages), lambda net: net(x.to("meta")))


def test_blocks_and_their_operations() -> None:
    pnet = GPT(11, 6, 3, 8, 2, 16)
    chain = chain_of(pnet, torch.zeros(2, 6, dtype=torch.int64))
    assert chain.names == ("blocks.0", "blocks.1", "blocks.2")
    tokens, width = 2 * 6, 8
    block = 2 * tokens * width * (3 * width + width + 2 * 16) + 2 * 2 * tokens * 6 * width
    assert chain.flops[:2] == (block, block) and chain.flops[2] == block + 2 * tokens * width * 11
    assert chain.places["tokens.weight"] == {-1, 2}  # The head is tied to it.
    assert chain.places["head.weight"] == chain.places["norm.weight"] == {2}
    assert chain.places["positions.weight"] == {0}  # Read between modules, for the first block.


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 4))
def test_spread_is_the_best_there_is(costs: list[int], stages: int) -> None:
    if stages > len(costs):
        return
    starts = balanced_stages(costs, stages)
    assert starts[0] == 0 and starts[-1] == len(costs) and len(starts) == stages + 1
    worst = max(sum(costs[a:b]) for a, b in pairwise(starts))
    cuts = combinations(range(1, len(costs)), stages - 1)
    assert worst == min(max(sum(costs[a:b]) for a, b in pairwise((0, *c, len(costs)))) for c in cuts)


def test_what_is_no_chain_is_refused() -> None:
    with pytest.raises(ValueError, match="a Linear has no list of 2 layers or more: name blocks by stages="):
        find_blocks(nn.Linear(2, 2), 2)
    with pytest.raises(ValueError, match="stages must name 1 blocks of one module"):
        find_blocks(Skip(), 2, ["blocks.1", "blocks.2"])
    with pytest.raises(ValueError, match=r"stages must be among \['blocks.0', .*got \['blocks.9'\]"):
        find_blocks(Skip(), 2, ["blocks.9"])
    shared = nn.Sequential(*[nn.Linear(3, 3)] * 3)
    with pytest.raises(ValueError, match="must run once each in their order"):
        trace_chain(shared, ["0", "1", "2"], lambda net: net(torch.zeros(2, 3, device="meta")))


@lru_cache
def by_two_ranks() -> list[dict[str, Any]]:
    return run_ranks(2, "pipeline_cases:run_cases", timeout=120)


@pytest.mark.process
@pytest.mark.parametrize("name", pipeline_cases.CASES)
def test_what_skips_a_stage_is_sent(name: str) -> None:
    """Gates, sorted places, masks, skips, tuples, changes in place, and losses of what earlier stages make."""
    if name.startswith(("t5", "gpt2")):
        pytest.importorskip("transformers")
    expected = pipeline_cases.CASES[name](None)
    for result in by_two_ranks():
        assert_equal(result[name], expected, 1e-9, equal_nan=name.startswith("stem"))


@pytest.mark.process
@pytest.mark.parametrize("name", pipeline_nets.REFUSED)
def test_what_cannot_be_sent_is_refused_by_name(name: str) -> None:
    for result in by_two_ranks():
        assert "in a pipeline" in result[name] and pipeline_nets.REFUSED[name][1] in result[name], result[name]


@pytest.mark.process
@pytest.mark.parametrize("name", pipeline_nets.UNPROVEN)
def test_what_the_trace_does_not_see_is_found_by_the_first_step(name: str) -> None:
    """Which compares its gradient with that of the whole p-net, whose random numbers are drawn alike."""
    words = {"dropout alone": "nothing", "a counter": "called again, it gives another gradient"}
    expected = words.get(name, "needs of an earlier one what that does not return")
    for result in by_two_ranks():
        assert expected in result[name], result[name]


@pytest.mark.process
@pytest.mark.parametrize("name", pipeline_nets.CHANGES)
def test_what_a_block_returns_otherwise_than_in_the_trace_is_refused(name: str) -> None:
    """Later stages know it from the trace alone."""
    first, second = run_ranks(2, "pipeline_cases:change", timeout=60, arguments={"name": name})
    assert "'blocks.0' must return in every microbatch what it did in the trace" in first, first
    assert "rank 1 of 2" in second, second


@pytest.mark.process
def test_a_backward_that_the_zero_bubble_schedule_cannot_divide_is_refused() -> None:
    said = run_ranks(2, "pipeline_cases:refused_by_zbv", timeout=60)
    assert any("take another pipeline= than 'zbv'" in words for words in said), said


@pytest.mark.process
def test_half_precision_is_that_of_one_process() -> None:
    for result in by_two_ranks():
        assert_equal(result["half"], pipeline_cases.half(None), 1e-3)


@pytest.mark.process
def test_ranks_of_a_pipeline_get_the_same_batch() -> None:
    for result in by_two_ranks():
        assert "must get the same batch: different from rank 0 are rank 1 in the batch" in result["another batch"]


@pytest.mark.process
def test_code_on_a_part_of_the_features_is_refused_in_a_pipeline_too() -> None:
    for words in run_ranks(4, "pipeline_cases:softmax_over_a_part", timeout=90):
        assert "code between layers gets a rank's part of the features" in words, words


@pytest.mark.process
def test_rows_of_a_pipeline_are_divided_by_its_microbatches_or_none() -> None:
    pnet = language_model("gpt", 4).double()
    plan = gb.make_plan(pnet, TYPES["periodic"], max_tile=10)
    step = gb.make_train_step(plan, pnet, next_token, ADAMW)
    _, info = step(step.init(3), torch.randint(0, 22, (4, 9), generator=torch.Generator().manual_seed(0)))
    for result in run_ranks(4, "tensor_cases:rows_in_a_pipeline", timeout=90):
        assert "4" in result["words"] and "3" in result["words"], result["words"]
        torch.testing.assert_close(result["loss"], info.loss, rtol=1e-12, atol=0.0)
        torch.testing.assert_close(result["norm"], info.grad_norm, rtol=1e-12, atol=0.0)
