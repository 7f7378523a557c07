"""Losses and gradients where layers are split over tensor ranks, which all have the same rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gbfunc.parallel import Layout, gather_objects, sum_ranks
from gbfunc.plan import DTYPES, Plan
from gbfunc.train.gradients.loss import GenomeLoss, Given, Gradients, OneGraph, Strategy, seeded
from gbfunc.train.gradients.ranks import RankObjective
from gbfunc.trees import tree_map
from gbfunc.types import Params

if TYPE_CHECKING:
    from gbfunc.parallel.tensor import TensorParallel


class SplitLoss(GenomeLoss):
    """Loss and aux of a p-net whose layers are split over tensor ranks; other arguments are those of `GenomeLoss`."""

    def __init__(
        self,
        split: TensorParallel,
        *args: Any,
        adapt: Callable[[nn.Module], Collection[str]] = lambda net: (),
        **options: Any,
    ) -> None:
        self._split = split
        both = {"pieces": split.pieces, "adapt": lambda net: {*split.adapt(net), *adapt(net)}}
        super().__init__(*args, **both, **options)

    def on(self, weights: Params, buffers: Params, batch: Any) -> tuple[Tensor, Any]:
        """Loss and aux for these weights, each rank's pieces of them; buffers are updated."""
        return super().on(self._split.place(weights), buffers, batch)

    def _loss_and_aux(self, out: Any) -> tuple[Tensor, Any]:
        loss, aux = super()._loss_and_aux(out)
        return self._split.plain(loss), aux

    def rows(self, rows: float) -> float:
        """Rows whose mean the last loss was: those of this rank's outputs, where these are a part of the rows."""
        return super().rows(rows) if self._split.local_rows is None else self._split.local_rows

    def gradients(self, loss: Tensor, of: list[Tensor]) -> Gradients:
        """Gradients of a loss of the p-net; None for tensors that have no part in it."""
        with self._split.backward():
            return super().gradients(loss, of)


class SplitObjective(RankObjective):
    """The loss of a genome on a global batch, where layers are split over tensor ranks.

    `whole` makes the loss of the whole p-net on this rank, which the first step is compared with; None where it cannot
    be: the first layer takes a part of the rows. `parts` makes the loss of its pieces, where the strategy has none of
    all blocks: in a pipeline.
    """

    def __init__(
        self,
        layout: Layout,
        strategy: Strategy,
        scale: float,
        check_every: int,
        split: TensorParallel,
        whole: Callable[[], GenomeLoss] | None,
        parts: Callable[[], GenomeLoss] | None,
    ) -> None:
        super().__init__(layout, strategy, scale, check_every)
        self._split, self._whole, self._parts, self.takes_parts = split, whole, parts, split.takes_parts

    def _found(self, given: Given, trained: Params, seed: int) -> tuple[Tensor, Any, Params, float]:
        """Loss, aux, gradients of the sum of the rows' losses, and rows."""
        loss, aux, gradients, counted = super()._found(given, trained, seed)
        self._split.compare(loss)
        if self._whole is not None:
            with self._layout.mesh.traffic.uncounted():
                self._compare_with(self._whole(), given, trained)
            self._whole = None
        # Tensor ranks have the same rows, but where the last layer's outputs are a part of them.
        return loss, aux, gradients, counted / (self._split.ranks if self._split.local_rows is None else 1)

    def _compare_with(self, whole: GenomeLoss, given: Given, trained: Params) -> None:
        """At the first step, the gradient of two rows over tensor ranks against that of the whole p-net on one rank.

        Code between layers gets a rank's part of the features, as in torch: a softmax over split ones is another
        function. Nothing is compared where the gradient is random, or the loss of each rank's part of the rows.
        """
        loss, wanted = self.strategy.loss if self._parts is None else self._parts(), [*trained.values()]
        assert loss is not None
        few = tree_map(lambda x: x[:2] if isinstance(x, Tensor) and x.ndim else x, given.batch)

        def gradient(loss: GenomeLoss, seed: int) -> Tensor:
            buffers = {k: v.clone() for k, v in given.buffers.items()}
            with seeded(seed, wanted[0].device), torch.enable_grad(), loss.without_amp():
                found = OneGraph(loss, 1.0)(given._replace(batch=few, buffers=buffers, rows=1), wanted).gradients
            dense = (torch.zeros_like(x) if g is None else g.to_dense() for x, g in zip(wanted, found, strict=True))
            parts = (torch.view_as_real(g) if g.is_complex() else g for g in dense)
            return torch.cat([g.reshape(-1).double() for g in parts])

        alone = gradient(whole, 0)
        mesh, found = self._layout.mesh, sum_ranks(self._layout.mesh, gradient(loss, 0), "tensor")
        known = self._split.local_rows is None and torch.equal(alone, gradient(whole, 1))
        eps = max(torch.finfo(dtype).eps for dtype in _floating(self._plan))
        apart = float(torch.linalg.vector_norm(found - alone) / torch.linalg.vector_norm(alone)) if known else 0.0
        # A quotient of zeros, or of what is not finite, says nothing.
        worst = max(x for x in gather_objects(mesh, apart) if not math.isnan(x)) if known else 0.0
        if worst > eps**0.4:
            raise ValueError(
                f"over tensor ranks the gradient is {worst:.2g} of its norm away from that of the p-net on one rank: "
                "code between layers gets a rank's part of the features, and a softmax or mean over a part is another "
                "function: gather them first, by the style's output_layouts=Replicate()"
            )


def _floating(plan: Plan) -> set[torch.dtype]:
    """Dtypes that a p-net and its genome are computed in."""
    dtypes = {plan.dtype, *(DTYPES[t.dtype] for t in plan.tensors)}
    return {dtype for dtype in dtypes if dtype.is_floating_point}
