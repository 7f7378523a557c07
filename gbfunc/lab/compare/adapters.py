"""Adapters of a pretrained p-net: small changes that are trained while the network itself stays as it is.

Adapters are those of the package `peft`, but for parts of the base that are trained themselves. A file holds what is
trained and the settings of the adapter: what a fresh base and the adapter need to be the network again. Random
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
from collections.abc import Callable, Iterable, Mapping
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

Kinds = tuple[str, ...]


class Linears(NamedTuple):
    """The linear layers of a network's equal blocks, `encoder.layer.3.output.dense` say."""

    blocks: tuple[str, ...]  # numbers, the first block first
    kinds: Mapping[str, tuple[int, int]]  # outputs and inputs by the name inside a block, in order

    def named(self, *roles: str) -> Kinds:
        """Names inside a block of the layers with one of these roles, keys of `_KINDS`; of all if none is given."""
        known = [_KINDS[role] for role in roles]
        return tuple(k for k in self.kinds if not known or any(re.fullmatch(pattern, k) for pattern in known))

    def last(self, n: int, kinds: Kinds) -> str:
        """The pattern of the names of such layers in the last `n` blocks."""
        return rf".*\.({'|'.join(self.blocks[-n:])})\.({'|'.join(kinds)})"


def linears_of(net: nn.Module) -> Linears:
    """Find the linear layers of a network's blocks."""
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


Shapes = Callable[[nn.Module], list[Ladder]]


@dataclass(frozen=True)
class Peft:
    """An adapter of the package `peft`."""

    config: str  # its class of settings: `LoraConfig`, ...
    ladders: Shapes  # the shapes that it has on a base

    def attach(self, net: nn.Module, settings: Settings) -> nn.Module:
        """Change the base in place: what requires gradients is what is trained."""
        peft = _import_peft()
        with warnings.catch_warnings():
            # Projections are to come from their seed.
            warnings.filterwarnings("ignore", message="Specified to not save", category=UserWarning)
            return peft.get_peft_model(net, getattr(peft, self.config)(modules_to_save=[HEAD], **settings))

    def state(self, net: nn.Module) -> Params:
        """Collect what a file holds: what `peft` saves, but for what the base gives again."""
        state = _import_peft().get_peft_model_state_dict(net)
        return {name: t for name, t in state.items() if not name.endswith((".tinylora_A", ".tinylora_B"))}

    def fill(self, net: nn.Module, state: TensorMap) -> Iterable[str]:
        """Put a state back into what `attach` gave; return names that belong to no such adapter."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Specified to not load", category=UserWarning)
            return _import_peft().set_peft_model_state_dict(net, dict(state)).unexpected_keys


def _import_peft() -> Any:
    return import_extra("peft", "comparing with other adapters", "peft")


@dataclass(frozen=True)
class Part:
    """Some of the base's parameters themselves, and the classifier, with the methods of `Peft`."""

    ladders: Shapes

    def attach(self, net: nn.Module, settings: Settings) -> nn.Module:
        """Train parameters whose whole name matches the pattern `trained`."""
        for name, parameter in net.named_parameters():
            chosen = name.startswith(f"{HEAD}.") or re.fullmatch(settings["trained"], name)
            parameter.requires_grad_(bool(chosen))
        return net

    def state(self, net: nn.Module) -> Params:
        """Collect the trained parameters."""
        return {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}

    def fill(self, net: nn.Module, state: TensorMap) -> Iterable[str]:
        """Put a state back; every other parameter stays."""
        return net.load_state_dict(dict(state), strict=False).unexpected_keys


