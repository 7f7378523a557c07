"""What a method of compression is: it fits something trainable into a number of bytes, and reads it back from them.

Here is also what methods share: the training, tensors as bytes, and smaller nets of a task's family.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from gbfunc.pnet import buffers_of, parameter_infos, with_weights
from gbfunc.tasks import Net, Recipe, Task
from gbfunc.tasks.pnets import PNet, find_pnet, mlp, mlp_sizes
from gbfunc.tasks.training import fit, leaf_trainer, total_steps
from gbfunc.types import Params, TensorMap

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Of tensors, by name."""

Sizes: TypeAlias = tuple[int, ...]
"""Units of every layer of a perceptron, inputs first."""

Settings: TypeAlias = dict[str, Any]
"""What validation data choose: learning rate, widths, ...; JSON."""


HEAD = "classifier"
"""The module that a pretrained base does not have: each method trains and stores it, or what generates it."""


def is_pretrained(task: Task) -> bool:
    """Whether the task's p-net begins with the weights of a pretrained network."""
    return bool(task.pnet.config.get("pretrained"))


class Problem(NamedTuple):
    """What every method is given alike."""

    task: Task  # data and p-net
    size: int  # parameters of the periodic genome that fills the budget
    budget: int  # most bytes of everything that is needed to run
    dtype: torch.dtype  # of what is stored, where a method has no other format
    recipe: Recipe  # batch size, augmentation, warm-up and length of every training; its rates are the genome's

    @property
    def steps(self) -> int:
        """Steps of a training."""
        return total_steps(self.task, self.recipe)


class Trained(NamedTuple):
    """What training gave."""

    data: bytes  # everything that is needed to run, beside the code
    params: int  # trained parameters in it


class BudgetTooSmall(ValueError):
    """The method can make nothing of this task that is as small as the budget."""


class Method(Protocol):
    """A way to a network in few bytes. A new one is one file and one entry in `METHODS`."""

    def candidates(self, problem: Problem) -> list[Settings]:
        """The settings among which validation data choose, each within the budget; raises `BudgetTooSmall` if none."""
        ...

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """Train with one of the candidates; `seed` is of all that is random, the data are within the budget."""
        ...

    def load(self, data: bytes, task: Task) -> Net:
        """The network, from nothing but the data and the task's code."""
        ...


@dataclass(frozen=True)
class Stored:
    """A method whose numbers are stored as another dtype than the problem's."""

    method: Method
    dtype: torch.dtype

    def candidates(self, problem: Problem) -> list[Settings]:
        """Those of the method."""
        return self.method.candidates(problem._replace(dtype=self.dtype))

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """As the method does."""
        return self.method.train(problem._replace(dtype=self.dtype), settings, seed)

    def load(self, data: bytes, task: Task) -> Net:
        """As the method does."""
        return self.method.load(data, task)


def grid(**axes: Any) -> list[Settings]:
    """Every combination of settings, the last axis fastest.

    >>> grid(width=(1, 2), lr=(0.1,))
    [{'width': 1, 'lr': 0.1}, {'width': 2, 'lr': 0.1}]
    """
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def train_net(
    problem: Problem,
    leaves: Iterable[Tensor],
    net: Net,
    lr: float,
    seed: int,
    after: Callable[[int], None] = lambda done: None,
) -> None:
    """Train leaves in place by Adam with its default moments, on the batches and steps that all methods share.

    Args:
        problem: data and length.
        leaves: what is trained.
        net: the network that reads them.
        lr: peak of the learning rate.
        seed: of the order of the examples.
        after: called with the number of each step when it is done.
    """
    recipe = replace(problem.recipe, dense_lr=lr, betas=(0.9, 0.999))
    trainer = leaf_trainer(leaves, net, problem.task, recipe)

    def step(done: int, batch: Any) -> Any:
        result = trainer.step(done, batch)
        after(done)
        return result

    fit(trainer._replace(step=step), problem.task, recipe, seed, validate=False)


