"""Optimizers as pairs of pure functions `(init, update)`, made of any class of `torch.optim`.

Each update makes torch's optimizer on copies, hands it the state, lets it step once and takes the new state out.

Leaves have roles, which say how a class takes them. Code weights and linear coefficients of g-nets are stacked,
[T, ...], with T tiles (or groups of tiles); direct parameters are ordinary parameters of the p-net.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import isfinite
from numbers import Real
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from gbfunc.trees import TensorSpec, compare_trees, flatten_tree, spec_of
from gbfunc.types import Params

Roles: TypeAlias = Mapping[str, str]
"""Role by name of leaf: `"code"`, `"linear"` or `"direct"`."""

LearningRate: TypeAlias = float | Callable[[int], float]
"""A number, or a function of the step, which counts from 0."""

ROLES: tuple[str, ...] = ("code", "linear", "direct")

_FULL = frozenset({torch.float32, torch.float64})
_FLOATS = _FULL | {torch.bfloat16, torch.float16}
_FUSED: Mapping[Any, Mapping[str, frozenset[torch.dtype]]] = {
    # On a CPU it skips all elements of a half type that fill a vector register (torch 2.5 to 2.13).
    torch.optim.SGD: {"cpu": _FULL, "cuda": _FLOATS},
    torch.optim.Adam: {"cpu": _FLOATS, "cuda": _FLOATS},
    torch.optim.AdamW: {"cpu": _FLOATS, "cuda": _FLOATS},
    # Its CUDA kernel is younger than the oldest torch that is supported: only where it is asked for.
    torch.optim.Adagrad: {"cpu": _FLOATS},
}
"""Where tests hold a fused kernel equal to the plain step: dtypes by type of device."""


class OptState(NamedTuple):
    """What an optimizer carries over; its structure is fixed at init.

    Attributes:
        step: updates done, int64 on the CPU.
        leaves: torch's state of every leaf, by name; zeros that nothing reads while `step` is 0.
        fingerprint: of the name of the class, int64 on the CPU: the state of one class is no state of another.
    """

    step: Tensor
    leaves: dict[str, Params]
    fingerprint: Tensor


class Optimizer(NamedTuple):
    """A pair of pure functions over flat dicts of tensors.

    Attributes:
        init: `(params, roles) -> state`; ValueError for leaves of no known role and classes that cannot be pure,
            TypeError for a class that keeps anything but tensors.
        update: `(grads, state, params, roles, *, donate=False) -> (params, state)`. Nothing given is changed unless
            donated; donated buffers may be updated in place and returned, and only the results may be used after.
            Results need no grad and have no graph. TypeError if `state` is no `OptState`; ValueError if it, the leaves
            or their roles do not fit, or the learning rate is negative.
        settings: class, learning rate and options, which all ranks must have alike.
    """

    init: Callable[[Params, Roles], OptState]
    update: Callable[..., tuple[Params, OptState]]
    settings: Mapping[str, Any]


def torch_optimizer(
    cls: type[torch.optim.Optimizer],
    lr: LearningRate,
    *,
    code: Mapping[str, Any] | None = None,
    linear: Mapping[str, Any] | None = None,
    direct: Mapping[str, Any] | None = None,
    **options: Any,
) -> Optimizer:
    """Make a pure optimizer of a class of `torch.optim` (https://docs.pytorch.org/docs/stable/optim.html).

    An update equals `step()` of the class with the same options. Fused kernels are used where tests hold them equal to
    the plain step, unless `fused=False` or `foreach` is given; never where they are known to differ.

    Classes that treat every number alone (SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop,
    ASGD) take stacked leaves as they are. Muon (Jordan et al., 2024) and Adafactor (Shazeer and Stern, 2018) mix the
    numbers of a matrix: they take every tile of a code or linear leaf by itself, and direct leaves whole. Leaves that
    they refuse (Muon: all but matrices; both: empty ones) go to AdamW with the same `lr` and, where given,
    `weight_decay`. A class that torch does not ship must treat every number alone, and keep all that changes as
    tensors in the state of a parameter.

    Args:
        cls: the class.
        lr: learning rate, or a function of the step, which counts from 0.
        code: options, `lr` among them, in which leaves of role `"code"` differ.
        linear: the same for leaves of role `"linear"`.
        direct: the same for direct parameters.
        options: options of the class.

    Raises:
        TypeError: if `cls` is no optimizer class, or an argument has the wrong type.
        ValueError: for LBFGS and SparseAdam, and for options that the class refuses or a pure update cannot have.

    >>> optimizer = torch_optimizer(torch.optim.SGD, lr=0.5, direct={"lr": 0.25})
    >>> params, roles = {"w": torch.ones(2), "b": torch.ones(1)}, {"w": "linear", "b": "direct"}
    >>> params, state = optimizer.update(params, optimizer.init(params, roles), params, roles)
    >>> params
    {'w': tensor([0.5000, 0.5000]), 'b': tensor([0.7500])}
    """
    _check_class(cls)
    group_of = _param_groups(cls, {"lr": lr, **options}, {"code": code, "linear": linear, "direct": direct})
    fingerprint = _fingerprint(cls.__name__)

    cached = lru_cache(maxsize=16)(partial(_prepare, group_of))

    def prepare(params: Params, roles: Roles) -> _Prepared:
        return cached(tuple((k, roles.get(k), p.shape, p.dtype, p.device) for k, p in params.items()))

    def init(params: Params, roles: Roles) -> OptState:
        """A state with the structure that torch gives it in one step; errors for roles and classes that do not fit."""
        leaves: dict[str, Params] = {k: {} for k in params}
        for (k, entry), (shape, dtype, device) in prepare(params, roles).specs.items():
            leaves[k][entry] = torch.zeros(shape or (), dtype=dtype, device=device)
        return OptState(torch.zeros((), dtype=torch.int64, device="cpu"), leaves, fingerprint.clone())

    def update(
        grads: Params, state: OptState, params: Params, roles: Roles, *, donate: bool = False
    ) -> tuple[Params, OptState]:
        """One step: the new parameters and the new state; errors for a state, leaves or a rate that do not fit."""
        calls, leaves, specs = prepare(params, roles)
        compare_trees(leaves, grads, "grads do not fit params")
        _check_state(state, params, specs, cls.__name__, fingerprint)
        step = int(state.step)
        with torch.no_grad():
            new = {k: p.detach() if donate and p.is_contiguous() else p.clone() for k, p in params.items()}
            # Torch fills an empty state at its first step. Zeros, or the state after a step with zero gradients, would
            # be another algorithm: NAdam's mu_product starts at 1, Rprop's step sizes at lr, SGD's momentum at the
            # first gradient, ASGD's average at the first iterate.
            old = {k: _writable(state.leaves[k], p, donate) for k, p in new.items()} if step else {}
            # Classes that torch does not ship may add weight decay to the gradient in place, as torch once did.
            copy = not donate and cls.__module__.partition(".")[0] != "torch"
            fitted = {k: _aligned(grads[k].clone() if copy else grads[k], p) for k, p in new.items()}
            stepped: dict[str, Params] = {}
            for call in calls:
                stepped |= call.step(step, new, fitted, old)
        ordered = {k: stepped[k] for k in params}
        return new, OptState(state.step + 1, ordered, state.fingerprint if donate else state.fingerprint.clone())

    settings = {"cls": cls, "lr": lr, "code": code, "linear": linear, "direct": direct, "options": options}
    return Optimizer(init, update, settings)


@dataclass(frozen=True, eq=False)
class ParamGroup:
    """A class with its options, for the leaves of one or more roles; `by_tile` steps each of their tiles by itself."""

    cls: Callable[..., torch.optim.Optimizer]
    lr: LearningRate
    options: dict[str, Any]
    by_tile: bool

    def fuses(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the fused kernel steps such a leaf: where it is right; on other devices, where the options ask."""
        asked = bool(self.options.get("fused"))
        dtypes = _FUSED.get(self.cls, {}).get(device.type)
        if dtypes is None:
            return asked
        return dtype in dtypes and (asked or not self.options.keys() & {"fused", "foreach"})

    def make(self, tensors: list[Tensor], step: int, fused: bool) -> torch.optim.Optimizer:
        """A fresh optimizer of torch for these tensors."""
        asked = {"fused": fused or None} if fused or self.options.get("fused") else {}
        return self.cls(tensors, lr=_learning_rate(self.lr, step), **self.options | asked)


_Leaf: TypeAlias = tuple[str, str | None, tuple[int, ...], torch.dtype, torch.device]
"""Name, role, shape, dtype and device: all that decides how a leaf is stepped."""


class _Call(NamedTuple):
    """One optimizer of torch that an update makes, and the leaves that it steps."""

    group: ParamGroup
    fused: bool
    names: list[str]

    def step(self, step: int, params: Params, grads: Params, old: dict[str, Params]) -> dict[str, Params]:
        """Step `params` in place; returns the new state of every leaf. `old` is {} at the first step."""
        tensors = [tile for k in self.names for tile in self._tiles(params[k])]
        tensor_grads = [tile for k in self.names for tile in self._tiles(grads[k])]
        optimizer = self.group.make(tensors, step, self.fused)
        for p, g in zip(tensors, tensor_grads, strict=True):
            p.grad = g
        if old:
            states: list[Params] = []
            for k in self.names:
                views = {e: self._tiles(t) for e, t in old[k].items()}
                states += [{e: v[i] for e, v in views.items()} for i in range(len(self._tiles(params[k])))]
            optimizer.state.update(zip(tensors, states, strict=True))
        before = {} if old else _memory(optimizer)
        optimizer.step()
        for p in tensors:
            p.grad = None
        if not old:
            _check_memory(optimizer, before, tensors)
        after = iter([optimizer.state[p] for p in tensors])
        if not self.group.by_tile:
            return dict(zip(self.names, after, strict=True))
        by_tile = {k: [next(after) for _ in params[k]] for k in self.names}
        return {k: {e: torch.stack([s[e] for s in states]) for e in states[0]} for k, states in by_tile.items()}

    def _tiles(self, x: Tensor) -> Sequence[Tensor]:
        """What torch shall see as a parameter each: leaves, or their tiles; of its state the same."""
        return x.unbind() if self.group.by_tile else (x,)


class _Prepared(NamedTuple):
    """What an update of such leaves calls, the leaves, and every tensor `(leaf, entry)` of its state."""

    calls: list[_Call]
    leaves: dict[str, TensorSpec]
    specs: dict[tuple[str, str], TensorSpec]


def _prepare(group_of: Callable[[str, str, tuple[int, ...]], ParamGroup], leaves: tuple[_Leaf, ...]) -> _Prepared:
    """Which leaves are stepped together, and the structure of their state: that after a step on zeros."""
    names: dict[tuple[ParamGroup, bool], list[str]] = {}
    zeros: Params = {}
    for name, role, shape, dtype, device in leaves:
        if role not in ROLES:
            raise ValueError(f"role of leaf {name!r} must be one of {ROLES}, got {role!r}")
        group = group_of(name, role, shape)
        names.setdefault((group, group.fuses(dtype, device)), []).append(name)
        zeros[name] = torch.zeros(shape, dtype=dtype, device=device)
    calls = [_Call(group, fused, named) for (group, fused), named in names.items()]
    grads = {k: torch.zeros_like(p) for k, p in zeros.items()}
    states: dict[str, Params] = {}
    with torch.no_grad():
        for call in calls:
            states |= call.step(0, zeros, grads, {})
    specs = {(k, entry): spec_of(t) for k in zeros for entry, t in states[k].items()}
    return _Prepared(calls, {k: spec_of(p) for k, p in zeros.items()}, specs)


def _param_groups(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], by_role: Mapping[str, Mapping[str, Any] | None]
) -> Callable[[str, str, tuple[int, ...]], ParamGroup]:
    """A function `(name, role, shape) -> ParamGroup`; all options are checked here, before any step."""
    muon = getattr(torch.optim, "Muon", None)  # Younger than the oldest torch that is supported.
    matrices_only = muon is not None and issubclass(cls, muon)
    mixes = matrices_only or issubclass(cls, torch.optim.Adafactor)
    whole = _make_group(cls, options, "all leaves")
    stacked = replace(whole, by_tile=True) if mixes else whole
    groups: dict[str, ParamGroup] = {"code": stacked, "linear": stacked, "direct": whole}

    def adamw(options: dict[str, Any]) -> ParamGroup:
        kept = {k: v for k, v in options.items() if k in ("lr", "weight_decay")}
        return _make_group(torch.optim.AdamW, kept, "leaves that fall back to AdamW")

    fallbacks: dict[str, ParamGroup] = dict.fromkeys(ROLES, adamw(options)) if mixes else {}
    for role, differing in by_role.items():
        if differing is not None and not isinstance(differing, Mapping):
            raise TypeError(f"{role} must be a dict of options or None, got {differing!r}")
        if differing:
            merged = options | dict(differing)
            groups[role] = _make_group(cls, merged, f"{role} leaves", by_tile=groups[role].by_tile)
            fallbacks |= {role: adamw(merged)} if mixes else {}

    def group_of(name: str, role: str, shape: tuple[int, ...]) -> ParamGroup:
        group = groups[role]
        if group.by_tile and not shape:
            raise ValueError(f"leaf {name!r} of role {role!r} must have a leading dimension of tiles, got a scalar")
        refused = mixes and (0 in shape or (matrices_only and len(shape) - group.by_tile != 2))
        return fallbacks[role] if refused else group

    return group_of


