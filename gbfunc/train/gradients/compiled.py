"""One graph, compiled."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from gbfunc.parallel import CollectiveError, Layout
from gbfunc.parallel.placement import gather_bytes
from gbfunc.train.gradients.loss import GenomeLoss, Given, Gradients, OneGraph, Result, seeded
from gbfunc.train.gradients.proof import as_vector, changes_of, gradient_and_changes, largest_distance

_FAILS = "compiled by torch.compile, the step fails, and the code as it is does not: pass compile=False"


class CompiledGraph(OneGraph):
    """The loss, compiled by `torch.compile`.

    Loss and gradient are one graph, by `torch.func`, where the compiler can make one; otherwise a graph each, by
    autograd, whose calls take some 0.3 ms more. Collectives inside of a graph are counted here.
    """

    def __init__(self, loss: GenomeLoss, scale: float, layout: Layout, *, joint: bool) -> None:
        super().__init__(loss, scale)
        self._apart = _compiled(loss.__call__)
        self._joint = [_compiled(loss.with_gradients, fullgraph=True, cpp_wrapper=on_cpu) for on_cpu in (False, True)]
        self._graphs = [self._as_one, self._as_two] if joint else [self._as_two]
        self._layout, self._checked = layout, False

    def __call__(self, given: Given, wanted: list[Tensor]) -> Result:
        self.loss.generator.prepare(given.leaves)
        layout, mesh = self._layout, self._layout.mesh
        if layout.sharded:
            sent = gather_bytes(layout.plan, mesh.gnets, layout.placement, max(x.element_size() for x in wanted))
            mesh.traffic["gnets"] += sum(sent[mesh.gnets_index])
        with mesh.failing("a compiled step") if layout.sharded else nullcontext():
            if self._checked:
                try:
                    return self._graphs[0](given, wanted)
                except _compilers_own():
                    if len(self._graphs) == 1:
                        raise
                    del self._graphs[0]
            return self._first(given, wanted)

    def _first(self, given: Given, wanted: list[Tensor]) -> Result:
        eager, failure = gradient_and_changes(self._eagerly, given, wanted, 0), RuntimeError(_FAILS)
        for i, graph in enumerate(self._graphs):
            fresh = given.copied()
            try:
                with given.restored(), seeded(0, wanted[0].device):
                    result = graph(fresh, wanted)
            except CollectiveError:
                raise
            except Exception as error:
                reason = str(error).partition("\n")[0]
                failure = RuntimeError(f"{_FAILS} ({type(error).__name__}: {reason})")
                failure.__cause__ = error
                continue
            found = as_vector(result.gradients, wanted), changes_of(given.buffers, fresh.buffers)
            apart = [largest_distance(self._layout.mesh, x, y) for x, y in zip(found, eager, strict=True)]
            if max(apart) <= self.loss.tolerance:
                self._graphs, self._checked = self._graphs[i:], True
                return graph(given, wanted)
            failure = ValueError(
                f"compiled by torch.compile, the gradient is {apart[0]:.2g} of its norm, and the change of buffers "
                f"{apart[1]:.2g} of its, away from those of the code as it is (torch.autograd.grad inside of a forward "
                "or loss is known to be wrong there): pass compile=False"
            )
        raise failure

    def _eagerly(self, given: Given, wanted: list[Tensor]) -> Gradients:
        with self.loss.net.kept():
            return self._result(given, wanted, *self.loss(given)).gradients

    def _as_two(self, given: Given, wanted: list[Tensor]) -> Result:
        return self._result(given, wanted, *self._apart(given))

    def _as_one(self, given: Given, wanted: list[Tensor]) -> Result:
        trained = {k: x for k, x in given.leaves.items() if x.requires_grad}
        leaves = {k: x.detach() for k, x in given.leaves.items()}
        rows = self.loss.rows(given.rows)
        # A tensor: each new Python number would be compiled again.
        factor = None if self._scale * rows == 1 else torch.tensor(self._scale * rows)
        # A failed trace inside of torch.func leaves the hooks disabled.
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


def _compilers_own() -> tuple[type[Exception], ...]:
    """Errors of the compiler itself, which come before anything has run."""
    tracing: Any = torch._dynamo.exc  # pyright: ignore[reportAttributeAccessIssue]
    # Too many values raise an error that is not of their class.
    more = getattr(tracing, "FailOnRecompileLimitHit", None)
    return (tracing.TorchDynamoException,) if more is None else (tracing.TorchDynamoException, more)


_CODES = count()


def _compiled(method: Any, *, fullgraph: bool = False, cpp_wrapper: bool = False) -> Callable[..., Any]:
    # Draw the random numbers of eager code. Torch below 2.8 makes wrappers in Python.
    cpp_wrapper = cpp_wrapper and hasattr(torch.compiler, "keep_tensor_guards_unsafe")
    options: dict[str, Any] = {"fallback_random": True, "cpp_wrapper": cpp_wrapper}
    return torch.compile(_own_code(method), fullgraph=fullgraph, options=options)


def _own_code(method: Any) -> Callable[..., Any]:
    """Give a method its own code object: with a shared one, the compiler takes two p-nets for one."""
    function = method.__func__
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_CODES)}")
    own = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    return MethodType(own, method.__self__)
