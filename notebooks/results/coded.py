"""Quantised and pruned nets for `rivals.py`: training with rounded weights, and entropy coding of the file.

    weight = step * level        |level| < 2^(bits - 1)

A level is an integer. A tensor has one quantization step, or one step per row (output channel). From 60 % of the
training on, torch's fake quantisation rounds the weights in the forward, and the backward ignores the rounding (Y.
Bengio et al., 2013; B. Jacob et al., 2018). The quantization steps minimise the squared error of the rounding, and are
computed a few times during the training. Quantization steps that are trained by gradients (S. Esser et al., "Learned
step size quantization", 2020) gave no higher accuracy. Quantization steps are powers of 2^(1/16) and take one byte
each. Vectors such as biases have levels of 8 bits and one step.

A file is a stream of the range coder of the package `constriction`. The levels of dense matrices are coded with a
normal distribution. A sparse matrix is coded in three parts: the positions of the nonzero entries (row by row; the
probability in a column is the density of the column in the rows above), their absolute values (a geometric distribution
that begins at the smallest value), and their signs.

A quantised net may be so wide that a file with all bits of its levels would exceed the budget. Then the quantization
steps are made coarser until the file fits. A net is pruned gradually (M. Zhu and S. Gupta, "To prune, or not to prune",
2017) between 30 and 60 % of the training. Then the coder finds the number of weights that fit into the budget, and
training continues with these weights, rounded to levels of 5 bits (S. Han et al., "Deep Compression", 2016, with
another coder and equal distances between levels). Biases are pruned like matrices with one row. Norms are not pruned.

Suffixes: R rows, C columns, S quantization steps tried, K nonzero entries. A tensor with one quantization step is one
row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune

from gbfunc.extras import import_extra
from gbfunc.lab.compare import base
from gbfunc.lab.compare.base import BudgetTooSmall, Dense, Problem, Settings, Trained
from gbfunc.pnet.describe import parameter_infos
from gbfunc.tasks import Net, Task
from gbfunc.tasks.pnets.base import PNet, n_params
from gbfunc.tasks.training import fit, leaf_trainer
from gbfunc.types import Params

sys.path.insert(0, str(Path(__file__).parents[2]))
from notebooks.results.subspace import generated_net, unpack_last

MARGIN = 0.98
"""Part of the budget that a file may take before the end of the training. The rest is for the last training steps."""

VECTOR_BITS = 8
_PER_OCTAVE, _ONE, _SHRINKS = 16, 192, 33
"""Quantization steps per octave; the byte of the step 1.0; the number of steps to try, each finer than the last."""

COARSEST = 8 * _PER_OCTAVE
"""How many bytes coarser than the step of least error a quantization step may become."""

_PRIOR, _TAIL = 2.0, 16
"""Weight of the matrix's density, in rows; the unit of the coded mean value is 1 / _TAIL."""

Ints = NDArray[np.int32]
Code = Callable[..., Ints]
"""`code(symbols, model, *params)` writes symbols. When a file is read, it reads as many symbols instead."""


class Levels(NamedTuple):
    """A tensor as integers, with quantization steps."""

    levels: Tensor  # int16, in its shape
    steps: Tensor  # uint8 [R]
    bits: int  # levels are below 2^(bits - 1)

    def values(self) -> Tensor:
        """Return the tensor that the levels represent, in float32."""
        rows_RC = self.levels.reshape(len(self.steps), -1).float()
        return (_step(self.steps)[:, None] * rows_RC).view(self.levels.shape)


def largest_level(bits: int) -> int:
    """Return the largest level. The smallest level is its negative."""
    return 2 ** (bits - 1) - 1


def _step(steps_R: Tensor) -> Tensor:
    return torch.exp2((steps_R.float() - _ONE) / _PER_OCTAVE)


