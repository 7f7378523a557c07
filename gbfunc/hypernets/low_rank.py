"""Low-rank tiles: the factors themselves are trained; codes play no part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gbfunc.hypernets.base import Hypernet, Leaf, Sized, check_size, draw
from gbfunc.types import Factors, Kernel, Params, TileDims


@dataclass(frozen=True)
class LowRank(Sized):
    """See `low_rank`."""

    rank: int | None = None
    type: ClassVar[str] = "low_rank"
    size_field: ClassVar[str] = "rank"
    default_size: ClassVar[int] = 4
    factorised: ClassVar[bool] = True
    batched: ClassVar[bool] = True

    def max_size(self, dims: TileDims) -> int:
        """The shorter side of the tile."""
        return min(dims.rows, dims.cols)

    def leaves(self, dims: TileDims) -> dict[str, Leaf]:
        """Two factors: [r, k] and [c, k]."""
        k = self.known_size
        return {"left": Leaf((dims.rows, k), "linear"), "right": Leaf((dims.cols, k), "code")}

    def init(self, dims: TileDims, n_tiles: int, n_groups: int, generator: torch.Generator) -> Params:
        """Normal factors, of unit deviation their product."""
        stds = {"left": self.known_size**-0.5, "right": 1.0}
        return draw(self.leaves(dims), n_tiles, n_groups, generator, stds)

    def apply(
        self,
        leaves: Params,
        row_codes_rp: Tensor,
        col_codes_cq: Tensor,
        *,
        noise: Params | None = None,
        kernel: Kernel = "auto",
    ) -> Factors:
        """The factors as they are."""
        return Factors(leaves["left"], leaves["right"])


def low_rank(rank: int | None = None) -> Hypernet:
    """Trained factors: `tile = left @ right.T`.

    Args:
        rank: columns of the factors; None lets the plan choose (4 without a size target).

    Raises:
        ValueError: for a rank below 1.
    """
    check_size("rank", rank)
    return LowRank(rank)
