"""Steps of quantisation by reverse water-filling (`steps`)."""

from __future__ import annotations

import math
from typing import Any

import torch

from gbfunc.plan.statistics import codable, coded, squares_of
from gbfunc.plan.step_stream import part_bits
from gbfunc.plan.steps import LARGEST, LEAST, MOST, OCTAVE, Seen, Steps, parts_of, quantise_part, shifts_of
from gbfunc.types import TensorMap

_BALANCE = math.log(2) / 12
"""A bit more halves `step^2` of two numbers in the loss's sum."""
_STATISTIC = -32
"""The largest index of a statistic's step, 1/16 of a deviation: nothing is trained around their rounding."""


def allocate(plan: Any, leaves: TensorMap, squares: TensorMap, bits: float, examples: int = 0) -> Steps:
    """Steps with which all integers take at most so many bits, or the largest ones.

    Args:
        plan: the plan.
        leaves: trained leaves on the CPU, and running statistics, where these shall be in codes, too.
        squares: mean squares of their gradients; leaves without any get the smallest steps.
        bits: of all integers.
        examples: of a batch, whose gradients these are; with them, a bit's weight is that at which a bit more, spent on
            smaller steps, lowers the loss as much.
    """
    # Far beyond what gradients of a training that goes well need: squares may have grown by a spike of the loss.
    low, high = -40.0, 88.0
    for _ in range(21):
        middle = (low + high) / 2
        if _steps_at(plan, leaves, squares, middle)[1] > bits:
            low = middle
        else:
            high = middle
    # The noise h step^2 / 24 of each number, with h the examples times the mean square of their mean gradient.
    # Bounded: after a spike of the gradients the bits' own would be the next one.
    rate = _BALANCE * examples * 4.0 ** min(high, 0.0)
    return Steps(_steps_at(plan, leaves, squares, high)[0].indices, rate)


def _steps_at(plan: Any, leaves: TensorMap, squares: TensorMap, log_noise: float) -> tuple[Steps, float]:
    """Steps of which each, times the root mean square of the gradient, is about 2^log_noise, and their bits."""
    parts = parts_of(plan, codable(plan, leaves))
    seen, indices, bits = Seen({}, {}), [], 0.0
    for part in parts:
        leaf = leaves[part.leaf]
        numbers = coded(part.leaf, leaf, seen.variances) if part.statistic else part.of(leaf)
        most = float(numbers.abs().max()) if leaf.numel() else 0.0
        least = LEAST if most == 0 or part.gain else math.ceil(OCTAVE * math.log2(most / LARGEST))
        index, coarsest = (_STATISTIC, _STATISTIC) if part.statistic else (least, MOST)
        found = squares_of(part.leaf, leaves, squares) if part.statistic else squares.get(part.leaf)
        if found is not None:
            shifts, alive = shifts_of(part, seen.gains, "cpu")
            # What the mean square would be, were all steps equal.
            even = (part.of(found).double() * torch.exp2(-shifts.double()))[alive.expand(part.shape)]
            mean = float(even.mean()) if even.numel() else 0.0
            index = coarsest if mean <= 0 else round(OCTAVE * (log_noise - math.log2(mean) / 2))
        indices.append(max(LEAST, least, min(coarsest, index)))
        bits += part_bits(quantise_part(part, leaf, indices[-1], seen)[0])
    return Steps.of(parts, indices), bits