def _make_group(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], where: str, *, by_tile: bool = False
) -> ParamGroup:
    """Check the options of a class by making an optimizer."""
    lr = cast(LearningRate, options["lr"])
    options = {k: v for k, v in options.items() if k != "lr"}
    if not (callable(lr) or isinstance(lr, Real)) or isinstance(lr, bool):
        raise TypeError(f"lr of {where} must be a number or a function of the step, got {lr!r}")
    if options.get("differentiable"):
        raise ValueError("differentiable=True must be left out: the results of a pure update have no graph")
    rate = _learning_rate(lr, 0)
    try:
        cls([torch.zeros(2, 2)], lr=rate, **options)  # pyright: ignore[reportCallIssue]
    except (TypeError, ValueError, RuntimeError) as error:
        known = [k for k in inspect.signature(cls).parameters if k != "params"]
        raise ValueError(f"{cls.__name__} refuses the options of {where}: {error}; its options are {known}") from error
    return ParamGroup(cast("Callable[..., torch.optim.Optimizer]", cls), lr, options, by_tile)


def _learning_rate(lr: LearningRate, step: int) -> float:
    """The rate at a step, checked: torch checks only what its constructor gets, never a schedule."""
    rate = float(lr(step) if callable(lr) else lr)
    if not 0 <= rate or not isfinite(rate):
        raise ValueError(f"lr must be finite and >= 0, got {rate} at step {step}")
    return rate


