"""Magnitude pruning: a dense net is trained, thinned out step by step and trained on; its entries are entropy-coded.

Gradual pruning by M. Zhu and S. Gupta, "To prune, or not to prune" (2017), over the middle third of the training; then
the coder itself says how many weights the budget holds. As S. Han et al., "Deep Compression" (2016), but for the coder.

Sparse matrices are bytes of one range coder: where the entries are, then what they are. Positions are coded row by row,
each column with the density that the rows above had there, which the reader knows too; magnitudes lie on equal steps
from the smallest to the largest of a matrix, and are coded by their counts.

Suffixes: R rows and C columns of a matrix, K entries that are not zero, V values that they take.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gbfunc.lab.compare import base
from gbfunc.lab.compare.base import BudgetTooSmall, Problem, Settings, Trained, grid
from gbfunc.tasks import Net, Task
from gbfunc.tasks.pnets.base import import_extra
from gbfunc.types import Params

_PRIOR = 2.0
"""Rows that the overall density counts as, beside those above."""


def encode_sparse(state: Mapping[str, Tensor], bits: int, about: Mapping[str, Any] | None = None) -> bytes:
    """Matrices [R, C], mostly of zeros, coded with so many bits a value; vectors as float16, integers as they are."""
    coder = _constriction().stream.queue.RangeEncoder()
    stored: Params = {}
    for name, tensor in state.items():
        if tensor.ndim < 2:
            stored[name] = tensor.detach().half() if tensor.is_floating_point() else tensor
            continue
        values_RC = tensor.detach().flatten(1).numpy()
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
    return base.pack(stored | {"code": torch.from_numpy(words.view(np.uint8).copy())}, torch.float16, about)


def decode_sparse(data: bytes, like: Mapping[str, Tensor], bits: int) -> Params:
    """Undo `encode_sparse`, up to the rounding of values."""
    kept: Params = {}
    for name, t in like.items():
        parts = {"ends": torch.zeros(2), "density": torch.zeros(1), "counts": torch.zeros(2**bits, dtype=torch.uint8)}
        kept |= {name: t} if t.ndim < 2 else {f"{name}.{part}": of for part, of in parts.items()}
    tensors = base.unpack(data, kept | {"code": torch.empty(0, dtype=torch.uint8)}, rest="code")
    coder = _constriction().stream.queue.RangeDecoder(tensors.pop("code").numpy().view(np.uint32))
    state: Params = {}
    for name, shape in ((name, tuple(t.shape)) for name, t in like.items()):
        if len(shape) < 2:
            state[name] = tensors[name]
            continue
        mask_RC = np.zeros((shape[0], math.prod(shape[1:])), bool)
        # Each row's densities are asked for when the rows above are there.
        for row, odds_C in enumerate(_densities(mask_RC, float(tensors[f"{name}.density"]))):
            mask_RC[row] = coder.decode(_bernoulli(), odds_C)
        counts_V, values_RC = tensors[f"{name}.counts"].numpy(), np.zeros(mask_RC.shape, np.float32)
        if n := int(mask_RC.sum()):
            symbols_K = coder.decode(_categorical(counts_V), n)
            values_RC[mask_RC] = _from_symbols(symbols_K, tensors[f"{name}.ends"], len(counts_V))
        state[name] = torch.from_numpy(values_RC).view(shape)
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


def _constriction() -> Any:
    return import_extra("constriction", "coding pruned nets needs constriction: pip install 'gbfunc[cli]'")


def _bernoulli() -> Any:
    return _constriction().stream.model.Bernoulli(perfect=False)


def _categorical(counts_V: NDArray[np.uint8]) -> Any:
    # A symbol that never occurs still needs some probability.
    odds_V = counts_V.astype(np.float64) + 1e-3
    return _constriction().stream.model.Categorical(odds_V / odds_V.sum(), perfect=False)


RATES = (1e-3, 3e-3, 1e-2)
WIDTHS = (1, 1 / 3, 1 / 9)
BITS = 5
_EVENTS = 20
_MARGIN = 0.98
"""Part of the budget that the code may take before the last training, which changes its length a little."""


@dataclass(frozen=True)
class Pruned:
    """The coded net."""

    def candidates(self, problem: Problem) -> list[Settings]:
        """Widths of the net that is pruned, in parts of the p-net's, and learning rates."""
        task, found = problem.task, []
        for part in (*WIDTHS, *base.wider(problem)):
            pnet = base.scaled(task, part)
            if pnet is None or dict(pnet.config) in found:
                continue
            if len(encode_sparse(base.blank(pnet), BITS, base.about_pnet(pnet, task))) < 0.9 * problem.budget:
                found.append(dict(pnet.config))
        if not found:
            raise BudgetTooSmall("what is not pruned of the net and the header of its file alone are larger")
        return grid(pnet=found, lr=RATES)

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """A third dense, a third pruning, a third with what is left."""
        pnet = base.with_config(problem.task, settings["pnet"])
        net, about = pnet.build(seed), base.about_pnet(pnet, problem.task)
        # Detached tensors share memory with the parameters.
        state, masks = base.state_of(net), Params()
        total = sum(t.numel() for t in base.matrices(state).values())
        steps, target = problem.steps, None
        start, end = steps // 3, 2 * steps // 3
        events = {start + (end - start) * i // _EVENTS: i / _EVENTS for i in range(1, _EVENTS)}

        def keep(n: int) -> None:
            for name, thin in _top(state, min(n, total)).items():
                masks[name] = thin != 0
                state[name].copy_(thin)

        def after(done: int) -> None:
            nonlocal target
            for name, mask in masks.items():
                state[name].mul_(mask)
            if done == start:
                target = most_entries(state, _MARGIN * problem.budget, about)
            if target is not None and done in events:
                keep(target + round((total - target) * (1 - events[done]) ** 3))
            if done == max(end, start):
                keep(most_entries(state, _MARGIN * problem.budget, about))

        base.train_net(problem, net.parameters(), net, settings["lr"], seed, after)
        keep(most_entries(state, problem.budget, about))
        data = encode_sparse(state, BITS, about)
        return Trained(data, sum(int(t.count_nonzero()) for t in base.matrices(state).values()))

    def load(self, data: bytes, task: Task) -> Net:
        """The net that the code stands for."""
        net = base.pnet_about(base.text_of(data), task).build(0)
        return base.restore(net, decode_sparse(data, base.state_of(net), BITS))


def most_entries(state: Params, budget: float, about: Mapping[str, Any] | None = None) -> int:
    """How many of the largest entries of the matrices can be coded in so many bytes."""
    total = sum(int(t.count_nonzero()) for t in base.matrices(state).values())
    return base.largest(lambda n: len(encode_sparse(state | _top(state, n), BITS, about)) <= budget, total)


def _top(state: Params, n: int) -> Params:
    """The matrices with only the `n` entries of largest magnitude among them all, in their shapes."""
    matrices = {name: state[name] for name in base.matrices(state)}
    flat = torch.cat([t.flatten() for t in matrices.values()])
    thin = torch.zeros_like(flat)
    kept = flat.abs().topk(n).indices
    thin[kept] = flat[kept]
    pieces = thin.split([t.numel() for t in matrices.values()])
    return {k: piece.view_as(t) for (k, t), piece in zip(matrices.items(), pieces, strict=True)}
