"""Optimizers as pairs of pure functions `(init, update)`, made of any class of `torch.optim`.

Each update makes torch's optimizer on copies, hands it the state, lets it step once and takes the new state out.
Classes that treat every number alone get the small leaves of a group as one: new leaves and their states are then
consecutive views of one buffer, which the next update takes as it is.

Leaves have roles, which say how a class takes them. Code weights and linear coefficients of g-nets are stacked,
[T, ...], with T tiles (or groups of tiles); direct parameters are ordinary parameters of the p-net.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from gbfunc.train.param_groups import ROLES, LearningRate, ParamGroup, check_class, learning_rate, param_groups
from gbfunc.trees import TensorSpec, compare_trees, flatten_tree, spec_of
from gbfunc.types import Params

Roles: TypeAlias = Mapping[str, str]
"""Role by name of leaf: `"code"`, `"linear"` or `"direct"`."""

JOINED_NUMEL = 2**14
"""Largest leaf that is stepped as a part of a buffer: a longer one takes less time to step than to copy there."""

# Functions in C: an update calls them for every tensor.
_SPEC, _FORM = attrgetter("shape", "dtype", "device"), attrgetter("shape", "dtype")
_NBYTES, _BASE = attrgetter("nbytes"), attrgetter("_base")


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
            Results need no grad, have no graph and may be views of buffers that they share. TypeError if `state` is no
            `OptState`; ValueError if it, the leaves or their roles do not fit, or the learning rate is negative.
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
    check_class(cls)
    group_of = param_groups(cls, {"lr": lr, **options}, {"code": code, "linear": linear, "direct": direct})
    fingerprint = _fingerprint(cls.__name__)

    cached = lru_cache(maxsize=16)(partial(_prepare, group_of))

    def prepare(params: Params, roles: Roles) -> _Prepared:
        return cached(tuple(zip(params, map(roles.get, params), map(_SPEC, params.values()), strict=True)))

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
        prepared = prepare(params, roles)
        if grads.keys() != params.keys() or [*map(_SPEC, map(grads.get, params))] != prepared.leaf_specs:
            compare_trees(prepared.leaves, grads, "grads do not fit params")
        _check_state(state, params, prepared, cls.__name__, fingerprint)
        step = int(state.step)
        new: Params = {}
        leaves: dict[str, Params] = {}
        with torch.no_grad():
            for call in prepared.calls:
                stepped, after = call.update(step, grads, state.leaves, params, donate)
                new |= stepped
                leaves |= after
        if len(prepared.calls) > 1:
            new, leaves = {k: new[k] for k in params}, {k: leaves[k] for k in params}
        return new, OptState(state.step + 1, leaves, state.fingerprint if donate else state.fingerprint.clone())

    settings = {"cls": cls, "lr": lr, "code": code, "linear": linear, "direct": direct, "options": options}
    return Optimizer(init, update, settings)


_Leaf: TypeAlias = tuple[str, str | None, tuple[tuple[int, ...], torch.dtype, torch.device]]
"""Name, role, and shape, dtype and device: all that decides how a leaf is stepped."""


class _Call(NamedTuple):
    """One optimizer of torch that an update makes, and the leaves that it steps.

    Attributes:
        group: the class and its options.
        options: its options, with or without the fused kernel.
        names: of the leaves.
        entries: where it steps the leaves as one, the entries of their state: whether each is a tensor like the leaf,
            or one number, which all leaves have alike.
    """

    group: ParamGroup
    options: dict[str, Any]
    names: list[str]
    entries: dict[str, bool] | None = None

    def update(
        self, step: int, grads: Params, old: Mapping[str, Params], params: Params, donate: bool
    ) -> tuple[Params, dict[str, Params]]:
        """New leaves and their new state; `old` is not read at the first step."""
        names, columns = self.names, {}
        if self.entries is not None:
            states = [old[k] for k in names] if step else []
            columns = {e: [*map(itemgetter(e), states)] for e in self.entries if step}
            counts = [column for e, column in columns.items() if not self.entries[e]]
        if self.entries is None or not all(map(_known_equal, counts)):
            given = {k: params[k] for k in names}
            return self._advance(step, grads, {k: old[k] for k in names} if step else {}, given, donate)
        leaves = [params[k] for k in names]
        state = {e: _join(x) if self.entries[e] else x[0].clone() for e, x in columns.items()}
        grad = {"": _join([grads[k] for k in names])}
        new, after = self._advance(step, grad, {"": state} if step else {}, {"": _join(leaves)}, donate)
        # Each has its own count of changes: a forward may change one in place that another's backward does not read.
        parts = [x.data for x in _unflatten_dense_tensors(new[""], leaves)]
        rows = [
            _unflatten_dense_tensors(after[""][e], leaves) if like else _repeat(after[""][e], len(names))
            for e, like in self.entries.items()
        ]
        of_leaf = zip(*rows, strict=True) if rows else ((),) * len(names)
        named: list[Params] = [dict(zip(self.entries, row, strict=True)) for row in of_leaf]
        return dict(zip(names, parts, strict=True)), dict(zip(names, named, strict=True))

    def _advance(
        self, step: int, grads: Params, old: Mapping[str, Params], params: Params, donate: bool
    ) -> tuple[Params, dict[str, Params]]:
        """Step copies of `params` and of their state, or donated ones in place."""
        new = {k: p.detach() if donate and p.is_contiguous() else p.clone() for k, p in params.items()}
        # Torch fills an empty state at its first step. Zeros, or the state after a step with zero gradients, would
        # be another algorithm: NAdam's mu_product starts at 1, Rprop's step sizes at lr, SGD's momentum at the
        # first gradient, ASGD's average at the first iterate.
        states = {k: _writable(old[k], p, donate) for k, p in new.items()} if step else {}
        # Classes that torch does not ship may add weight decay to the gradient in place, as torch once did.
        copy = not donate and self.group.cls.__module__.partition(".")[0] != "torch"
        fitted = {k: _aligned(grads[k].clone() if copy else grads[k], p) for k, p in new.items()}
        return new, self.step(step, new, fitted, states)

    def step(self, step: int, params: Params, grads: Params, old: dict[str, Params]) -> dict[str, Params]:
        """Step `params` in place; returns the new state of each. `old` is {} at the first step."""
        tensors = [tile for p in params.values() for tile in self._tiles(p)]
        tensor_grads = [tile for k in params for tile in self._tiles(grads[k])]
        rate = self.group.lr if isinstance(self.group.lr, float) else learning_rate(self.group.lr, step)
        optimizer = self.group.cls(tensors, lr=rate, **self.options)
        for p, g in zip(tensors, tensor_grads, strict=True):
            p.grad = g
        if old:
            states: list[Params] = []
            for k, p in params.items():
                views = {e: self._tiles(t) for e, t in old[k].items()}
                states += [{e: v[i] for e, v in views.items()} for i in range(len(self._tiles(p)))]
            optimizer.state.update(zip(tensors, states, strict=True))
        before = {} if old else _memory(optimizer)
        optimizer.step()
        for p in tensors:
            p.grad = None
        if not old:
            _check_memory(optimizer, before, tensors)
        after = iter([optimizer.state[p] for p in tensors])
        if not self.group.by_tile:
            return dict(zip(params, after, strict=True))
        by_tile = {k: [next(after) for _ in p] for k, p in params.items()}
        return {k: {e: torch.stack([s[e] for s in states]) for e in states[0]} for k, states in by_tile.items()}

    def _tiles(self, x: Tensor) -> Sequence[Tensor]:
        """What torch shall see as a parameter each: leaves, or their tiles; of its state the same."""
        return x.unbind() if self.group.by_tile else (x,)


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one dtype as one, [n]: a view where they are consecutive in memory, otherwise a copy."""
    first = tensors[0]
    places = [*accumulate(map(_NBYTES, tensors), initial=first.data_ptr())]
    end, storage = places.pop(), first.untyped_storage()
    if (
        places == [*map(Tensor.data_ptr, tensors)]
        and all(map(Tensor.is_contiguous, tensors))
        # Otherwise it is by chance: storages of their own, one after the other.
        and end <= storage.data_ptr() + storage.nbytes()
    ):
        return first.as_strided(((end - places[0]) // first.element_size(),), (1,))
    return _flatten_dense_tensors(tensors)


def _repeat(count: Tensor, n: int) -> Sequence[Tensor]:
    """A number as that of n leaves, which `_known_equal` recognises: each of its own memory, as files ask."""
    counts = count.expand(n).clone()
    vars(counts)["equal_at"] = counts._version
    return counts.unbind()


def _known_equal(counts: Sequence[Tensor]) -> bool:
    """Whether numbers are equal: known without reading them, which stops an accelerator, unless changed since."""
    base = counts[0]._base
    if base is not None and getattr(base, "equal_at", None) == base._version:
        if [*map(id, map(_BASE, counts))] == [id(base)] * len(counts):
            return True
    return len(set(map(Tensor.item, counts))) == 1


class _Prepared(NamedTuple):
    """What an update of such leaves calls, the leaves, and every tensor `(leaf, entry)` of its state.

    The last three are the specs as lists, in the order of the leaves.
    """

    calls: list[_Call]
    leaves: dict[str, TensorSpec]
    specs: dict[tuple[str, str], TensorSpec]
    leaf_specs: list[Any]
    entries: list[tuple[str, ...]]
    forms: list[Any]


def _prepare(group_of: Callable[[str, str, tuple[int, ...]], ParamGroup], leaves: tuple[_Leaf, ...]) -> _Prepared:
    """Which leaves are stepped together, and the structure of their state: that after a step on zeros."""
    names: dict[tuple[Any, ...], list[str]] = {}
    zeros: Params = {}
    for name, role, (shape, dtype, device) in leaves:
        if role not in ROLES:
            raise ValueError(f"role of leaf {name!r} must be one of {ROLES}, got {role!r}")
        group = group_of(name, role, shape)
        zeros[name] = torch.zeros(shape, dtype=dtype, device=device)
        joins = group.joins and dtype.is_floating_point and 0 < zeros[name].numel() <= JOINED_NUMEL
        key = group, group.fuses(dtype, device), (dtype, device) if joins else None
        names.setdefault(key, []).append(name)
    for key in [key for key, named in names.items() if key[2] is not None and len(named) == 1]:
        names.setdefault((*key[:2], None), []).extend(names.pop(key))
    calls: list[_Call] = []
    states: dict[str, dict[str, TensorSpec]] = {}
    with torch.no_grad():
        for (group, fused, kind), named in names.items():
            call = _Call(group, group.kernel(fused), named)
            joined = kind is not None
            given = {"": torch.zeros(2, dtype=kind[0], device=kind[1])} if joined else {k: zeros[k] for k in named}
            after = call.step(0, given, {k: torch.zeros_like(p) for k, p in given.items()}, {})
            found = {k: {e: spec_of(x) for e, x in state.items()} for k, state in after.items()}
            if joined:
                entries = {e: len(spec.shape or ()) > 0 for e, spec in found[""].items()}
                call = call._replace(entries=entries)
                for k in named:
                    like = tuple(zeros[k].shape)
                    found[k] = {e: x._replace(shape=like) if entries[e] else x for e, x in found[""].items()}
            states |= found
            calls.append(call)
    specs = {(k, entry): spec for k in zeros for entry, spec in states[k].items()}
    leaf_specs = [spec for _, _, spec in leaves]
    forms = [(spec.shape, spec.dtype) for spec in specs.values()]
    of_leaves = [tuple(states[k]) for k in zeros]
    return _Prepared(calls, {k: spec_of(p) for k, p in zeros.items()}, specs, leaf_specs, of_leaves, forms)


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


def _check_state(state: OptState, params: Params, prepared: _Prepared, cls: str, fingerprint: Tensor) -> None:
    """Check that a state is what the class needs: some kernels write beyond a tensor that is too small."""
    if not isinstance(state, OptState):
        raise TypeError(f"state must be an OptState from init or update, got {type(state).__name__}")
    if (got := int(state.fingerprint)) != int(fingerprint):
        other = next((name for name in dir(torch.optim) if int(_fingerprint(name)) == got), "another class")
        raise ValueError(f"the state must be one of {cls}, got one of {other}: make a new one by init")
    if [*state.leaves] == [*params] and [*map(tuple, state.leaves.values())] == prepared.entries:
        tensors = [t for of in state.leaves.values() for t in of.values()]
        if [*map(_FORM, tensors)] == prepared.forms:
            return
    what = f"the state does not fit {cls} and the parameters"
    # On any device: torch reads numbers of steps wherever they are.
    expected = {f"{k}/{entry}": spec._replace(device=None) for (k, entry), spec in prepared.specs.items()}
    compare_trees(expected, flatten_tree(state.leaves), what)
    if state.leaves.keys() != params.keys():  # Some classes keep nothing that could be compared.
        raise ValueError(f"{what}: expected the leaves {sorted(params)}, got {sorted(state.leaves)}")


def _fingerprint(name: str) -> Tensor:
    """The first 63 bits of the SHA-256 of a name."""
    digest = hashlib.sha256(name.encode()).digest()
    return torch.tensor(int.from_bytes(digest[:8], "big") >> 1, dtype=torch.int64, device="cpu")
