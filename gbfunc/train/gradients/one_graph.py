"""One graph from the loss through the p-net's weights to the g-nets, eager or compiled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from gbfunc.parallel import Layout
from gbfunc.train.gradients.loss import NO_GRADIENT, GenomeLoss, Given, Result, seeded


class OneGraph:
    """The eager graph.

    Args:
        loss: of the genome.
        scale: of the loss, against underflow in half precision.
    """

    seed_shift = 0
    least_rows = 2
    """Rows of zeros in the place of an empty share: some layers refuse a single one."""

    def __init__(self, loss: GenomeLoss, scale: float) -> None:
        self.loss, self._scale = loss, scale

    def prepare(self, given: Given, wanted: list[Tensor]) -> None:
        """Nothing."""

    def __call__(self, given: Given, wanted: list[Tensor]) -> Result:
        """Loss, aux and gradients."""
        return self._result(given, wanted, *self.loss(given))

    def _result(self, given: Given, wanted: list[Tensor], loss: Tensor, aux: Any) -> Result:
        rows = self.loss.rows(given.rows)
        gradients = self.loss.gradients(loss * (self._scale * rows), wanted)
        if all(g is None for g in gradients):
            raise ValueError(NO_GRADIENT)
        return Result(loss.detach(), given.detached(aux), gradients, rows)


class CompiledGraph(OneGraph):
    """The loss as one graph, compiled by `torch.compile`.

    Args:
        loss: of the genome.
        scale: of the loss.
        layout: whose collectives, which have no Python inside of a graph, are counted and named here.
    """

    def __init__(self, loss: GenomeLoss, scale: float, layout: Layout) -> None:
        super().__init__(loss, scale)
        self._compiled, self._layout = torch.compile(_own_code(loss.__call__)), layout
        self._counted = self._with_collectives if layout.sharded else lambda wanted: nullcontext()

    def prepare(self, given: Given, wanted: list[Tensor]) -> None:
        """Make constants, and take one gradient as it is.

        Compiled code would not refuse what changes the p-net, or reads another one's tensors.
        """
        self.loss.generator.prepare(given.leaves)
        if not self.loss.net.compiled:
            with seeded(0, wanted[0].device):
                loss, _ = self.loss(given._replace(buffers={k: b.clone() for k, b in given.buffers.items()}))
                torch.autograd.grad(loss, wanted, allow_unused=True)
            self.loss.net.compiled = True

    def __call__(self, given: Given, wanted: list[Tensor]) -> Result:
        """Loss, aux and gradients; CollectiveError if a rank is missing."""
        with self._counted(wanted):
            return self._result(given, wanted, *self._compiled(given))

    def _with_collectives(self, wanted: list[Tensor]) -> AbstractContextManager[None]:
        mesh = self._layout.mesh
        out, back = self._layout.wire_bytes(max(x.element_size() for x in wanted))
        mesh.traffic.add("gather", out)
        mesh.traffic.add("reduce_scatter", back)
        return mesh.faults.named("a compiled step")


_CODES = count()


def _own_code(method: Any) -> Callable[..., Any]:
    """A method with a code object of its own: the compiler remembers shapes by the file, line and name of code.

    Two p-nets with one code object would be taken for one whose shapes change.
    """
    function = method.__func__
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_CODES)}")
    own = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    return MethodType(own, method.__self__)
