"""Multilayer perceptrons by their layer sizes: the p-nets of the image tasks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import nn

from gbfunc.encoding import Encoding, binary, grid
from gbfunc.hypernets import Hypernet, constant


def mlp(sizes: tuple[int, ...], seed: int) -> nn.Sequential:
    """ReLU network of `Linear` layers named `0`, `2`, `4`, ...; its first weights depend on `seed` alone.

    Args:
        sizes: units of each layer, inputs first.
        seed: of the initialisation; torch's global generator is left as it was.
    """
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for n_in, n_out in pairwise(sizes):
            layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def check_sizes(sizes: tuple[int, ...], n_inputs: int, n_classes: int) -> tuple[int, ...]:
    """`sizes`, if they fit the data.

    Raises:
        ValueError: unless they are positive, start with `n_inputs` and end with `n_classes`.
    """
    fits = len(sizes) >= 2 and min(sizes) >= 1 and (sizes[0], sizes[-1]) == (n_inputs, n_classes)
    if not fits:
        got = " ".join(map(str, sizes)) or "none"
        raise ValueError(f"sizes must start with {n_inputs} inputs and end with {n_classes} classes, got {got}")
    return sizes


def mlp_sizes(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Layer sizes of the `mlp` whose parameters have these shapes.

    Raises:
        ValueError: if no `mlp` has such parameters.
    """
    weights = [shapes.get(f"{i}.weight", ()) for i in range(0, len(shapes), 2)]
    if weights and all(len(w) == 2 for w in weights):
        sizes = (weights[0][1], *(w[0] for w in weights))
        wanted = {f"{2 * i}.weight": (b, a) for i, (a, b) in enumerate(pairwise(sizes))}
        wanted |= {f"{2 * i}.bias": (b,) for i, b in enumerate(sizes[1:])}
        if dict(shapes) == wanted:
            return sizes
    raise ValueError(f"expected the parameters of an MLP (0.weight, 0.bias, 2.weight, ...), got {dict(shapes)}")


def mlp_plan_options(
    sizes: tuple[int, ...], image_shape: tuple[int, int], bandwidth: float
) -> tuple[dict[str, tuple[Encoding, Encoding]], tuple[tuple[str, Hypernet | None], ...]]:
    """Encodings and rules for an `mlp` on images: input units by their pixel's place, no hidden biases.

    Hidden units have no geometry, so plain bits code them. Hidden biases stay at zero: the parameters that
    they would cost do more as features. The biases of the output are few and stay direct.

    Args:
        sizes: units of each layer.
        image_shape: rows and columns of the image; their product is `sizes[0]`.
        bandwidth: see `gbfunc.grid`.
    """
    encodings = {"0.weight": (binary(), grid(*image_shape, bandwidth=bandwidth))}
    hidden = "|".join(str(2 * i) for i in range(len(sizes) - 2))
    rules: tuple[tuple[str, Hypernet | None], ...] = ((rf"^({hidden})\.bias$", constant(0.0)),) if hidden else ()
    return encodings, rules
