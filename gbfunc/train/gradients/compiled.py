"""One graph, compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from gbfunc.parallel import CollectiveError, Layout
from gbfunc.train.gradients.loss import GenomeLoss, Given, Gradients, OneGraph, Result
from gbfunc.train.gradients.proof import (
    NUMBERS,
    PLAIN,
    Rounding,
    as_vector,
    changes_of,
    gradient_and_changes,
    largest_distance,
    restored,
)

_FAILS = "compiled by torch.compile, the step fails, and the code as it is does not: pass compile=False"

_WRONG = "torch.autograd.grad inside of a forward or loss is known to be wrong there: pass compile=False"

Graph = Callable[[Given, list[Tensor]], Result]


class CompiledGraph(OneGraph):
    """The loss as one graph, compiled by `torch.compile`.

    Loss and gradient are one graph, by `torch.func`, where the compiler can make that, on a CPU without Python around
    its kernels (which takes 0.1 ms of a small net's call); else a graph each, by autograd, whose calls take some 0.3 ms
    more. The layout's collectives, which have no Python inside of a graph, are counted and named here.
    """

    def __init__(self, loss: GenomeLoss, scale: float, layout: Layout, amp: torch.dtype | None, *, joint: bool) -> None:
        super().__init__(loss, scale)
        self._rounding = Rounding(layout.plan, amp)
        self._apart = _compiled(loss.__call__)
        self._joint = [_compiled(loss.with_gradients, fullgraph=True, cpp_wrapper=on_cpu) for on_cpu in (False, True)]
        self._graphs: list[Graph] = [self._as_one, self._as_two] if joint else [self._as_two]
        self._counted = self._with_collectives if layout.sharded else lambda wanted: nullcontext()
        self._layout = layout

    def __call__(self, given: Given, wanted: list[Tensor]) -> Result:
        """Loss, aux and gradients.

        Raises:
            CollectiveError: if a rank is missing.
            RuntimeError: if compiled code fails at the first step, where the code as it is does not.
            ValueError: as eager code, and at the first step if compiled code has another gradient or change of buffers.
        """
        self.loss.generator.prepare(given.leaves)
        eager = None if self.loss.net.compiled else self._run_twice(given, wanted)
        apart: dict[str, float] = {}
        with self._counted(wanted):
            for i, graph in enumerate(self._graphs):
                fresh = given if eager is None else given.with_own_buffers()
                restore = given.restore() if eager is not None else None
                try:
                    result = graph(fresh, wanted)
                except Exception as error:
                    last, first = graph is self._graphs[-1], eager is not None
                    if (last and not first) or not _may_be_the_compilers(error, first):
                        raise
                    if last:
                        self.loss.net.compiled = False
                        reason = str(error).partition("\n")[0]
                        raise RuntimeError(f"{_FAILS} ({type(error).__name__}: {reason})") from error
                    if restore is not None:
                        restore()
                    # What takes its place is new.
                    eager = self._run_twice(given, wanted) if eager is None else eager
                    continue
                if eager is None or restore is None:
                    return result
                found = as_vector(result.gradients, wanted), changes_of(given.buffers, fresh.buffers)
                distances = (largest_distance(self._layout.mesh, x, y) for x, y in zip(found, eager, strict=True))
                apart = dict(zip(("gradient", "change of buffers"), distances, strict=True))
                if max(apart.values()) <= self._rounding.most:
                    given.buffers.update(fresh.buffers)
                    self._graphs = self._graphs[i:]
                    return result
                restore()
        self.loss.net.compiled = False
        what = max(apart, key=lambda name: apart[name])
        raise ValueError(
            f"compiled by torch.compile, the {what} is {apart[what]:.2g} of its norm away from that of the code as "
            f"it is ({_WRONG})"
        )

    def _as_two(self, given: Given, wanted: list[Tensor]) -> Result:
        return self._result(given, wanted, *self._apart(given))

    def _as_one(self, given: Given, wanted: list[Tensor]) -> Result:
        trained = {k: x for k, x in given.leaves.items() if x.requires_grad}
        leaves = {k: x.detach() for k, x in given.leaves.items()}
        rows = self.loss.rows(given.rows)
        # A tensor, since another number would be compiled anew.
        factor = None if self._scale * rows == 1 else torch.tensor(self._scale * rows)
        # What fails to be traced inside of torch.func would leave hooks so.
        with torch.autograd.graph.disable_saved_tensors_hooks("torch.func has none"):
            joint = self._joint[wanted[0].is_cpu]
            loss, aux, buffers, found = joint(given._replace(leaves=leaves), [*trained], factor)
        given.buffers.update(buffers)
        if loss.requires_grad:
            # By parameters of the p-net's own.
            self.loss.gradients(loss, [])
        by_leaf = dict(zip(map(id, trained.values()), found, strict=True))
        if by_leaf.keys() == set(map(id, wanted)):
            found = [by_leaf[id(x)] for x in wanted]
        else:
            # Leaves are made of those that are trained.
            found = torch.autograd.grad([*trained.values()], wanted, found, allow_unused=True)
        return Result(loss.detach(), given.detached(aux), tuple(found), rows)

    def _run_twice(self, given: Given, wanted: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The gradient and the change of buffers as they are; not numbers if they are random.

        Compiled code would not refuse what changes the p-net, or reads other tensors. What the first call leaves shows
        in the second.
        """
        net, inside = self.loss.net, False

        def called(frame: Any, event: str, _: Any) -> None:
            nonlocal inside
            if event == "call" and frame.f_code is torch.autograd.grad.__code__:
                # Not `torch.func.grad`, which compiled code has right.
                inside = inside or not frame.f_back.f_globals["__name__"].startswith("torch._functorch")

        def gradients(given: Given, wanted: list[Tensor]) -> Gradients:
            profile = sys.getprofile()
            with net.kept_open(), restored(net.skeleton, self.loss.function, NUMBERS):
                sys.setprofile(called if profile is None else profile)
                try:
                    with self._rounding:
                        loss, aux = self.loss(given)
                finally:
                    sys.setprofile(profile)
                return self._result(given, wanted, loss, aux).gradients

        # Numbers alone are put back between the two, and all after them: a flag says that something is there by now.
        with restored(net.skeleton, self.loss.function, PLAIN):
            (gradient, changes), again = (gradient_and_changes(gradients, given, wanted, seed) for seed in range(2))
        if inside and not torch.equal(gradient, again[0]):
            raise ValueError(f"with random numbers, compiled code is not compared with the code as it is, and {_WRONG}")
        net.compiled = True
        return _where_equal(gradient, again[0]), _where_equal(changes, again[1])

    def _with_collectives(self, wanted: list[Tensor]) -> AbstractContextManager[None]:
        mesh = self._layout.mesh
        out, back = self._layout.wire_bytes(max(x.element_size() for x in wanted))
        mesh.traffic.add("gather", out)
        mesh.traffic.add("reduce_scatter", back)
        return mesh.faults.named("a compiled step")


def _may_be_the_compilers(error: Exception, first: bool) -> bool:
    """Whether code that is compiled otherwise may do: later on, if nothing has run."""
    tracing: Any = torch._dynamo.exc  # pyright: ignore[reportAttributeAccessIssue]
    # Not of their class, where too many values came.
    limit = getattr(tracing, "FailOnRecompileLimitHit", ())
    return not isinstance(error, CollectiveError) and (
        first or isinstance(error, (tracing.TorchDynamoException, limit))
    )


def _where_equal(x: Tensor, y: Tensor) -> Tensor:
    return x if torch.equal(x, y) else torch.full_like(x, torch.nan)


_FIXED = (
    "self.generator",
    # With what follows the name: other packages' names begin so.
    *("__import_gbfunc_dot_", "__import_torch_dot_", "__import__('torch')", "__builtins_dict_", "type(given)"),
)


def _guarded(guards: Sequence[Any]) -> list[bool]:
    """Which of a compiled graph's guards are checked at every call: not those on what a plan fixes for good.

    Three quarters are on the constants of generation and the code of torch and of this package; those on arguments, the
    loss function and the p-net, which may have a state in Python, are kept.
    """
    return [not any(name in guard.name for name in _FIXED) for guard in guards]


_CODES = count()


def _compiled(method: Any, *, fullgraph: bool = False, cpp_wrapper: bool = False) -> Callable[..., Any]:
    """A method, compiled."""
    # Torch 2.5 has no filters.
    known = hasattr(torch.compiler, "keep_tensor_guards_unsafe")
    options: Any = {"guard_filter_fn": _guarded} if known else None
    if known and cpp_wrapper:
        options["cpp_wrapper"] = True
    return torch.compile(_own_code(method), fullgraph=fullgraph, options=options)


def _own_code(method: Any) -> Callable[..., Any]:
    """A method with a code object of its own: the compiler remembers shapes by the file, line and name of code.

    Two p-nets with one code object would be taken for one whose shapes change.
    """
    function = method.__func__
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_CODES)}")
    own = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    return MethodType(own, method.__self__)
