"""The protocol of compression methods (`Method`), and functions that several methods use."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
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
"""Settings that are chosen on validation data, such as the learning rate and widths. JSON can store the values."""

HEAD = "classifier"
"""Name of the new head of a pretrained network. Each method trains and stores the head, or generates its weights."""

USED = 0.85
"""A candidate whose file uses less than this fraction of the budget ranks below all other candidates."""


class Problem(NamedTuple):
    """A task, and the largest number of bytes of a network (the budget). All compared methods get the same problem."""

    task: Task  # Data and p-net
    size: int  # Number of parameters of a periodic genome that fills the budget
    budget: int  # Largest number of bytes of all data that are needed to run the network
    dtype: torch.dtype  # Dtype of the numbers in files, unless a method sets another dtype
    recipe: Recipe  # Batch size, augmentation, warm-up, length of every training. Methods set the learning rates

    @property
    def steps(self) -> int:
        return total_steps(self.task, self.recipe)


class BudgetTooSmall(ValueError):
    """Raised if even the smallest network of a method exceeds the budget."""


class Trained(NamedTuple):
    """The data of a trained network, and its number of parameters."""

    data: bytes  # All data that are needed to run the network, except code
    params: int  # Number of trained parameters in the data


class Method(Protocol):
    """A method that trains a network and stores it in few bytes. A new method needs an entry in `METHODS`."""

    def candidates(self, problem: Problem) -> list[Settings]:
        """Return settings to choose from, whose networks fit the budget. Raises BudgetTooSmall if no network fits."""
        ...

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """Train a network with one of the settings of `candidates`. Its data must not exceed `problem.budget` bytes."""
        ...

    def load(self, data: bytes, task: Task) -> Net:
        """Build a network from `Trained.data` and the code of the task, without reading any other file."""
        ...


def grid(**axes: Any) -> list[Settings]:
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def train_net(problem: Problem, leaves: Iterable[Tensor], net: Net, lr: float, seed: int) -> None:
    """Train `leaves` in place by Adam, with the peak learning rate `lr` and the number of steps of the problem."""
    recipe = replace(problem.recipe, dense_lr=lr, betas=(0.9, 0.999))
    fit(leaf_trainer(leaves, net, problem.task, recipe), problem.task, recipe, seed, validate=False)


FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of the floats in files. The first byte of a file is the index of its dtype in `FLOATS`."""


def pack(tensors: TensorMap, dtype: torch.dtype, about: Mapping[str, Any] | None = None) -> bytes:
    """Return a file's bytes: the index of `dtype` in `FLOATS`, the length of `about`, `about` in JSON, and all numbers.

    Names, shapes and integer dtypes are not in the file: `unpack` takes them from a newly built network.
    """
    text = json.dumps(about, separators=(",", ":")).encode() if about else b""
    stored = (t.detach().to("cpu", dtype if t.is_floating_point() else t.dtype) for t in tensors.values())
    numbers = (t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in stored)
    return b"".join((bytes([FLOATS.index(dtype)]), len(text).to_bytes(2, "little"), text, *numbers))


def unpack(data: bytes, like: TensorMap) -> Params:
    """Read the tensors that `pack` wrote, with the names and shapes of `like`, and floats as float32."""
    start = 3 + int.from_bytes(data[1:3], "little")
    dtypes = [FLOATS[data[0]] if t.is_floating_point() else t.dtype for t in like.values()]
    sizes = {name: t.numel() * dtype.itemsize for (name, t), dtype in zip(like.items(), dtypes, strict=True)}
    if (expected := start + sum(sizes.values())) != len(data):
        raise ValueError(f"expected a file of {expected:,} bytes, got {len(data):,}: use its own settings")
    pieces = torch.from_numpy(np.frombuffer(data, np.uint8)[start:].copy()).split(list(sizes.values()))
    found = Params()
    for (name, t), piece, dtype in zip(like.items(), pieces, dtypes, strict=True):
        # Copy, because the memory of a piece may not be aligned for its dtype.
        x = piece.clone().view(dtype).reshape(t.shape)
        found[name] = x.float() if t.is_floating_point() else x
    return found


def text_of(data: bytes) -> dict[str, Any]:
    return json.loads(data[3 : 3 + int.from_bytes(data[1:3], "little")] or b"{}")


def state_of(module: nn.Module) -> Params:
    """Return a module's parameters and persistent buffers by name. A tied parameter has only its first name."""
    return {o.name: o.tensor.detach() for o in parameter_infos(module)} | saved_buffers(module)


def saved_buffers(module: nn.Module) -> Params:
    return {name: b for name, (b, saved) in buffers_of(module).items() if saved}


