r"""Stochastic g-nets: a mean and a log standard deviation per weight, drawn by reparameterisation.

$w = \mu + e^{s} \epsilon$, $\epsilon \sim N(0, 1)$ (Kingma and Welling, Auto-encoding variational Bayes, 2014, eq. 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gbfunc.hypernets.base import Hypernet, Leaf
from gbfunc.hypernets.mlp import GNet, check_mlp
from gbfunc.types import Kernel, Params, TileDims

_INITIAL_LOG_SIGMA = -3.0


@dataclass(frozen=True)
class Stochastic(GNet):
    """See `stochastic`."""

    type: ClassVar[str] = "stochastic"
    stochastic: ClassVar[bool] = True

    def _head(self, width: int) -> dict[str, Leaf]:
        spread = {"log_sigma_weight": Leaf((width,), "code"), "log_sigma_bias": Leaf((), "code")}
        return super()._head(width) | spread

    def init(self, dims: TileDims, n_tiles: int, n_groups: int, generator: torch.Generator) -> Params:
        """As `GNet.init`; every weight's deviation starts at exp(-3), 5 % of the weights' own."""
        drawn = super().init(dims, n_tiles, n_groups, generator)
        drawn["log_sigma_weight"] = torch.zeros_like(drawn["log_sigma_weight"])
        drawn["log_sigma_bias"] = torch.full_like(drawn["log_sigma_bias"], _INITIAL_LOG_SIGMA)
        return drawn

    def noise_shapes(self, dims: TileDims) -> dict[str, tuple[int, ...]]:
        """One number a weight."""
        return {"weight": (dims.rows, dims.cols)}

    def apply(
        self,
        leaves: Params,
        row_codes_rp: Tensor,
        col_codes_cq: Tensor,
        *,
        noise: Params | None = None,
        kernel: Kernel = "auto",
    ) -> Tensor:
        """The tile [r, c]: a draw with noise, the mean without."""
        mean = self._mean(leaves, row_codes_rp, col_codes_cq, "out", kernel)
        if noise is None:
            return mean
        log_sigma = self._mean(leaves, row_codes_rp, col_codes_cq, "log_sigma", kernel)
        return mean + torch.exp(log_sigma) * noise["weight"]


def stochastic(hidden: tuple[int, ...] | None = None, activation: str = "relu") -> Hypernet:
    """An MLP with two heads: weights are drawn in training (noise is an argument) and at their mean in evaluation.

    Args:
        hidden: as for `gnet`.
        activation: as for `gnet`.

    Raises:
        ValueError: for options out of range.
    """
    return Stochastic(check_mlp(hidden, activation), activation)
