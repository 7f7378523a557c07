"""Checks a p-net, lists its parameters and buffers by name, and copies a p-net with other tensors."""

from __future__ import annotations

import copy
import inspect
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
    "GenomeModule": "a genome generates its weights already: train it, or pass the module that it was made from",
}
_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked", "_u", "_v", "weight_u", "weight_v"})
"""Buffers that batch norms and spectral norms (torch's old and new ones) update in training mode."""
_OWN = frozenset({*vars(nn.Module()), "_flat_weights"})
"""Attributes in which modules register tensors. `_flat_weights` is a list that recurrent layers update themselves."""


class ParameterInfo(NamedTuple):
    """A parameter of a p-net. `aliases` are further names of a tied parameter; `name` is the first name.

    `module` is the layer that uses the parameter as its `attribute`, also if a parametrization stores the parameter.
    """

    name: str
    aliases: tuple[str, ...]
    tensor: Tensor
    module: nn.Module
    attribute: str


def order_of_arguments() -> str:
    """Return advice that lists the arguments of the function of gbfunc that the user called, for an error message."""
    frame, names = inspect.currentframe(), ()
    while frame is not None and frame.f_globals["__name__"].startswith("gbfunc."):
        names, frame = frame.f_code.co_varnames[: frame.f_code.co_argcount], frame.f_back
    return f"the order of arguments is {', '.join(name for name in names if name not in ('self', 'cls'))}"


def check_pnet(pnet: nn.Module) -> None:
    """Check that a module can be a pure function of its parameters and buffers.

    Raises:
        TypeError: if `pnet` is not an `nn.Module`.
        ValueError: if the p-net is wrapped, scripted, compiled or lazy; if a tensor has an unsupported layout; or if a
            parameter has a hook, or shares memory with another tensor or attribute. The message says what to change.
    """
    if not isinstance(pnet, nn.Module):
        raise TypeError(f"the p-net must be an nn.Module, got {type(pnet).__name__}: {order_of_arguments()}")
    for name, module in pnet.named_modules():
        for base in (cls.__name__ for cls in type(module).__mro__ if cls.__name__ in _WRAPPERS):
            # Allow a scripted module without tensors, because the module needs no generated weights.
            if base != "ScriptModule" or any(True for _ in (*module.parameters(), *module.buffers())):
                where = f" at {name!r}" if name else ""
                raise ValueError(f"the p-net is wrapped in {base}{where}: {_WRAPPERS[base]}")
    named = named_tensors(pnet)
    for name, tensor in named:
        what = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise ValueError(f"{what} {name!r} is lazy and has no shape yet: run the p-net once on a batch first")
        if tensor.layout != torch.strided or tensor.is_nested:
            layout = "nested" if tensor.is_nested else tensor.layout
            raise ValueError(f"{what} {name!r} has the layout {layout}: make it dense (torch.strided)")
        if what == "parameter" and (tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)):
            raise ValueError(
                f"the parameter {name!r} has a hook on its gradient, which the generated weight lacks: remove it, "
                "or register the hook in the forward, on the generated weight (self.NAME.register_hook)"
            )
    places: dict[int, list[tuple[str, Tensor]]] = {}
    for name, x in named:
        # Meta tensors have no address. Meta tensors that share memory have the same storage object.
        if place := _address(x) or (id(x.untyped_storage()) if x.is_meta else 0):
            places.setdefault(place, []).append((name, x))
    for (a, x), (b, y) in (pair for here in places.values() for pair in combinations(here, 2)):
        if _overlap(x, y):
            raise ValueError(
                f"{a!r} and {b!r} are two tensors in the same memory, which a genome cannot tie: use one tensor in "
                f"both places (F.linear(x, self.{a}.t()) for its transpose), or a copy (.clone())"
            )
    _check_attributes(pnet)


def _check_attributes(pnet: nn.Module) -> None:
    parameters = [(name, x) for name, x in named_tensors(pnet, ties=True) if isinstance(x, nn.Parameter)]
    memory = {_address(x): name for name, x in reversed(parameters)}
    memory.pop(0, None)
    # Skip attributes that torch's older weight norm and spectral norm compute anew in each forward.
    computed = {name.rpartition("_")[0] for name, _ in parameters if name.endswith(("_orig", "_v"))}
    for path, module in pnet.named_modules():
        for key, value in vars(module).items():
            attribute = f"{path}.{key}".lstrip(".")
            for x in () if key in _OWN or attribute in computed else _arrays_in(value):
                if name := memory.get(_address(x)):
                    raise ValueError(
                        f"the attribute {attribute!r} of the p-net shares memory with its parameter {name!r}, but not "
                        f"with the generated weight: read self.{name} in the forward, or keep a copy"
                    )


def _arrays_in(value: Any, depth: int = 4) -> Iterator[Tensor | np.ndarray]:
    if isinstance(value, Tensor | np.ndarray):
        yield value
    elif depth and isinstance(value, dict | list | tuple | set):
        for x in value.values() if isinstance(value, dict) else value:
            yield from _arrays_in(x, depth - 1)


