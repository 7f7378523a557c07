"""Multilayer perceptrons, built from the numbers of units per layer."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from torch import Tensor, nn

from gbfunc.encoding import binary, grid
from gbfunc.hypernets import constant, periodic
from gbfunc.tasks.pnets.base import Interface, PlanOptions, PNet, check_reads, family, seeded

_HIDDEN_FREQUENCY = 0.5  # initial standard deviation of code weights of hidden units; chosen on MNIST


class MLP(nn.Sequential):
    """`Linear` layers named `0`, `2`, `4`, ... with ReLU between them; images are flattened."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        layers: list[nn.Module] = []
        for n_in, n_out in pairwise(sizes):
            layers += [nn.Linear(n_in, n_out), nn.ReLU()]
        super().__init__(*layers[:-1])

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(1))


def mlp(sizes: tuple[int, ...], seed: int) -> nn.Sequential:
    """Make an `MLP` with `sizes` units per layer, inputs first, and initial weights from a seed."""
    with seeded(seed):
        return MLP(sizes)


def mlp_pnet(interface: Interface, *, hidden: Sequence[int] | None = None, bandwidth: float | None = None) -> PNet:
    """Describe an MLP for an image task, with `hidden` units per hidden layer.

    `bandwidth` scales the coordinates of pixels (see `gbfunc.grid`). The defaults are 800 hidden units and a bandwidth
    of 6.0, or 1,100 units and 3.0 for images of 8 x 8 pixels.
    """
    check_reads("mlp", interface, "images")
    width, usual = (1100, 3.0) if interface.inputs == (1, 8, 8) else (800, 6.0)
    bandwidth = usual if bandwidth is None else bandwidth
    layers = (math.prod(interface.inputs), *((width,) if hidden is None else hidden), interface.outputs)
    widths, plan = {"hidden": list(layers[1:-1])}, mlp_plan(layers, interface.inputs, bandwidth)
    config = widths | {"bandwidth": bandwidth}
    return family("mlp", mlp_pnet, interface, partial(MLP, layers), plan, config, widths)


def mlp_plan(sizes: tuple[int, ...], inputs: tuple[int, ...], bandwidth: float) -> PlanOptions:
    """Return plan options for an `MLP` on images. The code of an input unit is the coordinates of its pixel.

    A hidden unit's code is the bits of its index, with half the initial code weights of inputs and outputs. Hidden
    biases are fixed at 0, which leaves more parameters for g-nets. The few output biases are trained directly.
    """
    n_hidden = len(sizes) - 2
    frequencies = pairwise([1.0, *[_HIDDEN_FREQUENCY] * n_hidden, 1.0]) if n_hidden else ()
    weights = [(rf"^{2 * i}\.weight$", periodic(frequency=(out, n_in))) for i, (n_in, out) in enumerate(frequencies)]
    biases = [(rf"^{2 * i}\.bias$", constant(0.0)) for i in range(n_hidden)]
    encodings = {"0.weight": (binary(), grid(*inputs, bandwidth=bandwidth))}
    return PlanOptions(encodings=encodings, rules=(*weights, *biases))
