"""A tensor left at a constant: no parameters at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gbfunc.hypernets.base import Hypernet, Leaf
from gbfunc.types import Kernel, Params, TileDims

_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Constant(Hypernet):
    """See `constant`."""

    value: float = 0.0
    type: ClassVar[str] = "constant"
    sizable: ClassVar[bool] = False
    standardised: ClassVar[bool] = False

    @property
    def size(self) -> int | None:
        """Nothing to choose."""
        return 0

    def leaves(self, dims: TileDims) -> dict[str, Leaf]:
        """None."""
        return {}

    def init(self, dims: TileDims, n_tiles: int, n_groups: int, generator: torch.Generator) -> Params:
        """Nothing to draw."""
        return {}

    def apply(
        self,
        leaves: Params,
        row_codes_rp: Tensor,
        col_codes_cq: Tensor,
        *,
        noise: Params | None = None,
        kernel: Kernel = "auto",
    ) -> Tensor:
        """The constant tile [r, c]."""
        return row_codes_rp.new_full((row_codes_rp.shape[-2], col_codes_cq.shape[-2]), self.value)


def constant(value: float = 0.0) -> Hypernet:
    """Leave a tensor at a constant: it costs no parameters and is never trained.

    Args:
        value: the constant, of every entry.

    Raises:
        ValueError: if float32 cannot hold it.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX:
        raise ValueError(f"value must be a finite number that float32 can hold, got {value!r}")
    return Constant(float(value))
