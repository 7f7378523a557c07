"""`net` of a loss function: the p-net on its generated weights, with all that it has, to be read and called.

The weights stand in the p-net's skeleton while the loss function runs, so submodules, methods and properties work as
they were written. What the loss function holds are views of the modules: they refuse what would change the p-net beyond
the call, and they work for this call alone.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import GeneratorType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from gbfunc.pnet.pure import PureNet
from gbfunc.types import Params, TensorMap

_READS = frozenset(
    "buffers children extra_repr forward get get_buffer get_extra_state get_parameter get_submodule items keys modules "
    "named_buffers named_children named_modules named_parameters parameters state_dict values _get_name".split()
)
"""Methods of torch's modules and containers that change nothing."""

_PARAMETERS = frozenset({"get_parameter", "named_parameters", "parameters", "state_dict"})
_CONTAINERS = (nn.Module, nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
_STOCK = {cls: frozenset(n for n in dir(cls) if callable(getattr(cls, n)) and n[:2] != "__") for cls in _CONTAINERS}
_END = object()
_LATE = (
    "net, or a part or method of it, is used outside of the call of the loss function that it belongs to, where there "
    "are no weights: use it inside"
)


class GrownNet:
    """The p-net on generated weights, or a part of it: what a loss function gets as `net`.

    It is called as the p-net is, and has its attributes: submodules on their generated weights (`net.encoder(x)`,
    `net.layers[0]`), their tensors with the graph (`net.head.weight`, `net.parameters()`), methods, plain values
    (`net.config`) and `training`. `isinstance` sees the module's class. `train()` and `eval()` hold until the loss
    function returns. What it changes of a buffer is part of the new state, as in a forward.

    What would change the p-net itself raises RuntimeError: assigning attributes, registering anything, `to()` and the
    like, replacing parameters or changing them in place. So does any use after the step.
    """

    __slots__ = ("__weakref__", "_gb_module", "_gb_run")
    _gb_module: nn.Module
    _gb_run: NetRun

    def __init__(self, module: nn.Module, run: NetRun) -> None:
        object.__setattr__(self, "_gb_module", module)
        object.__setattr__(self, "_gb_run", run)

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
        return type(self._gb_module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output."""
        self._gb_run.part(self._gb_module)
        return self._gb_run.call(self._gb_module, *args, **kwargs)

    def train(self, mode: bool = True) -> GrownNet:
        """Set the training mode until the loss function returns."""
        self._gb_run.train(self._gb_module, mode)
        return self

    def eval(self) -> GrownNet:
        """Set evaluation mode until the loss function returns."""
        return self.train(False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"net has no attribute {name!r}")
        module, run = self._gb_module, self._gb_run
        value = run.call(getattr, module, name)
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            return self._bound(name, value)
        if isinstance(value, Tensor) and name in module._parameters:
            run.watch(value)
        return _viewed(value, run)

    def __setattr__(self, name: str, value: Any) -> None:
        hint = {"training": "net.train() and net.eval() set it for this call"}
        raise RuntimeError(_impure(f"net.{name} = ...", hint.get(name, "keep the value outside, or return it as aux")))

    def __delattr__(self, name: str) -> None:
        raise RuntimeError(_impure(f"del net.{name}"))

    def _bound(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method of the module that keeps to the rules."""
        module, run = self._gb_module, self._gb_run
        stock = any(isinstance(module, cls) and name in names for cls, names in _STOCK.items())
        if getattr(method, "__func__", None) is nn.Module.get_parameter:
            method = functools.partial(_get_parameter, method)

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if stock and name not in _READS:
                raise RuntimeError(_impure(f"net.{name}(...)"))
            if name == "forward" or not stock:
                run.part(module, "" if stock else name)
            if not stock:
                run.own(name)
            value = run.call(method, *args, **kwargs)
            watched = run.watch if stock and name in _PARAMETERS else None
            return _viewed(value, run, watched)

        return call

    def __len__(self) -> int:
        return len(self._gb_module)  # pyright: ignore[reportArgumentType]

    def __bool__(self) -> bool:
        return bool(self._gb_module)

    def __iter__(self) -> Iterator[Any]:
        return _each(iter(self._gb_module), self._gb_run)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def __contains__(self, item: Any) -> bool:
        return item in self._gb_module  # pyright: ignore[reportOperatorIssue]

    def __getitem__(self, key: Any) -> Any:
        value = self._gb_run.call(lambda: self._gb_module[key])  # pyright: ignore[reportIndexIssue]
        if isinstance(value, Tensor):
            self._gb_run.watch(value)
        return _viewed(value, self._gb_run)

    def __eq__(self, other: Any) -> bool:
        return self._gb_module is (other._gb_module if type(other) is GrownNet else other)

    def __hash__(self) -> int:
        return hash(self._gb_module)

    def __dir__(self) -> list[str]:
        return dir(self._gb_module)

    def __repr__(self) -> str:
        return repr(self._gb_module)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("net is for one call of the loss function: it can neither be copied nor saved")


def _get_parameter(get: Any, target: str) -> Any:
    """What a module's `get_parameter` gives; that refuses a generated tensor, which is no `nn.Parameter`."""
    path, _, name = target.rpartition(".")
    module = get.__self__.get_submodule(path)
    value = getattr(module, name) if name in module._parameters else None
    return get(target) if value is None else value


def _impure(what: str, hint: str = "change the p-net before gb.make_plan") -> str:
    return f"{what} would change the p-net, which is a pure function of its weights in a loss function: {hint}"


def _viewed(value: Any, run: NetRun, watch: Callable[[Any], None] | None = None) -> Any:
    """A value with views in the place of modules; `watch` gets it, or each item of an iterator."""
    if type(value) is GrownNet:
        return value
    if isinstance(value, nn.Module):
        return run.view(value)
    if isinstance(value, GeneratorType) or type(value) in (type({}.keys()), type({}.values()), type({}.items())):
        return _each(iter(value), run, watch)
    if watch is not None:
        watch(value)
    if type(value) not in (list, tuple, dict):
        return value
    items = list(value.values()) if type(value) is dict else value
    views = [_viewed(x, run) for x in items]
    if all(view is x for view, x in zip(views, items, strict=True)):
        return value
    return dict(zip(value, views, strict=True)) if type(value) is dict else type(value)(views)


def _each(items: Iterator[Any], run: NetRun, watch: Callable[[Any], None] | None = None) -> Iterator[Any]:
    """The items of an iterator over parts of a module, each made while the weights are in place."""
    while (item := run.call(next, items, _END)) is not _END:
        yield _viewed(item, run, watch)


class RunnableNet(PureNet):
    """A pure function that also runs functions of the p-net with all that it has: `run`.

    Attributes:
        submodule_call_error: why no part of the p-net can be called alone, "" where it can.
        compiled: whether functions that are run may be compiled: they get the skeleton itself.
        runs: those that go on, the innermost last.
    """

    submodule_call_error, compiled = "", False
    # References in a list: a `WeakSet` takes longer to make and to go through than a small layer to run.
    _open: list[weakref.ref[NetRun]] | None = None

    @functools.cached_property
    def runs(self) -> list[NetRun]:  # noqa: D102
        return []

    def run(
        self, weights: TensorMap, buffers: Params, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """`function(net, *args, **kwargs)`, `net` being the p-net on these tensors, with all its parts (`GrownNet`).

        Outside of `kept_open`, the net is of no use afterwards.

        Raises:
            RuntimeError: for what would change the p-net, or a net that is used after its time.
            ValueError: as a call does.
        """
        if self.compiled or torch.compiler.is_compiling():
            return self.swap(weights, buffers, function, (self.skeleton, *args), kwargs)
        with self.turn(weights, buffers, getattr(function, "__code__", None)) as first:
            run = NetRun(self, weights, buffers, first)
            try:
                start = _uncompiled() if "torch._dynamo" in sys.modules else NetRun.start
                return start(run, function, args, kwargs)
            finally:
                if self._open is None:
                    run.close()
                else:
                    self._open.append(weakref.ref(run))

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Let the nets of runs be called again until the end of this, as checkpoints around them do in backward."""
        outer, self._open = self._open, (runs := [])
        try:
            yield
        finally:
            for reference in runs:
                if run := reference():
                    run.close()
            self._open = outer


class NetRun:
    """One run of a function with the net; those that are `first` of their kind are watched more closely."""

    def __init__(self, pure: RunnableNet, weights: TensorMap, buffers: Params, first: bool) -> None:
        self._pure, self._first = pure, first
        self._given: tuple[TensorMap, Params] | None = weights, buffers
        # What is assigned during the run is not seen by a recomputation; changes in place are, as in any module.
        self._before = dict(buffers)
        self._switched, self._structure = False, ("", [])
        self._parameters: dict[int, tuple[Tensor, Any, Tensor | None]] = {}
        self._views: dict[int, weakref.ref[GrownNet]] = {}

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
        for x, mark, copied in self._parameters.values():
            if _mark(x) != mark or (copied is not None and not torch.allclose(x, copied, 0, 0, equal_nan=True)):
                raise RuntimeError(f"the loss function changes {self._name(x)} in place: compute with a new tensor")
        self._parameters = {}
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

    def watch(self, value: Any) -> None:
        """Watch the parameters in a value, which must not change."""
        if isinstance(value, Mapping | tuple | list):
            for x in value.values() if isinstance(value, Mapping) else value:
                self.watch(x)
        elif type(value) in (Tensor, nn.Parameter) and id(value) not in self._parameters and not value.is_inference():
            mark = _mark(value)
            copied = value.detach().clone() if self._first and mark[1] else None
            self._parameters[id(value)] = value, mark, copied

    def view(self, module: nn.Module) -> GrownNet:
        """The view of a part, the same as long as somebody holds it: `m is not net.head` means what it says."""
        reference = self._views.get(id(module))
        view = reference and reference()
        if view is None:
            view = GrownNet(module, self)
            self._views[id(module)] = weakref.ref(view)
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
def _uncompiled() -> Callable[..., Any]:
    # isinstance knows no view of a module in compiled code, and would be False there without a word.
    return torch.compiler.disable(NetRun.start)  # pyright: ignore[reportReturnType]
