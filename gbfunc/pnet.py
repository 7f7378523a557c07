"""The p-net as a pure function of its parameters and buffers: the only `functional_call` of a p-net.

The function works on a skeleton: a copy of the module whose tensors have no storage. So the user's module is never
touched, and a module that reaches for its own weights behind the function's back fails loudly instead of silently.
"""

from __future__ import annotations

import copy
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.checkpoint import checkpoint

from gbfunc.layers.forms import Call, WeightForm, install
from gbfunc.trees import TensorSpec, compare_trees
from gbfunc.types import Params, TensorMap

_WRAPPERS = {
    "DistributedDataParallel": "DDP never synchronises the genome's gradient: pass the module inside it (ddp.module)",
    "DataParallel": "it copies the module's own weights, not the generated ones: pass the module inside it (.module)",
    "FullyShardedDataParallel": "FSDP owns the weights and ignores generated ones: pass the module before wrapping it",
    "FSDPModule": "FSDP2 owns the weights and ignores generated ones: pass the module before fully_shard",
    "OptimizedModule": "pass the module before torch.compile (its ._orig_mod) and compile the training step instead",
}
_ANY = TensorSpec()
_CHECKPOINT = (
    "this p-net calls torch.utils.checkpoint inside its forward: backward would recompute with the module's own "
    "weights instead of the generated ones. Switch it off (Hugging Face: model.gradient_checkpointing_disable())"
)

_CHANGED = "the p-net changes a buffer of its frozen base: name its module in modules_to_save: "
_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked", "_u", "_v"})
"""Buffers that layers update in training mode: batch norm's, and spectral norm's."""


class FrozenBuffers(Protocol):
    """Buffers of a base (`gbfunc.base.BaseTensors`): their names, and parameters and buffers on a device."""

    @property
    def buffer_names(self) -> Collection[str]: ...  # noqa: D102

    def on(self, device: torch.device) -> tuple[Params, Params]: ...  # noqa: D102


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
        ValueError: for a wrapped (DDP, FSDP, compiled) or uninitialised (lazy) p-net, naming what to do instead.
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


def keep_statistics(net: nn.Module, frozen: Collection[str]) -> None:
    """Put layers whose statistics are frozen buffers into evaluation mode: they would be updated in training mode."""
    for layer, _, attribute in (name.rpartition(".") for name in frozen):
        if attribute in _STATISTICS:
            net.get_submodule(layer).eval()


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
        return copy.deepcopy(pnet, memo)
    except Exception as error:
        raise ValueError(f"the p-net ({type(pnet).__name__}) cannot be deep-copied: {error}") from error


def with_weights(pnet: nn.Module, weights: TensorMap, buffers: TensorMap, *, bare: Collection[str] = ()) -> nn.Module:
    """A copy of the module with copies of these weights and buffers, those in `bare` as they are; ties are kept."""
    both = {**weights, **buffers}
    return _copy_with(pnet, lambda name, _: both[name].detach() if name in bare else both[name].detach().clone())


@contextmanager
def _refuse_checkpoints() -> Iterator[None]:
    """Raise ValueError if `torch.utils.checkpoint.checkpoint` is called inside, however it was imported."""
    code, seen = inspect.unwrap(checkpoint).__code__, False
    previous: Any = sys.getprofile()

    def watch(frame: Any, event: str, arg: Any) -> None:
        nonlocal seen
        seen = seen or (event == "call" and frame.f_code is code)

    # Before Python 3.12 cProfile holds the same place and is not callable: it must be paused, not put back.
    paused = previous is not None and not callable(previous)
    if paused:
        previous.disable()  # pyright: ignore[reportOptionalMemberAccess]
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None if paused else previous)
        if paused:
            previous.enable()  # pyright: ignore[reportOptionalMemberAccess]
    if seen:
        raise ValueError(_CHECKPOINT)


class StopForward(BaseException):
    """Ends a call of a p-net from inside of it, as stages of a pipeline do; no error."""


