"""Methods that train an adapter from the package `peft`, or some of the parameters, of a pretrained p-net.

A file has the trained tensors, including those of the classifier, and the names of the changed layers. Projections
(VeRA) are drawn from a seed, not stored. For each choice of layers, the largest adapter that fits the budget is tried.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from gbfunc.extras import import_extra
from gbfunc.lab.compare import base
from gbfunc.lab.compare.base import HEAD, BudgetTooSmall, Problem, Settings, Trained
from gbfunc.tasks import Net, Task
from gbfunc.tasks.pnets.base import seeded
from gbfunc.types import Params, TensorMap, dtype_name

_KINDS = {
    "query": r"(.*\.)?(query|q_proj|q_lin|q)",
    "key": r"(.*\.)?(key|k_proj|k_lin|k)",
    "value": r"(.*\.)?(value|v_proj|v_lin|v)",
    "up": r"(.*\.)?(intermediate\.dense|fc1|up_proj|lin1)",
    "down": r"output\.dense|(.*\.)?(fc2|down_proj|lin2)",
}
"""{role of a layer: pattern of its name in a block of BERT, RoBERTa, DistilBERT, Llama, MPNet and similar networks}"""

Kinds = tuple[str, ...]


class Linears(NamedTuple):
    """The linear layers of a network with equal blocks, such as `encoder.layer.3.output.dense` in block 3."""

    blocks: tuple[str, ...]  # Numbers of the blocks, in order
    kinds: Mapping[str, tuple[int, int]]  # {name of a layer inside a block: (number of outputs, number of inputs)}

    def named(self, *roles: str) -> Kinds:
        """Return names of a block's layers by role (a key of `_KINDS`, or "any"), or of all linear layers."""
        if roles == ("any",):
            return (".*",)
        known = [_KINDS[role] for role in roles]
        return tuple(k for k in self.kinds if not known or any(re.fullmatch(pattern, k) for pattern in known))

    def last(self, n: int, kinds: Kinds) -> str:
        """Return a regular expression for the full names of the layers `kinds` in the last `n` blocks."""
        return rf".*\.({'|'.join(self.blocks[-n:])})\.({'|'.join(kinds)})"


def linears_of(net: nn.Module) -> Linears:
    layers = ((re.fullmatch(r"\D+\.(\d+)\.(.+)", name), layer) for name, layer in net.named_modules())
    found = [(match[1], match[2], layer) for match, layer in layers if match and isinstance(layer, nn.Linear)]
    if not found:
        raise BudgetTooSmall("expected a p-net with numbered blocks of linear layers, got none: take another")
    kinds = {kind: (layer.out_features, layer.in_features) for _, kind, layer in found}
    return Linears(tuple(dict.fromkeys(block for block, _, _ in found)), kinds)


def _import_peft() -> Any:
    return import_extra("peft", "comparing with other adapters", "peft")


