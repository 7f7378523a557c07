"""Values beside a state as JSON and tensors, exactly as they were, and nothing that could run code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gbfunc.types import Params

EXTRA, _TAG = "extra/", "$type"


def pack(x: Any, tensors: Params) -> Any:
    """A value as JSON: its tensors go among `tensors`, and what JSON would change gets a tag."""
    if isinstance(x, torch.Tensor):
        name = f"{EXTRA}{len(tensors)}"
        tensors[name] = x.detach().to("cpu", copy=True).contiguous()
        return {_TAG: "tensor", "of": name}
    if isinstance(x, bytes):
        return {_TAG: "bytes", "of": x.hex()}
    if isinstance(x, Mapping):
        if _TAG not in x and all(isinstance(k, str) for k in x):
            return {k: pack(v, tensors) for k, v in x.items()}
        return {_TAG: "dict", "of": [[pack(k, tensors), pack(v, tensors)] for k, v in x.items()]}
    if isinstance(x, tuple):
        return {_TAG: "tuple", "of": [pack(v, tensors) for v in x]}
    return [pack(v, tensors) for v in x] if isinstance(x, list) else x


def unpack(x: Any, tensors: Params) -> Any:
    """What `pack` has packed."""
    if isinstance(x, list):
        return [unpack(v, tensors) for v in x]
    if not isinstance(x, dict):
        return x
    if (tag := x.get(_TAG)) is None:
        return {k: unpack(v, tensors) for k, v in x.items()}
    of = x["of"]
    if tag == "tensor":
        return tensors[of]
    if tag == "bytes":
        return bytes.fromhex(of)
    inside = unpack(of, tensors)
    return tuple(inside) if tag == "tuple" else dict(inside)
