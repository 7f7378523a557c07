"""What a p-net is made of: checks, its parameters and buffers by name, its skeleton, and copies of it."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Collection
from itertools import combinations
from types import CellType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

from gbfunc.pnet.reads import OwnTensors, storages_of, tensors_in
from gbfunc.types import TensorMap

_WRAPPERS = {
    "DistributedDataParallel": "DDP never synchronises the genome's gradient: pass the module inside it (ddp.module)",
    "DataParallel": "it copies the module's own weights, not the generated ones: pass the module inside it (.module)",
    "FullyShardedDataParallel": "FSDP owns the weights and ignores generated ones: pass the module before wrapping it",
    "FSDPModule": "FSDP2 owns the weights and ignores generated ones: pass the module before fully_shard",
    "OptimizedModule": "pass the module before torch.compile (its ._orig_mod) and compile the training step instead",
}
_KEEPERS = (nn.Module, dict, list, set)
_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked", "_u", "_v", "weight_u", "weight_v"})
"""Buffers that layers update in training mode: batch norm's, and spectral norm's, the older one's too."""


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
        ValueError: for a wrapped (DDP, FSDP, compiled) or uninitialised (lazy) p-net, a buffer that is a parameter, or
            a parameter in the memory of another tensor, a hook on a parameter, or one that is a closure over the p-net,
            naming what to do instead.
    """
    if not isinstance(pnet, nn.Module):
        raise TypeError(f"the p-net must be an nn.Module, got {type(pnet).__name__}")
    for name, module in pnet.named_modules():
        for base in type(module).__mro__:
            if base.__name__ in _WRAPPERS:
                where = f" at {name!r}" if name else ""
                raise ValueError(f"the p-net is wrapped in {base.__name__}{where}: {_WRAPPERS[base.__name__]}")
    parameters = {tensor: name for name, tensor in pnet.named_parameters()}
    for name, tensor in (*pnet.named_parameters(), *pnet.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            what = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise ValueError(f"{what} {name!r} is lazy and has no shape yet: run the p-net once on a batch first")
        if isinstance(tensor, nn.Parameter) and (parameter := parameters.get(tensor)) not in (None, name):
            cure = f"read self.{parameter}, or register a copy (.detach().clone())"
            raise ValueError(f"buffer {name!r} is the parameter {parameter!r} itself: {cure}")
    _check_memory(pnet)
    _check_hooks(pnet)


def _check_hooks(pnet: nn.Module) -> None:
    """Refuse hooks of parameters' own, and one that reaches the p-net by a closure.

    Generated weights would be without the former; copies share the latter, and what it keeps would be another's.
    """
    for name, x in pnet.named_parameters():
        if x._backward_hooks or getattr(x, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"the parameter {name!r} has a hook on its gradient, which no generated weight would have: remove it, "
                "or register it in the forward, where the weight is there (self.NAME.register_hook)"
            )
    own = {id(x) for module in pnet.modules() for x in (module, *vars(module).values()) if isinstance(x, _KEEPERS)}
    for name, module in pnet.named_modules():
        for hooks in (v for k, v in vars(module).items() if k.endswith("_hooks") and isinstance(v, dict)):
            for hook in hooks.values():
                cells = (cell for cell in getattr(hook, "__closure__", None) or () if cell != CellType())
                if any(id(cell.cell_contents) in own for cell in cells):
                    where = f" of {name!r}" if name else ""
                    raise ValueError(
                        f"the hook {hook.__qualname__}{where} reaches the p-net by a closure, and copies of the p-net "
                        "would share it: make it a method of the module that keeps what it finds (self.hook)"
                    )


def in_one_memory(pnet: nn.Module) -> list[tuple[tuple[str, Tensor], tuple[str, Tensor]]]:
    """Pairs of parameters and buffers, with their names, that have entries in the same place."""
    places: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in (*pnet.named_parameters(), *pnet.named_buffers()):
        for storage in storages_of(tensor) if tensor.layout == torch.strided else ():
            places.setdefault(storage._cdata, []).append((name, tensor))
    pairs = (pair for named in places.values() for pair in combinations(named, 2))
    return [(a, b) for a, b in pairs if _overlap(a[1], b[1])]


def _check_memory(pnet: nn.Module) -> None:
    """Refuse a parameter in the memory of another tensor: torch's training changes both, a genome makes two of them."""
    for (a, x), (b, y) in in_one_memory(pnet):
        if isinstance(x, nn.Parameter) or isinstance(y, nn.Parameter):
            raise ValueError(
                f"{a!r} and {b!r} are two tensors in the same memory, which training ties and a genome would not: use "
                f"one Parameter in both places (F.linear(x, self.{a}.t()) for its transpose), or a copy (.clone())"
            )


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors in one storage have entries in the same place."""
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


def without_sparse(net: nn.Module, names: Collection[str]) -> None:
    """Let the embeddings of these weights give dense gradients: no other can go through what generates a weight."""
    for name, layer in net.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and f"{name}.weight".lstrip(".") in names:
            layer.sparse = False


def skeleton_of(pnet: nn.Module) -> nn.Module:
    """A copy of the module with every tensor on the meta device; `ValueError` for one that cannot be copied."""
    skeleton = _copy_with(pnet, lambda name, tensor: torch.empty_like(tensor, device="meta"))
    OwnTensors(pnet).mark(skeleton)
    return skeleton


def _copy_with(pnet: nn.Module, replace: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """A deep copy in which every parameter and buffer is what `replace(name, tensor)` returns; ties are kept."""
    memo: dict[int, Any] = {}
    for name, tensor in (*pnet.named_parameters(), *pnet.named_buffers()):
        fresh = replace(name, tensor.detach())
        trained = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(fresh, tensor.requires_grad) if trained else fresh
    own = OwnTensors(pnet)
    for module in pnet.modules():
        for value in tensors_in(list(vars(module).values()), arrays=True):
            name = own.name_of(value)
            if isinstance(value, np.ndarray) and name is not None and name.startswith("parameter"):
                raise ValueError(
                    f"a {type(module).__name__} of the p-net holds an array in the memory of its {name}, where "
                    "generated weights never are: make it of the parameter when it is read, or of a copy"
                )
            # Activations that a forward left behind carry a graph, which deepcopy refuses; a view of a weight that was
            # copied could not be distinguished from a constant.
            if id(value) not in memo and (name is not None or isinstance(value, Tensor) and not value.is_leaf):
                memo[id(value)] = value.detach() if isinstance(value, Tensor) else value
    try:
        net = copy_of(pnet, memo)
    except Exception as error:
        raise ValueError(f"the p-net ({type(pnet).__name__}) cannot be deep-copied: {error}") from error
    # The copy of a scripted part is C++'s own, which knows of no other tensors.
    for path, part in net.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            own: Any = pnet.get_submodule(path)
            for name, tensor in (*own.named_parameters(recurse=False), *own.named_buffers(recurse=False)):
                setattr(part, name, memo[id(tensor)])
    return net


def copy_of(pnet: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy; what it holds as weak references to its parts are references to their copies. `memo` is deepcopy's.

    Functions that lead to the p-net by a closure or a global name are shared, as deepcopy does.
    """
    net = copy.deepcopy(pnet, memo)
    if same := {*map(id, net.modules())} & {*map(id, pnet.modules())}:
        name = next(name for name, module in pnet.named_modules() if id(module) in same)
        raise ValueError(f"a copy of the p-net has its {name!r} itself (a __deepcopy__ that returns self?)")
    copies = {id(x): memo.get(id(x)) for x in (*pnet.modules(), *pnet.parameters(), *pnet.buffers())}
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
        if name in bare:
            return x
        # Safetensors and FSDP take contiguous tensors alone, and matrices may be generated transposed.
        alike = x.layout == own.layout == torch.strided and own.is_contiguous()
        return x.clone(memory_format=torch.contiguous_format if alike else torch.preserve_format)

    return _copy_with(pnet, copied)
