"""The parts of a p-net: checks, its parameters and buffers by name, and copies with other tensors."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

from gbfunc.types import TensorMap

_WRAPPERS = {
    "DistributedDataParallel": "DDP never synchronises the genome's gradient: pass the module inside it (ddp.module)",
    "DataParallel": "it copies the module's own weights, not the generated ones: pass the module inside it (.module)",
    "FullyShardedDataParallel": "FSDP owns the weights and ignores generated ones: pass the module before wrapping it",
    "FSDPModule": "FSDP2 owns the weights and ignores generated ones: pass the module before fully_shard",
    "OptimizedModule": "pass the module before torch.compile (its ._orig_mod) and compile the training step instead",
    "ScriptModule": "its code is compiled and cannot take generated weights: pass the module before torch.jit",
}
_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked", "_u", "_v", "weight_u", "weight_v"})
"""Buffers that layers update in training mode: those of batch norm and of spectral norm, old and new."""
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules", "_flat_weights"})
"""Attributes of a module in which its registered tensors stand; recurrent layers refresh `_flat_weights` themselves."""
_DEPTH = 4
"""Containers inside of containers that the scan of attributes opens."""


class ParameterInfo(NamedTuple):
    """A parameter of a p-net by its first name, its `aliases` where it is tied, and its name in its layer `module`.

    The layer of a parametrised weight is the one that uses it, not the list of parametrisations.
    """

    name: str
    aliases: tuple[str, ...]
    tensor: Tensor
    module: nn.Module
    attribute: str


def check_pnet(pnet: nn.Module) -> None:
    """Refuse a module that cannot be a pure function of its parameters and buffers.

    Raises:
        TypeError: if `pnet` is not an `nn.Module`.
        ValueError: for a wrapped (DDP, FSDP, compiled, scripted) or uninitialised (lazy) p-net, a parameter or buffer
            of an unsupported layout, a parameter that shares memory with another tensor of the p-net, and a hook on a
            parameter. The message names the cure.
    """
    if not isinstance(pnet, nn.Module):
        raise TypeError(f"the p-net must be an nn.Module, got {type(pnet).__name__}")
    for name, module in pnet.named_modules():
        for base in (cls.__name__ for cls in type(module).__mro__ if cls.__name__ in _WRAPPERS):
            # A script without tensors is as good as any function.
            if base != "ScriptModule" or any(True for _ in (*module.parameters(), *module.buffers())):
                where = f" at {name!r}" if name else ""
                raise ValueError(f"the p-net is wrapped in {base}{where}: {_WRAPPERS[base]}")
    named = named_tensors(pnet)
    parameters: dict[Tensor, str] = {x: name for name, x in reversed(named) if isinstance(x, nn.Parameter)}
    for name, tensor in named:
        what = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise ValueError(f"{what} {name!r} is lazy and has no shape yet: run the p-net once on a batch first")
        if tensor.layout != torch.strided or tensor.is_nested:
            layout = "nested" if tensor.is_nested else tensor.layout
            raise ValueError(f"{what} {name!r} has the layout {layout}: make it dense (torch.strided)")
        if what == "parameter" and (parameter := parameters.get(tensor)) not in (None, name):
            cure = f"read self.{parameter}, or register a copy (.detach().clone())"
            raise ValueError(f"buffer {name!r} is the parameter {parameter!r} itself: {cure}")
        if what == "parameter" and (tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)):
            raise ValueError(
                f"the parameter {name!r} has a hook on its gradient, which no generated weight would have: remove it, "
                "or register it in the forward, where the weight is there (self.NAME.register_hook)"
            )
    for (a, x), (b, y) in in_one_memory(pnet):
        if isinstance(x, nn.Parameter) or isinstance(y, nn.Parameter):
            raise ValueError(
                f"{a!r} and {b!r} are two tensors in the same memory, which training ties and a genome would not: use "
                f"one Parameter in both places (F.linear(x, self.{a}.t()) for its transpose), or a copy (.clone())"
            )
    _check_attributes(pnet)


def _check_attributes(pnet: nn.Module) -> None:
    memory = {_address(x): name for name, x in named_tensors(pnet) if isinstance(x, nn.Parameter)}
    memory.pop(0, None)
    for path, module in pnet.named_modules():
        # The older weight and spectral norm make the attribute anew in each forward.
        made = {key.rpartition("_")[0] for key in module._parameters if key.endswith(("_orig", "_v"))}
        for key, value in vars(module).items():
            for x in _arrays_in(value, _DEPTH) if key not in _REGISTERED | made else ():
                if name := memory.get(_address(x)):
                    attribute = f"{path}.{key}".lstrip(".")
                    raise ValueError(
                        f"the attribute {attribute!r} of the p-net shares memory with its parameter {name!r}, where "
                        f"generated weights never stand: read self.{name} in the forward, or keep a copy"
                    )


def _arrays_in(value: Any, depth: int) -> Iterator[Tensor | np.ndarray]:
    if isinstance(value, Tensor | np.ndarray):
        yield value
    elif depth and isinstance(value, dict | list | tuple | set):
        for x in value.values() if isinstance(value, dict) else value:
            yield from _arrays_in(x, depth - 1)


def _address(x: Tensor | np.ndarray) -> int:
    """The address of the memory that a tensor, or the array that owns the memory, begins at; 0 where there is none."""
    if isinstance(x, np.ndarray):
        while isinstance(x.base, np.ndarray):
            x = x.base
        return _address(x.base) if isinstance(x.base, Tensor) else x.__array_interface__["data"][0]
    try:
        return x.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # of a fake tensor, or one of a transform of torch.func
        return 0


def in_one_memory(pnet: nn.Module) -> list[tuple[tuple[str, Tensor], tuple[str, Tensor]]]:
    """Pairs of parameters and buffers, with their names, that have entries in the same place."""
    places: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in named_tensors(pnet):
        # Meta tensors have no address: their storage is named by its object.
        place = _address(tensor) or (tensor.untyped_storage()._cdata if tensor.is_meta else 0)
        if place:
            places.setdefault(place, []).append((name, tensor))
    pairs = (pair for named in places.values() for pair in combinations(named, 2))
    return [(a, b) for a, b in pairs if _overlap(a[1], b[1])]


def _overlap(x: Tensor, y: Tensor) -> bool:
    if x.dtype != y.dtype or not x.numel() or not y.numel():
        return bool(x.numel() and y.numel())
    (first, end), (other_first, other_end) = map(_extent, (x, y))
    if end <= other_first or other_end <= first:
        return False
    places = torch.arange(max(end, other_end), device="cpu")
    taken = (places.as_strided(t.shape, t.stride(), t.storage_offset()).flatten() for t in (x, y))
    return bool(torch.isin(*taken).any())


def _extent(x: Tensor) -> tuple[int, int]:
    """The first place of a tensor in its storage, and that after the last."""
    steps = ((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    first = int(x.storage_offset())
    return first, first + int(sum(steps)) + 1


def eval_mode_warning(pnet: nn.Module) -> str | None:
    """What to tell a user who trains a p-net in eval mode; None where some module, or none at all, is in training mode.

    Only modules count that act otherwise in training: dropout with a rate above 0, and norms with running statistics.
    A p-net of which some are in eval mode (frozen batch norms) is so on purpose.

    >>> eval_mode_warning(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)).eval())
    'the p-net is in eval mode and trains without Dropout (1): call pnet.train() before make_train_step ...'
    """
    modes = [(type(m).__name__, m.training) for m in pnet.modules() if _trains_otherwise(m)]
    if not modes or any(training for _, training in modes):
        return None
    counts = ", ".join(f"{name} ({n})" for name, n in sorted(Counter(name for name, _ in modes).items()))
    cure = "call pnet.train() before make_train_step (from_pretrained of Hugging Face returns eval mode)"
    return f"the p-net is in eval mode and trains without {counts}: {cure}"


def _trains_otherwise(module: nn.Module) -> bool:
    names = ["dropout", "attention_dropout", "hidden_dropout", "dropout_p", "drop_prob"]
    rates = [getattr(module, name, None) for name in names + ["p"] * ("Drop" in type(module).__name__)]
    drops = any(isinstance(rate, float | int) and rate > 0 for rate in rates)
    return drops or isinstance(getattr(module, "running_mean", None), Tensor) or isinstance(module, nn.RReLU)


def named_tensors(net: nn.Module, *, ties: bool = False) -> list[tuple[str, Tensor]]:
    """Return parameters, then buffers, by name; with `ties` under each of their names."""
    every = not ties
    return [*net.named_parameters(remove_duplicate=every), *net.named_buffers(remove_duplicate=every)]


def parameter_infos(pnet: nn.Module) -> list[ParameterInfo]:
    """Every parameter once, in the p-net's order, with its aliases and its layer."""
    named: dict[int, tuple[Tensor, list[str]]] = {}
    for name, parameter in pnet.named_parameters(remove_duplicate=False):
        named.setdefault(id(parameter), (parameter, []))[1].append(name)
    infos = []
    for parameter, (name, *aliases) in named.values():
        prefix, _, attribute = name.rpartition(".")
        if isinstance(pnet.get_submodule(prefix), ParametrizationList):
            # `fc.parametrizations.weight.original1` is a weight of `fc`.
            layer, _, attribute = f".{prefix}".rpartition(".parametrizations.")
            prefix = layer.removeprefix(".")
        infos.append(ParameterInfo(name, tuple(aliases), parameter, pnet.get_submodule(prefix), attribute))
    return infos


