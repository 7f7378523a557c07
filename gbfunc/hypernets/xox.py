r"""The XOX model: gene expression of both neurons and rules of interaction, $W = s \, X_{out} O X_{in}^T$.

Source: Barabasi, Beynon, Katona, Perez-Nieves: Complex computation from developmental priors (Nature Communications
2023), after Kovacs, Barabasi, Barabasi: Uncovering the genetic blueprint of the C. elegans nervous system (PNAS 2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gbfunc.hypernets.base import Hypernet, Leaf, Sized, check_size, draw
from gbfunc.types import Factors, Kernel, Params, TileDims


@dataclass(frozen=True)
class XOX(Sized):
    """See `xox`."""

    genes: int | None = None
    type: ClassVar[str] = "xox"
    size_field: ClassVar[str] = "genes"
    default_size: ClassVar[int] = 8
    factorised: ClassVar[bool] = True
    batched: ClassVar[bool] = True

    def max_size(self, dims: TileDims) -> int:
        """The shorter side of the tile."""
        return min(dims.rows, dims.cols)

    def leaves(self, dims: TileDims) -> dict[str, Leaf]:
        """Expression of the row and column neurons [r, g], [c, g], rules [g, g], and a learned scale."""
        g = self.known_size
        return {
            "row_genes": Leaf((dims.rows, g), "code"),
            "col_genes": Leaf((dims.cols, g), "code"),
            "rules": Leaf((g, g), "linear"),
            "scale": Leaf((), "code"),
        }

    def init(self, dims: TileDims, n_tiles: int, n_groups: int, generator: torch.Generator) -> Params:
        """Normal genes and rules, unit scale."""
        stds = {"row_genes": 1.0, "col_genes": 1.0, "rules": 1 / self.known_size, "scale": 0.0}
        drawn = draw(self.leaves(dims), n_tiles, n_groups, generator, stds)
        return drawn | {"scale": torch.ones_like(drawn["scale"])}

    def apply(
        self,
        leaves: Params,
        row_codes_rp: Tensor,
        col_codes_cq: Tensor,
        *,
        noise: Params | None = None,
        kernel: Kernel = "auto",
    ) -> Factors:
        """Factors [r, g] and [c, g]."""
        return Factors(leaves["row_genes"] @ (leaves["rules"] * leaves["scale"][..., None, None]), leaves["col_genes"])


def xox(genes: int | None = None) -> Hypernet:
    """Genetic expression and interaction rules: `tile = scale * X_out @ O @ X_in.T`.

    Args:
        genes: genes a neuron; None lets the plan choose (8 without a size target).

    Raises:
        ValueError: for less than one gene.
    """
    check_size("genes", genes)
    return XOX(genes)
