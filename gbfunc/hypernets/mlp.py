r"""G-nets that are MLPs of a weight's codes, as in the genomic bottleneck; a variant draws the weights at random.

Source: Shuvaev et al., Encoding innate ability through a genomic bottleneck (PNAS 2024, doi 10.1073/pnas.2409160121).
A stochastic g-net generates a mean and a log standard deviation per weight, and draws the weight by reparameterisation:
$w = \mu + e^{s} \epsilon$, $\epsilon \sim N(0, 1)$ (Kingma and Welling, Auto-encoding variational Bayes, 2014, eq. 4).

The first layer is separable: for the weight in row i and column j, unit h is $A_{ih} + B_{jh}$ with $A = X_r W_r + b$
and $B = X_c W_c$, where X are codes. A single ReLU layer has kernels that store no activations (`kernels.relu`). Other
MLPs run in blocks of rows, which backward recomputes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gbfunc.hypernets.base import Hypernet, Leaf, check_size, project, uniform
from gbfunc.hypernets.kernels.operation import chunked_apply
from gbfunc.hypernets.kernels.relu import relu_matrix
from gbfunc.tiling import TileGrid
from gbfunc.types import Kernel, Params, TileDims

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"relu": F.relu, "tanh": torch.tanh, "gelu": F.gelu, "sin": torch.sin}
)


def _he(inputs: int) -> float:
    return math.sqrt(2 / max(1, inputs))  # standard deviation of initial weights (He et al., 2015)


@dataclass(frozen=True)
class GNet(Hypernet):
    """An MLP of any depth from the codes of a row and a column to a weight, as in torchGB and Shuvaev et al. (2024).

    Args:
        hidden: widths of the hidden layers. None is one layer, whose width the plan chooses (32 without a size target).
        activation: `"relu"`, `"tanh"`, `"gelu"` or `"sin"`.

    Raises:
        ValueError: for options out of range.
    """

    hidden: tuple[int, ...] | None = None
    activation: str = "relu"
    type: ClassVar[str] = "gnet"

    def __post_init__(self) -> None:
        hidden: Any = self.hidden
        if hidden is not None:
            if not isinstance(hidden, list | tuple) or not hidden:
                raise ValueError(f"hidden must be a tuple of one or more widths, or None, got {hidden!r}")
            for width in hidden:
                check_size("a hidden width", width or 0)
            object.__setattr__(self, "hidden", tuple(hidden))
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {sorted(ACTIVATIONS)}, got {self.activation!r}")

    @property
    def size(self) -> int | None:
        return None if self.hidden is None else self.hidden[0]

    @property
    def spreads(self) -> bool:
        # More units raise the rank of a tile much with sines, but little with other activations: use more tiles.
        return self.activation != "sin"

    def with_size(self, size: int) -> Hypernet:
        """Scale the widths of all hidden layers so that the first layer has `size` units."""
        first, *rest = self.hidden or (size,)
        return replace(self, hidden=(size, *(max(1, round(n * size / first)) for n in rest)))

    def leaves(self, dims: TileDims) -> dict[str, Leaf]:
        """Return the leaves of the first layer, of further hidden layers (`weight_i`, `bias_i`), and of the output."""
        if self.hidden is None:
            raise ValueError(f"{self.type} has no size yet: give hidden, or let make_plan choose it")
        first = self.hidden[0]
        std = 1.0 if self.activation == "sin" else _he(dims.row_width + dims.col_width)
        leaves = {
            "row_weight": Leaf((dims.row_width, first), "code", std=std),
            "col_weight": Leaf((dims.col_width, first), "code", std=std),
            "bias": Leaf((first,), "code"),
        }
        for i, (n, m) in enumerate(zip(self.hidden, self.hidden[1:], strict=False), start=1):
            leaves |= {f"weight_{i}": Leaf((n, m), "code", std=_he(n)), f"bias_{i}": Leaf((m,), "code", std=0.0)}
        return leaves | self._head(self.hidden[-1])

    def _head(self, width: int) -> dict[str, Leaf]:
        return {"out_weight": Leaf((width,), "linear", std=_he(width)), "out_bias": Leaf((), "linear", std=0.0)}

    def init(self, dims: TileDims, n_tiles: int, n_groups: int, generator: torch.Generator) -> Params:
        """Draw normal weights. Biases are uniform for "sin", otherwise normal and clamped to +-`reach / 2` (below)."""
        drawn = super().init(dims, n_tiles, n_groups, generator)
        if self.activation == "sin":
            drawn["bias"] = uniform(drawn["bias"].shape, generator) * (2 * math.pi)
        elif dims.row_width + dims.col_width:
            # Weighted sums of +-1 bits are at most `reach`. Biases up to `reach / 2` keep units from being always off.
            reach = drawn["row_weight"].abs().sum(-2) + drawn["col_weight"].abs().sum(-2)
            drawn["bias"] = drawn["bias"].clamp(-reach / 2, reach / 2)
        return drawn

    @property
    def _is_fused(self) -> bool:
        return self.activation == "relu" and len(self.hidden or ()) == 1

    def _mean(
        self, leaves: Params, row: Tensor, col: Tensor, kernel: Kernel, head: str = "out", grid: TileGrid | None = None
    ) -> Tensor:
        if self._is_fused:
            names = ("row_weight", "col_weight", "bias", f"{head}_weight", f"{head}_bias")
            return relu_matrix(row, col, *(leaves[name] for name in names), grid=grid, kernel=kernel)
        activation, depth = ACTIVATIONS[self.activation], len(self.hidden or ())
        names = [*((f"weight_{i}", f"bias_{i}") for i in range(1, depth)), (f"{head}_weight", f"{head}_bias")]

        def upper(x: Tensor, params: Params) -> Tensor:
            for weight, bias in names:
                x = activation(x) @ params[weight] + params[bias]
            return x

        a_TrH = project(row, leaves["row_weight"]) + leaves["bias"].unsqueeze(-2)
        b_TcH = project(col, leaves["col_weight"])
        return chunked_apply(upper, a_TrH, b_TcH, {name: leaves[name] for pair in names for name in pair})

    def matrix(self, leaves: Params, row_Urp: Tensor, col_Ucq: Tensor, grid: TileGrid, kernel: Kernel) -> Tensor | None:
        return self._mean(leaves, row_Urp, col_Ucq, kernel, grid=grid) if self._is_fused else None

    def tiles(self, leaves: Params, row_Urp: Tensor, col_Ucq: Tensor, noise: Params | None, kernel: Kernel) -> Tensor:
        """Generate tiles [tiles, rows, columns]: the means, or random weights if `noise` is given."""
        mean = self._mean(leaves, row_Urp, col_Ucq, kernel)
        if noise is None:
            return mean
        return mean + torch.exp(self._mean(leaves, row_Urp, col_Ucq, kernel, "log_sigma")) * noise["weight"]


@dataclass(frozen=True)
class Stochastic(GNet):
    """An MLP that outputs a weight's mean and log standard deviation. Evaluation uses the mean. Options: see `gnet`."""

    type: ClassVar[str] = "stochastic"
    stochastic: ClassVar[bool] = True

    def _head(self, width: int) -> dict[str, Leaf]:
        # At the start, the noise has a standard deviation of exp(-3), 5 % of the means' standard deviation.
        weight, bias = Leaf((width,), "code", std=0.0), Leaf((), "code", std=0.0, mean=-3.0)
        return super()._head(width) | {"log_sigma_weight": weight, "log_sigma_bias": bias}

    def noise_shapes(self, dims: TileDims) -> dict[str, tuple[int, ...]]:
        return {"weight": (dims.rows, dims.cols)}


gnet, stochastic = GNet, Stochastic
