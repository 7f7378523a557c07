"""Checks that ranks have equal tensors and options. Ranks compare hashes, and send texts only if hashes differ."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from gbfunc.parallel.collectives import all_gather, gather_objects
from gbfunc.parallel.mesh import AxisName, Mesh


def check_equal(mesh: Mesh, named: Mapping[str, Tensor | str], what: str, axis: AxisName = "world") -> None:
    """Compare named tensors or texts between the ranks of an axis; all ranks of the axis must call.

    Raises:
        ValueError: on every rank, if a rank differs from the first rank; the message is `what` and the differences.
        CollectiveError: if a rank is missing.
    """
    ranks, names = mesh.axis(axis).ranks, sorted(named)
    if len(ranks) == 1:
        return
    hashes = torch.tensor([[hash_of(named[k]) for k in names]], dtype=torch.int64, device=mesh.device)
    (by_rank,) = all_gather(mesh, [hashes], [(1,) * len(ranks)], axis)
    differs = (by_rank != by_rank[0]).tolist()
    if not any(map(any, differs)):
        return
    texts = gather_objects(mesh, {k: x for k, x in named.items() if isinstance(x, str)}, axis)
    words = []
    for rank, other, text in zip(ranks, differs, texts, strict=True):
        bad = [k for k, differing in zip(names, other, strict=True) if differing]
        details = [k + (_difference(texts[0][k], text[k]) if k in text else "") for k in bad]
        words += [f"rank {rank} in {', '.join(details)}"] if bad else []
    raise ValueError(f"{what}: different from rank {ranks[0]} are {'; '.join(words)}")


def hash_of(x: Tensor | str) -> int:
    """Return a hash that fits into int64: 63 bits of BLAKE2, of a text or of a tensor's dtype, shape and bytes."""
    digest = hashlib.blake2b((x if isinstance(x, str) else f"{x.dtype} {tuple(x.shape)} ").encode(), digest_size=8)
    if isinstance(x, Tensor):
        digest.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "little") >> 1


def text_of(options: Any) -> str:
    """Write options as JSON for `check_equal`; equal options give equal texts in all processes.

    Dataclasses, mappings, sequences, partial functions and styles of tensor parallelism are written with their content.
    A tensor is written as its hash, a function as its name, and any other object as its class. `str` of an object may
    contain an address in memory or a device, in which ranks may differ.

    >>> text_of({"clip_norm": 0.5, "amp": torch.bfloat16, "classes": [torch.nn.Linear]})
    '{"amp": "torch.bfloat16", "classes": ["torch.nn.modules.linear.Linear"], "clip_norm": 0.5}'
    """
    return json.dumps(options, default=_as_json, sort_keys=True)


def _as_json(x: Any) -> Any:
    # Compare the names of classes instead of calling `isinstance`: the import of DTensor takes half a second.
    bases = {base.__name__ for base in type(x).__mro__}
    if "ParallelStyle" in bases:
        return {"style": type(x), **vars(x)}
    if "Placement" in bases:
        return repr(x)
    if isinstance(x, torch.dtype | Number):
        return str(x)
    if isinstance(x, Tensor):
        return f"{x.dtype} {list(x.shape)} {hash_of(x):x}"
    if isinstance(x, Mapping):
        return {str(k): v for k, v in x.items()}
    if isinstance(x, set | frozenset):
        return sorted(x, key=str)
    if is_dataclass(x) and not isinstance(x, type):
        return {f.name: getattr(x, f.name) for f in fields(x)}
    if isinstance(x, partial):
        return {"function": x.func, "args": x.args, "keywords": x.keywords}
    named = x if hasattr(x, "__qualname__") else type(x)
    return f"{named.__module__}.{named.__qualname__}"


def _difference(first: str, text: str) -> str:
    at = len(os.path.commonprefix([first, text]))
    start, end = max(0, at - 80), at + 30
    quotes = (f"{'...' * (start > 0)}{x[start:end]}{'...' * (len(x) > end)}" for x in (text, first))
    return f" ({', not '.join(quotes)})"
