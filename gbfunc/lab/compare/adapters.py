"""Adapters of a pretrained p-net: small changes that are trained while the network itself stays as it is.

A file holds what is trained and the settings of the adapter: what a fresh base and it need to be the network again.
Those of `peft` are built, trained and read back by that package, tensors under the names that it saves. Random
projections come from their seed, and TinyLoRA's singular vectors, which `peft` does save, from the base: neither is
counted. Every adapter brings a full linear classifier, of E*K + K numbers for K classes; where that alone exceeds the
budget, nothing fits.

Within a budget each adapter has some shapes (which layers, which rank), each as large as fits; validation data choose
among them, together with the learning rate, which is one for all that is trained.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
from gbfunc.types import Params, TensorMap

_KINDS = {
    "query": r"(.*\.)?(query|q_proj|q_lin|q)",
    "key": r"(.*\.)?(key|k_proj|k_lin|k)",
    "value": r"(.*\.)?(value|v_proj|v_lin|v)",
    "up": r"(.*\.)?(intermediate\.dense|fc1|up_proj|lin1)",
    "down": r"output\.dense|(.*\.)?(fc2|down_proj|lin2)",
}
"""What the layers of a transformer's block are called in BERT, RoBERTa, DistilBERT, Llama, MPNet and others."""


class Linears(NamedTuple):
    """The linear layers of a network's equal blocks, `encoder.layer.3.output.dense` say."""

    blocks: tuple[str, ...]  # numbers, the first block first
    kinds: Mapping[str, tuple[int, int]]  # outputs and inputs by the name inside a block, in order

    def named(self, *roles: str) -> tuple[str, ...]:
        """Names inside a block of the layers with one of these roles, keys of `_KINDS`; of all if none is given."""
        known = [_KINDS[role] for role in roles]
        return tuple(k for k in self.kinds if not known or any(re.fullmatch(pattern, k) for pattern in known))

    def width(self, kinds: tuple[str, ...]) -> int:
        """Inputs and outputs of such layers in all blocks."""
        return len(self.blocks) * sum(sum(self.kinds[kind]) for kind in kinds)

    def last(self, n: int, kinds: tuple[str, ...]) -> str:
        """The pattern of the names of such layers in the last `n` blocks."""
        return rf".*\.({'|'.join(self.blocks[-n:])})\.({'|'.join(kinds)})"


def linears_of(net: nn.Module) -> Linears:
    """The linear layers of a network's blocks."""
    blocks: dict[str, None] = {}
    kinds: dict[str, tuple[int, int]] = {}
    for name, layer in net.named_modules():
        match = re.fullmatch(r"\D+\.(\d+)\.(.+)", name)
        if match and isinstance(layer, nn.Linear):
            blocks[match[1]] = None
            kinds.setdefault(match[2], (layer.out_features, layer.in_features))
    if not kinds:
        raise BudgetTooSmall("the p-net has no numbered blocks of linear layers")
    return Linears(tuple(blocks), kinds)


class Ladder(NamedTuple):
    """Settings of one shape of an adapter, larger with every rung."""

    rungs: int
    rung: Callable[[int], Settings]  # from 1 on


@dataclass(frozen=True)
class Peft:
    """An adapter of the package `peft`."""

    config: str  # its class of settings: `LoraConfig`, ...
    ladders: Callable[[nn.Module], list[Ladder]]  # the shapes that it has on a base

    def attach(self, net: nn.Module, settings: Settings) -> nn.Module:
        """The base with the adapter, changed in place: what requires gradients is what is trained."""
        peft = _import_peft()
        with _quiet():
            config = getattr(peft, self.config)(modules_to_save=[HEAD], **settings)
            return peft.get_peft_model(net, config)

    def state(self, net: nn.Module) -> Params:
        """What a file holds of what `attach` gave: what `peft` saves, but for what the base gives again."""
        state = _import_peft().get_peft_model_state_dict(net)
        return {name: t for name, t in state.items() if not name.endswith((".tinylora_A", ".tinylora_B"))}

    def fill(self, net: nn.Module, state: TensorMap) -> None:
        """Put it back into what `attach` gave."""
        with _quiet():
            unexpected = _import_peft().set_peft_model_state_dict(net, dict(state)).unexpected_keys
        if unexpected:
            raise ValueError(f"these tensors belong to no such adapter: {', '.join(unexpected)}")


def _import_peft() -> Any:
    return import_extra("peft", "comparing with other adapters", "peft")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings that projections come from their seed, which is wanted here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Specified to not (save|load)", category=UserWarning)
        yield