def rounded(weight_RC: Tensor, steps_R: Tensor, bits: int) -> Tensor:
    """Round weights [R, C] to the nearest levels. The gradient is zero for weights beyond the largest level."""
    most, zeros_R = largest_level(bits), torch.zeros(len(steps_R), dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(weight_RC, _step(steps_R), zeros_R, 0, -most, most)


def nearest_steps(weight_RC: Tensor, bits: int, shrinks: int = _SHRINKS) -> Tensor:
    """Find for each row the quantization step [R] with the least squared rounding error.

    With `shrinks=1`, only the smallest step that clips no weight is tried.

    Raises:
        FloatingPointError: for weights that are not finite.
    """
    if not bool(weight_RC.isfinite().all()):
        raise FloatingPointError("the training diverged: weights are not finite")
    top_R = (weight_RC.abs().amax(1) / largest_level(bits)).clamp(min=1e-9)
    first_R = (top_R.log2() * _PER_OCTAVE).ceil().int() + _ONE
    steps_SR = (first_R - torch.arange(shrinks, dtype=torch.int32)[:, None]).clamp(0, 255).to(torch.uint8)
    error_SR = torch.stack([(rounded(weight_RC, steps_R, bits) - weight_RC).square().sum(1) for steps_R in steps_SR])
    return steps_SR[error_SR.argmin(0), torch.arange(len(weight_RC))]


def to_levels(weight: Tensor, steps_R: Tensor, bits: int) -> Levels:
    """Round a tensor [R, ...] to levels."""
    most = largest_level(bits)
    rows_RC = weight.detach().reshape(len(steps_R), -1)
    levels = (rows_RC / _step(steps_R)[:, None]).clamp(-most, most).round()
    return Levels(levels.to(torch.int16).view(weight.shape), steps_R, bits)


def vector_levels(vector: Tensor) -> Levels:
    """Round a vector to levels of 8 bits, with the smallest quantization step that clips no entry."""
    return to_levels(vector, nearest_steps(vector.detach().reshape(1, -1), VECTOR_BITS, 1), VECTOR_BITS)


def _constriction() -> Any:
    return import_extra("constriction", "coding small nets", "gbfunc[cli]").stream


def _byte(code: Code, value: float) -> int:
    return int(code(np.array([value], np.int32), _constriction().model.Uniform(256))[0])


def _bell(code: Code, x: Ints, low: int, high: int, mean: float = 0.0) -> Ints:
    """Code integers with a normal distribution. The standard deviation is coded first, as a byte of 1/8 octaves."""
    deviation = np.sqrt(np.mean((x - mean) ** 2)) if x.size else 1.0
    byte = _byte(code, np.clip(np.rint(8 * np.log2(max(deviation, 2.0**-4))) + 32, 0, 255))
    return code(
        x, _constriction().model.QuantizedGaussian(low, high), *np.full((2, x.size), [[mean], [2 ** (byte / 8 - 4)]])
    )


def _sparse(code: Code, levels_RC: Ints, bits: int) -> Ints:
    """Code a matrix with mostly zeros."""
    model, mask_RC = _constriction().model, (levels_RC != 0).astype(np.int32)
    density = _byte(code, np.rint(-16 * np.log2(max(mask_RC.mean(), 2.0**-15.9)))) if mask_RC.size else 255
    above_C = np.full(mask_RC.shape[1], _PRIOR * 2 ** (-density / 16))
    for i, mask_C in enumerate(mask_RC):
        odds_C = np.clip(above_C / (i + _PRIOR), 1e-4, 1 - 1e-4)
        mask_RC[i] = code(mask_C, model.Bernoulli(perfect=False), odds_C)
        above_C = above_C + mask_RC[i]
    found = mask_RC.astype(bool)
    values_K = levels_RC[found]
    sizes_K = np.abs(values_K)
    if not len(values_K):
        return mask_RC
    least = _byte(code, max(1, sizes_K.min()))
    tail = _byte(code, np.clip(np.rint(_TAIL * (sizes_K.mean() - least)), 1, 255))
    sizes = np.arange(1, largest_level(bits) + 1)
    odds = np.where(sizes < least, 0.0, np.exp(-np.log1p(_TAIL / tail) * (sizes - least))) + 1e-3
    # The table of probabilities begins with the value 0, which no nonzero entry has.
    table = model.Categorical(np.append(1e-3, odds) / (odds.sum() + 1e-3), perfect=False)
    sizes_K, negative_K = code(sizes_K, table), code((values_K < 0).astype(np.int32), model.Uniform(2))
    mask_RC[found] = np.where(negative_K, -sizes_K, sizes_K)
    return mask_RC


def _stream(code: Code, coded: Mapping[str, Levels], sparse: bool) -> dict[str, Levels]:
    """Write or read levels.

    To read, `coded` has zeros with the names, shapes and numbers of quantization steps of the written levels.
    """
    steps = np.concatenate([np.zeros(0), *(of.steps.numpy() for of in coded.values())]).astype(np.int32)
    steps = _bell(code, steps, 0, 255, _byte(code, np.rint(steps.mean()) if steps.size else 0))
    parts = torch.from_numpy(steps.astype(np.uint8)).split([len(of.steps) for of in coded.values()])
    found = {}
    for (name, (levels, _, bits)), steps_R in zip(coded.items(), parts, strict=True):
        x, most = levels.numpy().astype(np.int32), largest_level(bits)
        if sparse and bits != VECTOR_BITS:
            # A vector is coded as one row, whose entries all have the probability of the overall density.
            x = _sparse(code, x.reshape(len(x) if x.ndim > 1 else 1, -1), bits)
        else:
            x = _bell(code, x.reshape(-1), -most, most)
        found[name] = Levels(torch.from_numpy(x.astype(np.int16)).view(levels.shape), steps_R, bits)
    return found


_CODE = "code"


def encode(
    state: Params, matrices: Mapping[str, Levels], about: Mapping[str, Any] | None = None, sparse: bool = False
) -> bytes:
    """Write a file: tensors of `matrices` as their levels, other float tensors in 8 bits, integers unchanged."""
    plain = {name: x for name, x in state.items() if not x.is_floating_point()}
    coded = {k: matrices[k] if k in matrices else vector_levels(x) for k, x in state.items() if k not in plain}
    coder = _constriction().queue.RangeEncoder()

    def code(symbols: Ints, model: Any, *params: Any) -> Ints:
        coder.encode(symbols, model, *params)
        return symbols

    _stream(code, coded, sparse)
    words = torch.from_numpy(np.asarray(coder.get_compressed()).view(np.uint8).copy())
    return base.pack(plain | {_CODE: words}, torch.float32, about)


def decode(data: bytes, like: Params, rows: Mapping[str, int], bits: int, sparse: bool = False) -> Params:
    """Read a file of `encode` into float32.

    `rows` gives the number of quantization steps of each tensor with levels of `bits`.
    """
    plain = {name: x for name, x in like.items() if not x.is_floating_point()}
    state = unpack_last(data, plain, _CODE, torch.uint8)
    coder = _constriction().queue.RangeDecoder(state.pop(_CODE).numpy().view(np.uint32))

    def code(symbols: Ints, model: Any, *params: Any) -> Ints:
        return coder.decode(model, *(params or (len(symbols),)))

    blank = {
        k: Levels(torch.zeros(x.shape), torch.zeros(rows.get(k, 1)), bits if k in rows else VECTOR_BITS)
        for k, x in like.items()
        if k not in plain
    }
    found = _stream(code, blank, sparse)
    return {name: found[name].values() if name in found else state[name] for name in like}


class RoundedNet:
    """A new net that is trained with rounded weights.

    Attributes:
        leaves: the net's parameters by name, trained in place.
        rows: the number of quantization steps of each rounded parameter.
        steps: the quantization steps of each rounded parameter, uint8 [R]; empty until rounding begins.
    """

    def __init__(self, net: nn.Module, bits: int, rows: Mapping[str, int]) -> None:
        self._net, self._bits, self.rows = net, bits, rows
        self.leaves = {info.name: info.tensor for info in parameter_infos(net)}
        self.steps: Params = {}
        self._call = generated_net(net, self._weights)

    def __call__(self, x: Tensor) -> Any:
        """Compute the output of the net with weights rounded to the current quantization steps."""
        return self._call(x)

    def _weights(self) -> Params:
        near = {name: rounded(self._matrix(name), steps_R, self._bits) for name, steps_R in self.steps.items()}
        return self.leaves | {name: weight_RC.view_as(self.leaves[name]) for name, weight_RC in near.items()}

    def _matrix(self, name: str) -> Tensor:
        return self.leaves[name].reshape(self.rows[name], -1)

    def nearest_steps(self) -> Params:
        """Find the quantization steps of all rounded parameters with the least squared error."""
        return {name: nearest_steps(self._matrix(name).detach(), self._bits) for name in self.rows}

    def levels(self, steps: Params) -> dict[str, Levels]:
        """Round all parameters in `rows` with these quantization steps."""
        return {name: to_levels(self.leaves[name], steps[name], self._bits) for name in self.rows}


def apart_from_norms(module: nn.Module) -> list[str]:
    """List the parameters that do not belong to norms, which `base.in_use` folds into other layers."""
    folded = {name.rpartition(".")[0] for name in base.state_of(module).keys() - base.in_use(module).keys()}
    return [o.name for o in parameter_infos(module) if o.name.rpartition(".")[0] not in folded]


def train_net(problem: Problem, net: RoundedNet, lr: float, seed: int, after: Callable[[int], None]) -> None:
    """Train the leaves of a net as `base.train_net` does. Call `after` with the number of each finished step."""
    recipe = replace(problem.recipe, dense_lr=lr, betas=(0.9, 0.999))
    trainer = leaf_trainer(net.leaves.values(), net, problem.task, recipe)

    def step(done: int, batch: Any) -> Any:
        result = trainer.step(done, batch)
        after(done)
        return result

    fit(trainer._replace(step=step), problem.task, recipe, seed, validate=False)


def _due(steps: int) -> set[int]:
    """Return the training steps, counted from 0, after which new quantization steps are computed."""
    return {min(steps - 1, round(part * steps)) for part in (0.6, 0.7, 0.8, 0.9)}


_SHAPES = ((True, 0.85), (True, 0.6), (False, 0.45))
"""Whether each row has a quantization step; the expected length of a coded level, divided by `bits`."""


@dataclass(frozen=True)
class Quantised(Dense):
    """A net with levels of `bits` (4 or 8). If the file is too long, its quantization steps are made coarser."""

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
        # Several entries of _SHAPES may lead to one net.
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
                net.steps = fitting(net.nearest_steps(), MARGIN * problem.budget)

        train_net(problem, net, settings["lr"], seed, after)
        return Trained(encoded(fitting(net.steps, problem.budget)), n_params(module))

    def load(self, data: bytes, task: Task) -> Net:
        net = base.pnet_about(about := base.text_of(data), task).build(0)
        rows = _rows(like := base.in_use(net), about.get("rows", True))
        return base.restore(net, decode(data, like, rows, self.bits))


def _rows(state: Params, by_row: bool) -> dict[str, int]:
    """Return the number of quantization steps of every matrix: one, or with `by_row` one per row (output channel)."""
    return {name: len(x) if by_row else 1 for name, x in state.items() if x.ndim > 1}


@dataclass(frozen=True)
class Pruned(Dense):
    """A net whose largest weights are stored as levels of `bits`. All other weights are zero."""

    bits: int = 5
    rates: ClassVar[tuple[float, ...]] = (1e-3, 3e-3, 1e-2)

    def candidates(self, problem: Problem) -> list[Settings]:
        found: list[PNet] = []
        least: list[PNet] = []
        for pnet in base.of_widths(problem, (1, 1 / 2, 1 / 4, 1 / 8)).values():
            state, about = base.blank(pnet), base.about_pnet(pnet, problem.task)
            with torch.device("meta"):
                prunable = apart_from_norms(pnet.make())
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
        net = RoundedNet(module, self.bits, dict.fromkeys(apart_from_norms(module), 1))
        matrices = {name: net.leaves[name].detach() for name in net.rows}
        total = sum(x.numel() for x in matrices.values())
        due, target, masks, events = _due(problem.steps), total, Params(), 20
        end = min(due)
        start = min(int(0.3 * problem.steps), end)
        prunes = {start + (end - start) * i // events: i / events for i in range(1, events)}

        def entries(steps: Params, budget: float) -> int:
            return most_entries(base.in_use(module), matrices, net.levels(steps), budget, about)

        def keep(n: int | None = None) -> None:
            """Set all entries to zero except the `n` largest. Entries that were zero before stay zero."""
            masks.update({} if n is None else top(matrices, n))
            for name, mask in masks.items():
                matrices[name].mul_(mask)

        def after(done: int) -> None:
            nonlocal target
            keep()
            if done == start:
                target = entries(net.nearest_steps(), MARGIN * problem.budget)
            if done in prunes and done < end:
                keep(target + round((total - target) * (1 - prunes[done]) ** 3))
            if done in due:
                net.steps = net.nearest_steps()
                keep(entries(net.steps, MARGIN * problem.budget))

        train_net(problem, net, settings["lr"], seed, after)
        keep(entries(net.steps, problem.budget))
        levels = net.levels(net.steps)
        data = encode(base.in_use(module), levels, about, sparse=True)
        return Trained(data, sum(int(x.levels.count_nonzero()) for x in levels.values()))

    def load(self, data: bytes, task: Task) -> Net:
        net = base.pnet_about(base.text_of(data), task).build(0)
        rows = dict.fromkeys(apart_from_norms(net), 1)
        return base.restore(net, decode(data, base.in_use(net), rows, self.bits, sparse=True))


def most_entries(
    state: Params, weights: Params, matrices: Mapping[str, Levels], budget: float, about: Any = None
) -> int:
    """Find how many of the largest `weights` fit into so many bytes. `matrices` has the levels of all weights."""

    def fits(n: int) -> bool:
        masks = top(weights, n)
        thin = {k: x._replace(levels=x.levels * masks[k]) for k, x in matrices.items()}
        return len(encode(state, thin, about, sparse=True)) <= budget

    return base.largest(fits, sum(int(x.count_nonzero()) for x in weights.values()))


def top(weights: Params, n: int) -> Params:
    """Make masks of the `n` weights of largest magnitude among all matrices. A mask has the shape of its matrix."""
    flat = parameters_to_vector(weights.values())
    mask = prune.L1Unstructured(max(0, len(flat) - n)).compute_mask(flat, torch.ones_like(flat, dtype=torch.bool))
    pieces = mask.split([x.numel() for x in weights.values()])
    return {name: piece.view_as(x) for (name, x), piece in zip(weights.items(), pieces, strict=True)}
