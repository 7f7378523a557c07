"""The base of all tasks: data in three splits, a p-net, a loss, metrics, and a recipe for training.

Suffixes: B examples of a batch, L positions of a text, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from inspect import signature
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gbfunc import Plan, make_plan, torch_schedule
from gbfunc.formats import bytes_each
from gbfunc.hypernets import HYPERNETS
from gbfunc.tasks.data import Augment, Batch, Data, Windows, endless_batches
from gbfunc.tasks.pnets.base import Interface, PNet, n_params
from gbfunc.train.distillation import distillation, logits_of

Net = Callable[[Tensor], Any]
"""Function that maps inputs to logits, or to the output of a Hugging Face model, whose attribute `logits` has them."""


class Metric(NamedTuple):
    """A quantity by which networks are compared."""

    name: str  # results of this metric have the keys `val_<name>` and `test_<name>`
    unit: str = "%"  # "%" shows values between 0 and 1 in percent; any other unit is written after the number
    higher_is_better: bool = True
    digits: int = 4  # number of decimals; with the unit "%", always two

    @property
    def label(self) -> str:
        return self.name.replace("_", " ")

    @property
    def sign(self) -> int:
        return 1 if self.higher_is_better else -1

    def show(self, value: float) -> str:
        return f"{value:.2%}" if self.unit == "%" else f"{value:.{self.digits}f} {self.unit}".rstrip()


def one_cycle(recipe: Recipe, lr: float, steps: int) -> Callable[[int], float]:
    """Return OneCycleLR's schedule: rise to `lr` over the fraction `recipe.warmup` of steps, then fall to nearly 0."""
    # A warm-up of exactly one step would make torch's schedule divide by zero, so use 1.5 steps.
    warmup = 1.5 / steps if math.isclose(recipe.warmup * steps, 1) and steps > 1 else recipe.warmup
    return torch_schedule(torch.optim.lr_scheduler.OneCycleLR, lr, steps, pct_start=warmup)


def linear_decay(recipe: Recipe, lr: float, steps: int) -> Callable[[int], float]:
    """Return a linear schedule: rise to `lr` over the fraction `recipe.warmup` of steps, then fall to 0."""
    warm = max(1, round(recipe.warmup * steps))
    return lambda step: lr * min((step + 1) / warm, max(0, steps - step) / max(1, steps - warm + 1))


def cosine(recipe: Recipe, lr: float, steps: int) -> Callable[[int], float]:
    """Return a schedule without warm-up that lowers the learning rate from `lr` to 0 along half a cosine period."""
    return torch_schedule(torch.optim.lr_scheduler.CosineAnnealingLR, lr, steps, T_max=steps)


Schedule = Callable[["Recipe", float, int], Callable[[int], float]]
"""Function `(recipe, peak rate, number of steps) -> schedule`, where the schedule maps a step to its learning rate."""

SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {"one_cycle": one_cycle, "linear": linear_decay, "cosine": cosine, "constant": lambda _, lr, steps: lambda step: lr}
)
"""{name of a schedule on the command line: schedule}"""


@dataclass(frozen=True)
class Recipe:
    """Settings for training a genome of a certain size, or a dense net. The settings were chosen on validation data."""

    lr: float = 2e-2  # peak learning rate of the g-nets
    direct_lr: float | None = None  # peak learning rate of direct parameters; None means the same as `lr`
    dense_lr: float = 1e-3  # peak learning rate of a dense net of the same task
    optimizer: type[torch.optim.Optimizer] = torch.optim.Adam
    betas: tuple[float, float] = (0.9, 0.99)  # option of Adam and similar optimizers
    eps: float = 1e-8  # option of Adam and similar optimizers
    weight_decay: float | None = None  # None means the default of the optimizer
    optimizer_config: Mapping[str, Any] = field(default_factory=dict)  # additional options of the optimizer
    batch_size: int = 128  # examples per step
    epochs: int = 10  # passes over the training split
    steps: int | None = None  # total number of training steps, instead of `epochs`
    # An int n: validate every n steps. A tuple: validate after these steps. None: after each pass over the data.
    measure_every: int | tuple[int, ...] | None = None
    augment: Augment | None = None  # random changes of the inputs of a training batch, such as noise
    clip_norm: float | None = None  # gradients with a larger norm are scaled down to this norm
    amp: torch.dtype | None = None  # dtype of autocast for the p-net; None means no autocast
    warmup: float = 0.1  # fraction of the steps in which the learning rate rises
    schedule: Schedule = one_cycle
    # {setting: reason for its value}, printed before a training, for settings that depend on the data or the genome.
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def optimizer_options(self) -> dict[str, Any]:
        adam = {"betas": self.betas, "eps": self.eps} if "betas" in signature(self.optimizer).parameters else {}
        decay = {} if self.weight_decay is None else {"weight_decay": self.weight_decay}
        return adam | decay | dict(self.optimizer_config)


