"""Rounding of trained numbers for storage: to a narrower floating-point dtype, or to codes of 2 to 8 bits.

    number = scale * (code - zero point)        0 <= code, zero point < 2 ** bits

Codes are an affine quantisation (B. Jacob et al., 2018). A leaf is divided into blocks, each with a scale and a zero
point. A block spans as few of the last dimensions as contain at least `BLOCK` numbers. A smaller leaf is one block.
Zero is represented exactly, and rounding a second time changes nothing. If leaves are stored in codes, direct vectors
(biases, norms) are float16, because errors in these vectors matter most. Running means are float16 and running
variances bfloat16, unless 16 bits do not suffice (`narrow_stats`).

Suffixes: N blocks, K numbers per block.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gbfunc.trees import BUFFERS, DIRECT
from gbfunc.types import DTYPES, Params, TensorMap, dtype_name

BITS = {f"int{bits}": bits for bits in range(2, 9)}  # Bits of a code by the name of the dtype
# Floating-point dtypes in which leaves can be stored
STORED_DTYPES = {name: DTYPES[name] for name in ("float32", "float16", "bfloat16")}
StoredDtype = str | torch.dtype  # A key of `STORED_DTYPES` or `BITS`, or a torch dtype whose name is a key
BLOCK = 64  # Minimum number of numbers in a block

# Dtypes of running statistics in 16 bits: bfloat16 has the range that variances need, float16 the precision for means.
_STATS = {"running_mean": torch.float16, "running_var": torch.bfloat16}


class Codes(NamedTuple):
    """A leaf as codes [blocks, numbers], with a bfloat16 scale [blocks] and a zero point [blocks] per block."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor


def stored_name(dtype: StoredDtype, what: str = "dtype") -> str:
    """Returns the name of a dtype, such as "int8"; raises ValueError for a dtype in which leaves cannot be stored."""
    name = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if not isinstance(name, str) or name not in {**STORED_DTYPES, **BITS}:
        raise ValueError(f"{what} must be None or one of {', '.join((*STORED_DTYPES, *BITS))}, got {dtype!r}")
    return name


def stored_dtype(name: str, leaf: Tensor, dtype: str | None, narrow: bool = True) -> torch.dtype | None:
    """Returns a leaf's dtype in files of `dtype`, None for codes. `narrow` permits running statistics of 16 bits."""
    buffer = name.startswith(BUFFERS)
    if dtype is None or not leaf.is_floating_point() or (buffer and not (narrow and dtype in BITS and is_stat(name))):
        return leaf.dtype
    if not buffer and dtype in BITS and not (name.startswith(DIRECT) and leaf.ndim < 2):
        return None
    wanted = _STATS[name.rpartition(".")[2]] if buffer else STORED_DTYPES.get(dtype, torch.float16)
    return min(leaf.dtype, wanted, key=lambda d: d.itemsize)


def is_stat(name: str) -> bool:
    return name.startswith(BUFFERS) and name.rpartition(".")[2] in _STATS


def narrow_stats(leaves: TensorMap) -> bool:
    """Returns True if 16 bits suffice for finite variances, and for means with an error of 1/64 standard deviation."""
    for name, x in leaves.items():
        if not is_stat(name):
            continue
        if name.endswith("running_var"):
            fits = x.bfloat16().isfinite()
        else:
            variance = leaves.get(name.removesuffix("mean") + "var")
            deviation = torch.zeros_like(x) if variance is None else variance.to(x.dtype).sqrt()
            # A NaN makes the comparison False, so NaN does not fit.
            fits = (x - x.half().to(x.dtype)).abs() <= deviation / 64
        if not bool(fits.all()):
            return False
    return True


def block_size(shape: tuple[int, ...]) -> int:
    """Returns the number of neighbouring numbers that share a scale, in a leaf of this shape; 0 for an empty leaf."""
    sizes = (math.prod(shape[i:]) for i in range(len(shape), -1, -1))
    return next((size for size in sizes if size >= BLOCK), math.prod(shape))


def encode(leaf: Tensor, bits: int) -> Codes:
    x_NK = leaf.detach().float().reshape(-1, max(1, block_size(tuple(leaf.shape))))
    most = 2**bits - 1
    low_N, high_N = x_NK.amin(1).clamp(max=0), x_NK.amax(1).clamp(min=0)
    step_N = (high_N - low_N) / most
    # Round scales to bfloat16 towards zero: a larger scale would leave the first or the last code unused.
    scales = (step_N.view(torch.int32) >> 16 << 16).view(torch.float32)
    unit_N1 = torch.where(scales > 0, scales, 1.0)[:, None]
    zeros_N1 = (-low_N[:, None] / unit_N1).round().clamp(max=most)
    codes_NK = ((x_NK / unit_N1).round() + zeros_N1).clamp(0, most)
    return Codes(codes_NK.to(torch.uint8), scales.bfloat16(), zeros_N1[:, 0].to(torch.uint8))


def decode(coded: Codes, like: Tensor) -> Tensor:
    steps_NK = coded.codes.float() - coded.zeros.float()[:, None]
    return (coded.scales.float()[:, None] * steps_NK).reshape(like.shape).to(like.dtype)


def rounded(leaves: TensorMap, dtype: StoredDtype) -> Params:
    """Rounds leaves and buffers as a file of this dtype does; backward ignores the rounding."""
    wanted, narrow, results = stored_name(dtype), narrow_stats(leaves), dict(leaves)
    for name, leaf in leaves.items():
        stored, x = stored_dtype(name, leaf, wanted, narrow), leaf.detach()
        if stored != leaf.dtype:
            value = decode(encode(x, BITS[wanted]), x) if stored is None else x.to(stored).to(x.dtype)
            # Straight-through estimator (Bengio et al., 2013): the rounded value, with the gradient of the leaf.
            results[name] = value + (leaf - x)
    return results