def buffers_of(pnet: nn.Module) -> dict[str, tuple[Tensor, bool]]:
    """Every buffer once: `{name: (tensor, persistent)}`."""
    saved = set(pnet.state_dict(keep_vars=True))
    return {name: (buffer, name in saved) for name, buffer in pnet.named_buffers()}


def keep_statistics(net: nn.Module, frozen: Collection[str]) -> list[nn.Module]:
    """Put layers whose statistics are frozen buffers into evaluation mode, so that no forward updates them."""
    names = (name.rpartition(".") for name in frozen)
    return [net.get_submodule(layer).eval() for layer, _, attribute in names if attribute in _STATISTICS]


def without_sparse(net: nn.Module, names: Collection[str]) -> None:
    """Let the embeddings of these weights give dense gradients: no other can go through what generates a weight."""
    for name, layer in net.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and f"{name}.weight".lstrip(".") in names:
            layer.sparse = False


def skeleton_of(pnet: nn.Module) -> nn.Module:
    """A copy of the module with every tensor on the meta device; `ValueError` for one that cannot be copied."""
    return copy_with(pnet, lambda name, tensor: torch.empty_like(tensor, device="meta"))


def copy_with(pnet: nn.Module, replace: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """A deep copy in which every parameter and buffer is what `replace(name, tensor)` returns; ties are kept."""
    memo: dict[int, Any] = {}
    for name, tensor in named_tensors(pnet):
        fresh = replace(name, tensor.detach())
        trained = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(fresh, tensor.requires_grad) if trained else fresh
    try:
        return copy_of(pnet, memo)
    except Exception as error:
        raise ValueError(f"the p-net ({type(pnet).__name__}) cannot be deep-copied: {error}") from error


def copy_of(pnet: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy whose weak references to its own parts lead to the copies. `memo` is deepcopy's."""
    for module in pnet.modules():
        # Activations that a forward left behind carry a graph, which deepcopy refuses.
        memo |= {id(x): x.detach() for x in vars(module).values() if isinstance(x, Tensor) and not x.is_leaf}
    net = copy.deepcopy(pnet, memo)
    if same := {*map(id, net.modules())} & {*map(id, pnet.modules())}:
        name = next(name for name, module in pnet.named_modules() if id(module) in same)
        raise ValueError(f"a copy of the p-net has its {name!r} itself (a __deepcopy__ that returns self?)")
    copies = {id(x): memo.get(id(x)) for x in pnet.modules()}
    for module in net.modules():
        for key, value in vars(module).items():
            there = copies.get(id(value())) if isinstance(value, weakref.ref) else None
            if there is not None:
                vars(module)[key] = weakref.ref(there)
    return net


def with_weights(pnet: nn.Module, weights: TensorMap, buffers: TensorMap, *, bare: Collection[str] = ()) -> nn.Module:
    """A copy of the module with copies of these weights and buffers, those in `bare` as they are; ties are kept."""
    both = {**weights, **buffers}

    def copied(name: str, own: Tensor) -> Tensor:
        x = both[name].detach()
        # Safetensors and FSDP take contiguous tensors alone, and matrices may be generated transposed.
        memory = torch.contiguous_format if own.is_contiguous() else torch.preserve_format
        return x if name in bare else x.clone(memory_format=memory)

    return copy_with(pnet, copied)
