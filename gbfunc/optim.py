"""Torch's optimizers as pure pairs `(init, update)`, and torch's schedules as pure functions of the step.

The torch object is made anew for every update and thrown away after it: what it knows is in the state, or it is nowhere.
"""

# Shapes: T tiles (or groups of tiles) of a stacked leaf.

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import lr_scheduler

from gbfunc.types import Params

Role: TypeAlias = Literal["code", "linear", "direct"]
"""What a leaf is: a g-net's codes, its linear coefficients (both stacked [T, ...]), or an ordinary parameter."""

Roles: TypeAlias = Mapping[str, Role]
LearningRate: TypeAlias = float | Callable[[int], float]

ROLES: tuple[Role, ...] = ("code", "linear", "direct")

_NUMBERS = {"int": torch.int64, "float": torch.float64, "bool": torch.bool}
"""Python numbers in the state of classes from elsewhere are kept as CPU tensors, under `name:type`."""


class OptState(NamedTuple):
    """What an optimizer carries over: a pytree of tensors, its structure fixed at init.

    Attributes:
        step: updates done, int64 on the CPU.
        leaves: torch's own state of every leaf, by name; all zeros, and not read, while `step` is 0.
    """

    step: Tensor
    leaves: dict[str, dict[str, Tensor]]


class Optimizer(NamedTuple):
    """A pair of pure functions over flat dicts of tensors.

    Attributes:
        init: `(params, roles) -> state`.
        update: `(grads, state, params, roles, *, donate=False) -> (params, state)`. Nothing given is changed, unless
            it is donated: then its buffers may be updated in place and returned, and only the results may be used
            after. Results need no grad and have no graph.
    """

    init: Callable[[Params, Roles], OptState]
    update: Callable[..., tuple[Params, OptState]]


@dataclass(frozen=True, eq=False)
class _Rule:
    """A torch class with its options, for the leaves of one or more roles."""

    cls: type[torch.optim.Optimizer]
    lr: LearningRate
    options: dict[str, Any]
    fused_on: tuple[str, ...]
    """Device types on which to ask for the fused kernel, unasked."""
    foreign: bool
    """The class comes from elsewhere than torch.optim."""

    def make(self, tensors: list[Tensor], step: int) -> torch.optim.Optimizer:
        options = self.options
        if self.fused_on and all(p.is_floating_point() and p.device.type in self.fused_on for p in tensors):
            options = options | {"fused": True}
        return self.cls(tensors, lr=_rate(self.lr, step), **options)  # pyright: ignore[reportCallIssue]


