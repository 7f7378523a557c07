"""What a task is: data in three splits, a p-net, a loss, metrics, and a recipe that trains its genome well.

Commands know this alone. A task learns from examples (`Split`, `Windows`), or from an environment in which the network
in training acts (`gbfunc.tasks.control`): its `batches` say how.

Suffixes: B examples of a batch, L positions of a text, K classes, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from inspect import signature
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gbfunc import Plan, make_plan, torch_schedule
from gbfunc.formats import bytes_each
from gbfunc.hypernets import HYPERNETS
from gbfunc.tasks.data import Augment, Batch, Data, Split, Windows, endless_batches
from gbfunc.tasks.pnets import Interface, PNet

Net = Callable[[Tensor], Any]
"""Inputs to logits, or to an object with logits (a Hugging Face output)."""

_CHUNK, _TEXT_CHUNK = 5_000, 256


class Metric(NamedTuple):
    """What networks are judged by.

    Attributes:
        name: its key in metrics: `val_<name>`, `test_<name>`.
        unit: `"%"` for parts of one shown in percent, else what stands behind the number.
        higher_is_better: whether a larger one is better.
        digits: decimals that are shown, but for percents.
    """

    name: str
    unit: str = "%"
    higher_is_better: bool = True
    digits: int = 4

    @property
    def label(self) -> str:
        """The name for a person."""
        return self.name.replace("_", " ")

    @property
    def sign(self) -> int:
        """What makes a larger value of any metric a better one."""
        return 1 if self.higher_is_better else -1

    def show(self, value: float) -> str:
        """The value for a person."""
        return f"{value:.2%}" if self.unit == "%" else f"{value:.{self.digits}f} {self.unit}".rstrip()


def one_cycle(recipe: Recipe, lr: float, steps: int) -> Callable[[int], float]:
    """Learning rate by step: up to `lr` in the recipe's warm-up, then down to nearly nothing."""
    # A warm-up of exactly one step divides by zero there.
    warmup = 1.5 / steps if math.isclose(recipe.warmup * steps, 1) and steps > 1 else recipe.warmup
    return torch_schedule(torch.optim.lr_scheduler.OneCycleLR, lr, steps, pct_start=warmup)


def linear_decay(recipe: Recipe, lr: float, steps: int) -> Callable[[int], float]:
    """Learning rate by step: in equal steps up to `lr` in the recipe's warm-up, then down to nothing."""
    warm = max(1, round(recipe.warmup * steps))

    def schedule(step: int) -> float:
        return lr * min((step + 1) / warm, max(0, steps - step) / max(1, steps - warm + 1))

    return schedule


def cosine(recipe: Recipe, lr: float, steps: int) -> Callable[[int], float]:
    """Learning rate by step: from `lr` down to nothing, by half a period of a cosine."""
    return torch_schedule(torch.optim.lr_scheduler.CosineAnnealingLR, lr, steps, T_max=steps)


def constant_rate(recipe: Recipe, lr: float, steps: int) -> Callable[[int], float]:
    """Learning rate by step: always `lr`."""
    return lambda step: lr


SCHEDULES: Mapping[str, Callable[[Recipe, float, int], Callable[[int], float]]] = MappingProxyType(
    {"one_cycle": one_cycle, "linear": linear_decay, "cosine": cosine, "constant": constant_rate}
)
"""Schedules of a recipe by their names on the command line."""


@dataclass(frozen=True)
class Recipe:
    """Settings that train a genome of a given size well, chosen on validation data.

    Attributes:
        lr: peak learning rate of the g-nets.
        direct_lr: peak learning rate of direct parameters; None for the same.
        dense_lr: peak learning rate of a dense net of the same task.
        optimizer: class.
        betas: of Adam and classes like it.
        eps: of those.
        weight_decay: of the class; None for its default.
        optimizer_config: other options of the class.
        batch_size: examples per step.
        epochs: passes over the training split.
        steps: steps in all, in place of `epochs`; None for whole passes.
        measure_every: steps from one validation to the next, or the steps after which to validate; None for a pass.
        augment: changes the inputs of a training batch.
        clip_norm: largest norm of the gradient.
        amp: dtype of the p-net's autocast; None for its own.
        warmup: part of the steps in which the learning rate rises.
        schedule: from the recipe, a peak rate and the number of steps to the learning rate by step.
        reasons: why settings are as they are, by their names, where a task chooses them by its data or the genome.
    """

    lr: float = 2e-2
    direct_lr: float | None = None
    dense_lr: float = 1e-3
    optimizer: type[torch.optim.Optimizer] = torch.optim.Adam
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float | None = None
    optimizer_config: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 128
    epochs: int = 10
    steps: int | None = None
    measure_every: int | tuple[int, ...] | None = None
    augment: Augment | None = None
    clip_norm: float | None = None
    amp: torch.dtype | None = None
    warmup: float = 0.1
    schedule: Callable[[Recipe, float, int], Callable[[int], float]] = one_cycle
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def schedule_name(self) -> str | None:
        """Name of the schedule in `SCHEDULES`; None for one that is a task's."""
        return next((name for name, schedule in SCHEDULES.items() if schedule is self.schedule), None)

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """All options of the optimizer's class but the learning rate."""
        adam = {"betas": self.betas, "eps": self.eps} if "betas" in signature(self.optimizer).parameters else {}
        decay = {} if self.weight_decay is None else {"weight_decay": self.weight_decay}
        return adam | decay | dict(self.optimizer_config)


