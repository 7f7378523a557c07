"""Smaller nets of the same family: dense as they are, and in whole numbers of few bits, trained for the rounding.

Levels of few bits (`levels`) are entropy-coded like a genome's codes: a bell curve, or all alike, whichever is shorter.
So a net may be wider than levels of full length allow; steps are made coarser until the file fits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gbfunc.formats.symbols import Reader, Run, most_runs_bytes, pack_runs
from gbfunc.lab.compare import base
from gbfunc.lab.compare.base import Problem, Settings, Trained, grid
from gbfunc.lab.compare.levels import (
    COARSER,
    VECTOR_BITS,
    Levels,
    RoundedNet,
    coarsened,
    fitting_steps,
    from_levels,
    largest_level,
    vector_levels,
)
from gbfunc.tasks import Net, Task
from gbfunc.tasks.pnets import PNet, n_params
from gbfunc.types import Params

DENSE_RATES = (3e-3, 1e-2, 3e-2, 1e-1)
QUANTISED_RATES = (3e-3, 1e-2, 3e-2)


@dataclass(frozen=True)
class Dense:
    """The weights of the net."""

    def candidates(self, problem: Problem) -> list[Settings]:
        """Depths, each as wide as fits, and learning rates."""

        def fits(pnet: PNet) -> bool:
            return len(self._encode(base.blank(pnet, used=True), pnet, problem)) <= problem.budget

        nets = base.narrow_pnets(problem.task, fits)
        return grid(pnet=[dict(pnet.config) for pnet in nets], lr=DENSE_RATES)

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """Adam on all weights."""
        pnet = base.with_config(problem.task, settings["pnet"])
        net = pnet.build(seed)
        base.train_net(problem, net.parameters(), net, settings["lr"], seed)
        return Trained(self._encode(base.in_use(net, base.state_of(net)), pnet, problem), n_params(net))

    def load(self, data: bytes, task: Task) -> Net:
        """The net."""
        net = base.pnet_about(base.text_of(data), task).build(0)
        return base.restore(net, base.unpack(data, base.in_use(net, base.state_of(net))))

    @staticmethod
    def _encode(state: Params, pnet: PNet, problem: Problem) -> bytes:
        return base.pack(state, problem.dtype, base.about_pnet(pnet, problem.task))


def _runs(state: Params, matrices: Mapping[str, Levels], bits: int) -> tuple[Params, list[Run]]:
    """What is stored as it is, and the rest in runs: steps, vectors, matrices."""
    coded, plain = dict(matrices), Params()
    for name, x in state.items():
        if name not in matrices:
            if x.is_floating_point():
                coded[name] = vector_levels(x)
            else:
                plain[name] = x
    names = [name for name in state if name in coded]
    steps = torch.cat([coded[name].steps for name in names]).numpy()
    runs = [Run(steps, 8, _STEP)]
    for name in names:
        n_bits = bits if name in matrices else VECTOR_BITS
        middle = largest_level(n_bits)
        runs.append(Run(coded[name].levels.reshape(-1).numpy() + middle, n_bits, np.array([middle])))
    return plain, runs


_STEP = np.array([96])
"""Centre of steps: 2^-6."""


def coded_bytes(state: Params, matrices: Mapping[str, Levels], bits: int, about: Mapping[str, Any]) -> int:
    """The most bytes that `encode_levels` takes; some more than it does."""
    plain, runs = _runs(state, matrices, bits)
    cost = sum(float(run.costs()[1].sum()) for run in runs)
    most = most_runs_bytes(cost, sum(len(run.symbols) for run in runs), len(runs))
    return len(base.pack(plain, torch.float32, about)) + most


def encode_levels(state: Params, matrices: Mapping[str, Levels], bits: int, about: Mapping[str, Any]) -> bytes:
    """A file of matrices in levels of so many bits, vectors in 8, and integers as they are."""
    plain, runs = _runs(state, matrices, bits)
    code = torch.frombuffer(bytearray(pack_runs(runs)[0]), dtype=torch.uint8)
    return base.pack(plain | {_CODE: code}, torch.float32, about)


_CODE = "code"


def decode_levels(data: bytes, like: Params, bits: int, by_row: bool) -> Params:
    """Undo `encode_levels`, into the numbers that levels stand for; `like` has names, order, shapes and dtypes."""
    plain = {name: x for name, x in like.items() if not x.is_floating_point()}
    state = base.unpack(data, plain | {_CODE: torch.empty(0, dtype=torch.uint8)}, rest=_CODE)
    coded = {name: x for name, x in like.items() if name not in plain}
    rows = {name: len(x) if by_row and x.ndim > 1 else 1 for name, x in coded.items()}
    numbers = sum(x.numel() for x in coded.values()) + sum(rows.values())
    reader = Reader(state.pop(_CODE).numpy().tobytes(), numbers + 1 + len(coded))
    steps = torch.from_numpy(reader.run(sum(rows.values()), 8, _STEP)).split(list(rows.values()))
    for (name, x), steps_R in zip(coded.items(), steps, strict=True):
        n_bits = bits if x.ndim > 1 else VECTOR_BITS
        middle = largest_level(n_bits)
        levels = reader.run(x.numel(), n_bits, np.array([middle])).astype(np.int16) - middle
        state[name] = from_levels(Levels(torch.from_numpy(levels).view(x.shape), steps_R))
    reader.close()
    return {name: state[name] for name in like}


_SHAPES = ((True, 0.85), (True, 0.6), (False, 0.45))
"""Whether rows have their own steps; the part of its bits that a level is expected to take."""


@dataclass(frozen=True)
class Quantised:
    """The weights of the net in levels of `bits` (4 or 8)."""

    bits: int

    def candidates(self, problem: Problem) -> list[Settings]:
        """Steps by row or matrix; depths, each as wide as fits if a level takes some part of its bits; rates."""
        found: list[Settings] = []
        # Each width is asked for a few times.
        blanks: dict[str, Params] = {}
        for by_row, part in _SHAPES:

            def takes(pnet: PNet, by_row: bool = by_row, part: float = part) -> float:
                key = json.dumps(dict(pnet.config))
                if key not in blanks:
                    blanks[key] = base.blank(pnet, used=True)
                return self._expected(blanks[key], pnet, problem, by_row, part)

            nets = base.narrow_pnets(problem.task, lambda pnet, takes=takes: takes(pnet) <= problem.budget)
            used = [net for net in nets if takes(net, part=1.0) >= base.USED * problem.budget]
            found += grid(pnet=[dict(pnet.config) for pnet in used or nets], by_row=(by_row,), lr=QUANTISED_RATES)
        # The same net may fit by several of these.
        return [c for i, c in enumerate(found) if c not in found[:i]]

    def _expected(self, state: Params, pnet: PNet, problem: Problem, by_row: bool, part: float) -> float:
        matrices = base.matrices(state)
        rows = sum(len(x) if by_row else 1 for x in matrices.values())
        vectors = [x for name, x in state.items() if name not in matrices and x.is_floating_point()]
        bits = part * self.bits * sum(x.numel() for x in matrices.values()) + 6 * rows
        bits += sum(7 * x.numel() + 8 for x in vectors) + 4 * (len(vectors) + len(matrices) + 1)
        plain = {name: x for name, x in state.items() if not x.is_floating_point()}
        return bits / 8 + 3 + len(base.pack(plain, torch.float32, self._about(pnet, problem.task, by_row)))

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """Adam on all weights, then on rounded ones, with steps that are coarser where the file is too long."""
        pnet, by_row = base.with_config(problem.task, settings["pnet"]), settings["by_row"]
        net, about = RoundedNet(pnet.build(seed), self.bits, by_row), self._about(pnet, problem.task, by_row)
        due = fitting_steps(problem.steps)

        def fitting(steps: Params, budget: float) -> Params:
            """These steps, or the least coarse ones with which the file fits."""
            state = net.state()

            def fits(finer: int) -> bool:
                return coded_bytes(state, net.levels(steps, COARSER - finer), self.bits, about) <= budget

            if fits(COARSER):
                return steps
            return coarsened(steps, COARSER - base.largest(fits, COARSER))

        def after(done: int) -> None:
            if done in due:
                net.steps = fitting(net.nearest_steps(), base.MARGIN * problem.budget)

        base.train_net(problem, net.leaves.values(), net, settings["lr"], seed, after)
        levels = net.levels(fitting(net.steps, problem.budget))
        data = encode_levels(net.state(), levels, self.bits, about)
        return Trained(data, sum(x.numel() for x in net.leaves.values()))

    def load(self, data: bytes, task: Task) -> Net:
        """The net, with the weights that levels stand for."""
        about = base.text_of(data)
        net = base.pnet_about(about, task).build(0)
        like = base.in_use(net, base.state_of(net))
        return base.restore(net, decode_levels(data, like, self.bits, about.get("rows", True)))

    @staticmethod
    def _about(pnet: PNet, task: Task, by_row: bool) -> dict[str, Any]:
        return base.about_pnet(pnet, task) | ({} if by_row else {"rows": 0})