def torch_optimizer(
    cls: type[torch.optim.Optimizer],
    lr: LearningRate,
    *,
    code: Mapping[str, Any] | None = None,
    linear: Mapping[str, Any] | None = None,
    direct: Mapping[str, Any] | None = None,
    **options: Any,
) -> Optimizer:
    """Make a pure optimizer of any class of `torch.optim` (https://docs.pytorch.org/docs/stable/optim.html).

    An update equals `step()` of the same class with the same options. Fused kernels are used where the class and the
    leaves have them, unless `fused` or `foreach` is given.

    Classes that treat every number alone (SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop,
    ASGD) take stacked leaves as they are. Muon (Jordan et al., 2024) and Adafactor (Shazeer and Stern, 2018) mix the
    numbers of a matrix, so they take every tile of a code or linear leaf alone, and direct leaves whole. Leaves that
    they refuse (Muon: all but matrices) go to AdamW, with the same `lr` and, where given, `weight_decay`. A class from
    elsewhere is taken to treat every number alone; it must keep its state by parameter, as tensors or numbers.

    Args:
        cls: the class.
        lr: learning rate, or a function of the step, which counts from 0.
        code: options for the leaves of role `"code"` that differ from the rest, `lr` among them.
        linear: the same for role `"linear"`.
        direct: the same for direct parameters.
        options: options of the class.

    Raises:
        TypeError: if `cls` is no optimizer class, or an argument is of the wrong type.
        ValueError: for LBFGS and SparseAdam, and for options that the class refuses or a pure update cannot have.
    """
    _check_class(cls)
    muon = getattr(torch.optim, "Muon", ())  # not in every torch
    mixes = issubclass(cls, (muon, torch.optim.Adafactor) if muon else torch.optim.Adafactor)
    matrices_only = mixes and not issubclass(cls, torch.optim.Adafactor)
    base = {"lr": lr, **options}
    rules, fallbacks = {None: _make_rule(cls, base, "all leaves")}, {None: _fallback(base)}
    for role, own in zip(ROLES, (code, linear, direct), strict=True):
        if own is not None and not isinstance(own, Mapping):
            raise TypeError(f"{role} must be a dict of options or None, got {own!r}")
        rules[role] = _make_rule(cls, base | dict(own), f"{role} leaves") if own else rules[None]
        fallbacks[role] = _fallback(base | dict(own)) if own else fallbacks[None]

    def place(name: str, p: Tensor, role: Role) -> tuple[_Rule, bool]:
        """The rule of a leaf, and whether it takes the tiles of the leaf one by one."""
        if not mixes:
            return rules[role], False
        stacked = role != "direct"
        if stacked and p.ndim == 0:
            raise ValueError(f"leaf {name!r} of role {role!r} must have a leading dimension of tiles, and is a scalar")
        if p.numel() == 0 or (matrices_only and p.ndim - stacked != 2):
            return fallbacks[role], False
        return rules[role], stacked

    def advance(
        step: int, params: Params, grads: Params, old: dict[str, dict[str, Tensor]], roles: Roles
    ) -> dict[str, dict[str, Tensor]]:
        """One step in place on `params`; returns the new state of every leaf."""
        placed = {k: place(k, p, roles[k]) for k, p in params.items()}
        groups: dict[_Rule, list[str]] = {}
        for k, (rule, _) in placed.items():
            groups.setdefault(rule, []).append(k)
        new = {}
        for rule, names in groups.items():
            units = {k: _units(params[k], grads[k], old.get(k, {}), placed[k][1]) for k in names}
            found = iter(_step(rule, step, [u for k in names for u in units[k]]))
            for k in names:
                states = [next(found) for _ in units[k]]
                new[k] = {s: torch.stack([x[s] for x in states]) for s in states[0]} if placed[k][1] else states[0]
        return {k: new[k] for k in params}

    def init(params: Params, roles: Roles) -> OptState:
        """A state whose structure torch gives in a step on copies; its values come with the first update.

        Raises:
            ValueError: for a leaf without a role, an unknown role, or leaves or options that the class refuses.
            TypeError: for a class that keeps anything but tensors and numbers.
        """
        _check_roles(params, roles)
        with torch.no_grad():
            copies = {k: p.clone() for k, p in params.items()}
            found = advance(0, copies, {k: torch.zeros_like(p) for k, p in copies.items()}, {}, roles)
            leaves = {k: {s: torch.zeros_like(t) for s, t in state.items()} for k, state in found.items()}
        return OptState(torch.zeros((), dtype=torch.int64, device="cpu"), leaves)

    def update(
        grads: Params, state: OptState, params: Params, roles: Roles, *, donate: bool = False
    ) -> tuple[Params, OptState]:
        """One step: the new parameters and the new state.

        Raises:
            TypeError: if `state` is no `OptState`.
            ValueError: for names, shapes, types or roles that do not fit, or a learning rate that is negative.
        """
        _check_roles(params, roles)
        _check_update(grads, state, params)
        with torch.no_grad():
            new = {k: p.detach() if donate and p.is_contiguous() else p.clone() for k, p in params.items()}
            copy_grads = not donate and rules[None].foreign
            aligned = {k: _aligned(g.clone() if copy_grads else g, new[k]) for k, g in grads.items()}
            step = int(state.step)
            # Torch fills an empty state at the first step; zeros in its place would be another algorithm for half the
            # classes (NAdam's mu_product starts at 1, Rprop's step sizes at lr, SGD's momentum at the first gradient).
            old = {} if step == 0 else {k: _owned(state.leaves[k], new[k], donate) for k in new}
            leaves = advance(step, new, aligned, old, roles)
        for k, leaf in leaves.items():
            if leaf.keys() != state.leaves[k].keys():
                raise ValueError(f"state of leaf {k!r} has {sorted(state.leaves[k])}, {cls.__name__} made {sorted(leaf)}")
        return new, OptState(state.step + 1, leaves)

    return Optimizer(init, update)


class _Unit(NamedTuple):
    """What torch takes for one parameter: a leaf, or a tile of one."""

    param: Tensor
    grad: Tensor
    state: dict[str, Tensor]


