"""Stores running means and variances of norms as integers times quantization steps, like trained numbers (`steps`).

A norm subtracts the mean and divides by the standard deviation sigma. The effect of a wrong mean depends on the error
divided by sigma, and so does the effect of a wrong sigma. Therefore files have u instead of a mean or variance:

    variance   u = ln(variance + 2^-16) / 2
    mean       u = mean / e^u'                 u' is the decoded u of the variance

If the norm's weight is 1, an error in u changes the output about as much as an equal error in the norm's bias:
`squares_of` uses the bias's gradient. Then a file has the norms' counters of batches, each minus the previous counter.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gbfunc.formats.symbols import Entry, Reader
from gbfunc.trees import BUFFERS, DIRECT
from gbfunc.types import Params, TensorMap

MEAN, VARIANCE, COUNTER = "running_mean", "running_var", "num_batches_tracked"
LEAST_VARIANCE = 2.0**-16
_WORD, _SIZE = 16, 64  # Bits of a word, and of a counter, which is written as up to four words
FARTHEST = 128.0  # Largest mean that can be stored, in standard deviations


def statistics_of(plan: Any) -> list[str]:
    """Lists the names of running variances, and then of running means, of all norms that have both."""
    names = {f"{BUFFERS}{b.name}" for b in plan.buffers if b.dtype.startswith(("float", "bfloat"))}
    variances = [k for k in sorted(names) if kind_of(k) == VARIANCE and sibling(k, MEAN) in names]
    return variances + [sibling(k, MEAN) for k in variances]


def counters_of(plan: Any) -> list[str]:
    scalars = (b for b in plan.buffers if b.dtype == "int64" and not b.shape)
    return sorted(f"{BUFFERS}{b.name}" for b in scalars if kind_of(b.name) == COUNTER)


def kind_of(name: str) -> str:
    return name.rpartition(".")[2]


def sibling(name: str, kind: str) -> str:
    return name.removesuffix(kind_of(name)) + kind


def codable(plan: Any, leaves: TensorMap) -> bool:
    """Returns True if the leaves have running statistics, and no statistic is nonfinite or too extreme to be stored."""
    names = statistics_of(plan)
    if not names or not leaves.keys() >= {*names}:
        return False
    for name in names:
        if kind_of(name) == VARIANCE:
            mean, variance = leaves[sibling(name, MEAN)].double(), leaves[name].double()
            near = mean.abs() <= FARTHEST * (variance + LEAST_VARIANCE).sqrt()
            # A NaN makes the comparisons False, so NaN cannot be stored.
            if not bool(((variance >= 0) & variance.isfinite() & near).all()):
                return False
    return True


def squares_of(name: str, leaves: TensorMap, squares: TensorMap) -> Tensor | None:
    """Estimates a statistic's mean squared gradient from the squared gradient of the norm's bias; None without bias."""
    module = name.removeprefix(BUFFERS)
    shift, scale = (f"{DIRECT}{sibling(module, kind)}" for kind in ("bias", "weight"))
    if shift not in squares or squares[shift].shape != leaves[name].shape:
        return None
    return squares[shift] * leaves[scale] ** 2 if scale in leaves else squares[shift]


def encode_statistic(name: str, leaf: Tensor, variances: Mapping[str, Tensor]) -> Tensor:
    """Transforms a mean or variance to u (see the module). For a mean, `variances` has the variance's rounded u."""
    x = leaf.double()
    if kind_of(name) == VARIANCE:
        return (x.clamp(min=0) + LEAST_VARIANCE).log() / 2
    return x / variances[sibling(name, VARIANCE)].exp()


def decode_statistic(name: str, u: Tensor, variances: Mapping[str, Tensor]) -> Tensor:
    if kind_of(name) == VARIANCE:
        return ((2 * u).exp() - LEAST_VARIANCE).clamp(min=0).float()
    return (u * variances[sibling(name, VARIANCE)].exp()).float()


def counter_entries(counters: Iterable[Tensor]) -> Iterator[list[Entry]]:
    before = 0
    for counter in counters:
        difference, before = (int(counter) - before) % (1 << _SIZE), int(counter)
        size = difference.bit_length()
        words = [difference >> low & ((1 << _WORD) - 1) for low in range(0, size, _WORD)]
        yield [(size, 1, _SIZE + 1), *((word, 1, 1 << _WORD) for word in words)]


def read_counters(reader: Reader, names: Iterable[str]) -> Params:
    found, before = {}, 0
    for name in names:
        size = reader.next(range(_SIZE + 2))
        words = reader.read([range((1 << _WORD) + 1)] * -(-size // _WORD))
        difference = sum(word << (_WORD * i) for i, word in enumerate(words))
        if difference.bit_length() != size:
            raise ValueError(f"{name!r} declares {size} bits and has {difference.bit_length()}")
        before = (before + difference) % (1 << _SIZE)
        found[name] = torch.tensor(before - (before >> (_SIZE - 1) << _SIZE), device="cpu")
    return found