@dataclass(frozen=True)
class Adapted:
    """The method of an adapter: what is trained, its settings as JSON in the header."""

    adapter: Peft | Part
    rates: tuple[float, ...]  # learning rates to choose from
    stored: torch.dtype | None = None  # instead of the problem's dtype

    def candidates(self, problem: Problem) -> list[Settings]:
        """The largest of every shape that fits, and learning rates."""
        net, dtype = problem.task.build(0).to("meta"), self.stored or problem.dtype

        def length(settings: Settings) -> int:
            return self.length(net, settings, dtype)

        ladders, shapes = self.adapter.ladders(net), list[Settings]()
        for _, rung in ladders:
            most = base.largest(lambda n, rung=rung: length(rung(n)) <= problem.budget, _)
            if most and (settings := rung(most)) not in shapes:
                shapes.append(settings)
        if not ladders:
            raise BudgetTooSmall("the p-net has no layers that it is for")
        if not shapes:
            least, kind = min(length(rung(1)) for _, rung in ladders), str(dtype).removeprefix("torch.")
            raise BudgetTooSmall(f"the smallest one takes {least:,} bytes in {kind}, its classifier included")
        return [{"adapter": settings, "lr": lr} for settings in shapes for lr in self.rates]

    def train(self, problem: Problem, settings: Settings, seed: int) -> Trained:
        """Adam on the adapter and the classifier."""
        about = {"adapter": settings["adapter"]}
        net = self._attached(problem.task.build(seed), about["adapter"], seed)
        leaves = [p for p in net.parameters() if p.requires_grad]
        base.train_net(problem, leaves, net, settings["lr"], seed)
        data = base.pack(self.adapter.state(net), self.stored or problem.dtype, about)
        return Trained(data, sum(leaf.numel() for leaf in leaves))

    def load(self, data: bytes, task: Task) -> Net:
        """A fresh base with the adapter."""
        net = self._attached(task.build(0), base.text_of(data)["adapter"], 0)
        if foreign := list(self.adapter.fill(net, base.unpack(data, self.adapter.state(net)))):
            raise ValueError(f"these tensors belong to no such adapter: {', '.join(foreign)}")
        return net.requires_grad_(False).eval()

    def length(self, net: nn.Module, settings: Settings, dtype: torch.dtype) -> int:
        """Count the bytes of a file, for a base on the meta device."""
        # A copy of shapes costs nothing, and no matrix is decomposed.
        attached = self._attached(copy.deepcopy(net), settings, 0)
        return len(base.pack(base.blanks(self.adapter.state(attached)), dtype, {"adapter": settings}))

    def _attached(self, net: nn.Module, settings: Settings, seed: int) -> nn.Module:
        # Adapters draw from torch's default generator, which is left as it was.
        with seeded(seed):
            return self.adapter.attach(net, settings)


# Shapes

_WHERE: tuple[tuple[str, ...], ...] = (("query",), ("query", "value"), ())
"""Queries, as the smallest; those that papers take; all."""


def _shapes(
    where: Iterable[tuple[str, ...]],
    rungs: Callable[[Linears, Kinds], int],
    rung: Callable[[Linears, Kinds, int], Settings],
) -> Shapes:
    """A ladder for each of some roles, where the network has such layers."""

    def shapes(net: nn.Module) -> list[Ladder]:
        linears = linears_of(net)
        chosen = [kinds for roles in where if (kinds := linears.named(*roles))]
        ladders = [Ladder(rungs(linears, kinds), partial(rung, linears, kinds)) for kinds in chosen]
        return [ladder for ladder in ladders if ladder.rungs]

    return shapes


def _of_ranks(*ranks: int, **fixed: Any) -> Shapes:
    """The least rank for layers of a kind in ever more of the last blocks; then, in all blocks, higher ranks."""

    def rung(linears: Linears, kinds: Kinds, n: int) -> Settings:
        blocks = len(linears.blocks)
        return {"r": ranks[max(0, n - blocks)], "target_modules": linears.last(min(n, blocks), kinds), **fixed}

    return _shapes(_WHERE, lambda linears, kinds: len(linears.blocks) + len(ranks) - 1, rung)


def _as_long_as_fits(size: str, most: Callable[[Linears, Kinds], int], *where: tuple[str, ...], **fixed: Any) -> Shapes:
    """A vector of up to `most` numbers for the layers of all blocks."""

    def rung(linears: Linears, kinds: Kinds, n: int) -> Settings:
        return {size: n, "target_modules": linears.last(len(linears.blocks), kinds), **fixed}

    return _shapes(where, most, rung)


