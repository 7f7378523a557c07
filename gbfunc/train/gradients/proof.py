"""The first step over ranks that have parts of the p-net, against the whole p-net on each of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gbfunc.parallel import Layout, gather_objects, sum_ranks
from gbfunc.parallel.mesh import AxisName
from gbfunc.plan import DTYPES
from gbfunc.train.gradients.loss import GenomeLoss, Given, Gradients, OneGraph, seeded
from gbfunc.types import Params

Part = Callable[[Given, list[Tensor]], Gradients]


class Proof(NamedTuple):
    """What the first step's gradient is compared with, on a few of its rows.

    Attributes:
        whole: makes the loss of the whole p-net on this rank.
        part: this rank's part of the gradient, as steps find it.
        few: takes the rows from a batch.
        axes: of the mesh, along which the parts are summed.
        cause: of a difference, and its cure.
    """

    whole: Callable[[], GenomeLoss]
    part: Part
    few: Callable[[Any], Any]
    axes: tuple[AxisName, ...]
    cause: str

    def compare(self, layout: Layout, given: Given, trained: Params) -> None:
        """Compare the gradients; all ranks call. One that is random is not compared.

        Raises:
            ValueError: on every rank, if they differ by more than rounding does.
        """
        mesh, loss, wanted = layout.mesh, self.whole(), [*trained.values()]
        given = given._replace(batch=self.few(given.batch), rows=1)

        def whole(given: Given, wanted: list[Tensor]) -> Gradients:
            with loss.without_amp():
                return OneGraph(loss, 1.0)(given, wanted).gradients

        def apart(x: Tensor, y: Tensor) -> float:
            """Of all ranks the most; a quotient of zeros, or of what is not finite, says nothing."""
            norm = float(torch.linalg.vector_norm(x - y) / torch.linalg.vector_norm(y))
            return max((z for z in gather_objects(mesh, norm) if not math.isnan(z)), default=0.0)

        # Features that are split draw other numbers.
        with nullcontext() if "tensor" in self.axes else _SameDraws():
            found, alone = _flat(self.part, given, wanted, 0), _flat(whole, given, wanted, 0)
            for axis in self.axes:
                found = sum_ranks(mesh, found, axis)
            dtypes = (layout.plan.dtype, *(DTYPES[t.dtype] for t in layout.plan.tensors))
            rounding = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point) ** 0.4
            worst = apart(found, alone)
            if worst <= rounding or apart(_flat(whole, given, wanted, 1), alone):
                return
        raise ValueError(
            f"over {' and '.join(self.axes)} ranks the gradient is {worst:.2g} of its norm away from that of the p-net "
            f"on one rank: {self.cause}"
        )


def _flat(part: Part, given: Given, wanted: list[Tensor], seed: int) -> Tensor:
    given = given._replace(buffers={k: v.clone() for k, v in given.buffers.items()})
    with seeded(seed, wanted[0].device), torch.enable_grad():
        found = part(given, wanted)
    dense = (torch.zeros_like(x) if g is None else g.to_dense() for x, g in zip(wanted, found, strict=True))
    parts = (torch.view_as_real(g) if g.is_complex() else g for g in dense)
    return torch.cat([g.reshape(-1).double() for g in parts])


class _SameDraws(TorchDispatchMode):
    """Random numbers of an operator depend on its shapes alone: not on the rank, nor on what was drawn before."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            torch.manual_seed(0)
        return func(*args, **kwargs or {})
