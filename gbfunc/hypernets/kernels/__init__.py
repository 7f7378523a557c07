"""Generation of tiles at the machine's limit: the fused ReLU tile, and row blocks for every other g-net."""

from gbfunc.hypernets.kernels.chunked import chunked_apply
from gbfunc.hypernets.kernels.relu_tile import relu_matrix, relu_tiles

__all__ = ["chunked_apply", "relu_matrix", "relu_tiles"]
