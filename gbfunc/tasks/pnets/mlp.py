"""Multilayer perceptrons by their layer sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise

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
    """
    if interface.tokens or interface.vocabulary or interface.actions:
        texts = "gpt for a text task" if interface.tokens else "hf:TYPE for a task of texts with classes"
        other = "actor_critic for a task of control" if interface.actions else texts
        raise ValueError(f"the p-net mlp reads images: take {other}")
    n_inputs = math.prod(interface.inputs)
    layers = tuple((n_inputs, *hidden, interface.outputs) if sizes is None else sizes)
    check_sizes(layers, (n_inputs, interface.outputs), "start with {} inputs and end with {} classes")
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


def check_sizes(sizes: tuple[int, ...], ends: tuple[int, int], expected: str, least: int = 2) -> None:
    """Raise `ValueError` unless at least so many sizes are positive ints that start and end with `ends`."""
    fits = all(type(n) is int and n >= 1 for n in sizes) and len(sizes) >= least
    if not fits or (sizes[0], sizes[-1]) != ends:
        got = " ".join(map(str, sizes)) or "none"
        raise ValueError(f"sizes must {expected.format(*ends)}, positive ints all, got {got}")


def mlp_sizes(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Layer sizes of the `MLP` whose parameters have these shapes."""
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
