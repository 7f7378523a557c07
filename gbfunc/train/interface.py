"""What every optimizer is: two pure functions, and a state that is a pytree of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

from gbfunc.types import Params

Role: TypeAlias = Literal["code", "linear", "direct"]
"""What a leaf is: code weights or linear coefficients of g-nets (stacked, [T, ...]), or an ordinary parameter."""

Roles: TypeAlias = Mapping[str, str]
"""Role by name of leaf; plain strings, checked at the door."""

LearningRate: TypeAlias = float | Callable[[int], float]
"""A number, or a function of the step, which counts from 0."""

LeafState: TypeAlias = dict[str, Tensor]

ROLES: tuple[Role, ...] = ("code", "linear", "direct")


class OptState(NamedTuple):
    """What an optimizer carries over, its structure fixed at init.

    Attributes:
        step: updates done, int64 on the CPU.
        leaves: torch's own state of every leaf, by name; zeros that nothing reads while `step` is 0.
    """

    step: Tensor
    leaves: dict[str, LeafState]


class Optimizer(NamedTuple):
    """A pair of pure functions over flat dicts of tensors.

    Attributes:
        init: `(params, roles) -> state`.
        update: `(grads, state, params, roles, *, donate=False) -> (params, state)`. Nothing given is changed unless
            donated; donated buffers may be updated in place and returned, and only the results may be used after.
            Results need no grad and have no graph.
    """

    init: Callable[[Params, Roles], OptState]
    update: Callable[..., tuple[Params, OptState]]
