"""Generation of tiles at the machine's limit: ReLU tiles and sines by native operators, row blocks for other g-nets."""

from gbfunc.hypernets.kernels.chunked import chunked_apply
from gbfunc.hypernets.kernels.relu import relu_matrix

__all__ = ["chunked_apply", "relu_matrix"]
