"""Sparse matrices as entropy-coded bytes: where the entries are, then what they are, by one range coder.

Positions are coded row by row, each column with the density that the rows above had there, which the reader knows too;
magnitudes lie on equal steps from the smallest to the largest of a matrix, and are coded by their counts.

Suffixes: R rows and C columns of a matrix, K entries that are not zero, V values that they take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import Tensor

from gbfunc.types import Params

if TYPE_CHECKING:
    from types import ModuleType

_PRIOR = 2.0
"""Rows that the overall density counts as, beside those above."""


def encode_sparse(state: Mapping[str, Tensor], bits: int) -> bytes:
    """Matrices [R, C] coded, vectors as float16; in a safetensors file.

    Args:
        state: parameters by name; matrices are mostly zeros.
        bits: of a value, sign included.
    """
    coder = _constriction().stream.queue.RangeEncoder()
    stored: Params = {}
    for name, tensor in state.items():
        if tensor.ndim != 2:
            stored[name] = tensor.detach().half()
            continue
        values_RC = tensor.detach().numpy()
        mask_RC = values_RC != 0
        symbols_K, ends, counts_V = _to_symbols(values_RC[mask_RC], bits)
        density = torch.tensor([mask_RC.mean()]).half()
        for mask_C, odds_C in zip(mask_RC, _densities(mask_RC, float(density)), strict=True):
            coder.encode(mask_C.astype(np.int32), _bernoulli(), odds_C)
        if len(symbols_K):
            coder.encode(symbols_K, _categorical(counts_V))
        # The reader learns how many entries there are from the mask.
        stored |= {f"{name}.ends": ends, f"{name}.density": density, f"{name}.counts": torch.from_numpy(counts_V)}
    words = np.asarray(coder.get_compressed())
    return save(stored | {"code": torch.from_numpy(words.view(np.uint8).copy())})


def decode_sparse(data: bytes, shapes: Mapping[str, tuple[int, int]]) -> Params:
    """Undo `encode_sparse`, up to the rounding of values.

    Args:
        data: what it gave.
        shapes: of the matrices, in the order in which they were coded.
    """
    tensors = load(data)
    coder = _constriction().stream.queue.RangeDecoder(tensors.pop("code").numpy().view(np.uint32))
    state = {name: t.float() for name, t in tensors.items() if name.count(".") == 1}
    for name, shape in shapes.items():
        mask_RC = np.zeros(shape, bool)
        # Each row's densities are asked for when the rows above are there.
        for row, odds_C in enumerate(_densities(mask_RC, float(tensors[f"{name}.density"]))):
            mask_RC[row] = coder.decode(_bernoulli(), odds_C)
        counts_V, values_RC = tensors[f"{name}.counts"].numpy(), np.zeros(shape, np.float32)
        if n := int(mask_RC.sum()):
            symbols_K = coder.decode(_categorical(counts_V), n)
            values_RC[mask_RC] = _from_symbols(symbols_K, tensors[f"{name}.ends"], len(counts_V))
        state[name] = torch.from_numpy(values_RC)
    return state


def _to_symbols(values_K: NDArray[np.float32], bits: int) -> tuple[NDArray[np.int32], Tensor, NDArray[np.uint8]]:
    """Symbols (sign, then step), the smallest and largest magnitude, and how often symbols occur (0 to 255)."""
    steps = 2 ** (bits - 1)
    sizes_K = np.abs(values_K)
    ends = torch.tensor([sizes_K.min(), sizes_K.max()] if len(values_K) else [0.0, 0.0]).half()
    low, high = ends.float().tolist()
    step = max((high - low) / max(steps - 1, 1), 1e-12)
    levels_K = np.clip(np.rint((sizes_K - low) / step), 0, steps - 1).astype(np.int32)
    symbols_K = np.ascontiguousarray(np.where(values_K < 0, levels_K + steps, levels_K), np.int32)
    counts_V = np.bincount(symbols_K, minlength=2 * steps)
    return symbols_K, ends, np.ceil(255 * counts_V / max(counts_V.max(), 1)).astype(np.uint8)


def _from_symbols(symbols_K: NDArray[np.int32], ends: Tensor, n_values: int) -> NDArray[np.float32]:
    steps = n_values // 2
    low, high = ends.float().tolist()
    sizes_K = low + (high - low) / max(steps - 1, 1) * (symbols_K % steps)
    return np.where(symbols_K < steps, sizes_K, -sizes_K).astype(np.float32)


def _densities(mask_RC: NDArray[np.bool_], density: float) -> Iterator[NDArray[np.float64]]:
    """Expected part of entries in each column of each row, from the rows above."""
    above_C = np.full(mask_RC.shape[1], _PRIOR * density)
    for i, mask_C in enumerate(mask_RC):
        yield np.clip(above_C / (i + _PRIOR), 1e-4, 1 - 1e-4)
        above_C = above_C + mask_C


def _constriction() -> ModuleType:
    try:
        import constriction
    except ImportError as error:
        raise ImportError("coding pruned nets needs constriction: pip install 'gbfunc[cli]'") from error
    return constriction


def _bernoulli() -> Any:
    return _constriction().stream.model.Bernoulli(perfect=False)


def _categorical(counts_V: NDArray[np.uint8]) -> Any:
    # A symbol that never occurs still needs some probability.
    odds_V = counts_V.astype(np.float64) + 1e-3
    return _constriction().stream.model.Categorical(odds_V / odds_V.sum(), perfect=False)
