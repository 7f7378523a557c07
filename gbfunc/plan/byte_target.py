"""A target in bytes of the genome's file, which holds a header and buffers beside the parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gbfunc.plan.spec import Plan, genome_file_bytes

_BYTE_ROUNDS = 16
_LADDER = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
"""Where to look for the smallest file, in multiples of the fewest parameters."""


class TargetTooSmall(ValueError):
    """A size target below the parameters of the smallest genome, `least`."""

    def __init__(self, words: str, least: int) -> None:
        super().__init__(words)
        self.least = least


def _in_words(size: int) -> str:
    """The target as `Plan.target` has it; its length counts, for the plan is in the file."""
    return f"at most {size:,} bytes"


def plan_for_bytes(build: Callable[[int, str], Plan], limit: int, total: int) -> Plan:
    """The largest plan whose file stays within `limit` bytes, by correcting the number of parameters.

    Args:
        build: makes a plan of at most so many parameters, for a target in words.
        limit: bytes.
        total: parameters of the p-net.

    Raises:
        ValueError: if no plan's file is as small as that; it names the smallest.
    """
    words = _in_words(limit)

    def nearest(params: int) -> tuple[int, Plan]:
        try:
            return params, build(params, words)
        except TargetTooSmall as error:
            return error.least, build(error.least, words)

    best, low, high, guess, push = None, 0, total, min(limit // 4, total), 1
    for _ in range(_BYTE_ROUNDS):
        reached, plan = nearest(max(1, guess))
        over = genome_file_bytes(plan) - limit
        if over <= 0:
            low, push = reached, 1
            best = plan if best is None or plan.genome_params > best.genome_params else best
        else:
            high, push = min(high, reached), 2 * push
        if -0.02 * limit <= over <= 0 or high - low <= 1 or reached > guess >= low:
            break
        guess = reached - push * -(-over // plan.dtype.itemsize)
        if not low < guess < high:
            guess = (low + high) // 2
    if best is not None:
        return best
    # Fewer parameters can need more bytes: a short vector takes less room than the words that say how to generate it.
    least, _ = nearest(1)
    smallest = min((build(max(1, round(rung * least)), words) for rung in _LADDER), key=genome_file_bytes)
    if (size := genome_file_bytes(smallest)) <= limit:
        return smallest
    # As its plan would say it.
    while (named := genome_file_bytes(replace(smallest, target=_in_words(size)))) > size:
        size = named
    raise ValueError(
        f"{words} cannot be reached: the smallest genome's file has {size:,} bytes (header and buffers included)"
    )
