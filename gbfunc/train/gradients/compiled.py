"""Computes loss and gradient by `torch.compile`, and compares the first compiled step with an eager step."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import count
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from gbfunc.parallel import CollectiveError, Layout
from gbfunc.parallel.placement import gather_bytes
from gbfunc.train.gradients.loss import GenomeLoss, OneGraph, Result, StepInputs, seeded
from gbfunc.train.gradients.proof import as_vector, changes_of, gradient_and_changes, largest_distance

_FAILS = "the step fails if torch.compile compiles the code, and runs otherwise: pass compile=False"


class CompiledGraph(OneGraph):
    """Computes the loss and the gradient by `torch.compile`.

    With `joint`, `torch.func` computes loss and gradient in one graph if the compiler supports the code. In all other
    cases, autograd runs one graph for the forward and one for the backward, which takes about 0.3 ms longer per call.
    """

    def __init__(self, loss: GenomeLoss, scale: float, layout: Layout, *, joint: bool) -> None:
        super().__init__(loss, scale)
        self._compiled_loss = _compiled(loss.__call__)
        compiled = partial(_compiled, loss.with_gradients, fullgraph=True)
        self._compiled_gradients = {on_cpu: compiled(cpp_wrapper=on_cpu) for on_cpu in (False, True)}
        self._graphs = [self._one_graph, self._two_graphs] if joint else [self._two_graphs]
        self._layout, self._checked = layout, False

    def __call__(self, inputs: StepInputs, wanted: list[Tensor]) -> Result:
        self.loss.generator.prepare(inputs.leaves)
        layout, mesh = self._layout, self._layout.mesh
        if layout.sharded:
            # Collectives inside a compiled graph do not count the bytes that they send, so count the bytes here.
            sent = gather_bytes(layout.plan, mesh.gnets, layout.placement, max(x.element_size() for x in wanted))
            mesh.traffic["gnets"] += sum(sent[mesh.gnets_index])
        with mesh.failing("a compiled step") if layout.sharded else nullcontext():
            if self._checked:
                try:
                    return self._graphs[0](inputs, wanted)
                except _compiler_errors():
                    if len(self._graphs) == 1:
                        raise
                    del self._graphs[0]
            return self._first_call(inputs, wanted)

    def _first_call(self, inputs: StepInputs, wanted: list[Tensor]) -> Result:
        eager = gradient_and_changes(lambda *args: OneGraph.__call__(self, *args).gradients, inputs, wanted, 0)
        failure: Exception = RuntimeError(_FAILS)
        for i, graph in enumerate(self._graphs):
            fresh = inputs.copied()
            try:
                with inputs.restored(), seeded(0, wanted[0].device):
                    result = graph(fresh, wanted)
            except CollectiveError:
                raise
            except Exception as error:
                reason = str(error).partition("\n")[0]
                failure = RuntimeError(f"{_FAILS} ({type(error).__name__}: {reason})")
                failure.__cause__ = error
                continue
            found = as_vector(result.gradients, wanted), changes_of(inputs.buffers, fresh.buffers)
            distances = [largest_distance(self._layout.mesh, x, y) for x, y in zip(found, eager, strict=True)]
            if max(distances) <= self.loss.tolerance:
                self._graphs, self._checked = self._graphs[i:], True
                return graph(inputs, wanted)
            failure = ValueError(
                f"compiled by torch.compile, the gradient differs by {distances[0]:.2g} of its norm, and the change of "
                f"buffers by {distances[1]:.2g} of its norm, from those of eager code (known for torch.autograd.grad "
                "inside of a forward or loss function): pass compile=False"
            )
        raise failure

    def _two_graphs(self, inputs: StepInputs, wanted: list[Tensor]) -> Result:
        return self._result(inputs, wanted, *self._compiled_loss(inputs))

    def _one_graph(self, inputs: StepInputs, wanted: list[Tensor]) -> Result:
        trained = {k: x for k, x in inputs.leaves.items() if x.requires_grad}
        leaves = {k: x.detach() for k, x in inputs.leaves.items()}
        rows = self.loss.rows(inputs.rows)
        # Pass the factor of the loss as a tensor, because each new Python number would cause a recompilation.
        factor = None if self._scale * rows == 1 else torch.tensor(self._scale * rows)
        # A failed trace in torch.func would leave saved-tensor hooks disabled. At its end, this context restores them.
        with torch.autograd.graph.disable_saved_tensors_hooks("torch.func has none"):
            compiled = self._compiled_gradients[wanted[0].is_cpu]
            loss, aux, buffers, found = compiled(inputs._replace(leaves=leaves), [*trained], factor)
        inputs.buffers.update(buffers)
        if loss.requires_grad:
            # The loss depends on the p-net's original parameters. `gradients` raises the ValueError for this case.
            self.loss.gradients(loss, [])
        by_leaf = dict(zip(map(id, trained.values()), found, strict=True))
        if by_leaf.keys() == set(map(id, wanted)):
            found = [by_leaf[id(x)] for x in wanted]
        else:
            # The leaves are computed from `wanted`, for example by rounding: continue the backward to `wanted`.
            found = torch.autograd.grad([*trained.values()], wanted, found, allow_unused=True)
        return Result(loss.detach(), inputs.detached(aux), tuple(found), rows)


def _compiler_errors() -> tuple[type[Exception], ...]:
    tracing: Any = torch._dynamo.exc  # pyright: ignore[reportAttributeAccessIssue]
    more = getattr(tracing, "FailOnRecompileLimitHit", None)
    return (tracing.TorchDynamoException,) if more is None else (tracing.TorchDynamoException, more)


# Drop Dynamo's guards (run-time checks) of objects that never change. `_dot_` excludes packages named gbfunc_X.
_FIXED = re.compile(r"self\.generator|__import_(gbfunc|torch)_dot_|__import__\('torch'|__builtins_dict_|type\(inputs\)")
_CODES = count()


def _compiled(method: Any, *, fullgraph: bool = False, cpp_wrapper: bool = False) -> Callable[..., Any]:
    # With `fallback_random`, compiled code draws random numbers as eager code does. The next options need torch 2.8.
    options: dict[str, Any] = {"fallback_random": True}
    if hasattr(torch.compiler, "keep_tensor_guards_unsafe"):
        options["cpp_wrapper"] = cpp_wrapper
        options["guard_filter_fn"] = lambda guards: [not _FIXED.search(guard.name) for guard in guards]
    return torch.compile(_with_new_code(method), fullgraph=fullgraph, options=options)


def _with_new_code(method: Any) -> Callable[..., Any]:
    """Copy a method and its code object. The compiler would confuse the graphs of p-nets that share a code object."""
    function = method.__func__
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_CODES)}")
    own = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    return MethodType(own, method.__self__)
