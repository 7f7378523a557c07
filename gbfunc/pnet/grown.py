"""`net` of a loss function: the p-net on its generated weights, with all that it has, to be read and called.

The weights stand in the p-net's skeleton while the loss function runs, so submodules, methods and properties work as
they were written. What the loss function holds are views of the modules: they refuse what would change the p-net beyond
the call, and they work for this call alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import GeneratorType, MethodType
from typing import Any, Protocol

from torch import Tensor, nn

_READS = frozenset(
    "buffers children extra_repr forward get get_buffer get_extra_state get_parameter get_submodule items keys modules "
    "named_buffers named_children named_modules named_parameters parameters state_dict values _get_name".split()
)
"""Methods of torch's modules and containers that change nothing."""

_PARAMETERS = frozenset({"get_parameter", "named_parameters", "parameters", "state_dict"})
_CONTAINERS = (nn.Module, nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
_STOCK = {cls: frozenset(n for n in dir(cls) if callable(getattr(cls, n)) and n[:2] != "__") for cls in _CONTAINERS}
_END = object()


class Run(Protocol):
    """One call of a function with the net (`gbfunc.pnet.pure.NetRun`)."""

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a part of the p-net while its weights are in place."""
        ...

    def train(self, module: nn.Module, mode: bool) -> None:
        """Set the training mode of a part for the rest of the run."""
        ...

    def part(self, module: nn.Module, method: str = "") -> None:
        """Refuse the call of a part, or of a method, of a p-net of which only the whole can be called."""
        ...

    def own(self, method: str) -> None:
        """Watch what a method of the p-net changes."""
        ...

    def note(self, value: Any) -> None:
        """Watch the parameters in a value, which the loss function must not change."""
        ...

    def view(self, module: nn.Module) -> GrownNet:
        """The view of a part, the same as long as somebody holds it."""
        ...


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
    _gb_run: Run

    def __init__(self, module: nn.Module, run: Run) -> None:
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
            run.note(value)
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

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if stock and name not in _READS:
                raise RuntimeError(_impure(f"net.{name}(...)"))
            if name == "forward" or not stock:
                run.part(module, "" if stock else name)
            if not stock:
                run.own(name)
            value = run.call(method, *args, **kwargs)
            noted = run.note if stock and name in _PARAMETERS else None
            return _viewed(value, run, noted)

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
            self._gb_run.note(value)
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


def _impure(what: str, hint: str = "change the p-net before gb.make_plan") -> str:
    return f"{what} would change the p-net, which is a pure function of its weights in a loss function: {hint}"


def _viewed(value: Any, run: Run, note: Callable[[Any], None] | None = None) -> Any:
    """A value with views in the place of modules; `note` gets it, or each item of an iterator."""
    if type(value) is GrownNet:
        return value
    if isinstance(value, nn.Module):
        return run.view(value)
    if isinstance(value, GeneratorType) or type(value) in (type({}.keys()), type({}.values()), type({}.items())):
        return _each(iter(value), run, note)
    if note is not None:
        note(value)
    if type(value) not in (list, tuple, dict):
        return value
    items = list(value.values()) if type(value) is dict else value
    views = [_viewed(x, run) for x in items]
    if all(view is x for view, x in zip(views, items, strict=True)):
        return value
    return dict(zip(value, views, strict=True)) if type(value) is dict else type(value)(views)


def _each(items: Iterator[Any], run: Run, note: Callable[[Any], None] | None = None) -> Iterator[Any]:
    """The items of an iterator over parts of a module, each made while the weights are in place."""
    while (item := run.call(next, items, _END)) is not _END:
        yield _viewed(item, run, note)
