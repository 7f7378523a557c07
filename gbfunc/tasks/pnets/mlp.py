"""Multilayer perceptrons by their layer sizes: classifiers, and the actor and critic of a task of control."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from gbfunc.encoding import binary, grid
from gbfunc.hypernets import Hypernet, constant, periodic
from gbfunc.tasks.pnets.base import Interface, PlanOptions, PNet, scaled_width, seeded

_HIDDEN_FREQUENCY = 0.5
"""Deviation of the first code weights of hidden units, on validation images of MNIST."""


class MLP(nn.Sequential):
    """`Linear` layers named `0`, `2`, `4`, ... with ReLU between them; images are flattened."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        layers: list[nn.Module] = []
        for n_in, n_out in pairwise(sizes):
            layers += [nn.Linear(n_in, n_out), nn.ReLU()]
        super().__init__(*layers[:-1])

    def forward(self, input: Tensor) -> Tensor:
        """[B, ...] -> [B, K]."""
        return super().forward(input.flatten(1))


def mlp(sizes: tuple[int, ...], seed: int) -> nn.Sequential:
    """An `MLP` of so many units in each layer, inputs first; its first weights depend on `seed` alone."""
    with seeded(seed):
        return MLP(sizes)


def mlp_pnet(
    interface: Interface,
    *,
    hidden: Sequence[int] = (800,),
    bandwidth: float = 6.0,
    sizes: Sequence[int] | None = None,
) -> PNet:
    """An MLP for an image task.

    Args:
        interface: of the task.
        hidden: units of the hidden layers.
        bandwidth: of the coordinates of pixels, see `gbfunc.grid`.
        sizes: units of all layers, inputs and classes included, in place of `hidden`.

    Raises:
        ValueError: if the task is no image task, or the sizes do not fit it.
    """
    if interface.tokens or interface.vocabulary or interface.actions:
        texts = "gpt for a text task" if interface.tokens else "hf:TYPE for a task of texts with classes"
        other = "actor_critic for a task of control" if interface.actions else texts
        raise ValueError(f"the p-net mlp reads images: take {other}")
    n_inputs = math.prod(interface.inputs)
    layers = tuple((n_inputs, *hidden, interface.outputs) if sizes is None else sizes)
    _check_sizes(layers, (n_inputs, interface.outputs), "start with {} inputs and end with {} classes")
    again = partial(mlp_pnet, interface, bandwidth=bandwidth)
    return PNet(
        name="mlp",
        make=lambda: MLP(layers),
        plan=lambda genome_params: mlp_plan(layers, interface.inputs, bandwidth),
        scaled=lambda factor: again(hidden=[scaled_width(n, factor) for n in layers[1:-1]]),
        fitted=lambda shapes: again(sizes=mlp_sizes(shapes)),
        config={"hidden": list(layers[1:-1]), "bandwidth": bandwidth},
        label="-".join(map(str, layers)),
    )


def _check_sizes(sizes: tuple[int, ...], ends: tuple[int, int], expected: str, least: int = 2) -> None:
    """Raise `ValueError` unless at least so many sizes are positive ints that start and end with `ends`."""
    fits = all(type(n) is int and n >= 1 for n in sizes) and len(sizes) >= least
    if not fits or (sizes[0], sizes[-1]) != ends:
        raise ValueError(f"sizes must {expected.format(*ends)}, got {' '.join(map(str, sizes)) or 'none'}")


def mlp_sizes(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Layer sizes of the `MLP` whose parameters have these shapes.

    Raises:
        ValueError: if no `MLP` has such parameters.
    """
    weights = [shapes.get(f"{i}.weight", ()) for i in range(0, len(shapes), 2)]
    if weights and all(len(w) == 2 for w in weights):
        sizes = (weights[0][1], *(w[0] for w in weights))
        wanted = {f"{2 * i}.weight": (b, a) for i, (a, b) in enumerate(pairwise(sizes))}
        wanted |= {f"{2 * i}.bias": (b,) for i, b in enumerate(sizes[1:])}
        if dict(shapes) == wanted:
            return sizes
    raise ValueError("expected the parameters of an MLP (0.weight, 0.bias, 2.weight, ...)")


def mlp_plan(sizes: tuple[int, ...], inputs: tuple[int, ...], bandwidth: float) -> PlanOptions:
    """Encodings and rules for an `MLP` on images: input units by their pixel's place, no hidden biases.

    Hidden units have no geometry, so plain bits code them, and so many that their code weights start out smaller.
    Hidden biases stay at zero: the parameters that they would cost do more as features. The biases of the output are
    few and stay direct.
    """
    n_hidden = len(sizes) - 2
    frequency = [1.0, *[_HIDDEN_FREQUENCY] * n_hidden, 1.0]
    rules: list[tuple[str, Hypernet | None]] = []
    if n_hidden:
        for i, (n_in, n_out) in enumerate(pairwise(frequency)):
            rules.append((rf"^{2 * i}\.weight$", periodic(frequency=(n_out, n_in))))
    rules += [(rf"^{2 * i}\.bias$", constant(0.0)) for i in range(n_hidden)]
    return PlanOptions(encodings={"0.weight": (binary(), grid(*inputs, bandwidth=bandwidth))}, rules=tuple(rules))


class ActorCritic(nn.Module):
    """Two tanh networks, `actor` and `critic`: observations [B, O] -> the policy's numbers [B, P] and values [B].

    Weights start orthogonal with gain sqrt(2), the policy's last layer with 0.01, the value's with 1; biases start at
    zero. Where actions are vectors, their log deviation `log_std` does not depend on the observation.

    Args:
        sizes: units of the actor's layers, numbers of an observation first; the critic's end with one.
        vectors: whether actions are vectors.
    """

    log_std: nn.Parameter

    def __init__(self, sizes: Sequence[int], vectors: bool = False) -> None:
        super().__init__()
        self.vectors = vectors
        self.actor = _tanh_mlp(sizes, 0.01)
        self.critic = _tanh_mlp((*sizes[:-1], 1), 1.0)
        if vectors:
            self.log_std = nn.Parameter(torch.zeros(sizes[-1]))

    def forward(self, obs_BO: Tensor) -> tuple[Tensor, Tensor]:
        """The policy's numbers [B, P] (see `gbfunc.tasks.ppo.policy`) and values [B]."""
        out = self.actor(obs_BO)
        numbers_BP = torch.cat([out, self.log_std.expand_as(out)], -1) if self.vectors else out
        return numbers_BP, self.critic(obs_BO).squeeze(-1)


def _tanh_mlp(sizes: Sequence[int], head_gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (n_in, n_out) in enumerate(pairwise(sizes), 2):
        layer = nn.Linear(n_in, n_out)
        nn.init.orthogonal_(layer.weight, head_gain if i == len(sizes) else 2**0.5)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


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

    Raises:
        ValueError: if the task is none of control, or the sizes do not fit it.
    """
    if interface.actions is None:
        raise ValueError("the p-net actor_critic acts: take it for a task of control")
    ends = (interface.inputs[0], interface.outputs)
    layers = tuple((ends[0], *hidden, ends[1]) if sizes is None else sizes)
    expected = "start with the {} numbers of an observation, have a hidden layer and end with the {} of an action"
    _check_sizes(layers, ends, expected, least=3)
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