LossFn = Callable[[Net, Any], tuple[Tensor, dict[str, Tensor]]]
Evaluate = Callable[[Net, Any], dict[str, float]]
Batches = Callable[[Any, Recipe, torch.Generator, Callable[[], Net]], Iterator[Any]]
History = Sequence[Mapping[str, float]]


def example_batches(data: Data, recipe: Recipe, generator: torch.Generator, net: Callable[[], Net]) -> Iterator[Batch]:
    """Pass after pass over a split of examples, augmented; what the network is does not matter."""
    return endless_batches(data, recipe.batch_size, generator, recipe.augment)


def loss_fn(net: Net, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean cross entropy (nats) of a batch [B, ...] and its classes [B], and its accuracy (0 to 1) beside it."""
    x, y_B = batch
    logits_BK = logits_of(net(x))
    hits_B = logits_BK.detach().argmax(1) == y_B
    return F.cross_entropy(logits_BK, y_B), {"accuracy": hits_B.float().mean()}


def token_loss(net: Net, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean cross entropy (nats) of the tokens [B, L] after those of a batch [B, L], from logits [B, L, V]."""
    x_BL, y_BL = batch
    return F.cross_entropy(logits_of(net(x_BL)).flatten(0, 1), y_BL.flatten()), {}


def logits_of(output: Any) -> Tensor:
    """The logits of a network's output: itself, or its attribute `logits`.

    Raises:
        TypeError: if it is neither.
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(f"a p-net must return logits or an object with .logits, got {type(output).__name__}")
    return logits


@torch.no_grad()
def accuracy(net: Net, split: Data, chunk: int = _CHUNK) -> float:
    """Part of a split (0 to 1) whose class `net` gets right, `chunk` examples at a time.

    Raises:
        ValueError: if the split is empty.
    """
    if not len(split):
        raise ValueError("accuracy expects a split with examples, got an empty one")
    hits = sum(int((logits_of(net(x)).argmax(1) == y_B).sum()) for x, y_B in split.chunks(chunk))
    return hits / len(split)


def classification_metrics(net: Net, split: Split) -> dict[str, float]:
    """`accuracy` alone."""
    # Images of a convolutional net need less of them at a time than flat ones.
    return {"accuracy": accuracy(net, split, _CHUNK if split.x.shape[1:].numel() < 1_000 else 500)}


@torch.no_grad()
def text_metrics(net: Net, text: Windows) -> dict[str, float]:
    """`loss` (nats a token) over all windows of a text, and `bits_per_char`, which no choice of tokens changes."""
    total = count = 0
    for x_BL, y_BL in text.chunks(_TEXT_CHUNK):
        logits = logits_of(net(x_BL)).flatten(0, 1)
        total += float(F.cross_entropy(logits, y_BL.flatten(), reduction="sum"))
        count += y_BL.numel()
    loss = total / count
    return {"loss": loss, "bits_per_char": loss / math.log(2) * len(text.tokens) / text.chars}


def scaling(mean: Any, std: Any) -> dict[str, Any]:
    """Mean and deviation of pixels for `Task.about`, in six digits; of channels [C, 1, 1] as lists."""
    return {
        name: [float(f"{x:.6g}") for x in np.ravel(value)] if np.ndim(value) else float(f"{value:.6g}")
        for name, value in (("mean", mean), ("std", std))
    }


ACCURACY = (Metric("accuracy"),)
LOSS = (Metric("loss", "nats", higher_is_better=False), Metric("bits_per_char", "bits", higher_is_better=False))


@dataclass(frozen=True)
class Task:
    """Data, a p-net and how to train it.

    Attributes:
        name: its key in `TASKS`, or where it comes from.
        interface: shapes of its examples and of the answers.
        train: examples to train on.
        val: held-out examples, to choose settings.
        test: held-out examples, to report.
        pnet: the p-net.
        settings: recipe from the p-net and the size of the genome, in parameters.
        genome_params: size target where the user gives none; None for `compression`.
        compression: the same as a ratio.
        loss: `(net, batch) -> (loss, metrics of the batch)`.
        evaluate: `(net, split) -> {metric: value}`.
        metrics: what `evaluate` measures, the one to judge by first.
        encode: text to tokens [N], for a task of texts; `ValueError` for what it has no tokens for.
        decode: tokens to text, for a task of texts.
        batches: `(train, recipe, generator, net) -> batches` without end; `generator` decides their order, and `net()`
            is the network as it is at that moment.
        resumable: whether batches can be drawn again, so that a training can go on from a checkpoint.
        counts: what else to count after so many steps, for a row of the history.
        about: what else a genome's file says: `mean` and `std` of pixels, by channel if need be, the largest one where
            that is not 255 (`white`), and names of `classes`.
        facts: what else to say of the task and of a training, from its history (which may be empty).
    """

    name: str
    interface: Interface
    # Each a `Data`; not typed so, as every kind has other attributes.
    train: Any
    val: Any
    test: Any
    pnet: PNet
    settings: Callable[[PNet, float], Recipe] = lambda pnet, genome_params: Recipe()
    genome_params: int | None = None
    compression: float = 20.0
    loss: LossFn = loss_fn
    evaluate: Evaluate = classification_metrics
    metrics: tuple[Metric, ...] = ACCURACY
    encode: Callable[[str], Tensor] | None = None
    decode: Callable[[list[int]], str] | None = None
    batches: Batches = example_batches
    resumable: bool = True
    about: Mapping[str, Any] = field(default_factory=dict)
    counts: Callable[[int], Mapping[str, float]] = lambda steps: {}
    facts: Callable[[History], Mapping[str, Any]] = lambda history: {}

    @property
    def metric(self) -> Metric:
        """The metric to judge by."""
        return self.metrics[0]

    def to(self, device: torch.device | str) -> Task:
        """A copy of the task whose examples are on `device`."""
        return replace(self, train=self.train.to(device), val=self.val.to(device), test=self.test.to(device))

    def with_pnet(self, pnet: PNet) -> Task:
        """A copy of the task with `pnet` in the place of its p-net."""
        return replace(self, pnet=pnet)

    def build(self, seed: int) -> nn.Module:
        """The p-net with the initial weights of a seed."""
        return self.pnet.build(seed)

    def recipe(self, genome_params: float) -> Recipe:
        """Settings for a genome of a size."""
        return self.settings(self.pnet, genome_params)

    def measured(self, net: Net, split: Any) -> dict[str, float]:
        """What `evaluate` finds, as plain numbers.

        Raises:
            ValueError: if it returns anything else, or nothing for one of `metrics`.
        """
        found: Any = self.evaluate(net, split)
        names = {metric.name for metric in self.metrics}
        if isinstance(found, Mapping) and names <= found.keys():
            with suppress(TypeError, ValueError, RuntimeError):
                return {name: float(value) for name, value in found.items()}
        expected = f"evaluate of the task {self.name} must return numbers by their names, {sorted(names)} among them"
        raise ValueError(f"{expected}, got {found!r:.200}")

    def plan(self, module: nn.Module, hypernet: str | None = None, **size: Any) -> Plan:
        """Plan a genome for the p-net as is known to be good.

        Args:
            module: what `build` gave.
            hypernet: type of the g-nets, a key of `HYPERNETS`; the p-net's options stand where it is theirs.
            size: `genome_params`, `genome_bytes` (with `stored`) or `compression` of `make_plan`, which raises for a
                bad one.
        """
        total = sum(p.numel() for p in module.parameters())
        target = size.get("genome_params") or (size.get("genome_bytes") or 0) / bytes_each(
            size.get("stored") or "float32"
        )
        options = self.pnet.plan(target or total / (size.get("compression") or 1.0))
        if hypernet is not None and hypernet != options.hypernet.type:
            options = options.with_hypernet(HYPERNETS[hypernet]())
        return make_plan(module, **options._asdict(), **size)
