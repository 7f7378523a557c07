"""The forward of `nn.MultiheadAttention` on projections in any form.

Suffixes: T targets, S sources, N batch, H heads, E embedding, D = E / H.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gbfunc.layers.forms import Weight, dense_linear, weight_of


def attention_forward(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`nn.MultiheadAttention.forward` on generated projections."""
    options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
    if not _is_usual(layer, query, key, value, key_padding_mask, attn_mask) or (is_causal and attn_mask is None):
        return nn.MultiheadAttention.forward(layer, query, key, value, *options)
    packed = layer._qkv_same_embed_dim
    itself = query is key and key is value
    if layer.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    bias = layer.in_proj_bias
    if packed and itself:
        q, k, v = project(layer, "in_proj_weight", query, bias).chunk(3, dim=-1)
    else:
        biases = (None, None, None) if bias is None else bias.chunk(3)
        e = layer.embed_dim
        names = ("in_proj_weight",) * 3 if packed else ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        rows = [slice(i * e, (i + 1) * e) if packed else None for i in range(3)]
        parts = zip(names, (query, key, value), biases, rows, strict=True)
        q, k, v = (project(layer, name, x, b, r) for name, x, b, r in parts)
    use_hint = is_causal and key_padding_mask is None and not need_weights
    mask = None if use_hint else _merge_masks(attn_mask, key_padding_mask, layer.num_heads, query.dtype)
    dropout = layer.dropout if layer.training else 0.0
    # Scaled dot-product attention (Vaswani et al. 2017, eq. 1): [T or S, N, E] -> [N, H, T or S, D] -> [N, H, T, D].
    heads, weights = layer.num_heads, None
    q, k, v = (x.unflatten(-1, (heads, x.shape[-1] // heads)).permute(1, 2, 0, 3) for x in (q, k, v))
    if need_weights:
        scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.mT
        weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        weights = F.dropout(weights, dropout) if dropout > 0.0 else weights
        mixed = weights @ v
        weights = weights.mean(dim=1) if average_attn_weights else weights
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, use_hint)
    mixed = mixed.permute(2, 0, 1, 3).reshape(query.shape)
    out = project(layer.out_proj, "weight", mixed, layer.out_proj.bias)
    return (out.transpose(0, 1) if layer.batch_first else out), weights


def _is_usual(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
) -> bool:
    """Whether inputs and masks are a batch of usual shapes; otherwise torch's forward runs."""
    if any(x.is_nested or x.ndim != 3 for x in (query, key, value)) or query.shape[-1] != layer.embed_dim:
        return False
    (targets, rows), (sources, others) = ((x.shape[:2][:: -1 if layer.batch_first else 1]) for x in (query, key))
    masks = [x for x in (key_padding_mask, attn_mask) if x is not None]
    return (
        rows == others
        and key.shape[:2] == value.shape[:2]
        and all(x.dtype == torch.bool or x.is_floating_point() for x in masks)
        and (key_padding_mask is None or key_padding_mask.shape == (rows, sources))
        and (attn_mask is None or attn_mask.shape in ((targets, sources), (rows * layer.num_heads, targets, sources)))
    )


def project(layer: Any, attribute: str, x: Tensor, bias: Tensor | None, rows: slice | None = None) -> Tensor:
    """`x @ W[rows].T + bias` with a weight of a layer in any form."""
    weight = weight_of(layer, attribute)
    if isinstance(weight, Weight):
        return weight.linear(x, bias, rows)
    return dense_linear(getattr(layer, attribute) if weight is None else weight, False, rows, x, bias)


def _merge_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """Add masks [T, S] or [N * H, T, S], and [N, S] of the keys: -> broadcasts to [N, H, T, S]."""

    def additive(mask: Tensor) -> Tensor:
        if mask.dtype != torch.bool:
            return mask.to(dtype)
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)

    if attn_mask is not None:
        attn_mask = additive(attn_mask if attn_mask.ndim == 2 else attn_mask.unflatten(0, (-1, heads)))
    if key_padding_mask is None:
        return attn_mask
    keys = additive(key_padding_mask)[:, None, None, :]
    return keys if attn_mask is None else attn_mask + keys
