"""The first step over ranks that have parts of the p-net, against the whole p-net on each of them."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gbfunc.parallel import Layout, gather_objects, sum_ranks
from gbfunc.parallel.mesh import AxisName, Mesh
from gbfunc.plan import DTYPES, Plan
from gbfunc.pnet.reads import tensors_in
from gbfunc.train.gradients.loss import GenomeLoss, Given, Gradients, OneGraph, seeded
from gbfunc.trees import differentiable
from gbfunc.types import Params

Part = Callable[[Given, list[Tensor]], Gradients]


class Proof(NamedTuple):
    """What the first step's gradient, and what it makes of buffers, are compared with, on a few of its rows.

    Attributes:
        whole: makes the loss of the whole p-net on this rank.
        part: this rank's part of the gradient, as steps find it.
        loss: what steps find it of.
        few: takes the rows from a batch.
        axes: of the mesh, along which the parts are summed.
        cause: of a difference, and its cure.
    """

    whole: Callable[[], GenomeLoss]
    part: Part
    loss: Callable[[], GenomeLoss | None]
    few: Callable[[Any], Any]
    axes: tuple[AxisName, ...]
    cause: str

    def compare(self, layout: Layout, given: Given, trained: Params) -> None:
        """Compare them; all ranks call. What is random is compared with equal draws, or in `eval` mode.

        Raises:
            ValueError: on every rank, if they differ by more than rounding does.
        """
        mesh, whole, wanted = layout.mesh, self.whole(), [*trained.values()]
        rounding, apart = Rounding(layout.plan), partial(largest_distance, mesh)
        # The net of steps has been watched.
        whole.net.compiled = True
        given = given._replace(batch=self.few(given.batch), rows=1)
        # Of features that are split other numbers are drawn than of whole ones: there, none are.
        nets = (loss.net.skeleton for loss in (whole, self.loss()) if loss is not None)
        for mode in nullcontext(), _evaluating(*nets) if "tensor" in self.axes else _SameDraws():
            with mode:
                found = gradient_and_changes(self.part, given, wanted, 0)
                with rounding:
                    alone = gradient_and_changes(plainly(whole), given, wanted, 0)
                for axis in self.axes:
                    sum_ranks(mesh, found[0], axis)
                worst = [*map(apart, found, alone)]
                if max(worst) <= rounding.most:
                    return
                again, other = (gradient_and_changes(plainly(whole), given, wanted, seed) for seed in (0, 1))
                varies, drawn = (max(map(apart, x, alone)) > rounding.most for x in (again, other))
            if varies:
                raise ValueError(
                    f"over {' and '.join(self.axes)} ranks the p-net's forward must be a function of its weights, "
                    "buffers, inputs and random numbers: called again, it gives another gradient (a counter in Python? "
                    "make it a buffer)"
                )
            if not drawn:
                raise ValueError(
                    f"over {' and '.join(self.axes)} ranks the gradient is {worst[0]:.2g} of its norm, and the change "
                    f"of buffers {worst[1]:.2g} of its, away from those of the p-net on one rank: {self.cause}"
                )
        warnings.warn(
            f"the first step over {' and '.join(self.axes)} ranks was not compared with one on one rank: what the "
            "p-net's forward computes is random in eval mode, too",
            stacklevel=2,
        )


def as_vector(found: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    """Gradients as one vector, float64; zeros for None."""
    dense = (torch.zeros_like(x) if g is None else g.to_dense() for g, x in zip(found, like, strict=True))
    parts = (torch.view_as_real(x) if x.is_complex() else x for x in dense)
    none = torch.zeros(0, device=like[0].device if like else "cpu")
    return torch.cat([none, *(x.reshape(-1) for x in parts)]).double()


class Rounding(TorchDispatchMode):
    """How far gradients of a p-net may be apart by rounding, in its precisions and those of operators inside of it."""

    supports_higher_order_operators = True

    def __init__(self, plan: Plan, amp: torch.dtype | None = None) -> None:
        super().__init__()
        self._dtypes = {plan.dtype, *(DTYPES[t.dtype] for t in plan.tensors)} | ({amp} if amp else set())

    @property
    def most(self) -> float:
        """Relative to their norm."""
        return max(torch.finfo(dtype).eps for dtype in self._dtypes if differentiable(dtype)) ** 0.4

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        self._dtypes |= {x.dtype for x in tensors_in(out)}
        return out


def largest_distance(mesh: Mesh, found: Tensor, expected: Tensor) -> float:
    """`|found - expected| / |expected|`, of all ranks the most; where `expected` is not finite, nothing is known."""
    by, size = (float(torch.linalg.vector_norm(x)) for x in (found - expected, expected))
    apart = by / size if size and math.isfinite(by) else math.inf if by else 0.0
    return max(gather_objects(mesh, apart if math.isfinite(size) else 0.0))


def plainly(loss: GenomeLoss) -> Part:
    """The gradient by one graph, in the p-net's own precision."""

    def gradients(given: Given, wanted: list[Tensor]) -> Gradients:
        with loss.without_amp():
            return OneGraph(loss, 1.0)(given, wanted).gradients

    return gradients