def _units(p: Tensor, g: Tensor, state: dict[str, Tensor], by_tile: bool) -> list[_Unit]:
    """A leaf as one unit, or a stacked one [T, ...] as T."""
    if not by_tile:
        return [_Unit(p, g, state)]
    views = {s: t.unbind() for s, t in state.items()}
    tiles = zip(p.unbind(), g.unbind(), strict=True)
    return [_Unit(pt, gt, {s: v[i] for s, v in views.items()}) for i, (pt, gt) in enumerate(tiles)]


def _step(rule: _Rule, step: int, units: list[_Unit]) -> list[dict[str, Tensor]]:
    """A step of a fresh torch optimizer, in place on the units' parameters; returns the units' new states."""
    tensors = [u.param for u in units]
    optimizer = rule.make(tensors, step)
    for u in units:
        u.param.grad = u.grad
        if step:
            optimizer.state[u.param] = _unpack(u.state) if rule.foreign else u.state
    before = _outside_state(optimizer) if rule.foreign and step == 0 else {}
    optimizer.step()
    for p in tensors:
        p.grad = None
    if before:
        changed = [k for k, v in _outside_state(optimizer).items() if before.get(k) != v]
        if changed or optimizer.state.keys() - set(tensors):
            where = ", ".join(changed) or "state that belongs to no parameter"
            raise ValueError(f"{rule.cls.__name__} cannot be pure: it remembers steps outside its state ({where})")
    found = [optimizer.state.get(p, {}) for p in tensors]
    return [_pack(s, rule.cls) for s in found] if rule.foreign else [dict(s) for s in found]


