"""A dense weight that notes how it is applied, from which the cheaper form is chosen."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from gbfunc.factored.interface import Report, new_lazy
from gbfunc.factored.lazy import LazyWeight


class ProbeWeight(LazyWeight):
    """A weight that counts the rows of input it is applied to, in `rows[name]`; built by `probe_weight`."""

    _weight: Tensor
    _rows: dict[str, int]

    def sources(self) -> tuple[Tensor, ...]:
        """The weight."""
        return (self._weight,)

    def dense(self) -> Tensor:
        """The weight."""
        return self._weight

    def flipped(self) -> ProbeWeight:
        """The transposed matrix."""
        return self._derived(self._weight.t())

    def row_block(self, start: int, stop: int) -> ProbeWeight:
        """Some rows."""
        return self._derived(self._weight[start:stop])

    def apply_linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ W.T + bias`: [..., i] -> [..., o]."""
        self._count(math.prod(x.shape[:-1]))
        return F.linear(x, self._weight, bias)

    def apply_conv(self, conv: Callable[..., Tensor], x: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        """`conv(x, W, bias, **options)`."""
        y = conv(x, self._weight, bias, **options)
        if options["groups"] == 1:
            self._count(y.numel() // self._shape[0])
        return y

    def apply_embedding(self, index: Tensor, padding_idx: int | None) -> Tensor:
        """Rows of the weight."""
        self._count(index.numel())
        return F.embedding(index, self._weight, padding_idx)

    def _count(self, rows: int) -> None:
        self._rows[self._name] = self._rows.get(self._name, 0) + rows

    def _derived(self, weight: Tensor) -> ProbeWeight:
        return probe_weight(weight, self._rows, name=self._name, report=self._report)


def probe_weight(weight: Tensor, rows: dict[str, int], *, name: str, report: Report | None) -> ProbeWeight:
    """Stand in for a dense weight and note its uses.

    Args:
        weight: the weight.
        rows: gains the input rows (positions of a convolution's output) of every use, by name.
        name: name of the parameter.
        report: counts the operations that only a dense weight can do, by (name, operation).
    """
    probe = new_lazy(ProbeWeight, tuple(weight.shape), weight.dtype, weight.device, name, report)
    probe._weight, probe._rows = weight, rows
    return probe
