"""What a call of a p-net reads: the weights that it is given, and never those of the module that it was made of.

A forward may reach its weights by other ways than `self`: a closure, a global name, a weak reference, a view kept as an
attribute. What is reached so is not generated. In calls 1, 2, 4, ... of each kind a dispatch mode sees the tensors of
every operator, whoever calls it, in forward, in hooks of gradients, and in the backward of that call but for torch's
own operators, which read what they did before, and refuses those in storages of the module's own. (What a gradient
tells is refused at any step: `gbfunc.train.gradients.loss`.) With gradients it refuses as well what an earlier call
computed and left in an attribute: weights of then, or a state that is none of the step's.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch._C._functorch as functorch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

_OTHERWISE = (
    "other than through the module, or after its call (a closure, a global name, a weak reference, a copy, a custom "
    "backward): write self."
)
_LEFT = (
    "which an earlier call computed and left there, and a step is a function of its state alone: compute it in each "
    "call, or register it as a buffer, which the state carries"
)
CHANGES_BASE = "the p-net changes a tensor of its frozen base: name its module in modules_to_save: "
_MARK = "_gb_own_tensors"


class OwnTensors:
    """The storages of modules' parameters and buffers, by what they are; weak references, which keep no memory."""

    def __init__(self, *modules: nn.Module) -> None:
        self._names: dict[int, tuple[StorageWeakRef, str]] = {}
        places: dict[int, int] = {}
        for module in modules:
            if (marked := vars(module).get(_MARK)) is not None:
                self._names |= marked._names
                places |= marked._places
            named = {f"parameter {k!r}": x for k, x in module.named_parameters()}
            named |= {f"buffer {k!r}": x for k, x in module.named_buffers()}
            for name, x in named.items():
                for storage in storages_of(x):
                    # A weak reference keeps the address from being used again.
                    self._names.setdefault(storage._cdata, (StorageWeakRef(storage), name))
                    places[_address(storage)] = storage._cdata
        # By the address of their memory, in order.
        self._places = dict(sorted(places.items()))
        self._addresses = [*self._places]

    def mark(self, skeleton: nn.Module) -> None:
        """Note them in a copy, for copies that are made of it."""
        vars(skeleton)[_MARK] = self

    def name_of(self, x: Tensor | np.ndarray) -> str | None:
        """Which of them a tensor or an array is, or is a view of, by its storage or the memory that it is in."""
        if isinstance(x, np.ndarray):
            return self._name_at(x.__array_interface__["data"][0]) if x.size else None
        return next(filter(None, map(self.name_of_storage, storages_of(x))), None)

    def name_of_storage(self, storage: torch.UntypedStorage) -> str | None:
        """Which of them a storage is; those of arrays and of other libraries share their memory alone."""
        return self._names[storage._cdata][1] if storage._cdata in self._names else self._name_at(_address(storage))

    def _name_at(self, address: int) -> str | None:
        before = bisect_right(self._addresses, address) - 1
        if not address or before < 0:
            return None
        reference, name = self._names[self._places[self._addresses[before]]]
        # What was freed may be another's by now.
        live: Any = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        return name if live is not None and 0 <= address - _address(live) < live.nbytes() else None

    def __deepcopy__(self, memo: Any) -> OwnTensors:
        return self

    def __reduce__(self) -> Any:
        # Another process has no such storages.
        return OwnTensors, ()

    def call(
        self,
        given: Iterable[Any],
        base: Mapping[str, Tensor],
        left: LeftTensors | None,
        function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """`function(*args, **kwargs)`, which may read of these tensors only what is `given`, `base` or an argument.

        It may not change what is of the `base`, nor read what is `left` of earlier calls, where these are watched.

        Raises:
            ValueError: for any other that an operator reads, now or in the backward of the output, or that it would
                change.
        """
        frozen = {s._cdata: name for name, x in base.items() for s in storages_of(x)}
        allowed = {s._cdata for x in tensors_in((*given, args, kwargs)) for s in storages_of(x)}
        watch = _Watch(self, left, allowed | frozen.keys(), frozen)
        with torch._C._DisableFuncTorch(), torch.inference_mode(False), torch.enable_grad():
            first = _number(torch.zeros((), requires_grad=True).view(()).grad_fn)
        with watch, (hooks := _Hooks(watch)):
            with torch._C._DisableFuncTorch():
                # Of an export the tensors are fake, each in a memory of its own.
                before = [] if torch.compiler.is_compiling() else [x.data for x in base.values()]
            out = function(*args, **kwargs)
        with torch._C._DisableFuncTorch():
            for (name, x), data in zip(base.items(), before, strict=False):
                if [s._cdata for s in storages_of(x)] != [s._cdata for s in storages_of(data)]:
                    x.data = data
                    raise ValueError(f"{CHANGES_BASE}{name!r}")
        watch.backward(out, first, hooks.used)
        return out


class LeftTensors:
    """Tensors that calls of a p-net compute and leave in attributes of its modules, by their storages.

    Computed is what operators make of weights and inputs, and what they change; not constants, which may be kept.
    """

    def __init__(self, net: nn.Module) -> None:
        self._modules = dict(net.named_modules())
        # Weak references keep the addresses from being used again.
        self._made: dict[int, StorageWeakRef] = {}
        self._constant: dict[int, StorageWeakRef] = {}
        self._left: dict[int, tuple[StorageWeakRef, str]] = {}

    def begin(self, weights: Any, inputs: Any) -> None:
        """Take note of what a call is given."""
        for x in tensors_in((weights, inputs)):
            self._made |= {s._cdata: StorageWeakRef(s) for s in storages_of(x)}

    def see(self, func: Any, read: Iterable[torch.UntypedStorage], out: Any) -> None:
        """Take note of what an operator makes."""
        changes, fills = _kind_of(func)
        computed = not fills and any(s._cdata in self._made for s in read)
        for x in tensors_in(out):
            for s in storages_of(x):
                changed = changes and s._cdata not in self._constant
                place = self._made if computed or changed else self._constant
                if s._cdata not in place:
                    place[s._cdata] = StorageWeakRef(s)

    def end(self) -> None:
        """Find what is left at the end of a call."""
        for path, module in self._modules.items():
            for key, value in vars(module).items():
                for s in (s for x in tensors_in(value) for s in storages_of(x) if s._cdata in self._made):
                    self._left[s._cdata] = StorageWeakRef(s), f"{path}.{key}".lstrip(".")
        self._made, self._constant = {}, {}

    def name_of(self, storage: torch.UntypedStorage) -> str | None:
        """Where an earlier call left this one; None where none did."""
        return self._left[storage._cdata][1] if storage._cdata in self._left else None


def written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operator changes in place."""
    found: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_in(args[i] if i < len(args) else kwargs.get(argument.name))
    return found


@functools.cache
def _kind_of(func: Any) -> tuple[bool, bool]:
    """Whether an operator changes tensors, and whether it fills new ones with what is not computed of others."""
    name = func.__name__
    # Those of higher order have no schema.
    changes = hasattr(func, "_schema") and func._schema.is_mutable
    return changes, name.startswith("new_") or "_like" in name


class _Watch(TorchDispatchMode):
    """Refuses operators that read own tensors, or such as are left of earlier calls, but in storages allowed."""

    supports_higher_order_operators = True

    def __init__(self, own: OwnTensors, left: LeftTensors | None, allowed: set[int], frozen: Mapping[int, str]) -> None:
        super().__init__()
        # With its weak references: backward may come when nothing else has them.
        self._own, self._left, self._allowed, self._frozen = own, left, allowed, frozen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [storage for x in tensors_in((*args, kwargs)) for storage in storages_of(x)]
        for storage in read:
            if storage._cdata in self._allowed:
                continue
            name = self._own.name_of_storage(storage)
            if name is not None:
                path = name.partition("'")[2].rstrip("'")
                raise ValueError(f"the p-net's forward reads its {name} {_OTHERWISE}{path}")
            name = None if self._left is None else self._left.name_of(storage)
            if name is not None:
                raise ValueError(f"the p-net's forward reads its {name!r}, {_LEFT}")
        if self._frozen and _kind_of(func)[0]:
            for storage in (s for x in written(func, args, kwargs or {}) for s in storages_of(x)):
                if storage._cdata in self._frozen:
                    raise ValueError(f"{CHANGES_BASE}{self._frozen[storage._cdata]!r}")
        out = func(*args, **kwargs or {})
        if self._left is not None:
            self._left.see(func, read, out)
        return out

    def backward(self, out: Any, first: int, hooked: bool) -> None:
        """Watch the backward of the nodes from this number on that a value leads to; stock ones if they are hooked."""
        # It reads what the call itself has left.
        self._left = None
        nodes, seen = [x.grad_fn for x in tensors_in(out, objects=True)], set[Node]()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen or not first < _number(node) < 2**63:
                continue
            seen.add(node)
            if hooked or not _is_stock_node(node):
                # Modes that a node's hooks set are those of this node alone, should it raise as well.
                node.register_prehook(self._enter)
                node.register_hook(self._leave)
            nodes += [previous for previous, _ in node.next_functions]

    def _enter(self, gradients: Any) -> None:
        _push_mode(self)

    def _leave(self, gradients: Any, outputs: Any) -> None:
        _pop_mode()


class _Hooks(TorchFunctionMode):
    """Watches hooks of gradients, too, and knows whether a call has made any, or may have."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch, self.used = watch, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _HOOKS:
            self.used = True
            if func == Tensor.register_hook:
                hook = args[1] if len(args) > 1 else kwargs["hook"]
                args, kwargs = (args[0], functools.partial(self._watched, hook)), {}
        return func(*args, **kwargs)

    def _watched(self, hook: Callable[[Tensor], Any], gradient: Tensor) -> Any:
        _push_mode(self._watch)
        try:
            return hook(gradient)
        finally:
            _pop_mode()


_HOOKS = frozenset({Tensor.register_hook, vars(torch._C.TensorBase)["grad_fn"].__get__})


def _number(node: Any) -> int:
    """Nodes of a thread are numbered as they are made; those of leaves have a number beyond 2**63."""
    return node._sequence_nr() % 2**64


def _is_stock_node(node: Any) -> bool:
    """Whether a node is of an operator of torch's, whose backward reads what its forward read or made.

    Those of Python have a base class, those of scripts and of other C++ one type together.
    """
    kind = type(node)
    return kind.__base__ is object and kind.__name__ != "CppFunction"


def tensors_in(value: Any, objects: bool = False, arrays: bool = False) -> list[Any]:
    """The tensors, and `arrays`, in containers and attributes of `objects`; tensors in function transforms, too."""
    found: list[Any] = []
    _add_tensors(found, value, objects, arrays, _DEPTH)
    return found


_PLAIN = frozenset(
    {type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)
_DEPTH = 9


def _add_tensors(found: list[Any], value: Any, objects: bool, arrays: bool, depth: int) -> None:
    # For every operand of every operator: what is most frequent comes first.
    if type(value) in _PLAIN:
        return
    if isinstance(value, Tensor):
        found.append(value)
        while functorch.is_functorch_wrapped_tensor(value):
            value = functorch.get_unwrapped(value)
            found.append(value)
        return
    if arrays and isinstance(value, np.ndarray):
        found.append(value)
        return
    if not depth or isinstance(value, (nn.Module, type, str, bytes)):
        return
    if isinstance(value, (tuple, list, set, frozenset)):
        items: Iterable[Any] = value
    elif isinstance(value, Mapping):
        items = value.values()
    else:
        items = vars(value).values() if objects and hasattr(value, "__dict__") else ()
    for x in items:
        _add_tensors(found, x, objects, arrays, depth - 1)


_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc), ("values",)),
}


