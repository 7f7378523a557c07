"""The tile of a ReLU g-net as plain broadcast expressions: the definition that every other form must agree with.

`W[i, j] = b + sum_h v[h] relu(A[i, h] + B[j, h])`, with `A` and `B` the halves of what the first layer feeds its ReLU.

Suffixes: T tiles; r, c rows and columns of a tile; H hidden units. Memory is O(T r c H).
"""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Precision of the sums over inputs of `dtype`: float32 for half precisions, else `dtype` itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def reference_tiles(A: Tensor, B: Tensor, v: Tensor, b: Tensor) -> Tensor:
    """Generate tiles by their definition: [..., r, H], [..., c, H], [..., H], [...] -> [..., r, c]."""
    A_rH, B_cH, v_H, b_11 = (x.to(compute_dtype(A.dtype)) for x in (A, B, v, b[..., None, None]))
    hidden_rcH = torch.relu(A_rH.unsqueeze(-2) + B_cH.unsqueeze(-3))
    return ((hidden_rcH * v_H.unsqueeze(-2).unsqueeze(-2)).sum(-1) + b_11).to(A.dtype)


def traced_tiles(A: Tensor, B: Tensor, v: Tensor, b: Tensor) -> Tensor:
    """Generate tiles as compiles best, `W[i, j] = b + sum_h [A + B > 0] (v[h] A[i, h] + v[h] B[j, h])`.

    It is linear in everything but the activity, so what automatic differentiation makes of it are the two sums of the
    hand-derived backward pass, and a compiler fuses both: half the time that the plain expression takes.
    """
    A_rH, B_cH, v_1H = (x.to(compute_dtype(A.dtype)) for x in (A, B, v.unsqueeze(-2)))
    active_rcH = A_rH.unsqueeze(-2) + B_cH.unsqueeze(-3) > 0
    terms_rcH = (A_rH * v_1H).unsqueeze(-2) + (B_cH * v_1H).unsqueeze(-3)
    return (torch.where(active_rcH, terms_rcH, 0).sum(-1) + b[..., None, None].to(terms_rcH.dtype)).to(A.dtype)
