"""Networks that act: a policy and the values of what it sees, for tasks of control.

Observations [B, O] go in, the policy's numbers [B, P] (see `gbfunc.tasks.ppo.policy`) and values [B] come out. A
network with an attribute `memory`, so many numbers M that it carries from step to step, is called on sequences instead:

    observations [B, T, O], starts of episodes [B, T], memory [B, M] -> numbers [B, T, P], values [B, T], memory [B, M]

It forgets what it carries wherever an episode starts.

Suffixes: B environments or examples, T steps, O numbers of an observation, P numbers that describe a policy, M numbers
of a memory, H hidden units; C channels, h rows and w columns of an image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from gbfunc.encoding import binary, grid, per_axis
from gbfunc.hypernets import constant
from gbfunc.tasks.pnets.base import Interface, PlanOptions, PNet, Shapes, check_options, rows_of, scaled_width
from gbfunc.tasks.pnets.mlp import check_sizes

_LARGE = 36
"""Rows and columns of the smallest images that Atari's three convolutions take."""


class ActorCritic(nn.Module):
    """Two tanh networks, `actor` and `critic`: observations [B, O] -> the policy's numbers [B, P] and values [B].

    Weights start orthogonal with gain sqrt(2), the policy's last layer with 0.01, the value's with 1; biases start at
    zero. Where actions are vectors, their log deviation `log_std` does not depend on the observation.

    Args:
        sizes: units of the actor's layers, numbers of an observation first; the critic's end with one.
        vectors: whether actions are vectors.
    """

    def __init__(self, sizes: Sequence[int], vectors: bool = False) -> None:
        super().__init__()
        self.actor = _tanh_mlp(sizes, 0.01)
        self.critic = _tanh_mlp((*sizes[:-1], 1), 1.0)
        self.log_std = nn.Parameter(torch.zeros(sizes[-1])) if vectors else None

    def forward(self, obs_BO: Tensor) -> tuple[Tensor, Tensor]:
        """The policy's numbers [B, P] (see `gbfunc.tasks.ppo.policy`) and values [B]."""
        out = self.actor(obs_BO)
        return _numbers(out, self.log_std), self.critic(obs_BO).squeeze(-1)


def _numbers(out: Tensor, log_std: Tensor | None) -> Tensor:
    """What describes a policy: of choices the logits, of vectors their mean and log deviation."""
    return out if log_std is None else torch.cat([out, log_std.expand_as(out)], -1)


