"""Which torch class takes which leaves, with which options; all options are checked here, before any step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from gbfunc.train.interface import ROLES, LearningRate


@dataclass(frozen=True, eq=False)
class Rule:
    """A torch class with its options, for the leaves of one or more roles.

    Attributes:
        cls: the class.
        lr: learning rate.
        options: all other options.
        fused_on: types of device on which the fused kernel is taken unasked.
        foreign: the class comes from elsewhere than `torch.optim`.
    """

    cls: Callable[..., torch.optim.Optimizer]
    lr: LearningRate
    options: dict[str, Any]
    fused_on: tuple[str, ...]
    foreign: bool

    def make(self, tensors: list[Tensor], step: int) -> torch.optim.Optimizer:
        """A fresh torch optimizer for these tensors."""
        options = self.options
        if self.fused_on and all(p.is_floating_point() and p.device.type in self.fused_on for p in tensors):
            options = options | {"fused": True}
        return self.cls(tensors, lr=learning_rate(self.lr, step), **options)


class Place(NamedTuple):
    """Where a leaf goes: to a rule, whole or tile by tile."""

    rule: Rule
    by_tile: bool


def make_placement(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], groups: Mapping[str, Mapping[str, Any] | None]
) -> Callable[[str, Tensor, str], Place]:
    """A function `(name, leaf, role) -> Place`.

    Args:
        cls: the class.
        options: options of all leaves, `lr` among them.
        groups: options of the leaves of a role that differ.

    Raises:
        TypeError: for a class or an argument of the wrong type.
        ValueError: for classes and options that cannot be taken.
    """
    _check_class(cls)
    muon = getattr(torch.optim, "Muon", None)  # Younger than the oldest torch that is supported.
    matrices_only = muon is not None and issubclass(cls, muon)
    mixes = matrices_only or issubclass(cls, torch.optim.Adafactor)
    everyone = _make_rule(cls, options, "all leaves")
    whole, tiled = Place(everyone, False), Place(everyone, True)
    stacked = tiled if mixes else whole
    places: dict[str, Place] = {"code": stacked, "linear": stacked, "direct": whole}
    fallbacks: dict[str, Place] = dict.fromkeys(ROLES, Place(_fallback(options), False)) if mixes else {}
    for role, own in groups.items():
        if own is not None and not isinstance(own, Mapping):
            raise TypeError(f"{role} must be a dict of options or None, got {own!r}")
        if own:
            merged = options | dict(own)
            places[role] = places[role]._replace(rule=_make_rule(cls, merged, f"{role} leaves"))
            if mixes:
                fallbacks[role] = Place(_fallback(merged), False)

    def place(name: str, p: Tensor, role: str) -> Place:
        if not mixes:
            return places[role]
        by_tile = places[role].by_tile
        if by_tile and p.ndim == 0:
            raise ValueError(f"leaf {name!r} of role {role!r} must have a leading dimension of tiles, got a scalar")
        refused = p.numel() == 0 or (matrices_only and p.ndim - by_tile != 2)
        return (fallbacks if refused else places)[role]

    return place


def learning_rate(lr: LearningRate, step: int) -> float:
    """The rate at a step, checked: torch checks only what its constructor gets, never a schedule."""
    rate = float(lr(step) if callable(lr) else lr)
    if not 0 <= rate or not isfinite(rate):
        raise ValueError(f"lr must be finite and >= 0, got {rate} at step {step}")
    return rate


def _make_rule(cls: type[torch.optim.Optimizer], options: dict[str, Any], where: str) -> Rule:
    """Check the options of a class by making one."""
    lr = options["lr"]
    _check_rate(lr, where)
    options = {k: v for k, v in options.items() if k != "lr"}
    if options.get("differentiable"):
        raise ValueError("differentiable=True must be left out: the results of a pure update have no graph")
    make = cast("Callable[..., torch.optim.Optimizer]", cls)
    rate = learning_rate(lr, 0)
    try:
        probe = make([torch.zeros(2, 2)], lr=rate, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        known = [k for k in inspect.signature(cls).parameters if k != "params"]
        raise ValueError(f"{cls.__name__} refuses the options of {where}: {error}; its options are {known}") from error
    foreign = getattr(torch.optim, cls.__name__, None) is not cls
    asked = options.keys() & {"fused", "foreach"}
    # Adagrad's CUDA kernel is younger than the oldest torch that is supported.
    devices = ("cpu",) if cls is torch.optim.Adagrad else ("cpu", "cuda")
    return Rule(make, lr, options, () if foreign or asked or "fused" not in probe.defaults else devices, foreign)


def _fallback(options: dict[str, Any]) -> Rule:
    kept = {k: v for k, v in options.items() if k in ("lr", "weight_decay")}
    return _make_rule(torch.optim.AdamW, kept, "leaves that fall back to AdamW")


def _check_rate(lr: Any, where: str) -> None:
    if not callable(lr) and (isinstance(lr, bool) or not isinstance(lr, Real)):
        raise TypeError(f"lr of {where} must be a number or a function of the step, got {lr!r}")


def _check_class(cls: Any) -> None:
    if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer) or cls is torch.optim.Optimizer:
        raise TypeError(f"cls must be a subclass of torch.optim.Optimizer, got {cls!r}")
    if issubclass(cls, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates the loss many times a step (it needs a closure): take a first-order class")
    if issubclass(cls, torch.optim.SparseAdam):
        raise ValueError("SparseAdam needs sparse gradients, and those of a genome are dense: take Adam")
