"""The planner: bytes and memory as ranks count them, large cases in seconds, and what cannot be."""

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn

import gbfunc as gb
from gbfunc.parallel.pipeline_order import in_flight, stages_of
from gbfunc.parallel.planner import DeviceSpec
from gbfunc.parallel.planner_costs import Model, RankLayout
from gbfunc.tasks.pnets.gpt import GPT
from notebooks.results.schedules import pipeline_order
from tests.support.pipeline_cases import Blocks, changed_later, unet
from tests.support.planner_cases import AXES, LAYOUTS, make_case
from tests.support.ranks import run_ranks
from tests.support.tensor_cases import next_token
from tests.support.versions import needs_pipelines, with_pipelines

CASES = with_pipelines(LAYOUTS, *(name for name, options in LAYOUTS.items() if "pipeline" in options))


@lru_cache
def measured() -> list[dict[str, Any]]:
    return run_ranks(4, "planner_cases:run_layouts", arguments={"names": list(LAYOUTS)}, timeout=300)


@lru_cache
def planned(name: str) -> Any:
    options = dict(LAYOUTS[name])
    pnet, plan, batch = make_case()
    model = Model(plan, pnet, batch, next_token, None, options.pop("lazy", "auto"), 2)
    sizes, schedule = {axis: options.pop(axis, 1) for axis in AXES}, options.pop("pipeline_schedule", None)
    return model.footprint(RankLayout(sizes, schedule=schedule, **options))


def busiest(name: str, what: str) -> Any:
    results = [result[name] for result in measured()]
    assert not any(isinstance(result, str) for result in results), results
    if what != "sent":
        return max(result[what] for result in results)
    axes = {axis for result in results for axis in result["sent"]}
    return {axis: max(result["sent"].get(axis, 0) for result in results) for axis in axes}


@pytest.mark.process
@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_that_ranks_send_and_store(name: str) -> None:
    memory, sent, *_ = planned(name)
    assert sent == pytest.approx(busiest(name, "sent"), rel=1e-3)
    assert memory["genome"] == pytest.approx(busiest(name, "genome"), rel=1e-3)
    assert memory["optimizer"] == pytest.approx(busiest(name, "optimizer"), rel=1e-3)
    assert sum(memory.values()) == pytest.approx(busiest(name, "live"), rel=0.1)


@pytest.mark.process
def test_ten_thousand_ranks_are_planned() -> None:
    with torch.device("meta"):
        pnet = GPT(50304, 1024, 24, 19200, 80, 76800)
    plan = gb.make_plan(pnet, gb.periodic(64), include=["tokens"])
    assert plan.pnet_params > 1e11
    device = DeviceSpec(flops=4e14, bandwidth=2e12, link=5e10, memory=80e9, latency=1e-5)
    batch = torch.empty((10_000, 1025), dtype=torch.int64, device="meta")
    found = gb.plan_parallel(plan, pnet, batch, ranks=10_000, device=device, loss_fn=next_token)
    assert found.fits and all(p.peak <= 80e9 for p in found.fits)
    assert [p.seconds for p in found.fits] == sorted(p.seconds for p in found.fits)


def test_layouts_that_cannot_be_are_refused_with_a_reason() -> None:
    pnet, plan, batch = make_case()
    found = gb.plan_parallel(plan, pnet, batch, ranks=6, loss_fn=next_token, device=DeviceSpec(memory=1e9))
    reason = dict(found.refused)["--mesh tensor=3"]
    assert reason == "'blocks.0.qkv', heads: 4 cannot be split over 3 tensor ranks, 1, 2, 4 would fit"
    tiny = gb.plan_parallel(plan, pnet, batch, ranks=2, loss_fn=next_token, device=DeviceSpec(memory=1e4))
    assert not tiny.fits
    one = gb.plan_parallel(plan, pnet, batch[:15], ranks=1, loss_fn=next_token)
    assert [p.layout.microbatches for p in one.fits] == [1], "one rank takes equal microbatches"
    few = gb.plan_parallel(plan, pnet, batch[:2], ranks=4, loss_fn=next_token)
    assert dict(few.refused)["--mesh data=4"] == "4 shards of a batch of 2 rows"
    assert "needs" in tiny.refused[0][1] and "do not" in tiny.report()


