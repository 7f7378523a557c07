"""The planner's answer as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

WIDTH = 100
"""Columns of a report."""

_LOCAL_STEPS = 50
"""Of a report's example."""


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
    """A `ParallelPlan` as a table of its fastest layouts, the reasons of the others, and the dense p-net beside it.

    The last column is what `gbfunc train` takes; a backslash goes on in the next line, as in a shell.
    """
    head = ["seconds", "bubble", "memory", "sent"]
    rows = [[f"{p.seconds:.4g}", f"{p.bubble:.0%}", size(p.peak), size(sum(p.sent.values()))] for p in plan.fits[:most]]
    lines = _table(head, rows, [options(p.layout) for p in plan.fits[:most]]) if rows else []
    more = len(plan.fits) - len(rows)
    lines += [f"and {more} more that fit"] if more else []
    for p in plan.fits[:1]:
        lines += [
            "",
            *_wrapped("the fastest    memory ", _parts(p.memory)),
            *_wrapped("               sent ", _parts(p.sent)),
        ]
    count = "1 rank" if plan.ranks == 1 else f"{plan.ranks:,} ranks"
    lines += ["", f"{len(plan.fits)} layouts of {count} fit, {len(plan.refused)} do not:"]
    lines += [line for layout, reason in plan.refused[:most] for line in _wrapped(f"  {layout}: ", reason)]
    lines += [f"  and {len(plan.refused) - most} more"] if len(plan.refused) > most else []
    smallest = "none of those tried" if plan.smallest is None else f"{plan.smallest:,}"
    lines += ["", f"fewest ranks   {smallest} (of {size(plan.device.memory)} each)"]
    lines += _wrapped("dense, FSDP    ", f"{size(sum(plan.dense.values()))} a rank ({_parts(plan.dense)})")
    lines += [f"               {size(plan.dense_sent)} sent per step and rank"]
    lines += _local_steps(plan)
    lines += [f"rule of thumb  {size(plan.rule_of_thumb)} in all (12 GB per billion parameters)"]
    return "\n".join(lines)


def _local_steps(plan: Any) -> list[str]:
    """What the fastest layout that splits the batch alone sends where its ranks exchange once in many steps."""
    whole = (p for p in plan.fits if p.layout.sizes["tensor"] == p.layout.sizes["pipeline"] == 1)
    found = [p for p in whole if p.layout.sizes["data"] > 1 and p.layout.sizes["gnets"] == 1][:1]
    words = "sent per step and rank by data alone with --local-steps"
    return [f"local steps    {size(sum(p.sent.values()) / _LOCAL_STEPS)} {words} {_LOCAL_STEPS}" for p in found]


def options(layout: Any) -> str:
    """A `RankLayout` as options of `gbfunc train`, which takes everything else as it is by default."""
    sizes = {axis: n for axis, n in layout.sizes.items() if n > 1 or (axis == "data" and layout.sizes["gnets"] > 1)}
    words = {
        "--mesh": ",".join(f"{axis}={n}" for axis, n in sizes.items()),
        "--placement": layout.placement if layout.sizes["gnets"] > 1 else "",
        "--pipeline": layout.schedule,
        "--microbatches": layout.microbatches if layout.microbatches > 1 else "",
        "--remat": layout.remat if layout.remat != "none" else "",
    }
    return " ".join(f"{option}\N{NO-BREAK SPACE}{value}" for option, value in words.items() if value)


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size(n)}" for name, n in parts.items())


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[str]) -> list[str]:
    """Numbers to the right, then the options, in as many lines as they take."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(map(str.rjust, head, widths)) + "  options",
        "  ".join("-" * n for n in [*widths, len("options")]),
    ]
    for row, text in zip(rows, words, strict=True):
        *first, last = _wrapped("  ".join(map(str.rjust, row, widths)) + "  ", text, WIDTH - len(" \\"))
        lines += [*(f"{line} \\" for line in first), last]
    return lines


def _wrapped(start: str, text: str, width: int = WIDTH) -> list[str]:
    """A text after a start, in lines of some columns; a space that must not end a line is a no-break space."""
    wrap = textwrap.TextWrapper(width, start, " " * len(start), break_long_words=False, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in wrap.wrap(text or "-")]
