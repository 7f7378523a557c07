"""Trained numbers as a file stores them: in a narrower dtype of floating point, or as codes of 2 to 8 bits.

    number = scale * (code - zero point)        0 <= code, zero point < 2 ** bits

Codes are an affine quantisation (B. Jacob et al., 2018). Each block of a leaf has a scale and a zero point; a block is
the fewest last dimensions with `BLOCK` numbers or more, otherwise the whole leaf. Every block represents zero exactly,
and rounding twice changes nothing. Beside codes, direct vectors (biases, norms), few but sensitive, are float16, and so
are running means of norms, unless one is too far from zero for its deviation; running variances are bfloat16.

Suffixes: N blocks, K numbers of a block.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gbfunc.trees import BUFFERS, DIRECT
from gbfunc.types import DTYPES, Params, TensorMap, dtype_name

BITS = {f"int{bits}": bits for bits in range(2, 9)}  # Of a code, by the name of its dtype
STORED_DTYPES = {name: DTYPES[name] for name in ("float32", "float16", "bfloat16")}
"""Dtypes of floating point that trained leaves may be stored in instead of the plan's."""

StoredDtype = str | torch.dtype
"""A key of `STORED_DTYPES` or `BITS`, or torch's dtype of that name."""

BLOCK = 64

# Running statistics by torch's names for them: variances need range, means precision.
_STATS = {"running_mean": torch.float16, "running_var": torch.bfloat16}


class Codes(NamedTuple):
    """A leaf in codes [N, K], with scales [N] in bfloat16 (which has float32's range) and zero points [N]."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor


def stored_name(dtype: StoredDtype, what: str = "dtype") -> str:
    """The name of a dtype that leaves may be stored in; `ValueError` for any other."""
    name = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if not isinstance(name, str) or name not in {**STORED_DTYPES, **BITS}:
        raise ValueError(f"{what} must be None or one of {', '.join((*STORED_DTYPES, *BITS))}, got {dtype!r}")
    return name


def stored_dtype(name: str, leaf: Tensor, dtype: str | None, narrow: bool = True) -> torch.dtype | None:
    """The dtype in a file of a leaf or buffer, None for codes; `narrow`: statistics in 16 bits beside codes."""
    buffer = name.startswith(BUFFERS)
    if dtype is None or not leaf.is_floating_point() or (buffer and not (narrow and dtype in BITS and is_stat(name))):
        return leaf.dtype
    if not buffer and dtype in BITS and not (name.startswith(DIRECT) and leaf.ndim < 2):
        return None
    wanted = _STATS[name.rpartition(".")[2]] if buffer else STORED_DTYPES.get(dtype, torch.float16)
    return min(leaf.dtype, wanted, key=lambda d: d.itemsize)


def is_stat(name: str) -> bool:
    """Whether a buffer is a running statistic of a norm."""
    return name.startswith(BUFFERS) and name.rpartition(".")[2] in _STATS


def narrow_stats(leaves: TensorMap) -> bool:
    """Whether 16 bits are enough for running statistics: no mean is off by more than 1/64 of the deviation."""
    for name, x in leaves.items():
        if not is_stat(name):
            continue
        if name.endswith("running_var"):
            fits = x.bfloat16().isfinite()
        else:
            variance = leaves.get(name.removesuffix("mean") + "var")
            deviation = torch.zeros_like(x) if variance is None else variance.to(x.dtype).sqrt()
            # False for NaN.
            fits = (x - x.half().to(x.dtype)).abs() <= deviation / 64
        if not bool(fits.all()):
            return False
    return True


def block_size(shape: tuple[int, ...]) -> int:
    """Numbers with a common scale, 0 for an empty leaf."""
    sizes = (math.prod(shape[i:]) for i in range(len(shape), -1, -1))
    return next((size for size in sizes if size >= BLOCK), math.prod(shape))


def encode(leaf: Tensor, bits: int) -> Codes:
    """Quantise a leaf."""
    x_NK = leaf.detach().float().reshape(-1, max(1, block_size(tuple(leaf.shape))))
    most = 2**bits - 1
    low_N, high_N = x_NK.amin(1).clamp(max=0), x_NK.amax(1).clamp(min=0)
    step_N = (high_N - low_N) / most
    # Towards zero, so that the first and the last code are used.
    scales = (step_N.view(torch.int32) >> 16 << 16).view(torch.float32)
    unit_N1 = torch.where(scales > 0, scales, 1.0)[:, None]
    zeros_N1 = (-low_N[:, None] / unit_N1).round().clamp(max=most)
    codes_NK = ((x_NK / unit_N1).round() + zeros_N1).clamp(0, most)
    return Codes(codes_NK.to(torch.uint8), scales.bfloat16(), zeros_N1[:, 0].to(torch.uint8))


def decode(coded: Codes, like: Tensor) -> Tensor:
    """Undo `encode`, in the shape and dtype of `like`."""
    steps_NK = coded.codes.float() - coded.zeros.float()[:, None]
    return (coded.scales.float()[:, None] * steps_NK).reshape(like.shape).to(like.dtype)


def rounded(leaves: TensorMap, dtype: StoredDtype) -> Params:
    """Leaves and buffers, by name, as they come back from a file of a dtype; gradients go straight through."""
    wanted, narrow, made = stored_name(dtype), narrow_stats(leaves), dict(leaves)
    for name, leaf in leaves.items():
        stored, x = stored_dtype(name, leaf, wanted, narrow), leaf.detach()
        if stored != leaf.dtype:
            value = decode(encode(x, BITS[wanted]), x) if stored is None else x.to(stored).to(x.dtype)
            # Straight through (Bengio et al., 2013): the value, with the gradient of the leaf.
            made[name] = value + (leaf - x)
    return made
