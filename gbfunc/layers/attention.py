"""`nn.MultiheadAttention` (and with it TransformerEncoder and TransformerDecoder): q, k and v are three matrices."""

from __future__ import annotations

import torch
from torch import nn

from gbfunc.layers.base import LayerKind, Shape
from gbfunc.types import MatrixDims

_SEPARATE = {"q_proj_weight": "embed_dim", "k_proj_weight": "kdim", "v_proj_weight": "vdim"}


def _is_in_proj(module: nn.Module, attribute: str, shape: Shape) -> bool:
    if not isinstance(module, nn.MultiheadAttention):
        return False
    return attribute == "in_proj_weight" and shape == (3 * module.embed_dim, module.embed_dim)


def _is_separate(module: nn.Module, attribute: str, shape: Shape) -> bool:
    if not isinstance(module, nn.MultiheadAttention) or attribute not in _SEPARATE:
        return False
    return shape == (module.embed_dim, getattr(module, _SEPARATE[attribute]))


IN_PROJ = LayerKind(
    "attention_in",
    True,
    _is_in_proj,
    lambda s: (MatrixDims(s[0] // 3, s[1]),) * 3,
    lambda m, s: torch.cat(m).reshape(s),
    lambda weight: list(weight.chunk(3)),
)

PROJ = LayerKind(
    "attention",
    True,
    _is_separate,
    lambda s: (MatrixDims(s[0], s[1]),),
    lambda m, s: m[0].reshape(s),
    lambda weight: [weight],
)