def in_use(module: nn.Module) -> Params:
    """Return `state_of(module)`, with batch norms' running means and variances merged into their weights and biases."""
    state = state_of(module)
    for name, norm in module.named_modules():
        if not (isinstance(norm, _BatchNorm) and norm.affine and norm.track_running_stats):
            continue
        state.pop(f"{name}.num_batches_tracked", None)
        scale = state[f"{name}.weight"] / (state.pop(f"{name}.running_var") + norm.eps).sqrt()
        state[f"{name}.bias"] = state[f"{name}.bias"] - scale * state.pop(f"{name}.running_mean")
        # In the loaded network, the running variance is 1, and the norm divides by (1 + eps) ** 0.5: compensate.
        state[f"{name}.weight"] = scale * (1 + norm.eps) ** 0.5
    return state


def restore(module: nn.Module, state: Params) -> nn.Module:
    """Return a copy of the module in evaluation mode, with the tensors of `state_of` or of `in_use`."""
    buffers = {name: state.get(name, b) for name, (b, _) in buffers_of(module).items()}
    return with_weights(module, {o.name: state[o.name] for o in parameter_infos(module)}, buffers).eval()


def largest(fits: Callable[[int], bool], limit: int = 1 << 20) -> int:
    """Find the largest n up to `limit` for which `fits(n)` is True, or 0. All n below a fitting n must fit, too."""
    high = 1
    while high < limit and fits(high):
        high *= 2
    return bisect_left(range(1, limit + 1), True, high // 2, min(high, limit), key=lambda n: not fits(n))


def of_widths(problem: Problem, factors: Sequence[float]) -> dict[float, PNet]:
    """Return {factor: task's p-net of factor times the width}; also for 2 if the budget has a bit per parameter."""
    task, make = problem.task, problem.task.pnet.scaled
    if make is None:
        return {1: task.pnet}
    wider = (2.0,) if 8 * problem.budget >= n_params(task.build(0)) else ()
    return {factor: task.pnet if factor == 1 else make(factor) for factor in (*factors, *wider)}


def narrow_pnets(task: Task, fits: Callable[[PNet], bool]) -> list[PNet]:
    """Find the widest p-nets that fit: MLPs with 0, 1 and 2 hidden layers; others up to 4 times the task's width."""
    if task.pnet.name == "mlp":

        def of(depth: int, width: int) -> PNet:
            return find_pnet("mlp", task.interface, {**task.pnet.config, "hidden": [width] * depth})

        widths = {depth: largest(lambda n, depth=depth: fits(of(depth, n))) for depth in (1, 2)}
        nets = [of(depth, n) for depth, n in widths.items() if n] + [of(0, 0)] * fits(of(0, 0))
    elif (make := task.pnet.scaled) is None:
        nets = [task.pnet] * fits(task.pnet)
    else:
        factor = largest(lambda n: fits(make(n / 256)), 4 * 256)
        nets = [make(factor / 256)] if factor else []
    if not nets:
        raise BudgetTooSmall(f"no {task.pnet.name} fits the budget: raise the number of bytes")
    return nets


def about_pnet(pnet: PNet, task: Task) -> dict[str, Any]:
    """Return `{"pnet": options}` with the options that differ from those of the task's p-net; {} if none does."""
    differs = {name: value for name, value in pnet.config.items() if task.pnet.config.get(name) != value}
    return differs and {"pnet": differs}


def pnet_about(about: Mapping[str, Any], task: Task) -> PNet:
    if "pnet" not in about:
        return task.pnet
    return find_pnet(task.pnet.name, task.interface, {**task.pnet.config, **about["pnet"]})


def of_nets(pnets: Iterable[PNet], task: Task, **axes: Any) -> list[Settings]:
    abouts = {json.dumps(about): about for about in (about_pnet(pnet, task) for pnet in pnets)}
    return [about | settings for about in abouts.values() for settings in grid(**axes)]


def blank(pnet: PNet) -> Params:
    """Return zeros like the tensors `in_use` of a p-net: a file's size depends on shapes and dtypes, not on values."""
    with torch.device("meta"):
        return blanks(in_use(pnet.make()))


def blanks(like: TensorMap) -> Params:
    return {name: torch.zeros(t.shape, dtype=t.dtype, device="cpu") for name, t in like.items()}


@dataclass(frozen=True)
class Dense:
    """The method that trains a dense network, as wide as its depth and the budget of bytes allow."""

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
        return restore(net, unpack(data, in_use(net)))

    def _encode(self, state: Params, pnet: PNet, problem: Problem) -> bytes:
        return pack(state, problem.dtype, about_pnet(pnet, problem.task))
