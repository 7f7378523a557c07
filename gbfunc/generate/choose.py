"""Which form the weight of each generated tensor gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from gbfunc.base import BaseTensors
from gbfunc.layers import KINDS
from gbfunc.layers.forms import DenseWeight, Target, WeightForm
from gbfunc.layers.recomputed import RecomputedWeight
from gbfunc.parallel import Layout
from gbfunc.plan import DTYPES, Ensemble, Plan, TensorPlan, factored_form, is_formable
from gbfunc.tiling import Piece
from gbfunc.types import Params

Form = DenseWeight | WeightForm
Lazy = bool | Literal["auto"]
Remake = Callable[[TensorPlan, list[tuple[Params, Params]]], list[Tensor]]
"""`(tensor, [(leaves, noise)]) -> matrices`: evaluates the g-nets of each slot of a tensor by themselves."""


class Chooser:
    """Gives each tensor of a plan its form, by its layers, the options, and where the genome lives.

    Args:
        plan: the plan.
        pnet: where its layers are looked at, weights can have other forms than dense.
        layout: where the genome lives, if it is split over ranks.
        lazy: whether weights stay factors: True wherever they can, `"auto"` where it pays.
        remat: whether the others are made for each use, and again in backward.
        pieces: which block is made of the matrix of a parameter, by name.
        base: what deltas belong to.
        remake: how the weight of a tensor is made again.
    """

    def __init__(
        self,
        plan: Plan,
        pnet: nn.Module | None,
        layout: Layout | None,
        lazy: Lazy,
        remat: bool,
        pieces: Mapping[str, Piece],
        base: BaseTensors | None,
        remake: Remake,
    ) -> None:
        self._plan, self._pnet, self._pieces, self._base, self._remake = plan, pnet, pieces, base, remake
        # With a gather for each use none stays factors, nor where it is tiles that are gathered.
        factors_come = layout is None or (layout.placement == "factors" and not remat)
        self._lazy: Lazy = lazy if factors_come else False
        self._remat = remat
        spans = [(p.tensor, p.part, e) for e in plan.ensembles for p in e.spans]
        self._ensembles: dict[int, list[Ensemble]] = {}
        for index, _, e in sorted(spans, key=lambda span: span[:2]):
            self._ensembles.setdefault(index, []).append(e)
        self._index = {t.name: i for i, t in enumerate(plan.tensors)}

    def target(self, tensor: TensorPlan) -> Target:
        """The tensor, or its block, as matrices make it."""
        kind, piece, narrow = KINDS[tensor.kind], self._pieces.get(tensor.name), DTYPES[tensor.dtype]
        shape = tensor.shape if piece is None else kind.block_shape(tensor.shape, piece.shape)
        # Generation runs in the leaves' dtype; only a narrower p-net (bf16, fp16) is cast to.
        cast = narrow if narrow.itemsize < self._plan.dtype.itemsize else None
        base = partial(_base_on, self._base, tensor.name) if tensor.base else None
        return Target(tensor.name, kind, shape, tuple(s.offset for s in tensor.slots), cast, base, piece)

    def __call__(self, tensor: TensorPlan) -> Form:
        """The form of a generated tensor."""
        target = self.target(tensor)
        if self._pnet is None or not is_formable(tensor, self._pnet):
            return DenseWeight(target)
        if (factored := factored_form(tensor, self._plan.dtype, self._lazy, target.base)) is not None:
            return factored
        if self._remat and all(e.leaves for e in self._ensembles[self._index[tensor.name]]):
            return self._recomputed(tensor, target)
        return DenseWeight(target)

    def _recomputed(self, tensor: TensorPlan, target: Target) -> WeightForm:
        ensembles = self._ensembles[self._index[tensor.name]]
        names = [([*e.leaves], [*e.hypernet.noise_shapes(e.dims)]) for e in ensembles]

        def maker(*given: Tensor) -> Tensor:
            values = iter(given)
            parts = [({k: next(values) for k in leaf}, {k: next(values) for k in noise}) for leaf, noise in names]
            return target.fold(self._remake(tensor, parts))

        # By number: the names of two leaves may be equal but for what no attribute's name has.
        inputs = tuple(f"input_{i}" for i in range(sum(len(of) for both in names for of in both)))
        return RecomputedWeight(
            tensor.name, inputs, maker, tensor.kind == "transposed_linear", split=target.piece is not None
        )


def _base_on(base: BaseTensors | None, name: str, device: torch.device) -> Tensor:
    """The tensor of a base, on a device."""
    assert base is not None
    return base.on(device)[0][name]