_PAIRS = (("query", "value"), ())

_MOST_TINY = 2_304
"""Longest vector of TinyLoRA: its projections take a number for each of its, of each layer, and of r^2."""


def _tiny(net: nn.Module) -> list[Ladder]:
    """One vector for all layers, no longer than what it is projected to has numbers.

    Of the paper's rank, and of one whose matrices have room for longer vectors.
    """
    fixed = {"weight_tying": 1.0, "save_projection": False}

    def most(linears: Linears, kinds: Kinds, r: int) -> int:
        return min(len(linears.blocks) * len(kinds) * r * r, _MOST_TINY)

    return [of for r in (2, 8) for of in _as_long_as_fits("u", partial(most, r=r), (), r=r, **fixed)(net)]


def _ia3(net: nn.Module) -> list[Ladder]:
    """Scales of values in the last blocks; of keys, values and hidden units, as the paper has it."""

    def rung(linears: Linears, kinds: Kinds, n: int) -> Settings:
        hidden = linears.named("down")
        scaled_inputs = linears.last(n, hidden) if set(hidden) & set(kinds) else []
        return {"target_modules": linears.last(n, kinds), "feedforward_modules": scaled_inputs}

    return _shapes((("value",), ("key", "value", "down")), _n_blocks, rung)(net)


def _n_blocks(linears: Linears, kinds: Kinds) -> int:
    return len(linears.blocks)


def _biases(net: nn.Module) -> list[Ladder]:
    """Biases in the last blocks: of queries; of queries and hidden units, which do nearly all (BitFit, 2022); all."""

    def rung(linears: Linears, kinds: Kinds, n: int) -> Settings:
        every = len(kinds) == len(linears.kinds)
        return {"trained": linears.last(n, (".*",) if every else kinds) + r"\.bias"}

    return _shapes((("query",), ("query", "up"), ()), _n_blocks, rung)(net)


def _whole(pattern: str) -> Shapes:
    """One shape of one size."""
    return lambda net: [Ladder(1, lambda n: {"trained": pattern})]


ADAPTERS: Mapping[str, Adapted] = {
    "linear_probe": Adapted(Part(_whole("(?!)")), (1e-2, 3e-2, 1e-1)),
    "bitfit": Adapted(Part(_biases), (3e-3, 1e-2, 3e-2)),
    "lora": Adapted(Peft("LoraConfig", _of_ranks(1, 2, 4, 8, 16, 32)), (3e-3, 1e-2, 3e-2)),
    # Two trained vectors a layer, around seeded matrices of higher rank.
    "vera": Adapted(Peft("VeraConfig", _of_ranks(64, 128, 256, 512, 1024, save_projection=False)), (1e-2, 3e-2, 1e-1)),
    # So many frequencies a layer, at most the weights of the smallest.
    "fourierft": Adapted(
        Peft(
            "FourierFTConfig",
            _as_long_as_fits("n_frequency", lambda x, kinds: min(math.prod(x.kinds[k]) for k in kinds), *_PAIRS),
        ),
        (3e-2, 1e-1, 3e-1),
    ),
    "tinylora": Adapted(Peft("TinyLoraConfig", _tiny), (3e-3, 1e-2, 3e-2)),
    # One vector for the factors of all these layers, of rank 4.
    "unilora": Adapted(
        Peft(
            "UniLoraConfig",
            _as_long_as_fits(
                "theta_d_length",
                lambda x, kinds: 4 * len(x.blocks) * sum(sum(x.kinds[k]) for k in kinds),
                *_PAIRS,
                r=4,
            ),
        ),
        (3e-3, 1e-2, 3e-2, 1e-1),
    ),
    "ia3": Adapted(Peft("IA3Config", _ia3), (3e-3, 1e-2, 3e-2)),
}
"""Every rival by its name."""

FULL = Adapted(Part(_whole(".*")), (3e-5, 1e-4, 2e-4))
"""All weights, far beyond the budgets: what adapters are measured against."""
