"""The base of an adapter: the frozen tensors of a pretrained p-net. A genome adds deltas to some of these tensors.

A genome's file has a hash of the base (`digest`) instead of the base's tensors.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Mapping
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gbfunc.layers.beside import hidden_layers
from gbfunc.trees import differentiable
from gbfunc.types import Params


class Base(NamedTuple):
    """The description of a base in a plan: hash, sizes and name."""

    digest: str  # hash of names, dtypes, shapes and values of parameters and persistent buffers
    params: int  # number of parameters; tied parameters count once
    bytes: int  # size of parameters and persistent buffers
    name: str = ""  # name on a hub; "" if the p-net is not from a hub
    revision: str = ""  # commit on the hub; "" if unknown


class BaseTensors:
    """The frozen tensors of a base: the p-net's parameters, and copies of the buffers, which a forward may change."""

    # Tensors named in `new` are not part of the base. If rows were appended to a parameter (a resized embedding), `old`
    # maps the parameter's name to a function that sets these rows to zero: the hash must not depend on these rows.
    def __init__(self, pnet: nn.Module, new: Collection[str], old: Mapping[str, Callable[..., Tensor]] = {}) -> None:
        for name, layer in pnet.named_modules():
            if getattr(layer, "max_norm", None) is not None and f"{name}.weight".lstrip(".") not in new:
                cure = "name it in modules_to_save, or set max_norm=None"
                raise ValueError(f"a base must be frozen, got {name!r}, whose max_norm changes its weight: {cure}")
        with torch.inference_mode(False):
            params = {k: x.detach() for k, x in pnet.named_parameters() if k not in new}
            params |= {k: take(params[k]) for k, take in old.items()}
            buffers = {k: b.detach().clone() for k, b in pnet.named_buffers() if k not in new}
        state = pnet.state_dict(keep_vars=True)
        self._saved = buffers.keys() & state.keys()
        # Hash and count weights that quantised layers pack into objects. Do not keep copies of packed weights.
        tensors = {id(x) for named in (pnet.parameters(), pnet.buffers()) for x in named}
        packed = {k: x if isinstance(x, tuple) else (x,) for k, x in state.items() if id(x) not in tensors}
        inner = {f"{k}.{i}": x for k, each in packed.items() for i, x in enumerate(each) if isinstance(x, Tensor)}
        self._packed_bytes = sum(x.nbytes for x in inner.values())
        self._hidden = 0
        for _, layer in hidden_layers(pnet):
            own = sum(p.numel() for p in layer.parameters() if p.ndim > 1 and not p.is_floating_point())
            self._hidden += getattr(layer, "out_features", 0) * layer.in_features - own
        self._packed_digest = _digest({k: x.dequantize() if x.is_quantized else x for k, x in inner.items()})
        self.params, self.buffers = params, buffers
        self._on: dict[torch.device, tuple[Params, Params]] = {}

    def on(self, device: torch.device) -> tuple[Params, Params]:
        """Return the parameters and the buffers on a device. A tensor is copied at most once per device."""
        if device not in self._on:
            params, buffers = ({k: x.to(device) for k, x in tensors.items()} for tensors in (self.params, self.buffers))
            self._on[device] = params, buffers
        return self._on[device]

    def cast(self, change: Callable[[Tensor], Tensor]) -> BaseTensors | None:
        """Return the base with the dtypes that `change(tensor)` returns, or None if no dtype changes."""
        first = self.params, self.buffers
        kinds = {x.dtype for tensors in first for x in tensors.values() if differentiable(x.dtype)}
        casts = {kind: new for kind in kinds if (new := change(torch.empty(0, dtype=kind)).dtype) != kind}
        if not casts:
            return None
        cast = copy(self)
        cast.params, cast.buffers = ({k: x.to(casts.get(x.dtype, x.dtype)) for k, x in each.items()} for each in first)
        cast._on = {}
        return cast

    def tensor(self, name: str, device: torch.device) -> Tensor:
        return self.on(device)[0][name]

    def describe(self, name: str = "", revision: str = "") -> Base:
        """Describe the base by hash and sizes. Raise ValueError on the meta device, where tensors have no values."""
        kept = self.params | {k: self.buffers[k] for k in self._saved}
        digest = _digest(kept, self._packed_digest if self._packed_bytes else b"")
        params = sum(x.numel() for x in self.params.values()) + self._hidden
        size = sum(x.nbytes for x in kept.values()) + self._packed_bytes
        return Base(digest.hex()[:32], params, size, name, revision)


def _digest(tensors: Params, start: bytes = b"") -> bytes:
    digest = hashlib.sha256(start)
    for key in sorted(tensors):
        _update(digest, key, tensors[key])
    return digest.digest()


def _update(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise ValueError(f"{name!r} of the base is on the meta device and has no values: load the p-net's weights")
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        # The tensor is of a subclass with inner tensors, such as a quantised weight.
        for inner in flatten()[0]:
            _update(digest, inner, getattr(tensor, inner))
    elif tensor.numel():
        try:
            values = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()
        except RuntimeError as error:
            hint = "in a torch.func transform, pass plan.base_tensors(pnet), made outside of the transform"
            raise ValueError(f"{name!r} of the base cannot be read ({error}): {hint}") from error
        digest.update(values.data)


def hub_name(pnet: nn.Module) -> tuple[str, str]:
    """Return a p-net's name and commit on a hub, from the first module that has a name; "" if unknown."""
    for module in pnet.modules():
        config = getattr(module, "config", None)
        name = getattr(config, "_name_or_path", None) or getattr(config, "name_or_path", None)
        # Do not return the path of a local folder, which other machines do not have.
        if isinstance(name, str) and re.fullmatch(r"(?:\w[\w.-]*/)?\w[\w.-]*", name) and not os.path.exists(name):
            return name, str(getattr(config, "_commit_hash", None) or "")
    return "", ""