Batches = Callable[[Any, Recipe, torch.Generator, Callable[[], Net]], Iterator[Any]]
History = Sequence[Mapping[str, float]]


def example_batches(data: Data, recipe: Recipe, generator: torch.Generator, net: Callable[[], Net]) -> Iterator[Batch]:
    """Yield random, augmented batches endlessly. `net` is ignored: only `Task.batches` of `control` needs a network."""
    return endless_batches(data, recipe.batch_size, generator, recipe.augment)


def loss_fn(net: Net, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean cross entropy (nats) and the accuracy (0 to 1) of `net` on inputs [B, ...] with classes [B]."""
    x, y_B = batch
    logits_BK = logits_of(net(x))
    hits_B = logits_BK.detach().argmax(1) == y_B
    return F.cross_entropy(logits_BK, y_B), {"accuracy": hits_B.float().mean()}


def token_loss(net: Net, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean cross entropy (nats) with which `net` predicts the next tokens [B, L] from tokens [B, L]."""
    x_BL, y_BL = batch
    return F.cross_entropy(logits_of(net(x_BL)).flatten(0, 1), y_BL.flatten()), {}


@torch.no_grad()
def accuracy(net: Net, split: Data, chunk: int = 500) -> float:
    """Return the fraction (0 to 1) of examples that `net` classifies correctly, in batches of `chunk` examples."""
    if not len(split):
        raise ValueError("accuracy expects a split with examples, got an empty one")
    hits = sum(int((logits_of(net(x)).argmax(1) == y_B).sum()) for x, y_B in split.chunks(chunk))
    return hits / len(split)


@torch.no_grad()
def text_metrics(net: Net, text: Data, windows: int = 256, most: int | None = None) -> dict[str, float]:
    """Measure a language model on a split: `loss` (nats per token) and, for a text in `Windows`, `bits_per_char`.

    `bits_per_char` makes models with different vocabularies comparable. A call of `net` gets `windows` windows (or
    chats). With `most`, only the first `most` windows (or chats) are used.
    """
    total = count = 0
    for x_BL, y_BL in islice(text.chunks(windows), most and most // windows):
        logits = logits_of(net(x_BL)).flatten(0, 1)
        total += float(F.cross_entropy(logits, y_BL.flatten(), reduction="sum"))
        count += int((y_BL >= 0).sum())
    loss = total / count
    bits = {"bits_per_char": loss / math.log(2) * len(text.tokens) / text.chars} if isinstance(text, Windows) else {}
    return {"loss": loss, **bits}


ACCURACY = (Metric("accuracy"),)
LOSS = (Metric("loss", "nats", higher_is_better=False), Metric("bits_per_char", "bits", higher_is_better=False))


@dataclass(frozen=True)
class Task:
    """A data set, a p-net, and the settings with which the p-net is trained."""

    name: str  # the key in `TASKS`; a user's task may have any name
    interface: Interface  # shapes of examples and outputs
    # Training examples, validation examples (for the choice of settings), and test examples (for the final results).
    train: Any
    val: Any
    test: Any
    pnet: PNet
    # maps a p-net and the number of parameters of the genome to the recipe
    settings: Callable[[PNet, float], Recipe] = lambda pnet, genome_params: Recipe()
    genome_params: int | None = None  # default number of genome parameters; None means that `compression` applies
    compression: float = 20.0  # default ratio of the p-net's parameters to the genome's parameters
    # maps a network and a batch to the loss and {metric: value}
    loss: Callable[[Net, Any], tuple[Tensor, dict[str, Tensor]]] = loss_fn
    evaluate: Callable[[Net, Any], dict[str, float]] = lambda net, split: {"accuracy": accuracy(net, split)}
    metrics: tuple[Metric, ...] = ACCURACY  # what `evaluate` measures; the first metric decides which network is better
    # For texts: functions from text to tokens [L] (ValueError for unknown characters) and from tokens to text.
    encode: Callable[[str], Tensor] | None = None
    decode: Callable[[list[int]], str] | None = None
    # Maps (`train`, recipe, generator, net) to endless random batches. `net()` returns the network at the present step.
    batches: Batches = example_batches
    resumable: bool = True  # if False, training can resume only after full passes over the data
    # Additional metadata of a genome's file: `classes`, the names of the classes. For images also `mean` and `std`, the
    # mean and standard deviation of pixels [1 or C, 1, 1], and `white`, the largest possible value of a pixel.
    about: Mapping[str, Any] = field(default_factory=dict)
    counts: Callable[[int], Mapping[str, float]] = lambda steps: {}  # steps -> the task's own columns of the history
    facts: Callable[[History], Mapping[str, Any]] = lambda history: {}  # history, which may be empty -> more results

    @property
    def metric(self) -> Metric:
        return self.metrics[0]

    def to(self, device: torch.device | str) -> Task:
        return replace(self, train=self.train.to(device), val=self.val.to(device), test=self.test.to(device))

    def with_pnet(self, pnet: PNet) -> Task:
        return replace(self, pnet=pnet)

    def build(self, seed: int) -> nn.Module:
        """Make the p-net with the initial weights of a seed."""
        return self.pnet.build(seed)

    def recipe(self, genome_params: float) -> Recipe:
        """Choose the recipe for a genome of `genome_params` parameters."""
        return self.settings(self.pnet, genome_params)

    def measured(self, net: Net, split: Any) -> dict[str, float]:
        """Return the results of `evaluate`; raises ValueError if a result is not a number or a metric is missing."""
        found: Any = self.evaluate(net, split)
        names = {metric.name for metric in self.metrics}
        if isinstance(found, Mapping) and names <= found.keys():
            with suppress(TypeError, ValueError, RuntimeError):
                return {name: float(value) for name, value in found.items()}
        expected = f"evaluate of the task {self.name} must return a dict of numbers with the names {sorted(names)}"
        raise ValueError(f"{expected}, got {found!r:.200}")

    def plan(self, module: nn.Module, hypernet: str | None = None, **size: Any) -> Plan:
        """Plan a genome for a module made by `build`, with the best known options for this task.

        `hypernet` is a key of `HYPERNETS`, or None for the p-net's default type. `size` sets the size of the genome:
        `genome_params`, `compression`, or `genome_bytes` with the file's dtype `stored` (see `make_plan`).
        """
        params = (size.get("genome_bytes") or 0) / bytes_each(size.get("stored") or "float16")
        params = size.get("genome_params") or params or n_params(module) / (size.get("compression") or 1.0)
        options = self.pnet.plan(params)
        if hypernet is not None and hypernet != options.hypernet.type:
            options = options.with_hypernet(HYPERNETS[hypernet]())
        return make_plan(module, **options._asdict(), **size)


def taught(task: Task, teacher: nn.Module, weight: float = 0.5, temperature: float = 2.0) -> Task:
    """Return the task with the loss `gb.distillation`. The term for the teacher's outputs has the weight `weight`."""
    if task.batches is not example_batches:
        raise ValueError(f"a teacher needs a task of examples, got {task.name}, an environment: train without one")
    return replace(task, loss=distillation(teacher, temperature=temperature, weight=weight, loss_fn=task.loss))
