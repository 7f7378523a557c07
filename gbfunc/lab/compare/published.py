"""Published networks in few bytes, for the figure of a comparison: accuracy on the test split, as papers report it.

None was run here, and data, training and what counts as a byte are the authors'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Published(NamedTuple):
    """A method's networks of one kind."""

    method: str
    network: str
    source: str  # arXiv number, or where else it is
    points: tuple[tuple[int, float], ...]  # bytes, and test accuracy in %
    remark: str = ""

    @property
    def label(self) -> str:
        """For a legend."""
        return f"{self.method}, {self.network} ({self.source}{', ' if self.remark else ''}{self.remark})"


_PENALISED, _LATER = "entropy-penalised reparametrisation", "as quoted by later work"

PUBLISHED: Mapping[str, tuple[Published, ...]] = {
    "mnist": (
        Published("MIRACLE", "LeNet-5", "arXiv 1810.00440", ((1_520, 99.04), (3_030, 99.31))),
        Published("Bayesian compression", "LeNet-5", "arXiv 1705.08665", ((2_300, 99.0),)),
        Published(_PENALISED, "LeNet-5", "arXiv 1906.06624", ((2_840, 99.0),)),
        Published(_PENALISED, "LeNet-300-100", "arXiv 1906.06624", ((8_560, 98.1),)),
        Published("Weightless", "LeNet-5", "arXiv 1711.04686", ((4_520, 99.0),)),
        Published("Deep Compression", "LeNet-5", "arXiv 1510.00149", ((44_000, 99.2),)),
        Published("AI-to-QR-Code", "own net", "github.com/LewisLee26/AI-to-QR-Code", ((2_579, 92.0),)),
    ),
    "cifar10": (
        Published(
            "tiny-cifar",
            "own nets",
            "github.com/Rome-1/tiny-cifar",
            ((930, 43.8), (3_900, 61.4), (5_200, 75.7), (12_200, 81.7), (38_900, 85.1)),
            "some chosen on test images",
        ),
        Published("uNAS", "own net", "arXiv 2010.14246", ((11_400, 86.5),), _LATER),
        Published("LilNetX", "ResNet-20-4", "arXiv 2204.02965", ((66_000, 91.5),), _LATER),
        Published("LilNetX", "VGG-16", "arXiv 2204.02965", ((76_000, 90.0),), _LATER),
        Published(_PENALISED, "VGG-16", "arXiv 1906.06624", ((101_000, 90.0),)),
        Published(_PENALISED, "ResNet-20-4", "arXiv 1906.06624", ((128_000, 91.2),)),
    ),
}
"""By the task's name; each read in its source unless its remark says otherwise."""
