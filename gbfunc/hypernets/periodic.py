r"""Periodic g-nets: sums of sines of the codes. The tiles are exactly products of two thin matrices.

With `share="none"`, a tile is $g_{ij} = \sum_h v_h \sin(A_{ih} + B_{jh})$ with $A = X_r W_r + \phi$ and $B = X_c W_c$.
If matrices share code weights, $g_{ij} = \sum_h s_h \sin(A_{ih} + B_{jh}) + t_h \cos(A_{ih} + B_{jh})$: tiles
with the same index in these matrices have the same $W_r$ and $W_c$, but each tile has its own $s$ and $t$. X are the
codes of rows and columns. By the addition theorem, a tile with H features is a product of factors with 2 H columns.

Bilinear g-nets multiply all pairs of sines: $g_{ij} = \phi(A_i)^T M \phi(B_j)$ with $\phi = [\sin, \cos]$ and a matrix
$M$ per tile.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from gbfunc.hypernets.base import Leaf, Share, Sharing, uniform
from gbfunc.types import Params, TileDims


@dataclass(frozen=True)
class Waves(Sharing):
    """Base class of g-nets with sines of codes. Several matrices may have the same code weights."""

    features: int | None = None
    share: Share = "none"
    frequency: float | tuple[float, float] | None = field(default=None, kw_only=True)
    size_field: ClassVar[str] = "features"
    factorised: ClassVar[bool] = True
    cosine_first: ClassVar[bool] = False  # True for a right factor [cos, sin], as in sin(A + B); False for [sin, cos]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self._deviations) != 2 or not all(
            type(f) is not bool and math.isfinite(f) and f > 0 for f in self._deviations
        ):
            raise ValueError(f"frequency must be a positive number, two of them or None, got {self.frequency!r}")

    @property
    def _deviations(self) -> tuple[float, float]:
        # Standard deviations of the initial code weights: (rows, columns).
        default = 2.5 if self.share == "layers" and self.type == "periodic" else 1.0
        frequency = default if self.frequency is None else self.frequency
        return frequency if isinstance(frequency, tuple) else (frequency, frequency)

    @property
    def factor_width(self) -> int:
        return 2 * self.known_size

    def _code_weights(self, dims: TileDims) -> dict[str, Leaf]:
        rows, cols = self._deviations
        scope = "group" if self.shares else "tile"
        return {
            "row_weight": Leaf((dims.row_width, self.known_size), "code", scope, rows, codes="row"),
            "col_weight": Leaf((dims.col_width, self.known_size), "code", scope, cols, codes="col"),
        }


@dataclass(frozen=True)
class Periodic(Waves):
    """Sums of sines of the codes: the default g-net, fast (a batched GEMM) and accurate at high compression.

    Args:
        features: number of sines per tile. None lets the plan choose (32 if there is no size target).
        share: which matrices have the same code weights. `"layers"`: matrices whose names differ only in numbers, such
            as the same weight of each block. `"shapes"`: all matrices of equal shape. `"none"`: no matrices.
        frequency: standard deviation of the initial code weights: one number, or a pair for rows and columns. None
            means 1.0, or 2.5 with `share="layers"`.

    Raises:
        ValueError: for options out of range.
    """

    type: ClassVar[str] = "periodic"
    rate: ClassVar[float] = 2e-2
    cosine_first: ClassVar[bool] = True

    def leaves(self, dims: TileDims) -> dict[str, Leaf]:
        """Return code weights [code width, features], and phases and amplitudes or, if matrices share, s and t."""
        h, codes = self.known_size, self._code_weights(dims)
        coefficient = Leaf((h,), "linear", std=math.sqrt((1 if self.shares else 2) / h))
        if self.shares:
            return codes | {"sine": coefficient, "cosine": coefficient}
        codes |= {"phase": Leaf((h,), "code", period=2 * math.pi)}
        return {k: leaf._replace(gain="amplitude") for k, leaf in codes.items()} | {"amplitude": coefficient}

    def init(self, dims: TileDims, n_tiles: int, n_groups: int, generator: torch.Generator) -> Params:
        """Draw normal code weights with standard deviation `frequency`, uniform phases, and normal coefficients."""
        drawn = super().init(dims, n_tiles, n_groups, generator)
        if "phase" in drawn:
            drawn["phase"] = uniform(drawn["phase"].shape, generator) * (2 * math.pi)
        return drawn


@dataclass(frozen=True)
class Bilinear(Waves):
    """Sums of products: each sine or cosine of a row times each one of a column, with one coefficient per pair.

    A tile with H features has $4 H^2$ coefficients, and factors with 2 H columns. This type suits many matrices that
    have the same code weights, such as deltas of a pretrained network.

    Args:
        features: number of sines, and of cosines, per row and column. None lets the plan choose (4 without a target).
        share: as for `periodic`.
        frequency: as for `periodic`, but None means 1.0.

    Raises:
        ValueError: for options out of range.
    """

    type: ClassVar[str] = "bilinear"
    default_size: ClassVar[int] = 4

    def leaves(self, dims: TileDims) -> dict[str, Leaf]:
        """Return code weights [width of the code, features] for rows and for columns, and the matrix M of a tile."""
        width = self.factor_width
        return self._code_weights(dims) | {"mix": Leaf((width, width), "linear", std=1 / self.known_size)}

    def max_size(self, dims: TileDims) -> int:
        return max(1, min(dims.rows, dims.cols) // 2)


periodic, bilinear = Periodic, Bilinear
