"""A p-net as a pure function of its tensors: the only `functional_call` of a p-net.

The function works on a skeleton: a copy of the module whose tensors have no storage. So the user's module is never
touched, and calls 1, 2, 4, ... of each kind refuse a forward that reads weights other than those given (`reads`).
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.func import functional_call
from torch.utils import checkpoint as checkpointing

from gbfunc.layers.forms import Call, WeightForm
from gbfunc.layers.install import install
from gbfunc.pnet.describe import buffers_of, check_pnet, in_one_memory, keep_statistics, parameter_infos, skeleton_of
from gbfunc.pnet.reads import CHANGES_BASE, LeftTensors, OwnTensors
from gbfunc.trees import TensorSpec, compare_trees
from gbfunc.types import Params, TensorMap

_ANY = TensorSpec()
_CHECKPOINT = (
    "this p-net calls torch.utils.checkpoint inside its forward: backward would recompute with the module's own "
    "weights instead of the generated ones. Switch it off (Hugging Face: model.gradient_checkpointing_disable())"
)
_APART = (
    "the p-net changes a buffer in the memory of another one, and a state keeps the two apart: register one of them, "
    "and compute the other from it in the forward: "
)


class FrozenBuffers(Protocol):
    """Buffers of a base (`gbfunc.base.BaseTensors`): their names, and parameters and buffers on a device."""

    @property
    def buffer_names(self) -> Collection[str]: ...  # noqa: D102

    def on(self, device: torch.device) -> tuple[Params, Params]: ...  # noqa: D102


_KEPT = [getattr(checkpointing, "_CheckpointFrame", object()), checkpointing.CheckpointFunction._backward_cls]


class StopForward(BaseException):
    """Ends a call of a p-net from inside of it, as stages of a pipeline do; no error."""


class _Body(nn.Module):
    """Runs a function while the tensors of a functional call are in the net inside of it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)