@contextmanager
def _evaluating(*nets: nn.Module) -> Iterator[None]:
    """Layers behave as in evaluation inside of this."""
    training = [module for net in nets for module in net.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


NUMBERS = (int, float, complex)
PLAIN = (*NUMBERS, bool, str)


@contextmanager
def restored(net: nn.Module, function: Callable[..., Any], kinds: tuple[type, ...]) -> Iterator[None]:
    """Put back what modules keep of Python's values, of these kinds, and what a function keeps in what it names.

    That is in its attributes, in the object that it is a method of, in what it closes over, and in globals.
    """

    def plain(module: nn.Module) -> dict[str, Any]:
        return {k: x for k, x in vars(module).items() if type(x) in kinds}

    before = [(module, plain(module)) for module in net.modules()]
    kept = [x for module in net.modules() for k, x in vars(module).items() if bool in kinds and k not in _TORCHS]
    body = getattr(function, "__func__", function)
    cells = [(cell, cell.cell_contents) for cell in getattr(body, "__closure__", None) or () if cell != CellType()]
    names = body.__code__.co_names if isinstance(body, FunctionType) else ()
    globals_ = [body.__globals__[k] for k in names if k in body.__globals__]
    objects = function, getattr(function, "__self__", None)
    undo = [_undo(x) for x in (*filter(_is_collection, kept), *objects, *globals_, *(x for _, x in cells))]
    try:
        yield
    finally:
        for module, own in before:
            for name in plain(module):
                if name in own:
                    vars(module)[name] = own[name]
                elif hasattr(type(module), name):
                    del vars(module)[name]
        for cell, x in cells:
            cell.cell_contents = x
        for put_back in undo:
            put_back()


def _is_collection(x: Any) -> bool:
    return type(x) in (list, dict, set)


def _undo(x: Any) -> Callable[[], Any]:
    """What makes a collection, a tensor, or an object and what it has of those, again what it is now."""
    if isinstance(x, Tensor):
        # Not of data, which is large, and what nothing has changed may not be written to.
        if x.numel() > _STATE or x.is_inference():
            return lambda: None
        numbers, version = x.detach().clone(), x._version
        return lambda: x.data.copy_(numbers) if x._version != version else None
    if isinstance(x, list | set):
        items = x.copy()
        return lambda: x.__init__(items)
    own = x if type(x) is dict else {} if isinstance(x, _OTHERS) else getattr(x, "__dict__", {})
    before = dict(own)
    inner = [_undo(v) for v in before.values() if own is not x and (_is_collection(v) or isinstance(v, Tensor))]

    def put_back() -> None:
        for name in own.keys() - before.keys():
            del own[name]
        own.update({k: v for k, v in before.items() if own.get(k) is not v})
        for undo in inner:
            undo()

    return put_back


_STATE = 1 << 16
"""Numbers that a tensor may have which a loss function keeps and changes, such as running means."""
_TORCHS = vars(nn.Module()).keys()
_OTHERS = (type, ModuleType, nn.Module, Tensor)


def gradient_and_changes(part: Part, given: Given, wanted: list[Tensor], seed: int) -> tuple[Tensor, Tensor]:
    """The gradient and the change of buffers, flat; what is given stays as it is."""
    fresh, restore = given.with_own_buffers(), given.restore()
    with seeded(seed, wanted[0].device), seeded_elsewhere(seed), torch.enable_grad():
        gradients = part(fresh, wanted)
    restore()
    return as_vector(gradients, wanted), changes_of(given.buffers, fresh.buffers)


def changes_of(before: Params, after: Params) -> Tensor:
    """The change of buffers, flat, of those with another shape what they are; what is not a number counts as zero."""
    pairs = [(x, after[k].detach()) for k, x in before.items() if differentiable(x.dtype)]
    changes = [y - x if x.shape == y.shape else y for x, y in pairs]
    return as_vector([x.nan_to_num(0.0, 0.0, 0.0) for x in changes], changes)


def seed_elsewhere(seed: int) -> None:
    """Seed Python's and NumPy's global random numbers."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def seeded_elsewhere(seed: int) -> Iterator[None]:
    """Seed Python's and NumPy's global random numbers, and put them back after."""
    states = random.getstate(), np.random.get_state()
    seed_elsewhere(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


class _SameDraws(TorchDispatchMode):
    """Random numbers of an operator depend on its shapes alone: not on the rank, nor on what was drawn before."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            torch.manual_seed(0)
        return func(*args, **kwargs or {})
