"""What a p-net is made of: checks, its parameters and buffers by name, its skeleton, and copies of it."""

from __future__ import annotations

import builtins
import copy
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

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
}
_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked", "_u", "_v"})
"""Buffers that layers update in training mode: batch norm's, and spectral norm's."""


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
    """Refuse what cannot be a pure function of its parameters.

    Raises:
        TypeError: if `pnet` is not an `nn.Module`.
        ValueError: for a wrapped (DDP, FSDP, compiled) or uninitialised (lazy) p-net, naming what to do instead, and
            for one whose forward uses parts as variables around it.
    """
    if not isinstance(pnet, nn.Module):
        raise TypeError(f"the p-net must be an nn.Module, got {type(pnet).__name__}")
    for name, module in pnet.named_modules():
        for base in type(module).__mro__:
            if base.__name__ in _WRAPPERS:
                where = f" at {name!r}" if name else ""
                raise ValueError(f"the p-net is wrapped in {base.__name__}{where}: {_WRAPPERS[base.__name__]}")
    for name, tensor in (*pnet.named_parameters(), *pnet.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            what = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise ValueError(f"{what} {name!r} is lazy and has no shape yet: run the p-net once on a batch first")
    parts = {id(x): _Part() for x in (*pnet.modules(), *pnet.parameters(), *pnet.buffers())}
    for cls in {type(module) for module in pnet.modules()}:
        method = inspect.getattr_static(cls, "forward", None)
        # Of imported files none names what a script has made.
        told = isinstance(method, FunctionType) and (method.__closure__ or method.__module__ == "__main__")
        if told and _moved(method, parts) is not method:
            what = f"{cls.__name__}.forward uses a part of the p-net that is a variable around it, not of self"
            raise ValueError(f"{what}: its weights would not be the generated ones")


class _Part:
    """Stands for the copy of a part of a p-net."""


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
    """Put layers whose statistics are frozen buffers into evaluation mode: they would be updated in training mode."""
    names = (name.rpartition(".") for name in frozen)
    return [net.get_submodule(layer).eval() for layer, _, attribute in names if attribute in _STATISTICS]


def skeleton_of(pnet: nn.Module) -> nn.Module:
    """A copy of the module with every tensor on the meta device; `ValueError` for one that cannot be copied."""
    return _copy_with(pnet, lambda name, tensor: torch.empty_like(tensor, device="meta"))


def _copy_with(pnet: nn.Module, replace: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """A deep copy in which every parameter and buffer is what `replace(name, tensor)` returns; ties are kept."""
    memo: dict[int, Any] = {}
    for name, tensor in (*pnet.named_parameters(), *pnet.named_buffers()):
        fresh = replace(name, tensor.detach())
        trained = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(fresh, tensor.requires_grad) if trained else fresh
    for module in pnet.modules():
        for value in vars(module).values():
            # Activations that a forward left behind carry a graph, which deepcopy refuses.
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach()
    try:
        return copy_of(pnet, memo)
    except Exception as error:
        raise ValueError(f"the p-net ({type(pnet).__name__}) cannot be deep-copied: {error}") from error


def copy_of(pnet: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy, whose functions (attributes, hooks) compute with its own parts where they closed over the p-net's.

    `memo` is deepcopy's; what it holds already stands for itself.
    """
    net = copy.deepcopy(pnet, memo)
    copies = {id(module): memo[id(module)] for module in pnet.modules() if id(module) in memo}
    copies |= {id(x): memo[id(x)] for x in (*pnet.parameters(), *pnet.buffers()) if id(x) in memo}
    for module in net.modules():
        held = vars(module)
        for key, value in held.items():
            # Attributes, and hooks in dicts.
            held[key] = _moved(value, copies)
            if isinstance(value, dict) and key[:1] == "_" and key not in ("_parameters", "_buffers", "_modules"):
                for name, hook in value.items():
                    value[name] = _moved(hook, copies)
    return net


def _moved(value: Any, copies: Mapping[int, Any], seen: frozenset[int] = frozenset()) -> Any:
    """A function or weak reference that leads to parts of a p-net, leading to their copies; all else as it is.

    deepcopy shares these: the copy would compute with the original's weights.
    """
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, weakref.ref):
        return weakref.ref(copies[id(value())]) if id(value()) in copies else value
    if isinstance(value, MethodType):
        return MethodType(value.__func__, copies[id(value.__self__)]) if id(value.__self__) in copies else value
    if isinstance(value, list | tuple | dict) and type(value) in (list, tuple, dict):
        items = list(value.values()) if isinstance(value, dict) else list(value)
        moved = [_moved(x, copies, seen | {id(value)}) if id(x) not in seen else x for x in items]
        if all(x is y for x, y in zip(items, moved, strict=True)):
            return value
        return dict(zip(value, moved, strict=True)) if isinstance(value, dict) else type(value)(moved)
    if not isinstance(value, FunctionType) or id(value) in seen:
        return value
    inside = seen | {id(value)}
    cells = [_moved_cell(cell, copies, inside) for cell in value.__closure__ or ()]
    defaults = _moved(value.__defaults__, copies, inside)
    keywords = _moved(value.__kwdefaults__, copies, inside)
    names = _moved_globals(value, copies, inside)
    same = all(x is y for x, y in zip(cells, value.__closure__ or (), strict=True))
    if same and not names and defaults is value.__defaults__ and keywords is value.__kwdefaults__:
        return value
    names = _Globals(value.__globals__, names) if names else value.__globals__
    function = FunctionType(value.__code__, names, value.__name__, defaults, tuple(cells))
    function.__kwdefaults__, function.__qualname__ = keywords, value.__qualname__
    function.__annotations__ = value.__annotations__
    vars(function).update(vars(value))
    return function


class _Globals(dict[str, Any]):
    """Global names of a function, some of which stand for something else."""

    def __init__(self, names: dict[str, Any], moved: dict[str, Any]) -> None:
        super().__init__(moved, __builtins__=names.get("__builtins__", builtins))
        self._names = names

    def __missing__(self, name: str) -> Any:
        return self._names[name]


def _moved_globals(function: FunctionType, copies: Mapping[int, Any], seen: frozenset[int]) -> dict[str, Any]:
    """Global names in a function's code that lead to the p-net, with what they should lead to."""
    names, codes = set[str](), [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [x for x in code.co_consts if isinstance(x, CodeType)]
    held = {name: function.__globals__[name] for name in names & function.__globals__.keys()}
    # Functions of other files are no p-net's own.
    own = {k: x for k, x in held.items() if getattr(x, "__globals__", function.__globals__) is function.__globals__}
    moved = {name: _moved(x, copies, seen) for name, x in own.items()}
    return {name: x for name, x in moved.items() if x is not held[name]}


def _moved_cell(cell: CellType, copies: Mapping[int, Any], seen: frozenset[int]) -> CellType:
    """The cell itself, unless it holds what leads to the p-net: what a function counts is counted once."""
    try:
        held = cell.cell_contents
    except ValueError:
        return cell
    moved = _moved(held, copies, seen)
    return cell if moved is held else CellType(moved)


def with_weights(pnet: nn.Module, weights: TensorMap, buffers: TensorMap, *, bare: Collection[str] = ()) -> nn.Module:
    """A copy of the module with copies of these weights and buffers, those in `bare` as they are; ties are kept."""
    both = {**weights, **buffers}
    net = _copy_with(pnet, lambda name, _: both[name].detach() if name in bare else both[name].detach().clone())
    first = {alias: info.name for info in parameter_infos(pnet) for alias in info.aliases}
    # The copy of a scripted part is C++'s own, which knows of no other tensors.
    for path, part in net.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            with torch.no_grad():
                for name, x in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
                    here = f"{path}.{name}" if path else name
                    x.copy_(both[first.get(here, here)])
    return net