class PureNet:
    """A p-net as a pure function: `call(weights, buffers, *args, **kwargs)`.

    Changes of buffers, in place (BatchNorm's running statistics) or by assignment, land in the `buffers` dict that is
    passed, so pass clones. It keeps the training mode the module has when it is made. Calls from threads take turns.
    For weights with `forms` that are not dense, by name, `weights` has the inputs, as `NAME_form.INPUT`. `adapt`
    changes the skeleton further, and names the parameters that it takes in another shape or kind. The `frozen`
    buffers of a base are not passed, layers whose statistics they are stay in evaluation mode, and a call that changes
    one is refused.
    """

    def __init__(
        self,
        pnet: nn.Module,
        forms: Mapping[str, WeightForm] | None = None,
        adapt: Callable[[nn.Module], Collection[str]] = lambda skeleton: (),
        frozen: FrozenBuffers | None = None,
    ) -> None:
        check_pnet(pnet)
        forms = forms or {}
        self.skeleton = skeleton_of(pnet)
        self._parameters: dict[str, TensorSpec] = {}
        for name, _, tensor, *_ in parameter_infos(pnet):
            if name in forms:
                self._parameters |= {f"{name}_form.{k}": _ANY for k in forms[name].inputs}
            else:
                self._parameters[name] = TensorSpec(tuple(tensor.shape))
        self._frozen = frozen if frozen is not None and frozen.buffer_names else None
        kept = () if self._frozen is None else self._frozen.buffer_names
        keep_statistics(self.skeleton, kept)
        self._buffers = dict.fromkeys((k for k in buffers_of(pnet) if k not in kept), _ANY)
        self._ties = _ties(pnet, forms)
        install(self.skeleton, forms, shown=True)
        self._parameters |= {name: _ANY for name in adapt(self.skeleton) if name in self._parameters}
        self._forms = list(dict.fromkeys(forms.values()))
        self._shared = Call()
        for form in self._forms:
            form.call = self._shared
        self._lock = threading.RLock()
        self._watched = False

    @property
    def dense_reads(self) -> dict[str, int]:
        """How often the p-net has read weights as dense tensors, of those that are not: by name."""
        return {form.name: form.reads for form in self._forms if form.reads}

    def check(self, weights: TensorMap, buffers: TensorMap) -> None:
        """Raise `ValueError` for a missing, misspelt or misshapen tensor (`functional_call` lets some of them pass)."""
        compare_trees(self._parameters, weights, "parameters do not fit the p-net")
        compare_trees(self._buffers, buffers, "buffers do not fit the p-net")

    def __call__(self, weights: TensorMap, buffers: Params, *args: Any, **kwargs: Any) -> Any:
        """The p-net's output; ValueError if it checkpoints inside its forward, or the first tensors do not fit it."""
        if torch.compiler.is_compiling():
            return self._call(weights, buffers, args, kwargs)
        with self._lock:
            if self._watched:
                return self._call(weights, buffers, args, kwargs)
            self.check(weights, buffers)
            try:
                with _refuse_checkpoints():
                    out = self._call(weights, buffers, args, kwargs)
            except StopForward:
                self._watched = True
                raise
            self._watched = True
            return out

    def bind(self, weights: TensorMap, buffers: Params) -> Callable[..., Any]:
        """The p-net closed over weights and buffers: what a loss function gets."""
        return lambda *args, **kwargs: self(weights, buffers, *args, **kwargs)

    def _call(self, weights: TensorMap, buffers: Params, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        frozen = {} if self._frozen is None else self._frozen.on(next(iter(weights.values())).device)[1]
        before = () if torch.compiler.is_compiling() else [b._version for b in frozen.values()]
        tensors = {**weights, **buffers, **frozen}
        # Not by functional_call's tie_weights, which would go through all parameters at every call.
        tensors |= {alias: tensors[name] for alias, name in self._ties.items()}
        self._shared.cache = {}
        try:
            out = functional_call(self.skeleton, tensors, args, kwargs, tie_weights=False)
        finally:
            self._shared.cache = None
            # functional_call leaves what the module assigned to its buffers in the dict it was given.
            for name, buffer in buffers.items():
                if tensors[name] is not buffer:
                    buffers[name] = tensors[name]
        for (name, buffer), version in zip(frozen.items(), before, strict=False):
            if tensors[name] is not buffer or buffer._version != version:
                raise ValueError(f"{_CHANGED}{name!r}")
        return out


def _ties(pnet: nn.Module, forms: Collection[str]) -> dict[str, str]:
    """Other names of tied parameters and buffers without a form: `{alias: name}`, one for each place."""
    first: dict[int, str] = {}
    ties, places = {}, set()
    buffers = pnet.named_buffers(remove_duplicate=False)
    for name, tensor in (*pnet.named_parameters(remove_duplicate=False), *buffers):
        prefix, _, attribute = name.rpartition(".")
        place = (id(pnet.get_submodule(prefix)), attribute)
        original = first.setdefault(id(tensor), name)
        if original != name and place not in places and original not in forms:
            ties[name] = original
        places.add(place)
    return ties
