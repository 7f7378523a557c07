"""A p-net as a pure function of its tensors: the only `functional_call` of a p-net.

The function works on a skeleton: a copy of the module whose tensors have no storage. So the user's module is never
touched, and the first call of each kind refuses a forward that reads weights other than those given (`reads`).
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gbfunc.layers.forms import Call, WeightForm
from gbfunc.layers.install import install
from gbfunc.pnet.describe import buffers_of, check_pnet, keep_statistics, parameter_infos, skeleton_of
from gbfunc.pnet.grown import GrownNet
from gbfunc.pnet.reads import OwnTensors, refuse_checkpoints
from gbfunc.trees import TensorSpec, compare_trees
from gbfunc.types import Params, TensorMap

_ANY = TensorSpec()
_LATE = (
    "net, or a part or method of it, is used outside of the call of the loss function that it belongs to, where there "
    "are no weights: use it inside"
)
_CHANGED = "the p-net changes a buffer of its frozen base: name its module in modules_to_save: "


class FrozenBuffers(Protocol):
    """Buffers of a base (`gbfunc.base.BaseTensors`): their names, and parameters and buffers on a device."""

    @property
    def buffer_names(self) -> Collection[str]: ...  # noqa: D102

    def on(self, device: torch.device) -> tuple[Params, Params]: ...  # noqa: D102


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
    """A p-net as a pure function: `call(weights, buffers, *args, **kwargs)`, or a function of all that it has: `run`.

    Changes of buffers, in place (BatchNorm's running statistics) or by assignment, land in the `buffers` dict that is
    passed, so pass clones. It keeps the training mode the module has when it is made. Calls from threads take turns.
    For weights with `forms` that are not dense, by name, `weights` has the inputs, by the form's `keys`. `adapt`
    changes the skeleton further, and names the parameters that it takes in another shape or kind. The `frozen`
    buffers of a base are not passed, layers whose statistics they are stay in evaluation mode, and a call that changes
    one is refused. `submodule_call_error` says why no part of the p-net can be called alone, "" where it can.

    Attributes:
        compiled: whether functions that are run may be compiled: they get the skeleton itself.
    """

    def __init__(
        self,
        pnet: nn.Module,
        forms: Mapping[str, WeightForm] | None = None,
        adapt: Callable[[nn.Module], Collection[str]] = lambda skeleton: (),
        frozen: FrozenBuffers | None = None,
        submodule_call_error: str = "",
    ) -> None:
        check_pnet(pnet)
        forms = forms or {}
        self.skeleton, self.compiled = skeleton_of(pnet), False
        self.submodule_call_error = submodule_call_error
        self._parameters: dict[str, TensorSpec] = {}
        for name, _, tensor, *_ in parameter_infos(pnet):
            if name in forms:
                self._parameters |= dict.fromkeys(forms[name].keys_at(name), _ANY)
            else:
                self._parameters[name] = TensorSpec(tuple(tensor.shape))
        self._frozen = frozen if frozen is not None and frozen.buffer_names else None
        kept = () if self._frozen is None else self._frozen.buffer_names
        for layer in keep_statistics(self.skeleton, kept):
            layer.__dict__["train"] = lambda mode=True, layer=layer: layer
        self._buffers = dict.fromkeys((k for k in buffers_of(pnet) if k not in kept), _ANY)
        self._ties = _ties(pnet, forms)
        install(self.skeleton, forms, shown=True)
        self._parameters |= {name: _ANY for name in adapt(self.skeleton) if name in self._parameters}
        self._forms = list(dict.fromkeys(forms.values()))
        self._shared = Call()
        for form in self._forms:
            form.call = self._shared
        self._body, self._modules = _Body(self.skeleton), list(self.skeleton.modules())
        self.lock = threading.RLock()
        self._own = OwnTensors(pnet, self.skeleton)
        # Kinds of calls that were made: training mode, whether there are gradients, and code that was run.
        self._watched: set[Any] = set()
        self.broken = ""
        self.runs: list[NetRun] = []
        self._held: weakref.WeakSet[NetRun] | None = None

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
        if torch.compiler.is_compiling():
            return self.swap(weights, buffers, None, args, kwargs)
        with self._turn(weights, buffers, None) as first:
            return self.guarded(first, weights, buffers, self.swap, weights, buffers, None, args, kwargs)

    def guarded(
        self, first: bool, weights: TensorMap, buffers: TensorMap, call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """`call(*args, **kwargs)`, which may not checkpoint, and, if `first`, read no other tensors than given ones."""
        if first:
            given = (weights, buffers, self._frozen_on(weights))
            return self._own.call(given, refuse_checkpoints, call, *args, **kwargs)
        return refuse_checkpoints(call, *args, **kwargs)

    def _frozen_on(self, weights: TensorMap) -> TensorMap:
        """The frozen buffers on the device of the weights."""
        return {} if self._frozen is None else self._frozen.on(next(iter(weights.values())).device)[1]

    def run(
        self, weights: TensorMap, buffers: Params, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """`function(net, *args, **kwargs)`, `net` being the p-net on these tensors, with all its parts (`GrownNet`).

        Outside of `held`, the net is of no use afterwards.

        Raises:
            RuntimeError: for what would change the p-net, or a net that is used after its time.
            ValueError: as a call does.
        """
        if self.compiled or torch.compiler.is_compiling():
            return self.swap(weights, buffers, function, (self.skeleton, *args), kwargs)
        with self._turn(weights, buffers, getattr(function, "__code__", None)) as first:
            run = NetRun(self, weights, buffers, first)
            try:
                return _uncompiled()(run, function, args, kwargs)
            finally:
                if self._held is None:
                    run.close()
                else:
                    self._held.add(run)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let the nets of runs be called again until the end of this, as checkpoints around them do in backward."""
        outer, self._held = self._held, weakref.WeakSet()
        try:
            yield
        finally:
            for run in self._held:
                run.close()
            self._held = outer

    @contextmanager
    def _turn(self, weights: TensorMap, buffers: TensorMap, code: Any) -> Iterator[bool]:
        """One thread at a time. Gives whether this is the first call of its kind: checked, and watched."""
        with self.lock:
            if self.broken:
                raise RuntimeError(self.broken)
            kind = self.skeleton.training, torch.is_grad_enabled(), code
            first = kind not in self._watched
            if first:
                self.check(weights, buffers)
            try:
                yield first
            except StopForward:
                self._watched.add(kind)
                raise
            self._watched.add(kind)

    def swap(
        self,
        weights: TensorMap,
        buffers: Params,
        function: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The output of a function, None for the p-net's forward, while these tensors are in the skeleton."""
        eager = not torch.compiler.is_compiling()
        frozen = self._frozen_on(weights)
        before = [b._version for b in frozen.values()] if eager else ()
        given = {**weights, **buffers, **frozen}
        # Not by functional_call's tie_weights, which would go through all parameters at every call.
        given |= {alias: given[name] for alias, name in self._ties.items()}
        module, at = (self.skeleton, "") if function is None else (self._body, "net.")
        tensors = {at + name: x for name, x in given.items()}
        if function is not None:
            args, kwargs = (function, args, kwargs), {}
        modes, shared = [m.training for m in self._modules], self._shared
        cache, used = shared.cache, shared.used
        shared.cache, shared.used = {}, set()
        try:
            out = functional_call(module, tensors, args, kwargs, tie_weights=False)
        finally:
            shared.cache, shared.used = cache, used
            for m, training in zip(self._modules, modes, strict=True):
                if m.training != training:
                    m.training = training
            # functional_call leaves what the module assigned in the dict it was given.
            for name, buffer in buffers.items():
                if tensors[at + name] is not buffer:
                    buffers[name] = tensors[at + name]
        for (name, buffer), version in zip(frozen.items(), before, strict=False):
            if tensors[at + name] is not buffer or buffer._version != version:
                raise ValueError(f"{_CHANGED}{name!r}")
        for name in weights if eager else ():
            if tensors[at + name] is not weights[name]:
                raise RuntimeError(f"the parameter {name!r} was replaced in a call on given weights")
        return out


class NetRun:
    """One run of a function with the net (`gbfunc.pnet.grown.Run`); `first` ones are watched more closely."""

    def __init__(self, pure: PureNet, weights: TensorMap, buffers: Params, first: bool) -> None:
        self._pure, self._first = pure, first
        self._given: tuple[TensorMap, Params] | None = weights, buffers
        # What is assigned during the run is not seen by a recomputation; changes in place are, as in any module.
        self._before = dict(buffers)
        self._switched, self._structure = False, ("", [])
        self._noted: dict[int, tuple[Tensor, Any, Tensor | None]] = {}
        self._views: weakref.WeakValueDictionary[int, GrownNet] = weakref.WeakValueDictionary()

    def start(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function; RuntimeError if it changed the p-net."""
        assert self._given is not None
        return self._swap(self._given[1], self._checked, function, *args, **kwargs)

    def close(self) -> None:
        """From here on the net is refused."""
        self._given = None

    def _swap(self, buffers: Params, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert self._given is not None
        self._pure.runs.append(self)
        try:
            return self._pure.swap(self._given[0], buffers, function, args, kwargs)
        finally:
            self._pure.runs.pop()

    def _checked(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        pure, (method, structure) = self._pure, self._structure
        try:
            out = function(self.view(pure.skeleton), *args, **kwargs)
        finally:
            method, structure = self._structure
            if method and structure != _structure(pure.skeleton):
                pure.broken = f"the p-net's method {method!r} changed its modules: call it before gb.make_plan"
        if pure.broken:
            raise RuntimeError(pure.broken)
        for x, mark, copied in self._noted.values():
            if _mark(x) != mark or (copied is not None and not torch.allclose(x, copied, 0, 0, equal_nan=True)):
                raise RuntimeError(f"the loss function changes {self._name(x)} in place: compute with a new tensor")
        self._noted = {}
        return out

    def _name(self, x: Tensor) -> str:
        weights = self._given[0] if self._given else {}
        return next((f"the parameter {k!r}" for k, w in weights.items() if w is x), "a parameter")

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a part of the p-net while its weights are in place; RuntimeError after the end."""
        if self._runs and self._given is not None:
            return self._pure.guarded(self._first, *self._given, function, *args, **kwargs)
        with self._pure.lock:
            # In backward, where a checkpoint around the call makes it again: buffers are not changed twice.
            if self._given is None or self in self._pure.runs or self._switched:
                raise RuntimeError(_LATE)
            return self._swap({k: b.detach().clone() for k, b in self._before.items()}, function, *args, **kwargs)

    @property
    def _runs(self) -> bool:
        """Whether it is this run's tensors that the skeleton has."""
        return bool(self._pure.runs) and self._pure.runs[-1] is self

    def train(self, module: nn.Module, mode: bool) -> None:
        """Set the training mode of a part for the rest of the run."""
        if not self._runs:
            raise RuntimeError(_LATE)
        self._switched = True
        module.train(mode)

    def part(self, module: nn.Module, method: str = "") -> None:
        """Refuse the call of a part, or of a method, of a p-net of which only the whole can be called."""
        if self._pure.submodule_call_error and (method or module is not self._pure.skeleton):
            what = f"its method {method!r}" if method else f"its {type(module).__name__}"
            raise RuntimeError(f"{self._pure.submodule_call_error}: call net(...), not {what}")

    def own(self, method: str) -> None:
        """Watch whether a method of the p-net changes its modules."""
        if not self._structure[0]:
            self._structure = method, _structure(self._pure.skeleton)

    def note(self, value: Any) -> None:
        """Watch the parameters in a value, which must not change."""
        if isinstance(value, Mapping | tuple | list):
            for x in value.values() if isinstance(value, Mapping) else value:
                self.note(x)
        elif type(value) in (Tensor, nn.Parameter) and id(value) not in self._noted and not value.is_inference():
            mark = _mark(value)
            copied = value.detach().clone() if self._first and mark[1] else None
            self._noted[id(value)] = value, mark, copied

    def view(self, module: nn.Module) -> GrownNet:
        """The view of a part, the same as long as somebody holds it: `m is not net.head` means what it says."""
        view = self._views.get(id(module))
        if view is None:
            view = self._views[id(module)] = GrownNet(module, self)
        return view


def _mark(x: Tensor) -> tuple[int, int, bool]:
    """What changes with a tensor that is changed in place, or is given other data; torch.func has no address."""
    try:
        return x._version, x.data_ptr(), x.requires_grad
    except RuntimeError:
        return x._version, 0, x.requires_grad


def _structure(net: nn.Module) -> list[Any]:
    """Modules, and names of what they hold."""
    return [(m, *(list(names) for names in (m._parameters, m._buffers, m._modules))) for m in net.modules()]


@functools.cache
def _disabled() -> Callable[..., Any]:
    # isinstance knows no view of a module in compiled code, and would be False there without a word.
    return torch.compiler.disable(NetRun.start)  # pyright: ignore[reportReturnType]


def _uncompiled() -> Callable[..., Any]:
    """`NetRun.start` that no compiler looks into, should there be one."""
    return _disabled() if "torch._dynamo" in sys.modules else NetRun.start


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
