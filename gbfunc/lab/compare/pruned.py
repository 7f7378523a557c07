"""Magnitude pruning: a dense net is trained, thinned out step by step and trained on; its entries are entropy-coded.

Gradual pruning by M. Zhu and S. Gupta, "To prune, or not to prune" (2017), between 30 and 60 % of the training; then
the coder itself says how many weights the budget holds, and what is left is trained for its rounding to levels of 5
bits (`levels`). As S. Han et al., "Deep Compression" (2016), but for the coder and equal steps between levels. Biases
are pruned like matrices of one row, norms are not.

Sparse matrices are bytes of one range coder: where the entries are, then what they are. Positions are coded row by row,
each column with the density that the rows above had there, which the reader knows too; the sizes of levels as a
geometric distribution from the smallest one on, signs as they are.

Suffixes: R rows and C columns of a matrix, K entries that are not zero.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gbfunc.extras import import_extra
from gbfunc.lab.compare import base
from gbfunc.lab.compare.base import BudgetTooSmall, Problem, Settings, Trained, grid
from gbfunc.lab.compare.levels import Levels, RoundedNet, fitting_steps, from_levels, largest_level, vector_levels
from gbfunc.tasks import Net, Task
from gbfunc.tasks.pnets.base import PNet
from gbfunc.types import Params

_PRIOR = 2.0
"""Rows that the overall density counts as, beside those above."""

_TAIL = 16
"""Parts of a level in which the mean distance from the smallest one is stored."""


def encode_sparse(state: Params, matrices: Mapping[str, Levels], about: Mapping[str, Any] | None = None) -> bytes:
    """Matrices [R, ...] of levels, mostly zeros, with a step each; vectors in 8 bits; integers as they are."""
    coder = _constriction().stream.queue.RangeEncoder()
    stored: Params = {}
    for name, x in state.items():
        if name not in matrices:
            stored |= _vector_parts(name, vector_levels(x)) if x.is_floating_point() else {name: x}
            continue
        levels, steps = matrices[name]
        levels_RC = levels.reshape(_rows(levels), -1).numpy()
        mask_RC = levels_RC != 0
        levels_K = levels_RC[mask_RC].astype(np.int32)
        sizes_K = np.abs(levels_K)
        least = int(sizes_K.min()) if len(sizes_K) else 1
        tail = int(np.clip(np.rint(_TAIL * (sizes_K.mean() - least)) if len(sizes_K) else 0, 1, 255))
        density = torch.tensor([mask_RC.mean()]).half()
        for mask_C, odds_C in zip(mask_RC, _densities(mask_RC, float(density)), strict=True):
            coder.encode(mask_C.astype(np.int32), _bernoulli(), odds_C)
        if len(levels_K):
            coder.encode(sizes_K, _geometric(least, tail))
            coder.encode((levels_K < 0).astype(np.int32), _constriction().stream.model.Uniform(2))
        # The reader learns how many entries there are from the mask.
        sizes = torch.tensor([least, tail], dtype=torch.uint8)
        stored |= {f"{name}.density": density, f"{name}.sizes": sizes, f"{name}.steps": steps}
    words = np.asarray(coder.get_compressed())
    return base.pack(stored | {"code": torch.from_numpy(words.view(np.uint8).copy())}, torch.float16, about)


def _rows(x: Tensor) -> int:
    """A vector is one row: its entries are as likely everywhere."""
    return len(x) if x.ndim > 1 else 1


def _vector_parts(name: str, coded: Levels) -> Params:
    return {name: coded.levels.to(torch.int8), f"{name}.steps": coded.steps}


def decode_sparse(data: bytes, like: Params, matrices: Collection[str]) -> Params:
    """Undo `encode_sparse`, into the numbers that levels stand for; `like` has names, order, shapes and dtypes."""
    kept: Params = {}
    for name, x in like.items():
        if name in matrices:
            parts = {"density": torch.zeros(1), "sizes": torch.zeros(2).byte(), "steps": torch.zeros(1).byte()}
            kept |= {f"{name}.{part}": of for part, of in parts.items()}
        else:
            kept |= _vector_parts(name, vector_levels(torch.zeros_like(x))) if x.is_floating_point() else {name: x}
    tensors = base.unpack(data, kept | {"code": torch.empty(0, dtype=torch.uint8)}, rest="code")
    coder = _constriction().stream.queue.RangeDecoder(tensors.pop("code").numpy().view(np.uint32))
    state: Params = {}
    for name, x in like.items():
        if name not in matrices:
            state[name] = (
                from_levels(Levels(tensors[name], tensors[f"{name}.steps"])) if x.is_floating_point() else tensors[name]
            )
            continue
        mask_RC = np.zeros((_rows(x), x.numel() // max(1, _rows(x))), bool)
        # Each row's densities are asked for when the rows above are there.
        for row, odds_C in enumerate(_densities(mask_RC, float(tensors[f"{name}.density"]))):
            mask_RC[row] = coder.decode(_bernoulli(), odds_C)
        levels_RC = np.zeros(mask_RC.shape, np.int16)
        if n := int(mask_RC.sum()):
            sizes_K = coder.decode(_geometric(*tensors[f"{name}.sizes"].tolist()), n)
            negative_K = coder.decode(_constriction().stream.model.Uniform(2), n)
            levels_RC[mask_RC] = np.where(negative_K, -sizes_K, sizes_K)
        state[name] = from_levels(Levels(torch.from_numpy(levels_RC).view(x.shape), tensors[f"{name}.steps"]))
    return state


def _densities(mask_RC: NDArray[np.bool_], density: float) -> Iterator[NDArray[np.float64]]:
    """Expected part of entries in each column of each row, from the rows above."""
    above_C = np.full(mask_RC.shape[1], _PRIOR * density)
    for i, mask_C in enumerate(mask_RC):
        yield np.clip(above_C / (i + _PRIOR), 1e-4, 1 - 1e-4)
        above_C = above_C + mask_C


def _constriction() -> Any:
    return import_extra("constriction", "coding pruned nets", "gbfunc[cli]")


def _bernoulli() -> Any:
    return _constriction().stream.model.Bernoulli(perfect=False)


def _geometric(least: int, tail: int) -> Any:
    """Sizes of levels from the least on, `tail` parts of a level above it in the mean."""
    most = largest_level(BITS)
    sizes = np.arange(1, most + 1)
    odds = np.where(sizes < least, 0.0, np.exp(-np.log1p(_TAIL / tail) * (sizes - least))) + 1e-3
    # A table begins at 0, which is no size.
    return _constriction().stream.model.Categorical(np.append(1e-3, odds) / (odds.sum() + 1e-3), perfect=False)


RATES = (1e-3, 3e-3, 1e-2)
WIDTHS = (1, 1 / 2, 1 / 4, 1 / 8)
BITS = 5
_EVENTS, _PRUNED_FROM = 20, 0.3


@dataclass(frozen=True)
class Pruned:
    """The coded net."""

    def candidates(self, problem: Problem) -> list[Settings]:
        """Widths of the net that is pruned, in parts of the p-net's, and learning rates."""
        task, found, least = problem.task, [], []
        for part in (*WIDTHS, *base.wider(problem)):
            pnet = base.scaled(task, part)
            if pnet is None or dict(pnet.config) in found:
                continue
            state = base.blank(pnet, used=True)
            matrices = {name: state[name] for name in _prunable(pnet)}
            empty = {k: Levels(x.to(torch.int16), torch.zeros(1).byte()) for k, x in matrices.items()}
            fixed = len(encode_sparse(state, empty, base.about_pnet(pnet, task)))
            if fixed < 0.9 * problem.budget:
                full = fixed + BITS / 8 * sum(x.numel() for x in matrices.values())
                (found if full > base.USED * problem.budget else least).append(dict(pnet.config))
        if not found + least:
            raise BudgetTooSmall("what is not pruned of the net and the header of its file alone are larger")
        return grid(pnet=found or least[:1], lr=RATES)

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """Dense, then pruning, then rounded, with what is left."""
        pnet = base.with_config(problem.task, settings["pnet"])
        about = base.about_pnet(pnet, problem.task)
        names, masks = _prunable(pnet), Params()
        net = RoundedNet(pnet.build(seed), BITS, by_row=False, names=names)
        matrices = {name: net.leaves[name].detach() for name in names}
        total = sum(x.numel() for x in matrices.values())
        due, target = fitting_steps(problem.steps), total
        start, end = min(int(_PRUNED_FROM * problem.steps), min(due)), min(due)
        events = {start + (end - start) * i // _EVENTS: i / _EVENTS for i in range(1, _EVENTS)}

        def entries(steps: Params, budget: float) -> int:
            """How many of the largest entries the file has room for."""
            return most_entries(net.state(), matrices, net.levels(steps), budget, about)

        def keep(n: int) -> None:
            for name, mask in _top(matrices, n).items():
                masks[name] = mask
                matrices[name].mul_(mask)

        def after(done: int) -> None:
            nonlocal target
            for name, mask in masks.items():
                matrices[name].mul_(mask)
            if done == start:
                target = entries(net.nearest_steps(), base.MARGIN * problem.budget)
            if done in events and done < end:
                keep(target + round((total - target) * (1 - events[done]) ** 3))
            if done in due:
                net.steps = net.nearest_steps()
                keep(entries(net.steps, base.MARGIN * problem.budget))

        base.train_net(problem, net.leaves.values(), net, settings["lr"], seed, after)
        keep(entries(net.steps, problem.budget))
        levels = net.levels(net.steps)
        data = encode_sparse(net.state(), levels, about)
        return Trained(data, sum(int(x.levels.count_nonzero()) for x in levels.values()))

    def load(self, data: bytes, task: Task) -> Net:
        """The net that the code stands for."""
        pnet = base.pnet_about(base.text_of(data), task)
        net = pnet.build(0)
        return base.restore(net, decode_sparse(data, base.in_use(net, base.state_of(net)), _prunable(pnet)))


def _prunable(pnet: PNet) -> list[str]:
    with torch.device("meta"):
        return base.apart_from_norms(pnet.make())


def most_entries(
    state: Params,
    weights: Params,
    matrices: Mapping[str, Levels],
    budget: float,
    about: Mapping[str, Any] | None = None,
) -> int:
    """How many of the largest `weights`, whose levels are `matrices`, can be coded in so many bytes."""
    total = sum(int(x.count_nonzero()) for x in weights.values())

    def fits(n: int) -> bool:
        masks = _top(weights, n)
        thin = {k: Levels(x.levels * masks[k], x.steps) for k, x in matrices.items()}
        return len(encode_sparse(state, thin, about)) <= budget

    return base.largest(fits, total)


def _top(weights: Params, n: int) -> Params:
    """Where the `n` weights of largest magnitude among all matrices are, in their shapes."""
    flat = torch.cat([x.flatten() for x in weights.values()]).abs()
    kept = torch.zeros(len(flat), dtype=torch.bool)
    kept[flat.topk(min(n, len(flat))).indices] = True
    pieces = kept.split([x.numel() for x in weights.values()])
    return {name: piece.view_as(x) for (name, x), piece in zip(weights.items(), pieces, strict=True)}
