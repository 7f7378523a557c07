"""Tensors as the bytes of a safetensors file, its header included."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from gbfunc.pnet import buffers_of, parameter_infos, with_weights
from gbfunc.types import Params, TensorMap


def pack(tensors: TensorMap, dtype: torch.dtype, about: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a file with these tensors, floating-point numbers as `dtype`.

    Args:
        tensors: by name.
        dtype: of the numbers in the file.
        about: text to keep with them.
    """

    def stored(t: Tensor) -> Tensor:
        return t.detach().to("cpu", dtype if t.is_floating_point() else t.dtype, copy=True).contiguous()

    return save({name: stored(t) for name, t in tensors.items()}, dict(about) if about else None)


def unpack(data: bytes) -> tuple[Params, dict[str, str]]:
    """Tensors, in float32 whatever they are stored as, and text of what `pack` gave."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in load(data).items()}
    return tensors, header.get("__metadata__", {})


def packed_size(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> int:
    """Length of what `pack` gives for floating-point tensors of these shapes, without text."""
    return len(pack({name: torch.zeros(shape) for name, shape in shapes.items()}, dtype))


def state_of(module: nn.Module) -> Params:
    """All that a module holds, tied parameters once: parameters and buffers that it saves."""
    state = {o.name: o.tensor.detach() for o in parameter_infos(module)}
    return state | {name: b for name, (b, saved) in buffers_of(module).items() if saved}


def restore(module: nn.Module, state: Params) -> nn.Module:
    """A copy of the module, in use, that holds what `state_of` gave."""
    buffers = {name: state.get(name, b) for name, (b, _) in buffers_of(module).items()}
    weights = {o.name: state[o.name] for o in parameter_infos(module)}
    return with_weights(module, weights, buffers).eval()
