"""A frozen weight of a base beside a delta in factors: `y = x W_base^T + (x R) L^T`, the sum of which is never formed.

LoRA's form (Hu et al., 2022), with factors that g-nets generate. Its weight is shown to others as the dense sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gbfunc.layers.forms import FactoredWeight, dense_linear


def added(base: Tensor, delta: Tensor) -> Tensor:
    """The weight of a base and a delta, in the base's dtype; the sum is taken in the wider one."""
    return (base + delta).to(base.dtype)


class DeltaWeight(FactoredWeight):
    """A weight `base + delta` whose delta has the tiles `L[i, j] @ R[i, j].T`: inputs base, left and right.

    The base is used in its dtype, the delta in that of its factors (LoRA in bf16 nets does likewise).
    """

    base: Tensor
    more: ClassVar[tuple[str, ...]] = ("base",)

    def make(self) -> Tensor:
        """The sum."""
        return added(self.given["base"], super().make())

    def linear(self, x: Tensor, bias: Tensor | None, rows: slice = slice(None)) -> Tensor:
        """`x @ W[rows].T + bias`."""
        left, right = self.left, self.right
        same = x.dtype == left.dtype == self.base.dtype and x.ndim > 1
        if same and rows.stop is None and self.grid.n_tiles == 1 and self._thin(math.prod(x.shape[:-1])):
            # Added by the product itself, which spares a pass over the outputs; factors as [k, r] and [k, c], whose
            # products with few columns are two to four times faster, forward and backward.
            y = dense_linear(self.base, self.transposed, rows, x, bias)
            thin = F.linear(x, right[0, 0].t().contiguous())
            return torch.addmm(y.flatten(0, -2), thin.flatten(0, -2), left[0, 0].t().contiguous()).reshape(y.shape)
        delta = self.thin_linear(self._wide(x), None, rows)
        if delta is None:
            return dense_linear(self.dense(), self.transposed, rows, x, bias)
        return _sum(dense_linear(self.base, self.transposed, rows, x, bias), delta)

    def conv(self, conv: Callable[..., Tensor], x: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        """`conv(x, W, bias, **options)`."""
        delta = self.thin_conv(conv, self._wide(x), None, options)
        if delta is None:
            return conv(x, self.dense(), bias, **options)
        return _sum(conv(x, self.base, bias, **options), delta)

    def embedding(self, index: Tensor, padding_idx: int | None) -> Tensor:
        """Rows of the weight."""
        delta = self.thin_embedding(index, padding_idx)
        if delta is None:
            return F.embedding(index, self.dense(), padding_idx)
        return _sum(F.embedding(index, self.base, padding_idx), delta)

    def _wide(self, x: Tensor) -> Tensor:
        """The input in the dtype of the factors; under autocast the products choose theirs."""
        return x if torch.is_autocast_enabled(x.device.type) else x.to(self.left.dtype)


def _sum(y: Tensor, delta: Tensor) -> Tensor:
    return y + delta.to(y.dtype)
