"""Optimizers as pairs of pure functions `(init, update)`, made from classes of `torch.optim`.

Each update copies the leaves, makes torch's optimizer for the copies and the old state, calls `step()` once, and
returns the new leaves and state. For Adam and AdamW, the update calls torch's fused kernel directly.

Each leaf has a role. Code weights and linear coefficients belong to g-nets, and are stacked: [n, ...] for n tiles or,
if tiles share parameters, for n groups of tiles. Direct parameters are ordinary parameters of the p-net.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from gbfunc.train.param_groups import FUSED, ROLES, Kernel, LearningRate, ParamGroup, learning_rate, param_groups
from gbfunc.trees import TensorSpec, compare_trees, flatten_tree, spec_of, unflatten_tree
from gbfunc.types import Params

Roles: TypeAlias = Mapping[str, str]  # by name of leaf: `"code"`, `"linear"` or `"direct"`
Rate: TypeAlias = Callable[[LearningRate, int], "float | Tensor"]  # (lr, step) -> rate, on the leaves' device

# Every update calls these functions for every tensor, so they are `attrgetter`s, which run in C.
_SPEC, _FORM = attrgetter("shape", "dtype", "device"), attrgetter("shape", "dtype")


class OptState(NamedTuple):
    """The state of an optimizer. Updates keep the names, shapes and dtypes of all tensors in the state."""

    step: Tensor  # number of updates, int64 on the CPU
    leaves: dict[str, Params]  # torch's state of every leaf, by name; zeros before the first update


class Optimizer(NamedTuple):
    """A pair of pure functions on dicts of tensors, `{name: tensor}`.

    Attributes:
        init: `(params, roles) -> state`. Raises ValueError for an unknown role, or a class that keeps numbers outside
            of the states of parameters. Raises TypeError for a class whose state does not consist of tensors.
        update: `(grads, state, params, roles, *, donate=False, finite=None, rate=learning_rate) -> (params, state)`.
            With `donate`, inputs may be updated in place and returned. Results have no autograd graph. `rate` maps
            `(lr, step)` to the learning rate. If the tensor `finite`, which the CPU never reads, is False, only counts
            of updates change; pass `finite` from the second update on. Raises TypeError if `state` is not an
            `OptState`, and ValueError if state, leaves and roles do not fit, or if the learning rate is negative.
        settings: the class, the learning rate and the options, which must be equal on all ranks.
    """

    init: Callable[[Params, Roles], OptState]
    update: Callable[..., tuple[Params, OptState]]
    settings: Mapping[str, Any]


def torch_optimizer(
    cls: type[torch.optim.Optimizer],
    *params: NoReturn,
    lr: LearningRate,
    code: Mapping[str, Any] | None = None,
    linear: Mapping[str, Any] | None = None,
    direct: Mapping[str, Any] | None = None,
    **options: Any,
) -> Optimizer:
    """Make a pure optimizer from a class of `torch.optim` (https://docs.pytorch.org/docs/stable/optim.html).

    An update equals `step()` of the class with the same options. Adam and AdamW use their fused kernels, unless
    `fused=False` or `foreach` is given; `fused=True` has no effect on other classes.

    Most classes update every number separately. Muon (Jordan et al., 2024) and Adafactor (Shazeer and Stern, 2018)
    update a matrix as a whole. Here, a matrix is the part of a leaf that belongs to one tile, or a direct parameter.
    AdamW, with the same `lr` and `weight_decay`, updates the leaves that these classes cannot update: empty leaves
    and, for Muon, leaves that are not matrices. A class from outside of torch must update every number separately, and
    keep everything that changes as tensors in its `state[parameter]`.

    Args:
        cls: the class.
        *params: pass no parameters here. A training step passes the genome's parameters.
        lr: learning rate, or a function of the number of the training step, which counts from 0.
        code: options for code weights. Each replaces the general option of the same name, such as `lr`.
        linear: options for linear coefficients (amplitudes), in the same way.
        direct: options for direct parameters, in the same way.
        **options: options of the class.

    Raises:
        TypeError: if `cls` is not an optimizer class, or an argument has the wrong type.
        ValueError: for LBFGS, and for options that the class or a pure update does not support.

    >>> optimizer = torch_optimizer(torch.optim.SGD, lr=0.5, direct={"lr": 0.25})
    >>> params, roles = {"w": torch.ones(2), "b": torch.ones(1)}, {"w": "linear", "b": "direct"}
    >>> params, state = optimizer.update(params, optimizer.init(params, roles), params, roles)
    >>> params
    {'w': tensor([0.5000, 0.5000]), 'b': tensor([0.7500])}
    """
    kind: Any = cls
    if params:
        raise TypeError("torch_optimizer takes a class and options by name (lr=...), and no parameters: drop them")
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer) or kind is torch.optim.Optimizer:
        got = getattr(kind, "__name__", f"an object of {type(kind).__name__}")
        raise TypeError(f"cls must be a subclass of torch.optim.Optimizer, got {got}: pass torch.optim.Adam")
    if issubclass(cls, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates the loss many times a step (it needs a closure): take a first-order class")
    group_of = param_groups(cls, {"lr": lr, **options}, {"code": code, "linear": linear, "direct": direct})
    cached = lru_cache(maxsize=16)(partial(_prepare, group_of))

    def prepare(params: Params, roles: Roles) -> _Prepared:
        return cached(tuple(zip(params, map(roles.get, params), map(_SPEC, params.values()), strict=True)))

    def init(params: Params, roles: Roles) -> OptState:
        leaves: dict[str, Params] = {k: {} for k in params}
        for (k, entry), (shape, dtype, device) in prepare(params, roles).specs.items():
            leaves[k][entry] = torch.zeros(shape or (), dtype=dtype, device=device)
        return OptState(torch.tensor(0, dtype=torch.int64, device="cpu"), leaves)

    def update(
        grads: Params,
        state: OptState,
        params: Params,
        roles: Roles,
        *,
        donate: bool = False,
        finite: Tensor | None = None,
        rate: Rate = learning_rate,
    ) -> tuple[Params, OptState]:
        prepared = prepare(params, roles)
        if grads.keys() != params.keys() or [*map(_SPEC, map(grads.get, params))] != prepared.leaf_specs:
            compare_trees({k: spec_of(p) for k, p in params.items()}, grads, "grads do not fit params")
        _check_state(state, params, prepared, cls.__name__)
        step = int(state.step)
        new: Params = {}
        leaves: dict[str, Params] = {}
        with torch.no_grad():
            for call in prepared.calls:
                stepped, after = call.update(step, grads, state.leaves, params, donate, finite, rate)
                new |= stepped
                leaves |= after
        if len(prepared.calls) > 1:
            new, leaves = {k: new[k] for k in params}, {k: leaves[k] for k in params}
        return new, OptState(state.step + 1, leaves)

    settings = {"cls": cls, "lr": lr, "code": code, "linear": linear, "direct": direct, "options": options}
    return Optimizer(init, update, settings)


class _Call(NamedTuple):
    group: ParamGroup
    names: list[str]
    adam: Kernel | None  # a fused kernel used instead of torch's class, or None; the kernel's state starts with zeros

    def update(
        self,
        step: int,
        grads: Params,
        old: Mapping[str, Params],
        params: Params,
        donate: bool,
        finite: Tensor | None,
        rate: Rate,
    ) -> tuple[Params, dict[str, Params]]:
        """Return new leaves and the new state. The first update ignores the state `old`, except with a fused kernel."""
        before = [params[k] for k in self.names]
        choose = finite is not None and self.adam is None  # Adam's kernel itself skips nonfinite updates.
        donate = donate and not choose
        if donate and all(map(Tensor.is_contiguous, before)):
            new = [p.detach() if p.requires_grad else p for p in before]
        else:
            new = _copies(before)
        # Make gradients contiguous: fused CPU kernels ignore strides, and `torch.autograd.grad` may return any strides.
        fitted = [grads[k].contiguous() for k in self.names]
        if not donate and self.group.cls.__module__.partition(".")[0] != "torch":
            # A class from outside of torch may add weight decay to the gradient in place, so pass copies.
            fitted = _copies(fitted)
        # At the first update, pass an empty state, which torch fills. A state of zeros would differ: NAdam's mu_product
        # starts at 1, Rprop's step sizes at lr, SGD's momentum at the first gradient, and ASGD's average at the leaf.
        rows = [old[k] for k in self.names] if step or self.adam else []
        tensors = [t for entries in rows for t in entries.values()]
        if not donate or any(t.requires_grad or not t.is_contiguous() for t in tensors):
            own = iter(_copies(tensors))
            rows = [dict(zip(entries, own, strict=False)) for entries in rows]
        after = self.step(step, new, fitted, rows, finite, rate)
        found = dict(zip(self.names, new, strict=True)), dict(zip(self.names, after, strict=True))
        return chosen(finite, found, (params, old)) if finite is not None and choose else found

    def step(
        self,
        step: int,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        old: Sequence[Params],
        finite: Tensor | None = None,
        rate_of: Rate = learning_rate,
    ) -> Sequence[Params]:
        """Update `params` in place, and return each parameter's new state. If `old` is empty, torch makes states."""
        rate = self.group.lr if isinstance(self.group.lr, float) else rate_of(self.group.lr, step)
        if old and self.adam is not None:
            counts, *moments = ([state[e] for state in old] for e in self.adam.entries)
            # Increase the counts of steps by a tensor: from a Python number, torch would make a tensor for every count.
            one = counts[0].new_ones(()) if finite is None else finite.to(counts[0].dtype)
            torch._foreach_add_(counts, one, alpha=1)  # pyright: ignore[reportPrivateImportUsage]
            moments += [[]] * (3 - len(moments))
            skip = {} if finite is None else {"found_inf": 1 - one}
            self.adam.function(params, grads, *moments, counts, lr=rate, **self.adam.options, **skip)
            return old
        tensors, tensor_grads = ([tile for x in xs for tile in self._tiles(x)] for xs in (params, grads))
        fused = {"fused": True} if self.adam else {}
        optimizer = self.group.cls(tensors, lr=rate, **self.group.options | fused)
        for p, g in zip(tensors, tensor_grads, strict=True):
            p.grad = g
        states: list[Params] = []
        for p, entries in zip(params, old, strict=False):
            views = {e: self._tiles(t) for e, t in entries.items()}
            states += [{e: v[i] for e, v in views.items()} for i in range(len(self._tiles(p)))]
        optimizer.state.update(zip(tensors, states, strict=False))
        before = "" if old else _memory(optimizer)
        optimizer.step()
        for p in tensors:
            p.grad = None
        name = type(optimizer).__name__
        if not old and (_memory(optimizer) != before or {*map(id, optimizer.state)} - {*map(id, tensors)}):
            words = "must keep everything that changes in the state of a parameter, and changes other attributes"
            raise ValueError(f"{name} {words}")
        for entry, value in () if old else ((e, v) for p in tensors for e, v in optimizer.state[p].items()):
            if not isinstance(value, Tensor):
                raise TypeError(f"state of {name} must be tensors, got {entry} of type {type(value).__name__}")
        after = iter([optimizer.state[p] for p in tensors])
        if not self.group.by_tile:
            return [*after]
        by_tile = [[next(after) for _ in p] for p in params]
        return [{e: torch.stack([s[e] for s in states]) for e in states[0]} for states in by_tile]

    def _tiles(self, x: Tensor) -> Sequence[Tensor]:
        return x.unbind() if self.group.by_tile else (x,)


class _Prepared(NamedTuple):
    calls: list[_Call]
    specs: dict[tuple[str, str], TensorSpec]  # of the state's tensors, by `(leaf, entry)`: `("b", "exp_avg")`
    # These lists repeat names, shapes and dtypes in the order of the leaves, so that the checks of an update are fast.
    leaf_specs: list[Any]
    entries: list[tuple[str, ...]]
    forms: list[Any]


def _prepare(group_of: Callable[..., ParamGroup], leaves: tuple[tuple[str, str | None, Any], ...]) -> _Prepared:
    """Divide leaves by `ParamGroup`, with one optimizer each. A step on zeros shows the state's shapes and dtypes."""
    names: dict[tuple[Any, ...], list[str]] = {}
    zeros: Params = {}
    for name, role, (shape, dtype, device) in leaves:
        if role not in ROLES:
            raise ValueError(f"role of leaf {name!r} must be one of {ROLES}, got {role!r}")
        group = group_of(name, role, shape)
        zeros[name] = torch.zeros(shape, dtype=dtype, device=device)
        fused = group.adam and dtype in FUSED and device.type in ("cpu", "cuda")
        names.setdefault((group, (dtype, device) if fused else None), []).append(name)
    calls = [_Call(group, named, group.adam if kind else None) for (group, kind), named in names.items()]
    states: dict[str, Params] = {}
    with torch.no_grad():
        for call in calls:
            params = [zeros[k] for k in call.names]
            after = call.step(0, params, [torch.zeros_like(p) for p in params], [])
            states |= zip(call.names, after, strict=True)
    specs = {(k, entry): spec_of(x) for k in zeros for entry, x in states[k].items()}
    forms = [(spec.shape, spec.dtype) for spec in specs.values()]
    return _Prepared(calls, specs, [spec for _, _, spec in leaves], [tuple(states[k]) for k in zeros], forms)


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    copies = [torch.empty_like(x, requires_grad=False, memory_format=torch.contiguous_format) for x in tensors]
    if copies:
        torch._foreach_copy_(copies, list(tensors))  # pyright: ignore[reportPrivateImportUsage]
    return copies


def chosen(condition: Tensor, tree: Any, other: Any) -> Any:
    """Return `tree`. If `condition` is False, replace tensors on the same device as `condition` by those of `other`."""
    flat, before = flatten_tree(tree), flatten_tree(other)
    on_device = [k for k, x in flat.items() if x.device.type == condition.device.type]
    return unflatten_tree(flat | {k: torch.where(condition, flat[k], before[k]) for k in on_device}, tree)


def _memory(optimizer: torch.optim.Optimizer) -> str:
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    rest = {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups") and k[0] != "_"}
    return repr((options, rest))


def _check_state(state: OptState, params: Params, prepared: _Prepared, cls: str) -> None:
    """Check the structure of a state, because some kernels write beyond the end of a tensor that is too small."""
    if not isinstance(state, OptState):
        raise TypeError(f"state must be an OptState from init or update, got {type(state).__name__}")
    if [*state.leaves] == [*params] and [*map(tuple, state.leaves.values())] == prepared.entries:
        tensors = [t for entries in state.leaves.values() for t in entries.values()]
        if [*map(_FORM, tensors)] == prepared.forms:
            return
    what = f"the state does not fit {cls} and the parameters"
    # Do not compare devices, because torch accepts counts of steps on any device.
    expected = {f"{k}/{entry}": spec._replace(device=None) for (k, entry), spec in prepared.specs.items()}
    compare_trees(expected, flatten_tree(state.leaves), what)
    if state.leaves.keys() != params.keys():  # `compare_trees` does not see leaves without state (SGD).
        raise ValueError(f"{what}: expected the leaves {sorted(params)}, got {sorted(state.leaves)}")
