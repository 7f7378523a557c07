"""Schedules: the published rows exactly, laws of pipelines, torch's own orders, and errors."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gbfunc.parallel.pipeline_order import in_flight, stages_of
from notebooks.results.schedules import (
    PUZZLES,
    RECIPES,
    Action,
    Event,
    PipelineOrder,
    Schedule,
    ScheduleCosts,
    ScheduleKind,
    Timeline,
    make_schedule,
    pipeline_order,
    simulate,
)
from tests.support.versions import HAS_PIPELINES, needs_pipelines

# No time for messages and updates; forward takes as long as each half of backward.
COMPUTE = ScheduleCosts(backward=2.0, backward_input=1.0, backward_weight=1.0, send=0.0, receive=0.0, update=0.0)
PIPELINES: tuple[PipelineOrder, ...] = ("gpipe", "1f1b", "interleaved", "zbv") if HAS_PIPELINES else ("gpipe", "1f1b")


def run(kind: ScheduleKind, **sizes: Any) -> Timeline:
    return simulate(make_schedule(kind, **sizes))


def test_published_rows_are_exact() -> None:
    steps = 16.5, 16.5, 5.1, 19.9, 19.9, 66.9, 33.3, 15.5
    memory = 2_621_440, 1_966_080, 1_835_008, 2_752_512, 2_359_296, 3_145_728, 4_194_304, 966_656
    found = [run(kind, **sizes) for kind, (sizes, _) in PUZZLES.items()]
    assert tuple(round(one.steps, 9) for one in found) == steps
    assert tuple(round(one.peak_memory, 6) for one in found) == memory


@needs_pipelines
@given(st.integers(2, 6), st.integers(1, 4))
def test_bubbles_follow_their_laws(S: int, rounds: int) -> None:
    """(S - 1) / (S - 1 + M); the wait is halved if interleaved (Narayanan et al., 2021), a third or sixth in a V."""
    M = S * rounds
    sizes: dict[str, Any] = {"ranks": S, "microbatches": M, "costs": COMPUTE}
    assert run("gpipe", layers=S, **sizes).bubble == pytest.approx((S - 1) / (S - 1 + M))
    assert run("1f1b", layers=S, **sizes).bubble == pytest.approx((S - 1) / (S - 1 + M))
    for order, part in (("interleaved", 2), ("zbv", 3 if rounds == 1 else 6)):
        wait = (S - 1) / part
        assert run(order, layers=2 * S, **sizes).bubble == pytest.approx(wait / (wait + M))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [kind for kind, recipe in RECIPES.items() if recipe.gathers is None])
def test_generated_weights_are_never_sent_and_take_less_memory(kind: ScheduleKind) -> None:
    if kind in ("interleaved", "zbv") and not HAS_PIPELINES:
        pytest.skip("torch 2.7 has these orders")
    sizes: dict[str, Any] = {"ranks": 1 if kind in ("basic", "accumulation") else 4, "layers": 16}
    sizes["microbatches"] = 1 if RECIPES[kind].data_parallel else 4
    schedules = [make_schedule(kind, weights=w, **sizes) for w in ("remat", "generated", "stored")]  # pyright: ignore
    assert not any("weight" in e.tag for schedule in schedules[:2] for events in schedule.events for e in events)
    peaks = [simulate(schedule).peak_memory for schedule in schedules]
    assert peaks == sorted(peaks) and len({*peaks}) == 3


@given(st.sampled_from(PIPELINES), st.integers(1, 5), st.integers(1, 12))
def test_orders_do_everything_once(order: PipelineOrder, ranks: int, microbatches: int) -> None:
    if order == "interleaved":
        microbatches *= ranks
    for rank, stages in enumerate(stages_of(order, ranks)):
        ops = "FIW" if order == "zbv" else "FB"
        actions = pipeline_order(order, rank, ranks, microbatches)
        assert sorted(actions) == sorted(Action(op, s, i) for op in ops for s in stages for i in range(microbatches))
        if order != "zbv":
            live = [sum({"F": 1, "B": -1}[a.op] for a in actions[:n]) for n in range(len(actions) + 1)]
            assert max(map(sum, in_flight(order, rank, ranks, microbatches))) == max(live)


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("fast", {}, "expected a schedule of .*'zbv'.*, got 'fast'"),
        ("gpipe", {"ranks": 3}, "'gpipe' expects layers in multiples of its 3 stages, got .*'layers': 4"),
        ("interleaved", {"ranks": 2, "microbatches": 5}, "multiple of the number of rounds|torch >= 2.7"),
    ],
)
def test_schedules_that_cannot_be_made(kind: Any, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(kind, layers=4, **sizes)


def test_a_deadlock_is_one_clear_error() -> None:
    with pytest.raises(ValueError, match="deadlock: rank 1 waits in receive of x; 1 ranks have ended"):
        simulate(Schedule([[], [Event("receive", peer=0, tag="x")]], [{}, {}]))
