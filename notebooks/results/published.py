"""Published networks of few bytes, for the figure of `rivals.py`: test accuracies that papers report.

No network was run here. Data, training and the way of counting bytes are those of the papers.
"""

from __future__ import annotations

from collections.abc import Mapping

PUBLISHED: Mapping[str, Mapping[str, tuple[tuple[int, float], ...]]] = {
    "mnist": {
        "MIRACLE, LeNet-5 (arXiv 1810.00440)": ((1_520, 99.04), (3_030, 99.31)),
        "Bayesian compression, LeNet-5 (arXiv 1705.08665)": ((2_300, 99.0),),
        "entropy-penalised reparametrisation, LeNet-5 (arXiv 1906.06624)": ((2_840, 99.0),),
        "entropy-penalised reparametrisation, LeNet-300-100 (arXiv 1906.06624)": ((8_560, 98.1),),
        "Weightless, LeNet-5 (arXiv 1711.04686)": ((4_520, 99.0),),
        "Deep Compression, LeNet-5 (arXiv 1510.00149)": ((44_000, 99.2),),
        "AI-to-QR-Code, own net (github.com/LewisLee26/AI-to-QR-Code)": ((2_579, 92.0),),
    },
    "cifar10": {
        "tiny-cifar, own nets (github.com/Rome-1/tiny-cifar, some chosen on test images)": (
            (930, 43.8),
            (3_900, 61.4),
            (5_200, 75.7),
            (12_200, 81.7),
            (38_900, 85.1),
        ),
        "uNAS, own net (arXiv 2010.14246, as quoted by later work)": ((11_400, 86.5),),
        "LilNetX, ResNet-20-4 (arXiv 2204.02965, as quoted by later work)": ((66_000, 91.5),),
        "LilNetX, VGG-16 (arXiv 2204.02965, as quoted by later work)": ((76_000, 90.0),),
        "entropy-penalised reparametrisation, VGG-16 (arXiv 1906.06624)": ((101_000, 90.0),),
        "entropy-penalised reparametrisation, ResNet-20-4 (arXiv 1906.06624)": ((128_000, 91.2),),
    },
}
"""Bytes and test accuracy in %, by task and label. The source is the cited paper unless the label says otherwise."""
