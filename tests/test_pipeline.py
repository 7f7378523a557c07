"""Pipelines: stages on ranks train as the whole does in one process, in float64, alone and with the other axes."""

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
from gbfunc.parallel.chain import balanced_stages, find_blocks, trace_chain
from gbfunc.tasks.pnets.gpt import GPT
from tests.support.pipeline_cases import CASES, REFUSED
from tests.support.rank_cases import TYPES
from tests.support.ranks import PATIENCE, launch, run_ranks
from tests.support.tensor_cases import ADAMW, PIPELINES, language_model, next_token
from tests.support.versions import needs_pipelines
from tests.test_distributed import assert_equal

pytestmark = needs_pipelines

MESHES: dict[str, dict[str, int]] = {
    "2 stages": {"pipeline": 2},
    "data 2": {"pipeline": 2, "data": 2},
    "tensor 2": {"pipeline": 2, "tensor": 2},
    "tensor 2, data 2": {"pipeline": 2, "tensor": 2, "data": 2},
}
TURNS = {**dict(zip(PIPELINES, cycle([*MESHES][:3]))), "gpt gnet zbv": "tensor 2, data 2"}


@lru_cache
def by_ranks(axes: str) -> list[dict[str, Any]]:
    names, sizes = [name for name in PIPELINES if TURNS[name] == axes], MESHES[axes]
    return run_ranks(2 ** len(sizes), "tensor_cases:run_cases", arguments={"names": names, **sizes}, timeout=300)


@pytest.mark.process
@pytest.mark.parametrize("name", PIPELINES)
def test_stages_train_as_the_whole(name: str) -> None:
    if name.startswith(("gpt2", "llama")):
        pytest.importorskip("transformers")
    expected = PIPELINES[name](None)
    for result in by_ranks(TURNS[name]):
        assert_equal(result[name], expected, 1e-9)


@pytest.mark.process
def test_a_rank_killed_in_a_pipelined_step_ends_all_others(tmp_path: Path) -> None:
    # Torch's own timeout is half an hour: who waits for that is ended before.
    arguments = {"victim": 2, "timeout": 15.0 * PATIENCE}
    ended = launch(4, "tensor_cases:die_in_a_pipeline", tmp_path, 100, arguments)
    for rank in (0, 1, 3):
        assert ended[rank][0] == 0, ended[rank]
        words = torch.load(tmp_path / f"result-{rank}.pt", weights_only=False)
        assert f"rank {rank} of 4" in words, words


def call(net: Any, x: Tensor) -> Any:
    return net(x)


def test_blocks_and_their_operations() -> None:
    pnet = GPT(11, 6, 3, 8, 2, 16)
    blocks = find_blocks(pnet, 2)
    chain = trace_chain(pnet, blocks, call, torch.zeros(2, 6, dtype=torch.int64, device="meta"))
    assert blocks == ("blocks.0", "blocks.1", "blocks.2")
    tokens, width = 2 * 6, 8
    block = 2 * tokens * width * (3 * width + width + 2 * 16) + 2 * 2 * tokens * 6 * width
    assert chain.flops == (block, block, block + 2 * tokens * width * 11)
    assert chain.places["tokens.weight"] == chain.places["head.weight"] == {-1, 2}  # They are tied.
    assert chain.places["norm.weight"] == {2} and chain.places["positions.weight"] == {-1}


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
    with pytest.raises(ValueError, match="a list of >= 2 layers, got a Linear: name blocks in stages="):
        find_blocks(nn.Linear(2, 2), 2)
    blocks = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(ValueError, match="stages must name 1 blocks of one module"):
        find_blocks(blocks, 2, ["0", "1"])
    with pytest.raises(ValueError, match=r"stages must be among \['0', .*got \['9'\]"):
        find_blocks(blocks, 2, ["9"])
    shared = nn.Sequential(*[nn.Linear(3, 3)] * 3)
    for pnet, names in ((shared, ["0", "1", "2"]), (blocks, ["1", "0"])):
        with pytest.raises(ValueError, match="must run in their order"):
            trace_chain(pnet, names, call, torch.zeros(2, 3))


@lru_cache
def by_two_ranks() -> list[dict[str, Any]]:
    return run_ranks(2, "pipeline_cases:run_cases", timeout=240)


@pytest.mark.process
@pytest.mark.parametrize("name", CASES)
def test_what_skips_a_stage_is_sent(name: str) -> None:
    """Gates, sorted places, masks, skips, tuples, changes in place, and losses of what earlier stages make."""
    if name.startswith(("t5", "bert", "masked")):
        pytest.importorskip("transformers")
    expected = CASES[name](None)
    for result in by_two_ranks():
        assert_equal(result[name], expected, 1e-3 if name == "half" else 1e-9)


@pytest.mark.process
def test_what_cannot_be_carried_is_refused_by_name() -> None:
    expected = {name: words for name, (_, words) in REFUSED.items()}
    expected["another batch"] = "must get the same batch: different from rank 0 are rank 1 in the batch"
    expected["another shape"] = "must get the same batch: different from rank 0 are rank 1 in shapes"
    expected["another dtype"] = 'in shapes ({"batch": "[8, 6], torch.int32"}, not {"batch": "[8, 6], torch.int64"})'
    for result in by_two_ranks():
        for name, words in expected.items():
            assert words in result[name], (name, result[name])
        assert isinstance(result["dropout"], dict), result["dropout"]


@pytest.mark.process
def test_layers_and_styles_that_stages_cannot_have_are_refused() -> None:
    assert any("another pipeline= than 'zbv'" in x for x in run_ranks(2, "pipeline_cases:words_of_zbv", timeout=90))
    for softmax, sequence in run_ranks(4, "pipeline_cases:words_over_tensor_ranks", timeout=180):
        assert "code between layers gets only this rank's part of the features" in softmax, softmax
        assert "or split along features, got SequenceParallel: torch's tracer takes no other" in sequence, sequence


@pytest.mark.process
def test_rows_of_a_pipeline_are_divided_by_its_microbatches_or_none() -> None:
    pnet = language_model("gpt", 4).double()
    plan = gb.make_plan(pnet, TYPES["periodic"], max_tile=10)
    step = gb.make_train_step(plan, pnet, next_token, ADAMW)
    _, info = step(step.init(3), torch.randint(0, 22, (4, 9), generator=torch.Generator().manual_seed(0)))
    for result in run_ranks(4, "tensor_cases:rows_in_a_pipeline", timeout=90):
        assert "microbatches=4 must divide" in result["words"] and "of (3, 9)" in result["words"], result["words"]
        torch.testing.assert_close(result["loss"], info.loss, rtol=1e-12, atol=0.0)
        torch.testing.assert_close(result["norm"], info.grad_norm, rtol=1e-12, atol=0.0)
