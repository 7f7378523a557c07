"""Checks that ranks agree: what must be equal everywhere is hashed, and the hashes are compared.

Only where they differ are texts exchanged, so that the error names what differs inside of them: as JSON (a plan, or
options as `text_of` writes them) by the path to each value.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import zip_longest
from numbers import Number
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gbfunc.parallel.collectives import gather_numbers, gather_texts
from gbfunc.parallel.mesh import AxisName, Mesh

_MOST = 5
"""Values that an error shows of two texts that differ."""

_ABSENT = "(nothing)"


def check_equal(mesh: Mesh, named: Mapping[str, Tensor | str], what: str, axis: AxisName = "world") -> None:
    """Compare tensors or texts, which have the same names everywhere, between the ranks of an axis.

    Args:
        mesh: the ranks; all of them must call.
        named: what must be equal, by name.
        what: what they are, and what to do about it, for the message.
        axis: along which.

    Raises:
        ValueError: on every rank, naming the ranks that differ from the axis' first, what differs, and for texts both
            values.
        CollectiveError: if a rank is missing.
    """
    if mesh.axis(axis).size == 1:
        return
    ranks, names = mesh.axis(axis).ranks, sorted(named)
    hashes = gather_numbers(mesh, [hash_of(named[k]) for k in names], axis)
    words: dict[int, list[str]] = {rank: [] for rank in ranks}
    for name, first, *others in zip(names, *hashes, strict=True):
        if others.count(first) < len(others):
            value = named[name]
            details = _differences(mesh, value, axis) if isinstance(value, str) else [""] * len(ranks)
            for rank, number, detail in zip(ranks, (first, *others), details, strict=True):
                words[rank] += [name + detail] if number != first else []
    if any(words.values()):
        bad = "; ".join(f"rank {rank} in {', '.join(of)}" for rank, of in words.items() if of)
        raise ValueError(f"{what}: different from rank {ranks[0]} are {bad}")


def hash_of(x: Tensor | str) -> int:
    """63 bits of BLAKE2 over dtype, shape and bytes of a tensor, or over a text."""
    if isinstance(x, str):
        content = x.encode()
    else:
        flat = x.detach().cpu().contiguous().reshape(-1)
        content = f"{x.dtype} {tuple(x.shape)} ".encode() + flat.view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


def text_of(options: Any) -> str:
    """Options as JSON, the same in every process that has the same ones: for `check_equal`.

    Dataclasses, NamedTuples, mappings and sequences are written out; functions by their name and what they close over
    (a schedule of other numbers is another one); tensors by their hash. Of anything else the class must do, for it may
    say where it lives (an address, a rank's device).

    >>> text_of({"clip_norm": 0.5, "amp": torch.bfloat16, "classes": [torch.nn.Linear]})
    '{"amp": "torch.bfloat16", "classes": ["torch.nn.modules.linear.Linear"], "clip_norm": 0.5}'
    """
    return json.dumps(_plain(options, ()), sort_keys=True)


def _plain(x: Any, inside: tuple[int, ...]) -> Any:
    """A value as JSON has it; `inside` are the ids of what it is part of."""
    if x is None or isinstance(x, bool | int | float | str):
        return x
    if isinstance(x, torch.dtype | Number):
        return str(x)
    if isinstance(x, Tensor):
        return f"{x.dtype} {list(x.shape)} {hash_of(x):x}"
    parts = _parts(x) if id(x) not in inside else None
    if isinstance(parts, Mapping):
        return {str(k): _plain(v, (*inside, id(x))) for k, v in parts.items()}
    if parts is not None:
        return [_plain(v, (*inside, id(x))) for v in parts]
    named = x if hasattr(x, "__qualname__") else type(x)
    return f"{named.__module__}.{named.__qualname__}"


def _parts(x: Any) -> Mapping[Any, Any] | Sequence[Any] | None:
    """What a value is made of, None if it has no parts to compare."""
    if isinstance(x, Mapping | list):
        return x
    if hasattr(x, "_asdict"):
        return x._asdict()
    if isinstance(x, tuple | set | frozenset):
        return list(x) if isinstance(x, tuple) else sorted(x, key=str)
    if is_dataclass(x) and not isinstance(x, type):
        return {f.name: getattr(x, f.name) for f in fields(x)}
    if isinstance(x, partial):
        return {"function": x.func, "args": x.args, "keywords": x.keywords}
    if isinstance(x, FunctionType) and (x.__closure__ or x.__defaults__):
        held = dict(zip(x.__code__.co_freevars, (cell.cell_contents for cell in x.__closure__ or ()), strict=True))
        return {"function": f"{x.__module__}.{x.__qualname__}", "defaults": x.__defaults__ or (), **held}
    return None


def _differences(mesh: Mesh, text: str, axis: AxisName) -> list[str]:
    """How every rank's text differs from that of the axis' first, in words."""
    first = gather_texts(mesh, "" if mesh.axis(axis).index else text, axis)[0]
    return gather_texts(mesh, _difference(first, text), axis)


def _difference(first: str, text: str) -> str:
    """How a text differs from the first rank's: ` (clip_norm: 0.5, not None)`."""
    if first == text:
        return ""
    try:
        pairs = [*_unequal(json.loads(first), json.loads(text), "")]
    except (ValueError, RecursionError):
        pairs = [("", repr(first), repr(text))]
    words = [f"{path}: {_short(b, a)}, not {_short(a, b)}".removeprefix(": ") for path, a, b in pairs[:_MOST]]
    return f" ({'; '.join(words)}{'; ...' if len(pairs) > _MOST else ''})"


def _unequal(a: Any, b: Any, path: str) -> Iterator[tuple[str, str, str]]:
    """Path and both values wherever two JSON values differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        for k in sorted(a.keys() | b.keys()):
            yield from _unequal(a.get(k, _ABSENT), b.get(k, _ABSENT), f"{path}.{k}" if path else k)
    elif isinstance(a, list) and isinstance(b, list):
        for i, (x, y) in enumerate(zip_longest(a, b, fillvalue=_ABSENT)):
            yield from _unequal(x, y, f"{path}[{i}]")
    elif repr(a) != repr(b):
        yield path, repr(a), repr(b)


def _short(text: str, other: str) -> str:
    """A text, cut around where it differs from the other."""
    at = next((i for i, (x, y) in enumerate(zip(text, other, strict=False)) if x != y), min(len(text), len(other)))
    start = max(0, at - 30)
    return f"{'...' if start else ''}{text[start : at + 30]}{'...' if len(text) > at + 30 else ''}"