@dataclass(frozen=True)
class Adapted:
    """A method: an adapter from the package `peft`, trained by Adam together with the classifier.

    To fill a budget, the adapter is first applied with its smallest size to as many of the last blocks as fit. Then the
    size is increased.
    """

    config: str  # Name of the adapter's config class, such as `LoraConfig`
    rates: tuple[float, ...]  # Learning rates to choose from
    # Choices of layers, by role: only queries (the fewest parameters), the layers that papers choose, or all layers
    where: tuple[tuple[str, ...], ...] = (("query",), ("query", "value"), ())
    size: str = ""  # Name of the config's option that sets the size
    sizes: Sequence[int] = (0,)  # Values of the option `size`, in increasing order
    fixed: Settings | None = None  # Other options of the config

    def attach(self, net: nn.Module, settings: Settings) -> nn.Module:
        """Add the adapter to the base in place. Afterwards, only the adapter and the classifier require gradients."""
        peft = _import_peft()
        with warnings.catch_warnings():
            # Ignore this warning: projections are drawn from a seed, so they need not be saved.
            warnings.filterwarnings("ignore", message="Specified to not save", category=UserWarning)
            config = getattr(peft, self.config)(modules_to_save=[HEAD], **settings, **(self.fixed or {}))
            return peft.get_peft_model(net, config)

    def state(self, net: nn.Module) -> Params:
        return _import_peft().get_peft_model_state_dict(net)

    def fill(self, net: nn.Module, state: TensorMap) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Specified to not load", category=UserWarning)
            _import_peft().set_peft_model_state_dict(net, dict(state))

    def ladders(self, net: nn.Module) -> Iterator[tuple[int, Callable[[int], Settings]]]:
        """For each choice of layers, yield n and a function from 1, ..., n to the settings of ever larger adapters."""
        linears = linears_of(net)
        blocks = len(linears.blocks)

        def rung(kinds: Kinds, sizes: Sequence[int], options: Settings, n: int) -> Settings:
            size = {self.size: sizes[max(0, n - blocks)]} if self.size else {}
            return {**options, **size, "target_modules": linears.last(min(n, blocks), kinds)}

        for kinds in filter(None, (linears.named(*roles) for roles in self.where)):
            for sizes, options in self.shapes(linears, kinds):
                yield len(sizes) + blocks - 1, partial(rung, kinds, sizes, options)

    def shapes(self, linears: Linears, kinds: Kinds) -> Iterator[tuple[Sequence[int], Settings]]:
        """Yield pairs for adapters of the layers `kinds`: values of the option `size`, ascending, and other options."""
        yield self.sizes, {}

    def candidates(self, problem: Problem) -> list[Settings]:
        net, dtype = problem.task.build(0).to("meta"), problem.dtype
        ladders, shapes = list(self.ladders(net)), list[Settings]()
        for rungs, rung in ladders:
            most = base.largest(lambda n, rung=rung: self.length(net, rung(n), dtype) <= problem.budget, rungs)
            if most and (settings := rung(most)) not in shapes:
                shapes.append(settings)
        if not ladders:
            raise BudgetTooSmall("expected a p-net with layers for the adapter, got none: take another method")
        if not shapes:
            least = min(self.length(net, rung(1), dtype) for _, rung in ladders)
            words = f"the smallest adapter, in {dtype_name(dtype)} and with its classifier, takes {least:,} bytes"
            raise BudgetTooSmall(f"{words}, got a budget of {problem.budget:,}: raise it")
        return base.grid(adapter=shapes, lr=self.rates)

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        about = {"adapter": settings["adapter"]}
        net = self._attached(problem.task.build(seed), about["adapter"], seed)
        leaves = [p for p in net.parameters() if p.requires_grad]
        base.train_net(problem, leaves, net, settings["lr"], seed)
        data = base.pack(self.state(net), problem.dtype, about)
        return Trained(data, sum(leaf.numel() for leaf in leaves))

    def load(self, data: bytes, task: Task) -> Net:
        net = self._attached(task.build(0), base.text_of(data)["adapter"], 0)
        self.fill(net, base.unpack(data, self.state(net)))
        return net.requires_grad_(False).eval()

    def length(self, net: nn.Module, settings: Settings, dtype: torch.dtype) -> int:
        """Return the length of the file from `train`. `net` is on the meta device, where copies take no memory."""
        attached = self._attached(copy.deepcopy(net), settings, 0)
        return len(base.pack(base.blanks(self.state(attached)), dtype, {"adapter": settings}))

    def _attached(self, net: nn.Module, settings: Settings, seed: int) -> nn.Module:
        # Seed torch's default generator, from which adapters draw random numbers.
        with seeded(seed):
            return self.attach(net, settings)


@dataclass(frozen=True)
class Part(Adapted):
    """Trains the parameters whose names match `config`, a regular expression in which {} means the chosen layers."""

    def attach(self, net: nn.Module, settings: Settings) -> nn.Module:
        pattern = self.config.format(settings.get("target_modules"))
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(name.startswith(f"{HEAD}.") or re.fullmatch(pattern, name) is not None)
        return net

    def state(self, net: nn.Module) -> Params:
        return {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}

    def fill(self, net: nn.Module, state: TensorMap) -> None:
        net.load_state_dict(dict(state), strict=False)

    def ladders(self, net: nn.Module) -> Iterator[tuple[int, Callable[[int], Settings]]]:
        return super().ladders(net) if "{}" in self.config else iter([(1, lambda n: {})])


_RATES, _FRESH = (3e-3, 1e-2, 3e-2), {"save_projection": False}

ADAPTERS: Mapping[str, Adapted] = {
    "linear_probe": Part("(?!)", (1e-2, 3e-2, 1e-1)),
    # Trains the biases of queries; of queries and hidden units (nearly as good as all: Ben Zaken et al., 2022); or all
    "bitfit": Part(r"{}\.bias", _RATES, (("query",), ("query", "up"), ("any",))),
    "lora": Adapted("LoraConfig", _RATES, size="r", sizes=(1, 2, 4, 8, 16, 32)),
    # Trains two vectors per layer, which scale random matrices. The matrices are drawn from a seed
    "vera": Adapted("VeraConfig", (1e-2, 3e-2, 1e-1), size="r", sizes=(64, 128, 256, 512, 1024), fixed=_FRESH),
    # Trains vectors that multiply the values, or the keys, values and hidden units (as in the paper of IA3)
    "ia3": Adapted(
        "IA3Config",
        _RATES,
        (("value",), ("key", "value", "down")),
        fixed={"feedforward_modules": rf"\D+\.\d+\.({_KINDS['down']})"},
    ),
}
"""All adapters, by name."""

FULL = Part(".*", (3e-5, 1e-4, 2e-4))
"""Full fine-tuning, with which adapters are compared."""
