"""One step of a torch optimizer that is made for it and thrown away: what it knows is in the state, or nowhere."""

# Shapes: T tiles (or groups of tiles) of a stacked leaf.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gbfunc.train.interface import LeafState
from gbfunc.train.rules import Place, Rule
from gbfunc.types import Params

_NUMBERS = {"int": torch.int64, "float": torch.float64, "bool": torch.bool}
"""Python numbers in the state of classes from elsewhere are kept as CPU tensors under `name:type`."""


def advance(
    step: int, params: Params, grads: Params, old: dict[str, LeafState], places: dict[str, Place]
) -> dict[str, LeafState]:
    """Step `params` in place; returns the new state of every leaf. `old` is {} at the first step."""
    names_by_rule: dict[Rule, list[str]] = {}
    for name, place in places.items():
        names_by_rule.setdefault(place.rule, []).append(name)
    new: dict[str, LeafState] = {name: {} for name in params}
    for rule, names in names_by_rule.items():
        tensors: list[Tensor] = []
        tensor_grads: list[Tensor] = []
        states: list[LeafState] = []
        for name in names:
            if places[name].by_tile:
                tensors += params[name].unbind()
                tensor_grads += grads[name].unbind()
                states += split_state(old[name], len(params[name])) if old else ()
            else:
                tensors.append(params[name])
                tensor_grads.append(grads[name])
                if old:
                    states.append(old[name])
        found = iter(_step(rule, step, tensors, tensor_grads, states))
        for name in names:
            tiles = range(len(params[name])) if places[name].by_tile else ()
            new[name] = join_state([next(found) for _ in tiles]) if tiles else next(found)
    return new


def split_state(state: LeafState, tiles: int) -> list[LeafState]:
    """The state of a stacked leaf, {name: [T, ...]}, as T states."""
    views = {k: t.unbind() for k, t in state.items()}
    return [{k: v[i] for k, v in views.items()} for i in range(tiles)]


def join_state(states: list[LeafState]) -> LeafState:
    """Undo `split_state`."""
    return {k: torch.stack([s[k] for s in states]) for k in states[0]}


def owned(state: LeafState, p: Tensor, donate: bool) -> LeafState:
    """The state of leaf `p` as tensors that torch may change in place."""
    if donate:
        return {k: aligned(t.detach() if t.requires_grad else t, p) for k, t in state.items()}
    return {k: aligned(t.clone(), p) for k, t in state.items()}


def aligned(t: Tensor, p: Tensor) -> Tensor:
    """`t` in the memory layout of `p`, where it has its shape.

    Fused CPU kernels ignore strides, and `torch.autograd.grad`, unlike `backward()`, returns gradients of any layout.
    """
    if (t.is_contiguous() and p.is_contiguous()) or t.shape != p.shape or t.stride() == p.stride():
        return t
    return torch.empty_like(p, dtype=t.dtype, device=t.device).copy_(t)


def _step(
    rule: Rule, step: int, tensors: list[Tensor], grads: list[Tensor], states: list[LeafState]
) -> list[LeafState]:
    """A step in place on `tensors`; without states, torch makes its own. Returns the new states."""
    optimizer = rule.make(tensors, step)
    for p, g in zip(tensors, grads, strict=True):
        p.grad = g
    if states:
        for p, s in zip(tensors, states, strict=True):
            optimizer.state[p] = _unpack(s) if rule.foreign else s
    before = _memory(optimizer) if rule.foreign else {}
    optimizer.step()
    for p in tensors:
        p.grad = None
    found = [optimizer.state[p] for p in tensors]
    if not rule.foreign:
        return found
    _check_memory(optimizer, before, len(tensors))
    return [_pack(s, type(optimizer).__name__) for s in found]


def _memory(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Options and public attributes, as text: what a step of a class from elsewhere must leave as it was."""
    options = {k: repr(v) for group in optimizer.param_groups for k, v in group.items() if k != "params"}
    own = {k: repr(v) for k, v in vars(optimizer).items() if k not in ("state", "param_groups") and k[0] != "_"}
    return options | own


def _check_memory(optimizer: torch.optim.Optimizer, before: dict[str, str], tensors: int) -> None:
    changed = [k for k, v in _memory(optimizer).items() if before.get(k) != v]
    if len(optimizer.state) != tensors:
        changed.append("state that belongs to no parameter")
    if changed:
        name = type(optimizer).__name__
        raise ValueError(f"{name} must keep all that changes in the state of a parameter, got {', '.join(changed)}")


def _pack(state: dict[str, Any], cls: str) -> LeafState:
    """State of a class from elsewhere, as tensors alone."""
    packed = {}
    for name, value in state.items():
        kind = type(value).__name__
        if isinstance(value, Tensor):
            packed[name] = value
        elif kind in _NUMBERS:
            packed[f"{name}:{kind}"] = torch.tensor(value, dtype=_NUMBERS[kind], device="cpu")
        else:
            raise TypeError(f"state of {cls} must be tensors and numbers, got {name}={value!r}")
    return packed


def _unpack(state: LeafState) -> dict[str, Any]:
    """Undo `_pack`."""
    unpacked = {}
    for key, t in state.items():
        name, _, kind = key.rpartition(":")
        unpacked |= {name: t.item()} if kind in _NUMBERS and name else {key: t}
    return unpacked