def pack(tensors: TensorMap, dtype: torch.dtype, about: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a file with these tensors, floating-point numbers as `dtype`.

    Args:
        tensors: by name.
        dtype: of the numbers in the file.
        about: text to keep with them.
    """

    def stored(t: Tensor) -> Tensor:
        return t.detach().to("cpu", dtype if t.is_floating_point() else t.dtype, copy=True).contiguous()

    return save({name: stored(t) for name, t in tensors.items()}, dict(about) if about else None)


def unpack(data: bytes) -> tuple[Params, dict[str, str]]:
    """Tensors, in float32 whatever they are stored as, and text of what `pack` gave."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in load(data).items()}
    return tensors, header.get("__metadata__", {})


def zeros(shapes: Shapes) -> Params:
    """Tensors of these shapes, to be packed for the length of their file."""
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def state_of(module: nn.Module) -> Params:
    """All that a module holds, tied parameters once: parameters and buffers that it saves."""
    state = {o.name: o.tensor.detach() for o in parameter_infos(module)}
    return state | {name: b for name, (b, saved) in buffers_of(module).items() if saved}


def restore(module: nn.Module, state: Params) -> nn.Module:
    """A copy of the module, in use, that holds what `state_of` gave."""
    buffers = {name: state.get(name, b) for name, (b, _) in buffers_of(module).items()}
    weights = {o.name: state[o.name] for o in parameter_infos(module)}
    return with_weights(module, weights, buffers).eval()


_PARTS = 256
"""Widths are tried in these parts of the p-net's."""


def largest(fits: Callable[[int], bool], limit: int = 1 << 20) -> int:
    """The largest n up to `limit` for which a monotone `fits` holds, 0 if none does.

    >>> largest(lambda n: n * n <= 30)
    5
    """
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def perceptron_sizes(task: Task) -> Sizes:
    """Layer sizes of the task's p-net.

    Raises:
        BudgetTooSmall: if it is no multilayer perceptron.
    """
    if task.pnet.name != "mlp":
        raise BudgetTooSmall(f"it is for multilayer perceptrons, and the p-net is {task.pnet.name}")
    return (math.prod(task.interface.inputs), *task.pnet.config["hidden"], task.interface.outputs)


def perceptron_shapes(sizes: Sizes, rank: int | None = None) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of the `mlp` of these sizes; with a rank, of factors where these are smaller."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i, (n_in, n_out) in enumerate(pairwise(sizes)):
        if rank is not None and rank * (n_in + n_out) < n_in * n_out:
            shapes |= {f"{2 * i}.left": (n_out, rank), f"{2 * i}.right": (rank, n_in), f"{2 * i}.bias": (n_out,)}
        else:
            shapes |= {f"{2 * i}.weight": (n_out, n_in), f"{2 * i}.bias": (n_out,)}
    return shapes


def coded_matrices(data: bytes, task: Task) -> dict[str, tuple[int, int]]:
    """Shapes of the matrices of a perceptron whose biases are in a file as they are, the matrices in a code."""
    biases = {int(name.split(".")[0]): len(t) for name, t in load(data).items() if name.endswith(".bias")}
    shapes = perceptron_shapes((perceptron_sizes(task)[0], *(biases[i] for i in sorted(biases))))
    return {name: (shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == 2}


def perceptron(state: Params) -> nn.Module:
    """The `mlp` with these parameters."""
    net = mlp(mlp_sizes({name: tuple(t.shape) for name, t in state.items()}), 0)
    net.load_state_dict(state)
    return net


def narrow_sizes(task: Task, fits: Callable[[Sizes], bool]) -> list[Sizes]:
    """Layer sizes of the perceptrons that fill a budget: no hidden layer, one and two equal ones, as wide as fits.

    Args:
        task: its inputs and outputs are kept.
        fits: whether a net of such sizes is within the budget.

    Raises:
        BudgetTooSmall: if none fits, or if the p-net is no multilayer perceptron.
    """
    n_in, *_, n_out = perceptron_sizes(task)
    one = largest(lambda h: fits((n_in, h, n_out)))
    two = largest(lambda h: fits((n_in, h, h, n_out)))
    nets = [((n_in, one, n_out), one), ((n_in, two, two, n_out), two), ((n_in, n_out), fits((n_in, n_out)))]
    if not any(fitting for _, fitting in nets):
        raise BudgetTooSmall(f"no net between {n_in} inputs and {n_out} outputs is as small as that")
    return [sizes for sizes, fitting in nets if fitting]


def narrow_pnets(task: Task, fits: Callable[[PNet], bool]) -> list[PNet]:
    """The nets of the p-net's family that fill a budget: perceptrons as `narrow_sizes` has them, others by width.

    Args:
        task: its p-net and interface.
        fits: whether such a net is within the budget.

    Raises:
        BudgetTooSmall: if none fits, or if the family has no widths to change.
    """
    if task.pnet.name == "mlp":

        def of_sizes(sizes: Sizes) -> PNet:
            return find_pnet("mlp", task.interface, {**task.pnet.config, "hidden": sizes[1:-1]})

        return [of_sizes(sizes) for sizes in narrow_sizes(task, lambda sizes: fits(of_sizes(sizes)))]
    scaled = task.pnet.scaled
    if scaled is None:
        raise BudgetTooSmall(f"the p-net {task.pnet.name} has no smaller one of its kind")
    part = largest(lambda n: fits(scaled(n / _PARTS)), 4 * _PARTS)
    if not part:
        raise BudgetTooSmall(f"no {task.pnet.name} is as small as that")
    return [scaled(part / _PARTS)]
