"""The planner's answer as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

_WIDTH = 100

_LOCAL_STEPS = 50
"""Of a report's example."""

_HEAD = f"{'seconds':>9}{'bubble':>8}{'memory':>9}{'sent':>9}  "


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

    The last column are options of `gbfunc train`; a backslash continues in the next line, as in a shell.
    """
    return "\n".join(_lines(plan, most))


def _lines(plan: Any, most: int) -> Iterator[str]:
    if plan.fits:
        yield f"{_HEAD}options"
    for p in plan.fits[:most]:
        row = f"{p.seconds:>9.4g}{p.bubble:>8.0%}{size(p.peak):>9}{size(sum(p.sent.values())):>9}  "
        # An option and its value stay in one line.
        words = str(p.layout).replace(" ", "\N{NO-BREAK SPACE}").replace("\N{NO-BREAK SPACE}--", " --")
        *first, last = _wrapped(row, words, _WIDTH - len(" \\"))
        yield from (f"{line} \\" for line in first)
        yield last
    if len(plan.fits) > most:
        yield f"and {len(plan.fits) - most} more that fit"
    for p in plan.fits[:1]:
        yield ""
        yield from _wrapped("the fastest    memory ", _parts(p.memory))
        yield from _wrapped("               sent ", _parts(p.sent))
    yield f"\n{len(plan.fits)} layouts of {plan.ranks:,} rank{'s' * (plan.ranks > 1)} fit, {len(plan.refused)} do not:"
    for layout, reason in plan.refused[:most]:
        yield from _wrapped(f"  {layout}: ", reason)
    if len(plan.refused) > most:
        yield f"  and {len(plan.refused) - most} more"
    smallest = "none of those tried" if plan.smallest is None else f"{plan.smallest:,}"
    yield f"\nfewest ranks   {smallest} (of {size(plan.device.memory)} each)"
    yield from _wrapped("dense, FSDP    ", f"{size(sum(plan.dense.values()))} a rank ({_parts(plan.dense)})")
    yield f"               {size(plan.dense_sent)} sent per step and rank"
    # The fastest layout that splits the batch alone, if its ranks exchange once in many steps.
    data = [p for p in plan.fits if p.layout.sizes["data"] == plan.ranks > 1]
    for p in data[:1]:
        sent = size(sum(p.sent.values()) / _LOCAL_STEPS)
        yield f"local steps    {sent} sent per step and rank by data alone with --local-steps {_LOCAL_STEPS}"
    yield f"rule of thumb  {size(plan.rule_of_thumb)} in all (12 GB per billion parameters)"


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size(n)}" for name, n in parts.items())


def _wrapped(start: str, text: str, width: int = _WIDTH) -> list[str]:
    """A text after a start, in lines of some columns; a space that must not end a line is a no-break space."""
    wrap = textwrap.TextWrapper(width, start, " " * len(start), break_long_words=False, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in wrap.wrap(text or "-")]
