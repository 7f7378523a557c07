"""Tensors that are generated only by name: embeddings, vectors, and any other tensor of two or more dimensions."""

from __future__ import annotations

import math

from torch import nn

from gbfunc.layers.base import LayerKind
from gbfunc.types import MatrixDims

EMBEDDING = LayerKind(
    "embedding",
    False,
    lambda module, attribute, shape: isinstance(module, nn.Embedding | nn.EmbeddingBag) and attribute == "weight",
)

VECTOR = LayerKind(
    "vector",
    False,
    lambda module, attribute, shape: len(shape) < 2,
    # One row an entry and a single column, which needs no code. A scalar is a vector of one.
    matrices=lambda s: (MatrixDims(math.prod(s), 1),),
    unfold=lambda weight: [weight.reshape(-1, 1)],
)

MATRIX = LayerKind("matrix", False, lambda module, attribute, shape: True)