def storages_of(x: Tensor) -> list[torch.UntypedStorage]:
    """The storages of a tensor: those of its parts if it is sparse, none inside of function transforms."""
    if parts := _SPARSE_PARTS.get(x.layout):
        return [getattr(x, part)().untyped_storage() for part in parts]
    try:
        return [x.untyped_storage()]
    except (NotImplementedError, RuntimeError):
        return []


def _address(storage: torch.UntypedStorage) -> int:
    """Where its memory begins; 0 where there is none to be read."""
    try:
        return storage.data_ptr() if storage.nbytes() else 0
    except RuntimeError:  # Of a fake tensor
        return 0


class _Watched:
    """Takes the place of a module's forward for its first call."""

    def __init__(self, net: nn.Module, own: OwnTensors) -> None:
        self._net, self._own, self._before = net, own, vars(net).get("forward")
        functools.update_wrapper(self, net.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A trace would hold what watching does.
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
            return self.__wrapped__(*args, **kwargs)
        attributes, net = vars(self._net), self._net
        attributes.pop("forward", None)
        attributes |= {} if self._before is None else {"forward": self._before}
        try:
            return self._own.call((), {}, None, net.forward, *args, **kwargs)
        except ValueError:
            attributes["forward"] = self
            raise

    def __getattr__(self, name: str) -> Any:
        # Exporters read a forward's code.
        return getattr(vars(self)["__wrapped__"], name)

    def __reduce__(self) -> Any:
        # A copy has its plain forward.
        return (getattr, (self._net, "forward")) if self._before is None else (functools.partial, (self._before,))


def watch_first_call(net: nn.Module, pnet: nn.Module) -> None:
    """Let the first call of a copy of a p-net refuse to read the p-net's own tensors.

    Torch's own modules read nothing but what is theirs, and are left as they are.
    """
    if not isinstance(net, torch.jit.ScriptModule) and not all(map(_stock, net.modules())):
        vars(net)["forward"] = _Watched(net, OwnTensors(pnet))


def _stock(module: nn.Module) -> bool:
    """Whether a module's code is torch's alone."""
    hooks = [v for k, v in vars(module).items() if k.endswith("_hooks") and isinstance(v, dict)]
    functions = [v for v in vars(module).values() if isinstance(v, FunctionType)]
    modules = [type(module).__module__, *(f.__module__ or "" for f in functions)]
    return not any(hooks) and "forward" not in vars(module) and all(m.split(".")[0] == "torch" for m in modules)
