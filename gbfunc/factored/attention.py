"""Multi-head attention whose lazy projection weights are applied and not formed.

Shape suffixes: T targets, S sources, N batch, H heads, E embedding, D = E / H.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gbfunc.factored.interface import densified
from gbfunc.factored.operations import chunk, linear


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """`F.multi_head_attention_forward` with lazy projections; the same signature.

    Returns:
        The output [T, N, E] and the attention weights or None; NotImplemented for unbatched input and for the
        rare options (bias_k, bias_v, add_zero_attn, static_k, static_v).
    """
    rare = (bias_k, bias_v, static_k, static_v)
    if add_zero_attn or any(t is not None for t in rare) or query.ndim != 3 or (is_causal and attn_mask is None):
        return NotImplemented
    if query.shape[-1] != embed_dim_to_check or embed_dim_to_check % num_heads:
        return NotImplemented
    if in_proj_weight is not None and query is key and key is value:
        q, k, v = _project(query, in_proj_weight, in_proj_bias).chunk(3, dim=-1)
    else:
        separate: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
        weights = separate if in_proj_weight is None else _thirds(in_proj_weight)
        biases = (None, None, None) if in_proj_bias is None else _thirds(in_proj_bias)
        q, k, v = (_project(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    use_hint = is_causal and key_padding_mask is None and not need_weights
    mask = None if use_hint else _merge_masks(attn_mask, key_padding_mask, num_heads, query.dtype)
    dropout = dropout_p if training else 0.0
    mixed, scores = _attend(q, k, v, num_heads, mask, dropout, use_hint, need_weights)
    if scores is not None and average_attn_weights:
        scores = scores.mean(dim=1)
    return _project(mixed, out_proj_weight, out_proj_bias), scores


def _project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` that calls a lazy weight by itself (see `operations`)."""
    result = linear(x, weight, bias)
    if result is NotImplemented:
        return F.linear(x, densified(weight, "linear"), densified(bias, "linear"))
    return result


def _thirds(packed: Tensor) -> Any:
    """The query, key and value rows of a packed weight or bias: [3E, ...] -> three [E, ...]."""
    blocks = chunk(packed, 3)
    return densified(packed, "chunk").chunk(3) if blocks is NotImplemented else blocks


def _attend(
    q_TNE: Tensor,
    k_SNE: Tensor,
    v_SNE: Tensor,
    heads: int,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """Scaled dot-product attention (Vaswani et al. 2017, eq. 1) of projected inputs.

    Args:
        q_TNE: Queries [T, N, E].
        k_SNE: Keys [S, N, E].
        v_SNE: Values [S, N, E].
        heads: Number of heads, a divisor of E.
        mask: Additive mask that broadcasts to [N, H, T, S], or None.
        dropout: Probability of dropping an attention weight.
        is_causal: Mask the future, in place of `mask`.
        need_weights: Return the attention weights too.

    Returns:
        The mixed values [T, N, E], and the attention weights [N, H, T, S] or None.
    """
    q, k, v = (_split_heads(t, heads) for t in (q_TNE, k_SNE, v_SNE))
    weights = None
    if need_weights:
        scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.mT
        weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        weights = F.dropout(weights, dropout) if dropout > 0.0 else weights
        mixed_NHTD = weights @ v
    else:
        mixed_NHTD = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
    return mixed_NHTD.permute(2, 0, 1, 3).reshape(q_TNE.shape), weights


def _merge_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """Add masks [T, S] or [N * H, T, S], and [N, S] of the keys: -> broadcasts to [N, H, T, S]."""
    mask = None
    if attn_mask is not None:
        mask = _additive(attn_mask, dtype)
        mask = mask if mask.ndim == 2 else mask.unflatten(0, (-1, heads))
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, dtype)[:, None, None, :]
        mask = padding if mask is None else mask + padding
    return mask


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """[L, N, E] -> [N, H, L, D]."""
    return x.unflatten(-1, (heads, x.shape[-1] // heads)).permute(1, 2, 0, 3)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask (True: hidden) as 0 and -inf; a float mask as it is."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)
