"""Tensors that another rank has: their shape, dtype and device are known, their values are not.

An `Absent` tensor can be computed with, on the meta device, and gives absent tensors; whatever needs its values
(`.item()`, `if`, `.tolist()`, writing it into a tensor that has values) raises `AbsentError` and names its sources. So
no placeholder becomes a number. In a trace the sources say what a tensor is made of, through all operators and views.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from gbfunc.pnet.reads import written


class Source(NamedTuple):
    """What an absent tensor is made of."""

    # `"output"` of a module's call; `"inside"` of one, made there and not returned; `"parameter"`; or drawn outside of
    # all modules that run on one rank: `"random"`, of which all draw the same, or else `"noise"`
    kind: str
    name: str  # Of the module or parameter, or of the operator that drew
    call: int = 0  # Number of the call in a forward, or of the operator
    leaf: int = 0  # Which tensor of its output

    def __str__(self) -> str:
        """In words."""
        of = {"output": "the output of", "inside": "a tensor made inside of", "parameter": "the parameter"}
        return f"{of.get(self.kind, 'random numbers of')} {self.name!r}"


class AbsentError(ValueError):
    """The values of a tensor are needed on a rank that does not have them."""


def refuse(sources: Iterable[Source], why: str) -> AbsentError:
    """The error, with the sources by name."""
    names = ", ".join(dict.fromkeys(str(s) for s in sorted(sources))) or "the p-net's tensors"
    return AbsentError(f"in a pipeline {why}: it depends on {names}")


class Absent(Tensor):
    """A tensor without values.

    Attributes:
        meta: the same tensor on the meta device.
        sources: what it is made of; views of one tensor share the set.
    """

    meta: Tensor
    sources: set[Source]

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device, sources: set[Source]) -> Absent:  # noqa: D102
        made: Any = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
        )
        made.meta, made.sources = meta, sources
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # noqa: D105
        return f"Absent({tuple(self.shape)}, {self.dtype}, {sorted(self.sources)})"

    def tolist(self) -> Any:  # noqa: D102
        raise refuse(self.sources, "no control flow may depend on the values of an absent tensor")

    def numpy(self, *, force: bool = False) -> Any:  # noqa: D102
        return self.tolist()

    def __dlpack__(self, *unused: Any, **options: Any) -> Any:  # noqa: D105
        return self.tolist()

    def __format__(self, spec: str) -> str:  # noqa: D105
        return self.tolist() if spec else repr(self)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: D102
        return operate(func, args, kwargs or {}, set())


def absent(shape: Any, dtype: torch.dtype, device: torch.device, sources: Iterable[Source]) -> Absent:
    """An absent tensor."""
    return Absent(torch.empty(shape, dtype=dtype, device="meta"), device, set(sources))


def operate(func: Any, args: Any, kwargs: Mapping[str, Any], more: set[Source]) -> Any:
    """An operator of which an argument is absent: its result is."""
    if func is torch.ops.aten.index.Tensor:  # A mask whose values are here has a known number of places.
        args = (args[0], [y for x in args[1] for y in (x.nonzero().unbind(1) if _is_mask(x) else (x,))])
    flat, spec = pytree.tree_flatten((args, dict(kwargs)))
    tensors = [x for x in flat if isinstance(x, Tensor)]
    given = [x for x in tensors if isinstance(x, Absent)]
    sources = set(more).union(*(x.sources for x in given))
    for x in written(func, args, kwargs):
        if not isinstance(x, Absent):
            raise refuse(sources, f"{func} would write into a tensor that has values")
        x.sources |= sources
    device = next((x.device for x in tensors if x.ndim), tensors[0].device)
    device = next((x for x in flat if isinstance(x, torch.device)), device)
    metas = {id(x.meta): x for x in given}
    storages = {x.meta.untyped_storage()._cdata: x.sources for x in given}

    def lower(x: Any) -> Any:
        if isinstance(x, Absent):
            return x.meta
        if isinstance(x, Tensor):
            return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta") if x.ndim else x
        return torch.device("meta") if isinstance(x, torch.device) else x

    low, named = pytree.tree_unflatten([lower(x) for x in flat], spec)
    try:
        out = func(*low, **named)
    except (NotImplementedError, RuntimeError) as error:
        if "meta" in str(error).lower():
            why = f"{func} needs the values of an absent tensor (keep to tensors whose shapes no values decide: no "
            why += ".item(), if, nonzero, x[mask], nested tensor, or BatchNorm of momentum=None)"
            raise refuse(sources, why) from error
        raise
    if torch.Tag.inplace_view in func.tags:
        with no_dispatch():  # Shape and strides of the absent tensor itself.
            func(*args, **kwargs)

    def lift(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) in metas:
            return metas[id(x)]
        return Absent(x, device, storages.get(x.untyped_storage()._cdata, sources))

    return pytree.tree_map(lift, out)


def _is_mask(x: Tensor | None) -> bool:
    return x is not None and x.dtype in (torch.bool, torch.uint8) and not isinstance(x, Absent) and not x.is_meta


def flops_of(func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> int:
    """Multiplications and additions of an operator, as torch counts them.

    Torch's own mode tracks modules by hooks, which end the gradients that a forward takes.
    """
    count: Any = flop_registry.get(func._overloadpacket)
    return 0 if count is None else count(*args, **kwargs, out_val=out)


class Provenance(TorchDispatchMode):
    """While a p-net is traced, every operator notes of what its result is made.

    Attributes:
        flops: operations so far, by torch's counts.
        inside: the call of the module that runs now; None between modules.
        read: sources of what its operators have read.
        changed: sources that operators write into; one that they write into a tensor made of it alone counts too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.inside: Source | None = None
        self.read: set[Source] = set()
        self.changed: set[Source] = set()
        self._made: list[Any] = []
        self._drawn, self._noisy = 0, False

    @contextmanager
    def unit(self, call: Source) -> Iterator[None]:
        """Around a module that runs on one rank."""
        self.inside, self.read, self._made = call, set(), []
        try:
            yield
        finally:
            self.inside, self._made, self._noisy = None, [], False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: D102
        kwargs = kwargs or {}
        out = self._operate(func, args, kwargs)
        self.flops += flops_of(func, args, kwargs, out)
        return out

    def _operate(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        more = set() if self.inside is None else {self.inside}
        if any(isinstance(x, Absent) for x in leaves):
            if self.inside is None and torch.Tag.nondeterministic_seeded in func.tags:
                # Not drawn where the tensor is absent, and else in the order in which it is in memory.
                self._noisy = True
                more = {self._draw(func, kwargs)}
            self.read.update(*(x.sources for x in leaves if isinstance(x, Absent)))
            into = [x.sources for x in written(func, args, kwargs) if isinstance(x, Absent)]
            self.changed.update(*(sources for sources in into if len(sources) == 1))
            return operate(func, args, kwargs, more)
        made = {s._cdata for s in self._made}
        drawn = torch.Tag.nondeterministic_seeded in func.tags and not more
        for x in written(func, args, kwargs):
            if drawn:
                raise refuse(
                    [self._draw(func, kwargs)], "random numbers in place are drawn by one module, or not at all"
                )
            if more and x.untyped_storage()._cdata not in made:
                raise refuse(more, f"{func} inside of a module changes a tensor of others in place")
        out = func(*args, **kwargs)
        if drawn:
            sources = {self._draw(func, kwargs)}
            return pytree.tree_map(lambda x: hide(x, sources) if isinstance(x, Tensor) else x, out)
        if more:
            given = {x.untyped_storage()._cdata for x in leaves if isinstance(x, Tensor)}
            results = [x.untyped_storage() for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
            self._made += [s for s in results if s._cdata not in given]
        return out

    def _draw(self, func: Any, kwargs: Mapping[str, Any]) -> Source:
        self._drawn += 1
        alike = not self._noisy and kwargs.get("generator") is None
        return Source("random" if alike else "noise", str(func), self._drawn)


def hide(x: Tensor, sources: Iterable[Source]) -> Absent:
    """A new absent tensor of the same shape, dtype and device."""
    return absent(x.shape, x.dtype, x.device, sources)