def _writable(state: Params, p: Tensor, donate: bool) -> Params:
    """The state of leaf `p` as tensors that torch may change in place."""
    return {e: _aligned((t.detach() if t.requires_grad else t) if donate else t.clone(), p) for e, t in state.items()}


def _aligned(t: Tensor, p: Tensor) -> Tensor:
    """`t` in the memory layout of `p`, where it has its shape.

    Fused CPU kernels ignore strides, and `torch.autograd.grad`, unlike `backward()`, returns gradients of any layout.
    """
    if (t.is_contiguous() and p.is_contiguous()) or t.shape != p.shape or t.stride() == p.stride():
        return t
    return torch.empty_like(p, dtype=t.dtype, device=t.device).copy_(t)


def _check_class(cls: Any) -> None:
    if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer) or cls is torch.optim.Optimizer:
        raise TypeError(f"cls must be a subclass of torch.optim.Optimizer, got {cls!r}")
    if issubclass(cls, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates the loss many times a step (it needs a closure): take a first-order class")
    if issubclass(cls, torch.optim.SparseAdam):
        raise ValueError("SparseAdam needs sparse gradients, and those of a genome are dense: take Adam")


def _memory(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Options and public attributes, as text: what a step must leave as it was."""
    options = {k: v for group in optimizer.param_groups for k, v in group.items() if k != "params"}
    rest = {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups") and k[0] != "_"}
    return {k: repr(v) for k, v in (options | rest).items()}


def _check_memory(optimizer: torch.optim.Optimizer, before: dict[str, str], tensors: list[Tensor]) -> None:
    """Check after a step that all that has changed is in the state of parameters, as tensors."""
    name = type(optimizer).__name__
    changed = [k for k, v in _memory(optimizer).items() if before.get(k) != v]
    if {id(p) for p in optimizer.state} - {id(p) for p in tensors}:
        changed.append("state that belongs to no parameter")
    if changed:
        raise ValueError(f"{name} must keep all that changes in the state of a parameter, got {', '.join(changed)}")
    for entry, value in ((e, v) for p in tensors for e, v in optimizer.state[p].items()):
        if not isinstance(value, Tensor):
            raise TypeError(f"state of {name} must be tensors, got {entry} of type {type(value).__name__}")


def _check_state(
    state: OptState, params: Params, specs: dict[tuple[str, str], TensorSpec], cls: str, fingerprint: Tensor
) -> None:
    """Check that a state is what the class needs: some kernels write beyond a tensor that is too small."""
    if not isinstance(state, OptState):
        raise TypeError(f"state must be an OptState from init or update, got {type(state).__name__}")
    if (got := int(state.fingerprint)) != int(fingerprint):
        other = next((name for name in dir(torch.optim) if int(_fingerprint(name)) == got), "another class")
        raise ValueError(f"the state must be one of {cls}, got one of {other}: make a new one by init")
    given = {(k, entry): t for k, of in state.leaves.items() for entry, t in of.items()}
    if state.leaves.keys() == params.keys() and given.keys() == specs.keys():
        if all([t.shape == specs[k].shape and t.dtype == specs[k].dtype for k, t in given.items()]):
            return
    what = f"the state does not fit {cls} and the parameters"
    # On any device: torch reads numbers of steps wherever they are.
    expected = {f"{k}/{entry}": spec._replace(device=None) for (k, entry), spec in specs.items()}
    compare_trees(expected, flatten_tree(state.leaves), what)
    if state.leaves.keys() != params.keys():  # Some classes keep nothing that could be compared.
        raise ValueError(f"{what}: expected the leaves {sorted(params)}, got {sorted(state.leaves)}")


def _fingerprint(name: str) -> Tensor:
    """The first 63 bits of the SHA-256 of a name."""
    digest = hashlib.sha256(name.encode()).digest()
    return torch.tensor(int.from_bytes(digest[:8], "big") >> 1, dtype=torch.int64, device="cpu")
