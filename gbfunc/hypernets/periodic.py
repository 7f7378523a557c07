r"""Periodic g-nets: a sum of sines over the codes, which is exactly a product of two thin matrices.

With `share="none"`, a tile is $g_{ij} = \sum_h v_h \sin(A_{ih} + B_{jh})$ with $A = X_r W_r + \phi$ and $B = X_c W_c$.
With shared code weights, a tile is $g_{ij} = \sum_h s_h \sin(A_{ih} + B_{jh}) + t_h \cos(A_{ih} + B_{jh})$. The group
has the code weights $W_r, W_c$, and each tile has $s, t$. The addition theorem gives factors of 2 H columns.

Bilinear g-nets mix all pairs: $g_{ij} = \phi(A_i)^T M \phi(B_j)$ with $\phi = [\sin, \cos]$ and a matrix $M$ per tile.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from gbfunc.hypernets.base import Leaf, Share, Sharing, uniform
from gbfunc.types import Params, TileDims


@dataclass(frozen=True)
class Waves(Sharing):
    """Base of g-nets made of sines over the codes. Matrices may share code weights; see `periodic_factors`."""

    features: int | None = None
    share: Share = "none"
    frequency: float | tuple[float, float] | None = field(default=None, kw_only=True)
    size_field: ClassVar[str] = "features"
    factorised: ClassVar[bool] = True
    cosine_first: ClassVar[bool] = False  # whether cosines come before sines in the right factor

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
    """Sums of sines over the codes: the default g-net, fast (a batched GEMM) and good at high compression.

    Args:
        features: number of sines per tile; None lets the plan choose (32 without a size target).
        share: which matrices share code weights. `"layers"`: matrices whose names differ only in numbers, such as the
            same weight of each block. `"shapes"`: all matrices of a shape. `"none"`: no matrices.
        frequency: standard deviation of the initial code weights, either one number or a pair for rows and columns.
            None is 1.0, or 2.5 with `share="layers"`.

    Raises:
        ValueError: for options out of range.
    """

    type: ClassVar[str] = "periodic"
    rate: ClassVar[float] = 2e-2
    cosine_first: ClassVar[bool] = True

    def leaves(self, dims: TileDims) -> dict[str, Leaf]:
        """Return code weights [p, H] and [q, H], with phases and amplitudes, or with two coefficients if shared."""
        h, codes = self.known_size, self._code_weights(dims)
        coefficient = Leaf((h,), "linear", std=math.sqrt((1 if self.shares else 2) / h))
        if self.shares:
            return codes | {"sine": coefficient, "cosine": coefficient}
        codes |= {"phase": Leaf((h,), "code", period=2 * math.pi)}
        return {k: leaf._replace(gain="amplitude") for k, leaf in codes.items()} | {"amplitude": coefficient}

    def init(self, dims: TileDims, n_tiles: int, n_groups: int, generator: torch.Generator) -> Params:
        """Draw code weights, phases and coefficients: normal of deviation `frequency`, uniform, and normal."""
        drawn = super().init(dims, n_tiles, n_groups, generator)
        if "phase" in drawn:
            drawn["phase"] = uniform(drawn["phase"].shape, generator) * (2 * math.pi)
        return drawn


@dataclass(frozen=True)
class Bilinear(Waves):
    """Sines of the rows times sines of the columns, mixed by a matrix per tile: thin factors, many coefficients.

    A tile of H features has $4 H^2$ coefficients and factors of 2 H columns. This type suits many matrices that share
    code weights, such as deltas of a pretrained net.

    Args:
        features: number of row sines, and of column sines; None lets the plan choose (4 without a size target).
        share: as for `periodic`.
        frequency: as for `periodic`; None is 1.0.

    Raises:
        ValueError: for options out of range.
    """

    type: ClassVar[str] = "bilinear"
    default_size: ClassVar[int] = 4

    def leaves(self, dims: TileDims) -> dict[str, Leaf]:
        """Return code weights [p, H] and [q, H], and the tile's mixing matrix [2H, 2H]."""
        width = self.factor_width
        return self._code_weights(dims) | {"mix": Leaf((width, width), "linear", std=1 / self.known_size)}

    def max_size(self, dims: TileDims) -> int:
        return max(1, min(dims.rows, dims.cols) // 2)


periodic, bilinear = Periodic, Bilinear
