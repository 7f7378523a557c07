"""A weight that is generated for each use and again in backward, so that no weight stays in memory in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gbfunc.layers.forms import Needs, Source, Use, Weight, WeightForm, outside_autocast
from gbfunc.types import Params


class RecomputedWeight(WeightForm):
    """A weight `maker(*inputs)` that exists only while a layer uses the weight. Backward calls `maker` again.

    `maker` is pure and draws no random numbers. With `split`, this rank has only a part of the weight, and code other
    than the layer cannot read it. Transforms of `torch.func` and `torch.compile` may keep the weight until backward.
    """

    needs: Needs = "leaves"

    def __init__(
        self, name: str, inputs: tuple[str, ...], maker: Callable[..., Tensor], transposed: bool, split: bool = False
    ) -> None:
        super().__init__(name, inputs, transposed)
        self.maker, self.split = maker, split

    def of(self, sources: Sequence[Source]) -> Params:
        """Return `{key: tensor}`: the leaves of all matrices' g-nets, and the noise of stochastic g-nets."""
        return dict(zip(self.keys, (x for source in sources for x in source.inputs()), strict=True))

    def make(self, inputs: Params) -> Tensor:
        """Form the dense weight. Raise RuntimeError if this rank has only a part of the weight."""
        if self.split:
            raise RuntimeError(f"{self.name!r} is split over ranks and made in pieces: read it with remat='none'")
        return self.maker(*(inputs[k] for k in self.inputs))

    def apply(self, weight: Weight, use: Use, x: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the weight, which exists only during this call. Backward generates the weight again."""
        others = (x,) if bias is None else (x, bias)
        if weight.formed is not None:
            return use.run(weight.dense(), *others)
        inputs = tuple(weight.inputs[k] for k in self.inputs)

        def used(*tensors: Tensor) -> Tensor:
            with outside_autocast(x.device):
                generated = self.maker(*tensors[: len(inputs)])
            return use.run(generated, *tensors[len(inputs) :])

        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return used(*inputs, *others)
        # In backward, the checkpoint runs `used` again, and stops as soon as the weight is generated.
        y: Tensor = checkpoint(  # pyright: ignore[reportAssignmentType]
            used, *inputs, *others, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
        )
        return y