class PureNet:
    """A p-net as a pure function: `call(weights, buffers, *args, **kwargs)`; `gbfunc.pnet.grown` gives out its parts.

    Changes of buffers, in place (BatchNorm's running statistics) or by assignment, land in the `buffers` dict that is
    passed, so pass clones. It keeps the training mode the module has when it is made. Calls from threads take turns.
    For weights with `forms` that are not dense, by name, `weights` has the inputs, by the form's `keys`. `adapt`
    changes the skeleton further, and names the parameters that it takes in another shape or kind. The `frozen`
    buffers of a base are not passed, layers whose statistics they are stay in evaluation mode, and a call that changes
    one is refused.

    Attributes:
        skeleton: the copy.
        lock: held during a call.
        broken: why it can no longer be called, "" if it can.
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
        self.skeleton, self.broken = skeleton_of(pnet), ""
        self._parameters: dict[str, TensorSpec] = {}
        for name, _, tensor, *_ in parameter_infos(pnet):
            if name in forms:
                self._parameters |= dict.fromkeys(forms[name].keys_at(name), _ANY)
            else:
                self._parameters[name] = TensorSpec(tuple(tensor.shape))
        self._base, self._frozen = frozen, frozen if frozen is not None and frozen.buffer_names else None
        kept = () if self._frozen is None else self._frozen.buffer_names
        for layer in keep_statistics(self.skeleton, kept):
            layer.__dict__["train"] = lambda mode=True, layer=layer: layer
        self._buffers = dict.fromkeys((k for k in buffers_of(pnet) if k not in kept), _ANY)
        self._ties = _ties(pnet, forms)
        # Buffers in the memory of another: a state keeps them apart.
        self._apart = {name for pair in in_one_memory(pnet) for name, _ in pair} & self._buffers.keys()
        install(self.skeleton, forms, shown=True)
        self._parameters |= {name: _ANY for name in adapt(self.skeleton) if name in self._parameters}
        self._forms = list(dict.fromkeys(forms.values()))
        self._shared = Call()
        for form in self._forms:
            form.call = self._shared
        self._body, self._modules = _Body(self.skeleton), list(self.skeleton.modules())
        self._place = cache(partial(_find_place, self.skeleton))
        self.lock = threading.RLock()
        self._own, self._left = OwnTensors(pnet, self.skeleton), LeftTensors(self.skeleton)
        # Calls of each kind: training mode, whether there are gradients, and code that was run.
        self._calls = Counter[Any]()

    @property
    def dense_reads(self) -> dict[str, int]:
        """How often the p-net has read weights as dense tensors, of those that are not: by name."""
        return {form.name: form.reads for form in self._forms if form.reads}

    def check(self, weights: TensorMap, buffers: TensorMap) -> None:
        """Raise `ValueError` for a missing, misspelt or misshapen tensor (`functional_call` lets some of them pass)."""
        compare_trees(self._parameters, weights, "parameters do not fit the p-net")
        compare_trees(self._buffers, buffers, "buffers do not fit the p-net")

    def __call__(self, weights: TensorMap, buffers: Params, /, *args: Any, **kwargs: Any) -> Any:
        """The p-net's output.

        Raises:
            ValueError: if it checkpoints inside its forward, and at the first call of a kind if the tensors do not fit
                it, or if it reads the module's own.
        """
        # Dynamo traces code without running it; an export without Dynamo runs it, and is watched.
        if torch.compiler.is_dynamo_compiling():
            return self.swap(weights, buffers, self.skeleton, args, kwargs)
        with self.turn(weights, buffers, None) as first:
            return self.guarded(first, weights, buffers, self.swap, weights, buffers, self.skeleton, args, kwargs)

    def guarded(
        self, first: bool, weights: TensorMap, buffers: TensorMap, call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """`call(*args, **kwargs)`, which may not checkpoint, and, if `first`, read no other tensors than given ones.

        Raises:
            ValueError: if it does, or leaves something that `torch.utils.checkpoint` recomputes, or changes a buffer in
                the memory of another.
        """
        checkpoints = _checkpoints()
        if first:
            # The base has the p-net's memory, though storages of its own.
            both = () if self._base is None else self._base.on(next(iter(weights.values())).device)
            base = {name: x for tensors in both for name, x in tensors.items()}
            # Without gradients a state may be kept, as in any module.
            left = self._left if torch.is_grad_enabled() else None
            if left is not None:
                left.begin(weights, (args, kwargs))
            before = {name: (buffers[name], buffers[name]._version) for name in self._apart}
            out = self._own.call((weights, buffers), base, left, call, *args, **kwargs)
            for name, (buffer, version) in before.items():
                if buffers[name] is not buffer or buffer._version != version:
                    raise ValueError(f"{_APART}{name!r}")
        else:
            out = call(*args, **kwargs)
        if _checkpoints() > checkpoints:
            raise ValueError(_CHECKPOINT)
        return out

    @contextmanager
    def turn(self, weights: TensorMap, buffers: TensorMap, code: Any) -> Iterator[bool]:
        """One thread at a time. Gives whether this call is checked and watched: calls 1, 2, 4, 8, ... of each kind."""
        with self.lock:
            if self.broken:
                raise RuntimeError(self.broken)
            kind = self.skeleton.training, torch.is_grad_enabled(), code
            call = self._calls[kind] + 1
            # A forward may take another way later; graphs of exports should not hold what watching does.
            first = call & (call - 1) == 0 and (call == 1 or not torch.compiler.is_compiling())
            if first:
                self.check(weights, buffers)
            try:
                yield first
            except StopForward:
                self._calls[kind] = call
                raise
            self._calls[kind] = call
            # Not inside of another call, whose tensors are there yet.
            if first and self._shared.cache is None:
                self._left.end()

    def swap(
        self,
        weights: TensorMap,
        buffers: Params,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The output of a function, or of the skeleton's forward, while these tensors are in the skeleton."""
        eager = not torch.compiler.is_compiling()
        frozen = {} if self._frozen is None else self._frozen.on(next(iter(weights.values())).device)[1]
        before = [b._version for b in frozen.values()] if eager else ()
        given = {**weights, **buffers, **frozen}
        # Not by functional_call's tie_weights, which would go through all parameters at every call.
        given.update({alias: given[name] for alias, name in self._ties.items()})
        modes, shared = [m.training for m in self._modules], self._shared
        cache, used = shared.cache, shared.used
        shared.cache, shared.used = {}, set()
        try:
            if eager:
                out = self._exchanged(given, function, args, kwargs)
            else:
                named = {f"net.{name}": x for name, x in given.items()}
                out = functional_call(self._body, named, (function, args, kwargs), tie_weights=False)
                given = {name: named[f"net.{name}"] for name in given}
        finally:
            shared.cache, shared.used = cache, used
            for m, training in zip(self._modules, modes, strict=True):
                if m.training != training:
                    m.training = training
            # What the module assigned is in the dict.
            for name, buffer in buffers.items():
                if given[name] is not buffer:
                    buffers[name] = given[name]
        for (name, buffer), version in zip(frozen.items(), before, strict=False):
            if given[name] is not buffer or buffer._version != version:
                raise ValueError(f"{CHANGES_BASE}{name!r}")
        for name in weights if eager else ():
            if given[name] is not weights[name]:
                raise RuntimeError(f"the parameter {name!r} was replaced in a call on given weights")
        return out

    def _exchanged(self, given: Params, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`call(*args, **kwargs)` while the tensors are in the skeleton; after it `given` has what is in their places.

        It is `functional_call`, which looks for each place anew at every call: 0.05 ms, half a small net's forward.
        """
        places = [*map(self._place, given)]
        before = [holder[attribute] for holder, attribute in places]
        try:
            for (holder, attribute), x in zip(places, given.values(), strict=True):
                holder[attribute] = x
            return call(*args, **kwargs)
        finally:
            for name, (holder, attribute), x in zip(given, places, before, strict=True):
                if attribute in holder:
                    given[name] = holder[attribute]
                holder[attribute] = x


def _find_place(net: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Where a net keeps a parameter or buffer: a dict, and the key in it."""
    path, _, attribute = name.rpartition(".")
    module = net.get_submodule(path)
    return (module._parameters if attribute in module._parameters else module._buffers), attribute


def _checkpoints() -> int:
    """A number that rises with each checkpoint that waits for backward: an object has a reference to its type."""
    return sum(map(sys.getrefcount, _KEPT))


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
