r"""Types that do not use codes: constants, trained rows, low-rank factors, and products of genes (XOX).

Source of the XOX model, $W = s X_{out} O X_{in}^T$: Barabasi et al., Complex computation from developmental priors
(Nature Communications 2023).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gbfunc.hypernets.base import Hypernet, Leaf, Share, Sharing, Sized
from gbfunc.types import Factors, Params, TileDims


@dataclass(frozen=True)
class Constant(Hypernet):
    """A constant tensor, which has no parameters and is not trained.

    Args:
        value: the value of every entry.

    Raises:
        ValueError: if float32 cannot hold the value.
    """

    value: float = 0.0
    type: ClassVar[str] = "constant"
    sizable: ClassVar[bool] = False
    standardised: ClassVar[bool] = False

    def __post_init__(self) -> None:
        value: Any = self.value
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and abs(value) <= torch.finfo(torch.float32).max):
            raise ValueError(f"value must be a finite number that float32 can hold, got {value!r}")
        object.__setattr__(self, "value", float(value))

    def leaves(self, dims: TileDims) -> dict[str, Leaf]:
        return {}

    def tiles(self, leaves: Params, row_Urp: Tensor, col_Ucq: Tensor, *unused: Any) -> Tensor:
        return row_Urp.new_full((1, row_Urp.shape[-2], col_Ucq.shape[-2]), self.value)


@dataclass(frozen=True)
class _Factored(Sized):
    factorised: ClassVar[bool] = True
    rate: ClassVar[float] = 2e-2
    spreads: ClassVar[bool] = True

    def max_size(self, dims: TileDims) -> int:
        return min(dims.rows, dims.cols)


@dataclass(frozen=True)
class LowRank(_Factored, Sharing):
    """Trained factors: `tile = left @ right.T`. Several matrices may have the same right factor, as in Tied-LoRA.

    Source of the common right factor: A. Renduchintala, T. Konuk, O. Kuchaiev, Tied-LoRA (2023).

    Args:
        rank: number of columns of the factors. None lets the plan choose (4 if there is no size target).
        share: which matrices have the same `right`: `"layers"`, `"shapes"` or `"none"`, as for `periodic`.

    Raises:
        ValueError: for a rank below 1, or an unknown value of `share`.
    """

    rank: int | None = None
    share: Share = "none"
    type: ClassVar[str] = "low_rank"
    size_field: ClassVar[str] = "rank"
    default_size: ClassVar[int] = 4

    def leaves(self, dims: TileDims) -> dict[str, Leaf]:
        k, scope = self.known_size, "group" if self.shares else "tile"
        # The right factor of a vector is a single row. Start this row at 1: near 0, training would be slow.
        std, mean = (0.0, 1.0) if dims.cols == 1 else (1.0, 0.0)
        right = Leaf((dims.cols, k), "code", scope, std, mean=mean)
        return {"left": Leaf((dims.rows, k), "linear", std=k**-0.5), "right": right}

    def tiles(self, leaves: Params, *unused: Any) -> Factors:
        return Factors(leaves["left"], leaves["right"])


@dataclass(frozen=True)
class XOX(_Factored):
    """The XOX model: `tile = scale * X_out @ O @ X_in.T`, with the genes X of neurons and the rules O of interaction.

    Args:
        genes: number of genes per neuron. None lets the plan choose (8 if there is no size target).

    Raises:
        ValueError: for less than one gene.
    """

    genes: int | None = None
    type: ClassVar[str] = "xox"
    size_field: ClassVar[str] = "genes"
    default_size: ClassVar[int] = 8

    def leaves(self, dims: TileDims) -> dict[str, Leaf]:
        """Describe the leaves: `X_out` [rows, genes], `X_in` [columns, genes], `O` [genes, genes], and the scale."""
        g = self.known_size
        genes = {"row_genes": Leaf((dims.rows, g), "code"), "col_genes": Leaf((dims.cols, g), "code")}
        return genes | {"rules": Leaf((g, g), "linear", std=1 / g), "scale": Leaf((), "code", std=0.0, mean=1.0)}

    def tiles(self, leaves: Params, *unused: Any) -> Factors:
        return Factors(leaves["row_genes"] @ (leaves["rules"] * leaves["scale"][..., None, None]), leaves["col_genes"])


@dataclass(frozen=True)
class NewRows(Sized):
    """Trained rows at the end of a base's matrix, such as embeddings of new tokens. The delta of all other rows is 0.

    The new rows are no part of the base, but start at the values that they have in the p-net. The base's digest does
    not cover new rows, so a genome also loads into a base whose new rows have other values.

    Args:
        rows: the number of rows.

    Raises:
        ValueError: for a number below 1, or for a matrix that has fewer rows than `rows`.
    """

    rows: int = 1
    type: ClassVar[str] = "new_rows"
    size_field: ClassVar[str] = "rows"
    factorised: ClassVar[bool] = True
    standardised: ClassVar[bool] = False

    def leaves(self, dims: TileDims) -> dict[str, Leaf]:
        if self.rows > dims.rows:
            raise ValueError(f"new_rows({self.rows}) needs a matrix of at least {self.rows} rows, got {dims.rows}")
        return {"rows": Leaf((self.rows, dims.cols), "linear", std=dims.cols**-0.5)}

    def tiles(self, leaves: Params, row_Urp: Tensor, *unused: Any) -> Factors:
        x, more = leaves["rows"], row_Urp.shape[-2] - self.rows
        places_rk = F.pad(torch.eye(self.rows, dtype=x.dtype, device=x.device), (0, 0, more, 0))
        return Factors(places_rk.expand(len(x), -1, -1), x.mT)


constant, low_rank, xox, new_rows = Constant, LowRank, XOX, NewRows