def _outside_state(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Options and public attributes as text: what a step of a class from elsewhere must leave alone."""
    options = {k: repr(v) for group in optimizer.param_groups for k, v in group.items() if k != "params"}
    public = {k: repr(v) for k, v in vars(optimizer).items() if k not in ("state", "param_groups") and k[0] != "_"}
    return options | public


def _pack(state: dict[str, Any], cls: type) -> dict[str, Tensor]:
    """State of a class from elsewhere as tensors alone."""
    packed = {}
    for name, value in state.items():
        kind = type(value).__name__
        if isinstance(value, Tensor):
            packed[name] = value
        elif kind in _NUMBERS:
            packed[f"{name}:{kind}"] = torch.tensor(value, dtype=_NUMBERS[kind], device="cpu")
        else:
            raise TypeError(f"state of {cls.__name__} must be tensors and numbers, got {name}={value!r}")
    return packed


def _unpack(state: dict[str, Tensor]) -> dict[str, Any]:
    """Undo `_pack`."""
    return {k.rpartition(":")[0] if ":" in k else k: t.item() if ":" in k else t for k, t in state.items()}


def _owned(state: dict[str, Tensor], p: Tensor, donate: bool) -> dict[str, Tensor]:
    """State that torch may change in place."""
    return {s: _aligned(t.detach() if donate else t.clone(), p) for s, t in state.items()}


def _aligned(t: Tensor, p: Tensor) -> Tensor:
    """`t`, laid out in memory as `p` where it has its shape: fused CPU kernels read past strides without a word."""
    if t.stride() == p.stride() or t.shape != p.shape:
        return t
    return torch.empty_like(p, dtype=t.dtype).copy_(t)


def _make_rule(cls: type[torch.optim.Optimizer], options: dict[str, Any], where: str) -> _Rule:
    """Check the options of `cls`, by making one."""
    options = dict(options)
    lr = options.pop("lr")
    if not callable(lr) and (not isinstance(lr, Real) or isinstance(lr, bool)):
        raise TypeError(f"lr of {where} must be a number or a function of the step, got {lr!r}")
    if options.get("differentiable"):
        raise ValueError("differentiable=True must be left out: the results of a pure update have no graph")
    foreign = getattr(torch.optim, cls.__name__, None) is not cls
    rate = _rate(lr, 0)
    try:
        probe = cls([torch.zeros(2, 2)], lr=rate, **options)  # pyright: ignore[reportCallIssue]
    except (TypeError, ValueError, RuntimeError) as error:
        known = [k for k in inspect.signature(cls).parameters if k != "params"]
        raise ValueError(f"{cls.__name__} refuses the options of {where}: {error}; it has {known}") from error
    asked = options.keys() & {"fused", "foreach"}
    # Adagrad's CUDA kernel is younger than the others'.
    devices = ("cpu",) if cls is torch.optim.Adagrad else ("cpu", "cuda")
    return _Rule(cls, lr, options, () if foreign or asked or "fused" not in probe.defaults else devices, foreign)


def _fallback(options: dict[str, Any]) -> _Rule:
    kept = {k: v for k, v in options.items() if k in ("lr", "weight_decay")}
    return _make_rule(torch.optim.AdamW, kept, "leaves that fall back to AdamW")


def _rate(lr: LearningRate, step: int) -> float:
    rate = float(lr(step) if callable(lr) else lr)
    if not 0 <= rate or not isfinite(rate):
        raise ValueError(f"lr must be finite and >= 0, got {rate} at step {step}")
    return rate


def _check_class(cls: Any) -> None:
    if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer):
        raise TypeError(f"cls must be a subclass of torch.optim.Optimizer, got {cls!r}")
    if cls is torch.optim.Optimizer:
        raise TypeError("cls must be a subclass of torch.optim.Optimizer, got that class itself")
    if issubclass(cls, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates the loss many times a step (it needs a closure): take a first-order class")
    if issubclass(cls, torch.optim.SparseAdam):
        raise ValueError("SparseAdam needs sparse gradients, and gradients of a genome are dense: take Adam")


def _check_roles(params: Params, roles: Roles) -> None:
    for k in params:
        if roles.get(k) not in ROLES:
            raise ValueError(f"role of leaf {k!r} must be one of {ROLES}, got {roles.get(k)!r}")


def _check_update(grads: Params, state: OptState, params: Params) -> None:
    if not isinstance(state, OptState):
        raise TypeError(f"state must be the OptState of init or update, got {type(state).__name__}")
    for what, named in (("grads", grads), ("state.leaves", state.leaves)):
        if named.keys() != params.keys():
            without, beyond = sorted(params.keys() - named.keys()), sorted(named.keys() - params.keys())
            raise ValueError(f"{what} must have the names of params; missing {without}, unknown {beyond}")
    for k, p in params.items():
        g = grads[k]
        if g.shape != p.shape or g.dtype != p.dtype or g.device != p.device:
            expected, got = (f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (p, g))
            raise ValueError(f"gradient of {k!r} must be {expected} as the leaf, got {got}")


def torch_schedule(
    scheduler_cls: type[lr_scheduler.LRScheduler], lr: float, steps: int, **options: Any
) -> Callable[[int], float]:
    """A torch scheduler, run once, as a pure function of the step; its last value holds past the end.

    Only the learning rate is scheduled. OneCycleLR gets `max_lr=lr` and `total_steps=steps` unless `options` say
    otherwise; all others start from an optimizer with learning rate `lr`
    (https://docs.pytorch.org/docs/stable/optim.html#how-to-adjust-learning-rate).

    Args:
        scheduler_cls: a class of `torch.optim.lr_scheduler`.
        lr: learning rate.
        steps: length of the table.
        options: options of the class.

    Raises:
        TypeError: if `scheduler_cls` is no scheduler class.
        ValueError: for options out of range, or a schedule that is no function of the step.
    """
    if not isinstance(scheduler_cls, type) or not issubclass(scheduler_cls, lr_scheduler.LRScheduler):
        raise TypeError(f"scheduler_cls must be a subclass of LRScheduler, got {scheduler_cls!r}")
    if issubclass(scheduler_cls, lr_scheduler.ReduceLROnPlateau):
        raise ValueError("ReduceLROnPlateau follows a measured loss: it is no function of the step")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be an int >= 1, got {steps!r}")
    if options.get("cycle_momentum"):
        raise ValueError("cycle_momentum must be False: only the learning rate is scheduled")
    if issubclass(scheduler_cls, lr_scheduler.OneCycleLR):
        options = {"max_lr": lr, "total_steps": steps} | options
    if issubclass(scheduler_cls, (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR)):
        options["cycle_momentum"] = False
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=_rate(lr, 0))
    try:
        scheduler = scheduler_cls(optimizer, **options)
    except TypeError as error:
        raise ValueError(f"{scheduler_cls.__name__} refuses its options: {error}") from error
    table = [float(scheduler.get_last_lr()[0])]
    for _ in range(steps - 1):
        optimizer.step()
        scheduler.step()
        table.append(float(scheduler.get_last_lr()[0]))

    def schedule(step: int) -> float:
        if step < 0:
            raise ValueError(f"step must be >= 0, got {step}")
        return table[min(step, len(table) - 1)]

    return schedule