def _tanh_mlp(sizes: Sequence[int], head_gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (n_in, n_out) in enumerate(pairwise(sizes), 2):
        layers += [_orthogonal(nn.Linear(n_in, n_out), head_gain if i == len(sizes) else 2**0.5), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def _orthogonal(layer: nn.Module, gain: float) -> nn.Module:
    """The layer with orthogonal weights, and biases of zero."""
    for parameter in layer.parameters():
        if parameter.ndim > 1:
            nn.init.orthogonal_(parameter, gain)
        else:
            nn.init.zeros_(parameter)
    return layer


def actor_critic(
    interface: Interface,
    *,
    hidden: Sequence[int] = (64, 64),
    odd: bool = False,
    sizes: Sequence[int] | None = None,
) -> PNet:
    """Policy and value networks for a task of control.

    Args:
        interface: of the task.
        hidden: units of the hidden layers of each.
        odd: keep the policy's hidden biases at zero in a genome, so that its outputs are odd functions of the
            observation, up to a constant: for an environment in which left and right are alike.
        sizes: units of all layers of the actor, in place of `hidden`.
    """
    _check_vectors("actor_critic", interface)
    ends = (interface.inputs[0], interface.outputs)
    layers = tuple((ends[0], *hidden, ends[1]) if sizes is None else sizes)
    expected = "start with the {} numbers of an observation, have a hidden layer and end with the {} of an action"
    check_sizes(layers, ends, expected, least=3)
    biases = "|".join(str(2 * i) for i in range(len(layers) - 2))
    rules = ((rf"^actor\.({biases})\.bias$", constant(0.0)),) if odd else ()
    again = partial(actor_critic, interface, odd=odd)
    return PNet(
        name="actor_critic",
        make=lambda: ActorCritic(layers, interface.actions == "vector"),
        plan=lambda genome_params: PlanOptions(rules=rules),
        scaled=lambda factor: again(hidden=[scaled_width(n, factor) for n in layers[1:-1]]),
        fitted=lambda shapes: again(hidden=_actor_widths(shapes)),
        config={"hidden": list(layers[1:-1]), "odd": odd},
        label="-".join(map(str, layers)),
    )


def _actor_widths(shapes: Mapping[str, tuple[int, ...]]) -> list[int]:
    """Hidden units of the actor whose parameters have these shapes."""
    widths = [shape[0] for name, shape in shapes.items() if name.startswith("actor.") and len(shape) == 2][:-1]
    if not widths:
        raise ValueError("expected the parameters of an actor (actor.0.weight, actor.0.bias, actor.2.weight, ...)")
    return widths


def _check_acts(name: str, interface: Interface) -> None:
    if interface.actions is None:
        raise ValueError(f"the p-net {name} acts: take it for a task of control")


def _check_vectors(name: str, interface: Interface) -> None:
    _check_acts(name, interface)
    if len(interface.inputs) != 1:
        raise ValueError(f"the p-net {name} reads vectors: take conv_actor_critic for observations that are images")


class Heads(nn.Module):
    """A policy and a value that share features: [..., H] -> the policy's numbers [..., P] and values [...]."""

    def __init__(self, features: int, n_actions: int, vectors: bool) -> None:
        super().__init__()
        self.actor = _orthogonal(nn.Linear(features, n_actions), 0.01)
        self.critic = _orthogonal(nn.Linear(features, 1), 1.0)
        self.log_std = nn.Parameter(torch.zeros(n_actions)) if vectors else None

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """As above."""
        out = self.actor(features)
        return _numbers(out, self.log_std), self.critic(features).squeeze(-1)


class RecurrentActorCritic(nn.Module):
    """A layer of tanh, a GRU or LSTM, each of H units, and a policy and a value of what it holds.

    The memory of a `"gru"` (Cho et al., 2014) has H numbers, of an `"lstm"` (Hochreiter and Schmidhuber, 1997) 2 H.
    """

    def __init__(self, n_obs: int, hidden: int, n_actions: int, vectors: bool, cell: str) -> None:
        super().__init__()
        self.hidden, self.lstm = hidden, cell == "lstm"
        self.memory = 2 * hidden if self.lstm else hidden
        self.first = _orthogonal(nn.Linear(n_obs, hidden), 2**0.5)
        self.cell = _orthogonal((nn.LSTMCell if self.lstm else nn.GRUCell)(hidden, hidden), 1.0)
        self.heads = Heads(hidden, n_actions, vectors)

    def forward(
        self, obs_BTO: Tensor, starts_BT: Tensor | None = None, memory_BM: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Sequences and a memory as above; without them, observations [B, O] that are the first of their episodes."""
        if starts_BT is None or memory_BM is None:
            blank = obs_BTO.new_zeros(len(obs_BTO), self.memory)
            numbers, values, _ = self(obs_BTO[:, None], blank[:, :1], blank)
            return numbers[:, 0], values[:, 0]
        x_BTH, outputs = torch.tanh(self.first(obs_BTO)), []
        goes_on_BT1 = 1 - starts_BT.to(x_BTH)[..., None]
        for x_BH, goes_on_B1 in zip(x_BTH.unbind(1), goes_on_BT1.unbind(1), strict=True):
            memory_BM = self._remember(x_BH, memory_BM * goes_on_B1)
            outputs.append(memory_BM[:, : self.hidden])
        return *self.heads(torch.stack(outputs, 1)), memory_BM

    def _remember(self, x_BH: Tensor, memory_BM: Tensor) -> Tensor:
        return torch.cat(self.cell(x_BH, memory_BM.chunk(2, -1)), -1) if self.lstm else self.cell(x_BH, memory_BM)


def recurrent_actor_critic(interface: Interface, *, hidden: int = 64, cell: Literal["gru", "lstm"] = "gru") -> PNet:
    """A `RecurrentActorCritic` for a task of control whose observations are vectors and do not tell all."""
    name = "recurrent_actor_critic"
    _check_vectors(name, interface)
    check_options(name, hidden=hidden)
    if cell not in ("gru", "lstm"):
        raise ValueError(f"cell of {name} must be 'gru' or 'lstm', got {cell!r}")
    again = partial(recurrent_actor_critic, interface, cell=cell)
    vectors = interface.actions == "vector"

    def fitted(shapes: Shapes) -> PNet:
        hidden, rows = rows_of(shapes, "first.weight", "an actor"), rows_of(shapes, "cell.weight_hh", "an actor")
        return recurrent_actor_critic(interface, hidden=hidden, cell="lstm" if rows == 4 * hidden else "gru")

    return PNet(
        name=name,
        make=lambda: RecurrentActorCritic(interface.inputs[0], hidden, interface.outputs, vectors, cell),
        plan=lambda genome_params: PlanOptions(include=(r"^cell\.weight_",)),
        scaled=lambda factor: again(hidden=scaled_width(hidden, factor)),
        fitted=fitted,
        config={"hidden": hidden, "cell": cell},
        label=f"{interface.inputs[0]}-{cell} {hidden}-{interface.outputs}",
    )


class ConvActorCritic(nn.Module):
    """Convolutions, a wide layer, and a policy and a value of it: images [B, C, h, w] -> numbers [B, P] and values [B].

    Images of 36 x 36 and more go through the three convolutions of Mnih et al. (2015), smaller ones through two of
    3 x 3. The first has `width` channels, the others twice as many. Integers of 8 bits are brightnesses up to 255.
    """

    def __init__(self, inputs: Sequence[int], width: int, hidden: int, n_actions: int, vectors: bool) -> None:
        super().__init__()
        channels, *size = inputs
        layers: list[nn.Module] = []
        for out, kernel, stride in _convolutions(inputs, width):
            layers += [_orthogonal(nn.Conv2d(channels, out, kernel, stride), 2**0.5), nn.ReLU()]
            channels, size = out, [(n - kernel) // stride + 1 for n in size]
        self.size = tuple(size)
        self.convolutions = nn.Sequential(*layers)
        self.wide = _orthogonal(nn.Linear(channels * size[0] * size[1], hidden), 2**0.5)
        self.heads = Heads(hidden, n_actions, vectors)

    def forward(self, obs_BChw: Tensor) -> tuple[Tensor, Tensor]:
        """As above."""
        x_BChw = obs_BChw / 255 if obs_BChw.dtype == torch.uint8 else obs_BChw
        return self.heads(torch.relu(self.wide(self.convolutions(x_BChw).flatten(1))))


def _convolutions(inputs: Sequence[int], width: int) -> tuple[tuple[int, int, int], ...]:
    """(channels, kernel, stride) of each."""
    if min(inputs[1:]) >= _LARGE:
        return (width, 8, 4), (2 * width, 4, 2), (2 * width, 3, 1)
    return (width, 3, 1), (2 * width, 3, 1)


def conv_actor_critic(interface: Interface, *, width: int = 32, hidden: int = 512) -> PNet:
    """A `ConvActorCritic` for a task of control whose observations are images."""
    name, inputs = "conv_actor_critic", interface.inputs
    _check_acts(name, interface)
    if len(inputs) != 3 or min(inputs[1:]) < 5:
        raise ValueError(f"the p-net {name} reads images of 5 x 5 or more, got observations of shape {inputs}")
    check_options(name, width=width, hidden=hidden)
    vectors = interface.actions == "vector"

    def make() -> ConvActorCritic:
        return ConvActorCritic(inputs, width, hidden, interface.outputs, vectors)

    def plan(genome_params: float) -> PlanOptions:
        with torch.device("meta"):
            size = make().size
        places = per_axis(binary(), grid(*size), size[0] * size[1])
        return PlanOptions(encodings={"wide.weight": (None, places)})

    def fitted(shapes: Shapes) -> PNet:
        first = rows_of(shapes, "convolutions.0.weight", "an actor", 4)
        return conv_actor_critic(interface, width=first, hidden=rows_of(shapes, "wide.weight", "an actor"))

    return PNet(
        name=name,
        make=make,
        plan=plan,
        scaled=lambda f: conv_actor_critic(interface, width=scaled_width(width, f), hidden=scaled_width(hidden, f)),
        fitted=fitted,
        config={"width": width, "hidden": hidden},
        label=f"{width} channels-{hidden}-{interface.outputs}",
    )
