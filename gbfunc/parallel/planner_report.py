"""The planner's answer as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PARTS = ("weights", "genome", "optimizer", "gradients", "activations", "buffers")


def size(n: float) -> str:
    """Bytes for a person, in powers of ten.

    >>> size(1_500_000), size(12)
    ('1.5 MB', '12 B')
    """
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= scale:
            return f"{n / scale:.3g} {unit}"
    return f"{n:.0f} B"


def report(plan: Any, most: int) -> str:
    """A `ParallelPlan` as a table of its fastest layouts, the reasons of the others, and the dense p-net beside it."""
    head = ["seconds", "bubble", "memory", *PARTS, "sent", "by axis", "layout"]
    rows = [
        [
            f"{p.seconds:.4g}",
            f"{p.bubble:.0%}",
            size(p.peak),
            *(size(p.memory[part]) for part in PARTS),
            size(sum(p.sent.values())),
            ", ".join(f"{axis} {size(n)}" for axis, n in p.sent.items()) or "-",
            str(p.layout),
        ]
        for p in plan.fits[:most]
    ]
    lines = _table(head, rows) if rows else []
    more = len(plan.fits) - len(rows)
    lines += [f"and {more} more that fit"] if more else []
    count = "1 rank" if plan.ranks == 1 else f"{plan.ranks:,} ranks"
    lines += ["", f"{len(plan.fits)} layouts of {count} fit, {len(plan.refused)} do not:"]
    lines += [f"  {layout}: {reason}" for layout, reason in plan.refused[:most]]
    lines += [f"  and {len(plan.refused) - most} more"] if len(plan.refused) > most else []
    smallest = "none of those tried" if plan.smallest is None else f"{plan.smallest:,}"
    lines += ["", f"fewest ranks   {smallest} (of {size(plan.device.memory)} each)"]
    lines += [f"dense, FSDP    {size(sum(plan.dense.values()))} a rank ({_parts(plan.dense)})"]
    lines += [f"               {size(plan.dense_sent)} sent per step and rank"]
    lines += [f"rule of thumb  {size(plan.rule_of_thumb)} in all (12 GB per billion parameters)"]
    return "\n".join(lines)


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size(n)}" for name, n in parts.items())


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    columns = []
    for name, *cells in zip(head, *rows, strict=True):
        width, place = max(map(len, [name, *cells])), str.ljust if name in head[-2:] else str.rjust
        columns.append([place(cell, width) for cell in (name, "-" * width, *cells)])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]
