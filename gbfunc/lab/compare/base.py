"""Methods of compression: each fits something trainable into a number of bytes, and reads it back from the bytes.

Methods share the training, tensors as bytes, and smaller nets of a task's family.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gbfunc.pnet.describe import buffers_of, parameter_infos, with_weights
from gbfunc.tasks import Net, Recipe, Task
from gbfunc.tasks.pnets import PNet, find_pnet
from gbfunc.tasks.pnets.base import n_params
from gbfunc.tasks.training import fit, leaf_trainer, total_steps
from gbfunc.types import Params, TensorMap

Settings: TypeAlias = dict[str, Any]
"""Learning rate, widths, ..., as validation data choose them; JSON."""

HEAD = "classifier"
"""The module that a pretrained base does not have: each method trains and stores it, or what generates it."""

USED = 0.85
"""Least part of a budget that the file of a candidate should fill."""


class Problem(NamedTuple):
    """The same task for every method."""

    task: Task  # data and p-net
    size: int  # parameters of the periodic genome that fills the budget
    budget: int  # most bytes of everything that is needed to run
    dtype: torch.dtype  # stored, unless a method has another format
    recipe: Recipe  # batch size, augmentation, warm-up and length of every training; its rates suit the genome

    @property
    def steps(self) -> int:
        return total_steps(self.task, self.recipe)


class BudgetTooSmall(ValueError):
    """The method can make nothing of this task that is as small as the budget."""


class Trained(NamedTuple):
    """The result of a training."""

    data: bytes  # everything that is needed to run, beside the code
    params: int  # trained parameters in it


class Method(Protocol):
    """A way to a network in few bytes. A new one is one file and one entry in `METHODS`."""

    def candidates(self, problem: Problem) -> list[Settings]:
        """Return the settings among which validation data choose, each within the budget, or raise BudgetTooSmall."""
        ...

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """Train with one of the candidates, into data within the budget; `seed` decides all that is random."""
        ...

    def load(self, data: bytes, task: Task) -> Net:
        """Read the network from nothing but the data and the task's code."""
        ...


def grid(**axes: Any) -> list[Settings]:
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def train_net(problem: Problem, leaves: Iterable[Tensor], net: Net, lr: float, seed: int) -> None:
    """Train leaves in place by Adam with its default moments and a peak rate, on the steps that all methods share."""
    recipe = replace(problem.recipe, dense_lr=lr, betas=(0.9, 0.999))
    fit(leaf_trainer(leaves, net, problem.task, recipe), problem.task, recipe, seed, validate=False)


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""By the first byte of a file."""


def pack(tensors: TensorMap, dtype: torch.dtype, about: Mapping[str, Any] | None = None) -> bytes:
    """Write a file of numbers alone, behind a byte for the `dtype` of floats, and `about` as JSON with its length.

    The reader knows names, order, shapes and kinds from the code.
    """
    text = json.dumps(about, separators=(",", ":")).encode() if about else b""
    stored = (t.detach().to("cpu", dtype if t.is_floating_point() else t.dtype) for t in tensors.values())
    numbers = (t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in stored)
    return b"".join((bytes([_FLOATS.index(dtype)]), len(text).to_bytes(2, "little"), text, *numbers))


def unpack(data: bytes, like: TensorMap) -> Params:
    """Undo `pack`, with floats in float32; the first empty tensor of `like` takes all other numbers, as a vector."""
    start = 3 + int.from_bytes(data[1:3], "little")
    dtypes = [_FLOATS[data[0]] if t.is_floating_point() else t.dtype for t in like.values()]
    sizes = {name: t.numel() * dtype.itemsize for (name, t), dtype in zip(like.items(), dtypes, strict=True)}
    for name in [name for name, size in sizes.items() if not size][:1]:
        sizes[name] = max(0, len(data) - start - sum(sizes.values()))
    if (expected := start + sum(sizes.values())) != len(data):
        raise ValueError(f"expected a file of {expected:,} bytes, got {len(data):,}")
    parts = torch.from_numpy(np.frombuffer(data, np.uint8)[start:].copy()).split(list(sizes.values()))
    found = Params()
    for (name, t), part, dtype in zip(like.items(), parts, dtypes, strict=True):
        # Copies are aligned as their dtype asks for.
        x = part.clone().view(dtype).reshape(t.shape if t.numel() else -1)
        found[name] = x.float() if t.is_floating_point() else x
    return found


def text_of(data: bytes) -> dict[str, Any]:
    return json.loads(data[3 : 3 + int.from_bytes(data[1:3], "little")] or b"{}")


def state_of(module: nn.Module) -> Params:
    """Collect all that a module holds, tied parameters once: parameters and buffers that it saves."""
    return {o.name: o.tensor.detach() for o in parameter_infos(module)} | saved_buffers(module)


def saved_buffers(module: nn.Module) -> Params:
    return {name: b for name, (b, saved) in buffers_of(module).items() if saved}


def norms(module: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    """Find the batch norms with scales, shifts and statistics, whose statistics `in_use` folds."""
    for name, norm in module.named_modules():
        if isinstance(norm, _BatchNorm) and norm.affine and norm.track_running_stats:
            yield name, norm


def in_use(module: nn.Module) -> Params:
    """Collect the state, the statistics of batch norms folded into scales and shifts; `restore` into a new module."""
    state = state_of(module)
    for name, norm in norms(module):
        state.pop(f"{name}.num_batches_tracked", None)
        scale = state[f"{name}.weight"] / (state.pop(f"{name}.running_var") + norm.eps).sqrt()
        state[f"{name}.bias"] = state[f"{name}.bias"] - scale * state.pop(f"{name}.running_mean")
        # A new norm has the mean 0 and the variance 1.
        state[f"{name}.weight"] = scale * (1 + norm.eps) ** 0.5
    return state


def restore(module: nn.Module, state: Params) -> nn.Module:
    """Copy a module, in use, with what `state_of` gave; or a new module with what `in_use` gave."""
    buffers = {name: state.get(name, b) for name, (b, _) in buffers_of(module).items()}
    return with_weights(module, {o.name: state[o.name] for o in parameter_infos(module)}, buffers).eval()


def largest(fits: Callable[[int], bool], limit: int = 1 << 20) -> int:
    """Find the largest n up to `limit` for which a monotone `fits` holds, 0 if none does."""
    high = 1
    while high < limit and fits(high):
        high *= 2
    return bisect_left(range(1, limit + 1), True, high // 2, min(high, limit), key=lambda n: not fits(n))


def of_widths(problem: Problem, parts: Sequence[float]) -> dict[float, PNet]:
    """Scale the p-net's widths by these parts, and by 2 from a bit per parameter on; by 1 alone without widths."""
    task, make = problem.task, problem.task.pnet.scaled
    if make is None:
        return {1: task.pnet}
    wider = (2.0,) if 8 * problem.budget >= n_params(task.build(0)) else ()
    return {part: task.pnet if part == 1 else make(part) for part in (*parts, *wider)}


