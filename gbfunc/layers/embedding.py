"""Tensors that are generated only by name: embeddings, vectors, and any other tensor of two or more dimensions."""

from __future__ import annotations

import math

from torch import nn

from gbfunc.layers.base import LayerKind, Shape
from gbfunc.layers.conv import conv_fold, conv_matrices, conv_unfold
from gbfunc.types import MatrixDims


def _is_embedding(module: nn.Module, attribute: str, shape: Shape) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and attribute == "weight"


EMBEDDING = LayerKind("embedding", False, _is_embedding, conv_matrices, conv_fold, conv_unfold)

VECTOR = LayerKind(
    "vector",
    False,
    lambda module, attribute, shape: len(shape) < 2,
    # One row an entry and a single column, which needs no code. A scalar is a vector of one.
    lambda s: (MatrixDims(math.prod(s), 1),),
    lambda m, s: m[0].reshape(s),
    lambda weight: [weight.reshape(-1, 1)],
)

MATRIX = LayerKind("matrix", False, lambda module, attribute, shape: True, conv_matrices, conv_fold, conv_unfold)
