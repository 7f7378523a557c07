"""One graph, compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from gbfunc.parallel import Layout
from gbfunc.train.gradients.loss import GenomeLoss, Given, OneGraph, Result, seeded
from gbfunc.train.gradients.proof import as_vector, largest_distance, rounding_of


class CompiledGraph(OneGraph):
    """The loss as one graph, compiled by `torch.compile`.

    The layout's collectives, which have no Python inside of a graph, are counted and named here.
    """

    def __init__(self, loss: GenomeLoss, scale: float, layout: Layout, amp: torch.dtype | None) -> None:
        super().__init__(loss, scale)
        self._tolerance = rounding_of(layout.plan, amp)
        # Torch 2.5 has no filters.
        options: Any = {"guard_filter_fn": _guarded} if hasattr(torch.compiler, "keep_tensor_guards_unsafe") else None
        self._compiled, self._layout = torch.compile(_own_code(loss.__call__), options=options), layout
        self._counted = self._with_collectives if layout.sharded else lambda wanted: nullcontext()

    def __call__(self, given: Given, wanted: list[Tensor]) -> Result:
        """Loss, aux and gradients.

        Raises:
            CollectiveError: if a rank is missing.
            ValueError: as eager code, and at the first step if the compiled code has another gradient.
        """
        self.loss.generator.prepare(given.leaves)
        eager = None if self.loss.net.compiled else self._run_twice(given, wanted)
        with self._counted(wanted):
            result = self._result(given, wanted, *self._compiled(given))
        if eager is not None:
            apart = largest_distance(self._layout.mesh, as_vector(result.gradients, wanted), eager)
            if apart > self._tolerance:
                self.loss.net.compiled = False
                raise ValueError(
                    f"compiled by torch.compile, the gradient is {apart:.2g} of its norm away from that of the code as "
                    "it is (torch.autograd.grad inside of a forward is known to be wrong there): pass compile=False"
                )
        return result

    def _run_twice(self, given: Given, wanted: list[Tensor]) -> Tensor:
        """The gradient as it is; not a number if it is random.

        Compiled code would not refuse what changes the p-net, or reads other tensors. What the first call leaves shows
        in the second.
        """
        found: list[Tensor] = []
        for seed in range(2):
            fresh = given._replace(buffers={k: b.clone() for k, b in given.buffers.items()})
            with seeded(seed, wanted[0].device), self.loss.net.kept_open():
                found.append(as_vector(self._result(fresh, wanted, *self.loss(fresh)).gradients, wanted))
        self.loss.net.compiled = True
        return found[0] if torch.equal(*found) else torch.full_like(found[0], torch.nan)

    def _with_collectives(self, wanted: list[Tensor]) -> AbstractContextManager[None]:
        mesh = self._layout.mesh
        out, back = self._layout.wire_bytes(max(x.element_size() for x in wanted))
        mesh.traffic.add("gather", out)
        mesh.traffic.add("reduce_scatter", back)
        return mesh.faults.named("a compiled step")


_FIXED = (
    "self.generator",
    # With what follows the name: other packages' names begin so.
    *("__import_gbfunc_dot_", "__import_torch_dot_", "__builtins_dict_"),
)


def _guarded(guards: Sequence[Any]) -> list[bool]:
    """Which of a compiled graph's guards are checked at every call: not those on what a plan fixes for good.

    Three quarters are on the constants of generation and the code of torch and of this package; those on arguments, the
    loss function and the p-net, which may have a state in Python, are kept.
    """
    return [not any(name in guard.name for name in _FIXED) for guard in guards]


_CODES = count()


def _own_code(method: Any) -> Callable[..., Any]:
    """A method with a code object of its own: the compiler remembers shapes by the file, line and name of code.

    Two p-nets with one code object would be taken for one whose shapes change.
    """
    function = method.__func__
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_CODES)}")
    own = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    return MethodType(own, method.__self__)