def widest(task: Task, fits: Callable[[PNet], bool], most: float = 4.0) -> PNet | None:
    """Find the widest p-net of the task's family, up to `most` times its widths, that fits; None if none does."""
    if (make := task.pnet.scaled) is None:
        return task.pnet if fits(task.pnet) else None
    part = largest(lambda n: fits(make(n / 256)), round(most * 256))
    return make(part / 256) if part else None


def narrow_pnets(task: Task, fits: Callable[[PNet], bool]) -> list[PNet]:
    """Find the nets of the p-net's family that fill a budget, as wide as fits; perceptrons of 0 to 2 hidden layers."""
    if task.pnet.name == "mlp":

        def of(depth: int, width: int) -> PNet:
            return find_pnet("mlp", task.interface, {**task.pnet.config, "hidden": [width] * depth})

        widths = {depth: largest(lambda n, depth=depth: fits(of(depth, n))) for depth in (1, 2)}
        nets = [of(depth, n) for depth, n in widths.items() if n] + [of(0, 0)] * fits(of(0, 0))
    else:
        nets = list(filter(None, [widest(task, fits)]))
    if not nets:
        raise BudgetTooSmall(f"no {task.pnet.name} is as small as that")
    return nets


def about_pnet(pnet: PNet, task: Task) -> dict[str, Any]:
    """Say, for settings and files, how a p-net of the task's family differs from the task's."""
    differs = {name: value for name, value in pnet.config.items() if task.pnet.config.get(name) != value}
    return differs and {"pnet": differs}


def pnet_about(about: Mapping[str, Any], task: Task) -> PNet:
    if "pnet" not in about:
        return task.pnet
    return find_pnet(task.pnet.name, task.interface, {**task.pnet.config, **about["pnet"]})


def of_nets(pnets: Iterable[PNet], task: Task, **axes: Any) -> list[Settings]:
    """Combine p-nets of the task's family, each once, with other settings."""
    abouts = {json.dumps(about): about for about in (about_pnet(pnet, task) for pnet in pnets)}
    return [about | settings for about in abouts.values() for settings in grid(**axes)]


def blank(pnet: PNet) -> Params:
    """Make zeros in the shapes of a p-net's `in_use`, to measure its file."""
    with torch.device("meta"):
        return blanks(in_use(pnet.make()))


def blanks(like: TensorMap) -> Params:
    """Make zeros on the CPU in the shapes of tensors, also of meta tensors."""
    return {name: torch.zeros(t.shape, dtype=t.dtype, device="cpu") for name, t in like.items()}


@dataclass(frozen=True)
class Dense:
    """The weights of the net, as deep and wide as fits."""

    rates: ClassVar[tuple[float, ...]] = (3e-3, 1e-2, 3e-2, 1e-1)

    def candidates(self, problem: Problem) -> list[Settings]:
        def fits(pnet: PNet) -> bool:
            return len(self._encode(blank(pnet), pnet, problem)) <= problem.budget

        return of_nets(narrow_pnets(problem.task, fits), problem.task, lr=self.rates)

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        pnet = pnet_about(settings, problem.task)
        net = pnet.build(seed)
        train_net(problem, net.parameters(), net, settings["lr"], seed)
        return Trained(self._encode(in_use(net), pnet, problem), n_params(net))

    def load(self, data: bytes, task: Task) -> Net:
        net = pnet_about(text_of(data), task).build(0)
        return restore(net, self._decode(data, in_use(net), net))

    def _encode(self, state: Params, pnet: PNet, problem: Problem) -> bytes:
        return pack(state, problem.dtype, about_pnet(pnet, problem.task))

    def _decode(self, data: bytes, like: Params, net: nn.Module) -> Params:
        return unpack(data, like)