@dataclass(frozen=True)
class Part:
    """Some of the base's parameters themselves, and the classifier, with the methods of `Peft`."""

    ladders: Callable[[nn.Module], list[Ladder]]

    def attach(self, net: nn.Module, settings: Settings) -> nn.Module:
        """Parameters whose whole name matches the pattern `trained` are trained."""
        for name, parameter in net.named_parameters():
            chosen = name.startswith(f"{HEAD}.") or re.fullmatch(settings["trained"], name)
            parameter.requires_grad_(bool(chosen))
        return net

    def state(self, net: nn.Module) -> Params:
        """Those parameters."""
        return {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}

    def fill(self, net: nn.Module, state: TensorMap) -> None:
        """Every other parameter stays."""
        unexpected = net.load_state_dict(dict(state), strict=False).unexpected_keys
        if unexpected:
            raise ValueError(f"the p-net has no parameters {', '.join(unexpected)}")


@dataclass(frozen=True)
class Adapted:
    """The method of an adapter: what is trained, its settings as JSON in the header."""

    adapter: Peft | Part
    rates: tuple[float, ...]  # learning rates to choose from

    def candidates(self, problem: Problem) -> list[Settings]:
        """The largest of every shape that fits, and learning rates."""
        net = problem.task.build(0).to("meta")

        def fits(settings: Settings) -> bool:
            return len(self._packed(net, settings, problem.dtype)) <= problem.budget

        shapes: list[Settings] = []
        for ladder in self.adapter.ladders(net):
            most = base.largest(lambda n, ladder=ladder: fits(ladder.rung(n)), ladder.rungs)
            if most and (settings := ladder.rung(most)) not in shapes:
                shapes.append(settings)
        if not shapes:
            raise BudgetTooSmall(self._least(net, problem))
        return [{"adapter": settings, "lr": lr} for settings in shapes for lr in self.rates]

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """Adam on the adapter and the classifier."""
        net = self._attached(problem.task.build(seed), settings["adapter"], seed)
        leaves = [p for p in net.parameters() if p.requires_grad]
        base.train_net(problem, leaves, net, settings["lr"], seed)
        data = base.pack(self.adapter.state(net), problem.dtype, {"adapter": settings["adapter"]})
        return Trained(data, sum(leaf.numel() for leaf in leaves))

    def load(self, data: bytes, task: Task) -> Net:
        """A fresh base with the adapter."""
        net = self._attached(task.build(0), base.text_of(data)["adapter"], 0)
        self.adapter.fill(net, base.unpack(data, self.adapter.state(net)))
        return net.requires_grad_(False).eval()

    def file_bytes(self, task: Task, dtype: torch.dtype) -> int:
        """The length of the longest file of the last shape."""
        net = task.build(0).to("meta")
        ladder = self.adapter.ladders(net)[-1]
        return len(self._packed(net, ladder.rung(ladder.rungs), dtype))

    def _attached(self, net: nn.Module, settings: Settings, seed: int) -> nn.Module:
        # Adapters draw from torch's default generator, which is left as it was.
        with seeded(seed):
            return self.adapter.attach(net, settings)

    def _packed(self, net: nn.Module, settings: Settings, dtype: torch.dtype) -> bytes:
        # Of tensors of shapes alone: a copy of the base costs nothing, and no matrix is decomposed.
        attached = self._attached(copy.deepcopy(net), settings, 0)
        return base.pack(base.blanks(self.adapter.state(attached)), dtype, {"adapter": settings})

    def _least(self, net: nn.Module, problem: Problem) -> str:
        ladders = self.adapter.ladders(net)
        if not ladders:
            return "the p-net has no layers that it is for"
        least = min(len(self._packed(net, ladder.rung(1), problem.dtype)) for ladder in ladders)
        dtype = str(problem.dtype).removeprefix("torch.")
        return f"the smallest one takes {least:,} bytes in {dtype}, its classifier included"


# Shapes


_WHERE: tuple[tuple[str, ...], ...] = (("query",), ("query", "value"), ())
"""Queries, as the smallest; those that papers take; all."""


def _of_ranks(*ranks: int, **fixed: Any) -> Callable[[nn.Module], list[Ladder]]:
    """The least rank for layers of a kind in ever more of the last blocks; then, in all blocks, higher ranks."""

    def shapes(net: nn.Module) -> list[Ladder]:
        linears = linears_of(net)
        blocks = len(linears.blocks)

        def rung(n: int, kinds: tuple[str, ...]) -> Settings:
            rank = ranks[max(0, n - blocks)]
            return {"r": rank, "target_modules": linears.last(min(n, blocks), kinds), **fixed}

        where = filter(None, (linears.named(*roles) for roles in _WHERE))
        return [Ladder(blocks + len(ranks) - 1, partial(rung, kinds=kinds)) for kinds in where]

    return shapes


