"""`torch_optimizer`: any class of `torch.optim` as a pure pair `(init, update)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gbfunc.train.interface import ROLES, LearningRate, Optimizer, OptState, Roles
from gbfunc.train.rules import make_placement
from gbfunc.train.stepping import advance, aligned, owned
from gbfunc.types import Params


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

    An update equals `step()` of the class with the same options. Fused kernels are used where the class and the
    leaves have them, unless `fused` or `foreach` is given.

    Classes that treat every number alone (SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop,
    ASGD) take stacked leaves as they are. Muon (Jordan et al., 2024) and Adafactor (Shazeer and Stern, 2018) mix the
    numbers of a matrix: they take every tile of a code or linear leaf by itself, and direct leaves whole. Leaves that
    they refuse (Muon: all but matrices; both: empty ones) go to AdamW with the same `lr` and, where given,
    `weight_decay`. A class from elsewhere is taken to treat every number alone; a step may change nothing but the
    parameters and their state, which holds tensors and numbers.

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
    place = make_placement(cls, {"lr": lr, **options}, {"code": code, "linear": linear, "direct": direct})

    def init(params: Params, roles: Roles) -> OptState:
        """A state with the structure that torch gives it in one step, on copies.

        Raises:
            ValueError: for leaves without a role or of an unknown one, and for classes that cannot be pure.
            TypeError: for a class that keeps anything but tensors and numbers.
        """
        _check_roles(params, roles)
        places = {k: place(k, p, roles[k]) for k, p in params.items()}
        with torch.no_grad():
            copies = {k: p.clone() for k, p in params.items()}
            found = advance(0, copies, {k: torch.zeros_like(p) for k, p in copies.items()}, {}, places)
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
        _check_fit(grads, state, params)
        places = {k: place(k, p, roles[k]) for k, p in params.items()}
        step = int(state.step)
        with torch.no_grad():
            new = {k: p.detach() if donate and p.is_contiguous() else p.clone() for k, p in params.items()}
            # Classes from elsewhere may add weight decay to the gradient in place, as torch's once did.
            copy = not donate and any(p.rule.foreign for p in places.values())
            fitted = {k: aligned(grads[k].clone() if copy else grads[k], p) for k, p in new.items()}
            # Torch fills an empty state at its first step. Zeros, or the state after a step with zero gradients, would
            # be another algorithm: NAdam's mu_product starts at 1, Rprop's step sizes at lr, SGD's momentum at the
            # first gradient, ASGD's average at the first iterate.
            old = {k: owned(state.leaves[k], p, donate) for k, p in new.items()} if step else {}
            leaves = advance(step, new, fitted, old, places)
        for k, leaf in leaves.items():
            if leaf.keys() != state.leaves[k].keys():
                expected, got = sorted(leaf), sorted(state.leaves[k])
                raise ValueError(f"state of leaf {k!r} must have the entries {expected} for {cls.__name__}, got {got}")
        return new, OptState(state.step + 1, leaves)

    return Optimizer(init, update)


def _check_roles(params: Params, roles: Roles) -> None:
    for k in params:
        if roles.get(k) not in ROLES:
            raise ValueError(f"role of leaf {k!r} must be one of {ROLES}, got {roles.get(k)!r}")


def _check_fit(grads: Params, state: OptState, params: Params) -> None:
    if not isinstance(state, OptState):
        raise TypeError(f"state must be an OptState from init or update, got {type(state).__name__}")
    for what, named in (("grads", grads), ("state.leaves", state.leaves)):
        if named.keys() != params.keys():
            missing, unknown = sorted(params.keys() - named.keys()), sorted(named.keys() - params.keys())
            raise ValueError(f"{what} must have the names of params, got {missing} missing and {unknown} unknown")
    for k, p in params.items():
        g = grads[k]
        if g.shape != p.shape or g.dtype != p.dtype or g.device != p.device:
            expected, got = (f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (p, g))
            raise ValueError(f"gradient of leaf {k!r} must be {expected} like the leaf, got {got}")