def _address(x: Tensor | np.ndarray) -> int:
    if isinstance(x, np.ndarray):
        while isinstance(x.base, np.ndarray):
            x = x.base
        return _address(x.base) if isinstance(x.base, Tensor) else x.__array_interface__["data"][0]
    try:
        return x.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # raised by fake tensors, and by tensors inside `torch.func`
        return 0


def _overlap(x: Tensor, y: Tensor) -> bool:
    first = [int(t.storage_offset()) * t.itemsize for t in (x, y)]
    extents = [sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) * t.itemsize for t in (x, y)]
    last = map(sum, zip(first, extents, strict=True))
    return x.numel() > 0 < y.numel() and max(first) <= min(last)


def eval_mode_warning(pnet: nn.Module) -> str | None:
    """Return a warning if training would use no dropout and no batch statistics (eval mode), otherwise None."""
    layers = [module for module in pnet.modules() if _trains_otherwise(module)]
    if not layers or any(module.training for module in layers):
        return None
    names = ", ".join(sorted({type(module).__name__ for module in layers}))
    cure = "call pnet.train() before make_train_step (from_pretrained of Hugging Face returns eval mode)"
    return f"the p-net is in eval mode and trains without {names}: {cure}"


def _trains_otherwise(module: nn.Module) -> bool:
    names = ["dropout", "attention_dropout", "hidden_dropout", "dropout_p", "drop_prob"]
    rates = [getattr(module, name, None) for name in names + ["p"] * ("Drop" in type(module).__name__)]
    drops = any(isinstance(rate, float | int) and rate > 0 for rate in rates)
    return drops or isinstance(getattr(module, "running_mean", None), Tensor)


def named_tensors(net: nn.Module, *, ties: bool = False) -> list[tuple[str, Tensor]]:
    """List parameters, then buffers. A tied tensor is listed by its first name, or with `ties` by all its names."""
    each = (net.named_parameters, net.named_buffers)
    return [pair for named in each for pair in named(remove_duplicate=not ties)]


def parameter_infos(pnet: nn.Module) -> list[ParameterInfo]:
    """List every parameter once, in the order of the p-net."""
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
    """Return every buffer once: `{name: (tensor, persistent)}`."""
    saved = set(pnet.state_dict(keep_vars=True))
    return {name: (buffer, name in saved) for name, buffer in pnet.named_buffers()}


def keep_statistics(net: nn.Module, frozen: Collection[str]) -> list[nn.Module]:
    """Freeze the running statistics that `frozen` names: switch their layers to eval mode. Return these layers."""
    names = (name.rpartition(".") for name in frozen)
    return [net.get_submodule(layer).eval() for layer, _, attribute in names if attribute in _STATISTICS]


def without_sparse(net: nn.Module, names: Collection[str]) -> None:
    """Switch off `sparse` of embeddings with weights in `names`, because generated weights need dense gradients."""
    for name, layer in net.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and f"{name}.weight".lstrip(".") in names:
            layer.sparse = False


def skeleton_of(pnet: nn.Module) -> nn.Module:
    """Copy the module with all tensors on the meta device. Raise ValueError if the module cannot be copied."""
    return copy_with(pnet, lambda name, tensor: torch.empty_like(tensor, device="meta"))


def copy_with(pnet: nn.Module, replace: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """Deep-copy the module, and replace each tensor by `replace(name, tensor)`. Tied tensors stay tied."""
    memo: dict[int, Any] = {}
    for name, tensor in named_tensors(pnet):
        fresh = replace(name, tensor.detach())
        trained = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(fresh, tensor.requires_grad) if trained else fresh
    for module in pnet.modules():
        # Detach activations that a forward stored as attributes: `deepcopy` cannot copy tensors with a graph.
        memo |= {id(x): x.detach() for x in vars(module).values() if isinstance(x, Tensor) and not x.is_leaf}
        # Share the packed weights of a quantised base with the copy, because packed weights never change.
        memo |= {id(x): x for x in vars(module).values() if isinstance(x, torch.ScriptObject)}
    try:
        net = copy.deepcopy(pnet, memo)
    except Exception as error:
        raise ValueError(f"the p-net ({type(pnet).__name__}) cannot be deep-copied: {error}") from error
    if same := {*map(id, net.modules())} & {*map(id, pnet.modules())}:
        name = next(name for name, module in pnet.named_modules() if id(module) in same)
        raise ValueError(f"a deep copy of the p-net shares the module {name!r} with it: does __deepcopy__ return self?")
    return net


def with_weights(pnet: nn.Module, weights: TensorMap, buffers: TensorMap, *, bare: Collection[str] = ()) -> nn.Module:
    """Copy the module with `weights` and `buffers`, which are cloned unless named in `bare`. Tied tensors stay tied."""
    tensors = {**weights, **buffers}

    def copied(name: str, own: Tensor) -> Tensor:
        x = tensors[name].detach()
        # Make tensors contiguous: generated matrices may be transposed, which safetensors and FSDP do not support.
        memory = torch.contiguous_format if own.is_contiguous() else torch.preserve_format
        return x if name in bare else x.clone(memory_format=memory)

    return copy_with(pnet, copied)
