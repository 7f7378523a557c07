"""Tensors as the bytes of a safetensors file, its header included."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from safetensors.torch import load, save

from gbfunc.types import Params, TensorMap


def pack(tensors: TensorMap, dtype: torch.dtype, about: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a file with these tensors as numbers of `dtype`.

    Args:
        tensors: floating-point tensors by name.
        dtype: of the numbers in the file.
        about: text to keep with them.
    """
    stored = {name: t.detach().to("cpu", dtype).contiguous() for name, t in tensors.items()}
    return save(stored, dict(about) if about else None)


def packed_size(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> int:
    """Length of what `pack` gives for tensors of these shapes, without text."""
    return len(pack({name: torch.zeros(shape) for name, shape in shapes.items()}, dtype))


def unpack(data: bytes) -> tuple[Params, dict[str, str]]:
    """Tensors, in float32 whatever they are stored as, and text of what `pack` gave."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = {name: t.float() for name, t in load(data).items()}
    return tensors, header.get("__metadata__", {})
