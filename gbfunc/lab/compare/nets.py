"""Smaller nets of the p-net's family: dense ones, and ones that are quantised or pruned while they are trained.

A quantised net may be wider than levels of full length allow; steps are made coarser until the file fits. A pruned one
is thinned out gradually (M. Zhu and S. Gupta, "To prune, or not to prune", 2017) between 30 and 60 % of the training;
then the coder says how many weights the budget holds, and these are trained for their rounding to levels of 5 bits.
This is S. Han et al., "Deep Compression" (2016), with another coder and equal steps between levels. Biases are pruned
like matrices of one row, norms are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, prune

from gbfunc.lab.compare import base
from gbfunc.lab.compare.base import BudgetTooSmall, Problem, Settings, Trained
from gbfunc.lab.compare.coded import COARSEST, Levels, RoundedNet, decode, encode
from gbfunc.tasks import Net, Task
from gbfunc.tasks.pnets.base import PNet, n_params
from gbfunc.types import Params


@dataclass(frozen=True)
class Dense:
    """The weights of the net, as deep and wide as fits."""

    rates: ClassVar[tuple[float, ...]] = (3e-3, 1e-2, 3e-2, 1e-1)

    def candidates(self, problem: Problem) -> list[Settings]:
        def fits(pnet: PNet) -> bool:
            return len(self._encode(base.blank(pnet), pnet, problem)) <= problem.budget

        return base.of_nets(base.narrow_pnets(problem.task, fits), problem.task, lr=self.rates)

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        pnet = base.pnet_about(settings, problem.task)
        net = pnet.build(seed)
        base.train_net(problem, net.parameters(), net, settings["lr"], seed)
        return Trained(self._encode(base.in_use(net), pnet, problem), n_params(net))

    def load(self, data: bytes, task: Task) -> Net:
        net = base.pnet_about(base.text_of(data), task).build(0)
        return base.restore(net, self._decode(data, base.in_use(net), net))

    def _encode(self, state: Params, pnet: PNet, problem: Problem) -> bytes:
        return base.pack(state, problem.dtype, base.about_pnet(pnet, problem.task))

    def _decode(self, data: bytes, like: Params, net: nn.Module) -> Params:
        return base.unpack(data, like)


def _due(steps: int) -> set[int]:
    """Training steps, from 0, after which weights get new steps and the file is made to fit."""
    return {min(steps - 1, round(part * steps)) for part in (0.6, 0.7, 0.8, 0.9)}


_SHAPES = ((True, 0.85), (True, 0.6), (False, 0.45))
"""Steps per row or per matrix; the expected share of its bits that a level takes."""


@dataclass(frozen=True)
class Quantised(Dense):
    """The weights of the net in levels of `bits` (4 or 8), with steps that are coarser where the file is too long."""

    bits: int = 8
    rates: ClassVar[tuple[float, ...]] = (3e-3, 1e-2, 3e-2)

    def candidates(self, problem: Problem) -> list[Settings]:
        found: list[Settings] = []
        for by_row, part in _SHAPES:

            def takes(pnet: PNet, by_row: bool = by_row, part: float = part) -> float:
                state, about = base.blank(pnet), base.about_pnet(pnet, problem.task)
                rows = _rows(state, by_row)
                numbers = sum(state[name].numel() for name in rows)
                vectors = [x for name, x in state.items() if name not in rows and x.is_floating_point()]
                bits = part * self.bits * numbers + 6 * sum(rows.values()) + sum(7 * x.numel() + 16 for x in vectors)
                return bits / 8 + len(rows) + 16 + len(base.pack({}, torch.float32, about))

            nets = base.narrow_pnets(problem.task, lambda pnet, takes=takes: takes(pnet) <= problem.budget)
            used = [net for net in nets if takes(net, part=1.0) >= base.USED * problem.budget]
            found += base.of_nets(used or nets, problem.task, by_row=(by_row,), lr=self.rates)
        # The same net may fit by several shapes.
        return [settings for i, settings in enumerate(found) if settings not in found[:i]]

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        pnet, by_row = base.pnet_about(settings, problem.task), settings["by_row"]
        module = pnet.build(seed)
        net = RoundedNet(module, self.bits, _rows(base.state_of(module), by_row))
        about = base.about_pnet(pnet, problem.task) | ({} if by_row else {"rows": 0})

        def encoded(steps: Params) -> bytes:
            return encode(base.in_use(module), net.levels(steps), about)

        def fitting(steps: Params, budget: float) -> Params:
            def coarser(by: int) -> Params:
                return {name: (steps_R.int() + by).clamp(max=255).to(torch.uint8) for name, steps_R in steps.items()}

            finer = base.largest(lambda n: len(encoded(coarser(COARSEST - n))) <= budget, COARSEST)
            return coarser(COARSEST - finer)

        def after(done: int) -> None:
            if done in _due(problem.steps):
                net.steps = fitting(net.nearest_steps(), base.MARGIN * problem.budget)

        base.train_net(problem, net.leaves.values(), net, settings["lr"], seed, after)
        return Trained(encoded(fitting(net.steps, problem.budget)), n_params(module))

    def _decode(self, data: bytes, like: Params, net: nn.Module) -> Params:
        return decode(data, like, _rows(like, base.text_of(data).get("rows", True)), self.bits)


def _rows(state: Params, by_row: bool) -> dict[str, int]:
    """Count the steps of every matrix; a convolution has a row for an output channel."""
    return {name: len(x) if by_row else 1 for name, x in state.items() if x.ndim > 1}


@dataclass(frozen=True)
class Pruned(Dense):
    """The weights of the net that are largest, in levels of `bits`."""

    bits: int = 5
    rates: ClassVar[tuple[float, ...]] = (1e-3, 3e-3, 1e-2)

    def candidates(self, problem: Problem) -> list[Settings]:
        found: list[PNet] = []
        least: list[PNet] = []
        for pnet in base.of_widths(problem, (1, 1 / 2, 1 / 4, 1 / 8)).values():
            state, about = base.blank(pnet), base.about_pnet(pnet, problem.task)
            with torch.device("meta"):
                prunable = base.apart_from_norms(pnet.make())
            empty = {k: Levels(state[k].to(torch.int16), torch.zeros(1).byte(), self.bits) for k in prunable}
            fixed = len(encode(state, empty, about, sparse=True))
            if fixed < 0.9 * problem.budget:
                full = fixed + self.bits / 8 * sum(state[k].numel() for k in prunable)
                (found if full > base.USED * problem.budget else least).append(pnet)
        if not found + least:
            raise BudgetTooSmall("what is not pruned of the net and the header of its file alone are larger")
        return base.of_nets(found or least[:1], problem.task, lr=self.rates)

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        pnet = base.pnet_about(settings, problem.task)
        module, about = pnet.build(seed), base.about_pnet(pnet, problem.task)
        net = RoundedNet(module, self.bits, dict.fromkeys(base.apart_from_norms(module), 1))
        matrices = {name: net.leaves[name].detach() for name in net.rows}
        total = sum(x.numel() for x in matrices.values())
        due, target, masks, events = _due(problem.steps), total, Params(), 20
        end = min(due)
        start = min(int(0.3 * problem.steps), end)
        prunes = {start + (end - start) * i // events: i / events for i in range(1, events)}

        def entries(steps: Params, budget: float) -> int:
            return most_entries(base.in_use(module), matrices, net.levels(steps), budget, about)

        def keep(n: int | None = None) -> None:
            """Set all but the `n` largest entries to zero, or those that were set before."""
            masks.update({} if n is None else top(matrices, n))
            for name, mask in masks.items():
                matrices[name].mul_(mask)

        def after(done: int) -> None:
            nonlocal target
            keep()
            if done == start:
                target = entries(net.nearest_steps(), base.MARGIN * problem.budget)
            if done in prunes and done < end:
                keep(target + round((total - target) * (1 - prunes[done]) ** 3))
            if done in due:
                net.steps = net.nearest_steps()
                keep(entries(net.steps, base.MARGIN * problem.budget))

        base.train_net(problem, net.leaves.values(), net, settings["lr"], seed, after)
        keep(entries(net.steps, problem.budget))
        levels = net.levels(net.steps)
        data = encode(base.in_use(module), levels, about, sparse=True)
        return Trained(data, sum(int(x.levels.count_nonzero()) for x in levels.values()))

    def _decode(self, data: bytes, like: Params, net: nn.Module) -> Params:
        return decode(data, like, dict.fromkeys(base.apart_from_norms(net), 1), self.bits, sparse=True)


def most_entries(
    state: Params, weights: Params, matrices: Mapping[str, Levels], budget: float, about: Any = None
) -> int:
    """Find how many of the largest `weights`, whose levels are `matrices`, can be coded in so many bytes."""

    def fits(n: int) -> bool:
        masks = top(weights, n)
        thin = {k: x._replace(levels=x.levels * masks[k]) for k, x in matrices.items()}
        return len(encode(state, thin, about, sparse=True)) <= budget

    return base.largest(fits, sum(int(x.count_nonzero()) for x in weights.values()))


def top(weights: Params, n: int) -> Params:
    """Make masks of the `n` weights of largest magnitude among all matrices, in their shapes."""
    flat = parameters_to_vector(weights.values())
    mask = prune.L1Unstructured(max(0, len(flat) - n)).compute_mask(flat, torch.ones_like(flat, dtype=torch.bool))
    pieces = mask.split([x.numel() for x in weights.values()])
    return {name: piece.view_as(x) for (name, x), piece in zip(weights.items(), pieces, strict=True)}