def _as_long_as_fits(
    size: str, most: Callable[[Linears, tuple[str, ...]], int], **fixed: Any
) -> Callable[[nn.Module], list[Ladder]]:
    """A vector of up to `most` numbers for queries and values, and for all layers."""

    def shapes(net: nn.Module) -> list[Ladder]:
        linears, ladders = linears_of(net), []
        for kinds in (linears.named("query", "value"), linears.named()):
            pattern = linears.last(len(linears.blocks), kinds)
            ladders.append(Ladder(most(linears, kinds), lambda n, p=pattern: {size: n, "target_modules": p, **fixed}))
        return [ladder for ladder in ladders if ladder.rungs]

    return shapes


def _smallest(linears: Linears, kinds: tuple[str, ...]) -> int:
    """Weights of the smallest of such layers."""
    return min((math.prod(linears.kinds[kind]) for kind in kinds), default=0)


_MOST_TINY = 2_304
"""Longest vector of TinyLoRA: its projections take a number for each of its, of each layer, and of r^2."""


def tiny_shapes(net: nn.Module) -> list[Ladder]:
    """One vector for all layers, no longer than what it is projected to has numbers, at two ranks."""
    linears = linears_of(net)
    kinds = linears.named()
    layers = len(linears.blocks) * len(kinds)
    fixed = {"target_modules": linears.last(len(linears.blocks), kinds), "weight_tying": 1.0, "save_projection": False}
    return [
        Ladder(min(layers * r * r, _MOST_TINY), lambda n, r=r: {"r": r, "u": n, **fixed})
        # The paper's rank, and one whose matrices have room for longer vectors.
        for r in (2, 8)
    ]


def ia3_shapes(net: nn.Module) -> list[Ladder]:
    """Scales of values in the last blocks; of keys, values and hidden units, as the paper has it."""
    linears = linears_of(net)
    blocks, hidden = len(linears.blocks), linears.named("down")
    ladders = []
    for kinds, forward in ((linears.named("value"), ()), (linears.named("key", "value", "down"), hidden)):

        def rung(n: int, kinds: tuple[str, ...] = kinds, forward: tuple[str, ...] = forward) -> Settings:
            scaled_inputs = linears.last(n, forward) if forward else []
            return {"target_modules": linears.last(n, kinds), "feedforward_modules": scaled_inputs}

        if kinds:
            ladders.append(Ladder(blocks, rung))
    return ladders


def bias_shapes(net: nn.Module) -> list[Ladder]:
    """Biases in the last blocks: of queries; of queries and hidden units, which do nearly all (BitFit, 2022); all."""
    linears = linears_of(net)
    blocks = len(linears.blocks)
    some = filter(None, (linears.named("query"), linears.named("query", "up"), (".*",)))
    return [Ladder(blocks, lambda n, kinds=kinds: {"trained": linears.last(n, kinds) + r"\.bias"}) for kinds in some]


def _whole(pattern: str) -> Callable[[nn.Module], list[Ladder]]:
    """One shape of one size."""
    return lambda net: [Ladder(1, lambda n: {"trained": pattern})]


ADAPTERS: Mapping[str, Adapted] = {
    "linear_probe": Adapted(Part(_whole("(?!)")), (1e-2, 3e-2, 1e-1)),
    "bitfit": Adapted(Part(bias_shapes), (3e-3, 1e-2, 3e-2)),
    "lora": Adapted(Peft("LoraConfig", _of_ranks(1, 2, 4, 8, 16, 32)), (3e-3, 1e-2, 3e-2)),
    # Two trained vectors a layer, around seeded matrices of higher rank.
    "vera": Adapted(Peft("VeraConfig", _of_ranks(64, 128, 256, 512, 1024, save_projection=False)), (1e-2, 3e-2, 1e-1)),
    # So many frequencies a layer.
    "fourierft": Adapted(Peft("FourierFTConfig", _as_long_as_fits("n_frequency", _smallest)), (3e-2, 1e-1, 3e-1)),
    "tinylora": Adapted(Peft("TinyLoraConfig", tiny_shapes), (3e-3, 1e-2, 3e-2)),
    # One vector for the factors of all these layers, of rank 4.
    "unilora": Adapted(
        Peft("UniLoraConfig", _as_long_as_fits("theta_d_length", lambda x, kinds: 4 * x.width(kinds), r=4)),
        (3e-3, 1e-2, 3e-2, 1e-1),
    ),
    "ia3": Adapted(Peft("IA3Config", ia3_shapes), (3e-3, 1e-2, 3e-2)),
}
"""Every rival by its name."""

FULL = Adapted(Part(_whole(".*")), (3e-5, 1e-4, 2e-4))
"""All weights, far beyond the budgets: what adapters are measured against."""