@needs_pipelines
def test_pipelines_that_cannot_be_are_refused_with_a_reason() -> None:
    pnet, plan, batch = make_case()
    found = gb.plan_parallel(plan, pnet, batch, ranks=6, loss_fn=next_token, device=DeviceSpec(memory=1e9))
    assert dict(found.refused)["--mesh pipeline=6 --pipeline gpipe"] == "6 stages of 4 blocks"
    odd = gb.plan_parallel(plan, pnet, batch[:15], ranks=2, loss_fn=next_token, microbatches=5)
    assert {p.layout.schedule for p in odd.fits} == {None, "gpipe", "1f1b", "zbv"}
    uneven = gb.plan_parallel(plan, pnet, batch[:15], ranks=4, loss_fn=next_token, microbatches=4)
    reason = dict(uneven.refused)["--mesh data=2,pipeline=2 --pipeline gpipe"]
    assert reason == "no number of microbatches from 2 on divides 7.5 rows"


@needs_pipelines
def test_what_skips_a_stage_is_counted_or_refused() -> None:
    batch = torch.zeros(8, 6, dtype=torch.int64)

    def planned(*made_of: Any) -> Any:
        pnet = Blocks(*made_of)
        return gb.plan_parallel(gb.make_plan(pnet), pnet, batch, ranks=2, loss_fn=next_token, microbatches=2)

    (found,) = (p for p in planned(unet).fits if p.layout.schedule == "gpipe")
    # The embedding, and the sum of the third block and its skip, for 5 words of 6 numbers.
    assert found.sent["pipeline"] == 8 * 2 * 5 * 6 * 4
    refused = dict(planned(changed_later).refused)["--mesh pipeline=2 --pipeline gpipe"]
    assert "one stage changes the buffer 'count' and another one uses it" in refused


def test_a_forward_that_needs_values_is_no_raw_error() -> None:
    pnet = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 2, enable_nested_tensor=False)
    mask = nn.Transformer.generate_square_subsequent_mask(4, device=torch.device("meta"))
    with pytest.raises(ValueError, match="on the meta device, where tensors have no values, got: Tensor.item"):
        gb.plan_parallel(
            gb.make_plan(pnet), pnet, torch.zeros(4, 4, 8), ranks=2, loss_fn=lambda net, x: net(x, mask=mask).sum()
        )


def test_a_device_is_read_as_it_is_written_or_refused() -> None:
    device = DeviceSpec(flops=1e12, latency=0.0)
    assert DeviceSpec.from_json(device.to_json()) == device
    for text in ("[]", "{", '{"speed": 1}'):
        with pytest.raises(ValueError, match="a device must be a JSON object with flops, bandwidth"):
            DeviceSpec.from_json(text)
    wrong: dict[str, Any] = {"flops": 0.0, "link": -1.0, "memory": float("nan"), "latency": True}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"{name} of a device must be"):
            DeviceSpec(**{name: value})


class Backwards(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed([*self.children()]):
            x = layer(x)
        return x


@needs_pipelines
def test_layers_that_run_in_another_order_are_planned_without_a_pipeline() -> None:
    pnet = Backwards(nn.Linear(8, 8), nn.Linear(8, 8))
    found = gb.plan_parallel(gb.make_plan(pnet, gb.periodic(2)), pnet, torch.zeros(4, 8), ranks=2)
    assert {p.layout.sizes["pipeline"] for p in found.fits} == {1}
    assert "there are styles for" in dict(found.refused)["--mesh tensor=2"]
    assert "no list of layers that run in their order" in dict(found.refused)["--mesh pipeline=2 --pipeline gpipe"]


@needs_pipelines
@pytest.mark.parametrize("order", ["gpipe", "1f1b", "interleaved"])
def test_microbatches_in_flight_are_those_of_the_order(order: Any) -> None:
    for ranks, microbatches in ((1, 3), (2, 4), (4, 12)):
        for rank, stages in enumerate(stages_of(order, ranks)):
            actions = pipeline_order(order, rank, ranks, microbatches)
            assert len(actions) == 2 * len(stages) * microbatches
            live = [sum({"F": 1, "B": -1}[a.op] for a in actions[:n]) for n in range(len(actions) + 1)]
            assert max(map(sum, in_flight(order, rank, ranks, microbatches))) == max(live)
