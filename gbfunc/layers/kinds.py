"""Weight tensors as matrices: which tensors a kind of layer claims, and how they fold. A new kind is one entry here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from gbfunc.types import MatrixDims

Shape = tuple[int, ...]

_WEIGHT_NAMES = frozenset({"weight", "weight_v", "weight_orig"})
"""A layer's weight by its name, or as a (legacy) weight-norm or spectral-norm parametrisation stores it."""

_SEPARATE = {"q_proj_weight": "embed_dim", "k_proj_weight": "kdim", "v_proj_weight": "vdim"}
"""Projections of an `nn.MultiheadAttention` whose inputs differ in width, with their widths."""


class LayerKind(NamedTuple):
    """How the weight tensor of one kind of layer is seen as one or more matrices [rows, columns].

    Rows are output channels and columns input channels (times kernel positions, innermost), whatever the layer's
    layout. By default a tensor [out, in, *kernel] is one matrix [out, in * prod(kernel)].

    Attributes:
        name: the kind's name, as it stands in plans and files.
        selected: whether the default selection generates tensors of this kind.
        claims: `(module, attribute, shape) -> bool`: is this tensor of this kind?
        matrices: `shape -> (MatrixDims, ...)`.
        fold: `(matrices, shape) -> tensor` of that shape.
        unfold: `tensor -> matrices`, the inverse of `fold`.
        block_shape: `(shape, (rows, columns)) -> shape` of what `fold` makes of a block of its one matrix.
    """

    name: str
    selected: bool
    claims: Callable[[nn.Module, str, Shape], bool]
    matrices: Callable[[Shape], tuple[MatrixDims, ...]] = lambda s: (MatrixDims(s[0], math.prod(s[1:]), s[2:]),)
    fold: Callable[[list[Tensor], Shape], Tensor] = lambda m, s: m[0].reshape(s)
    unfold: Callable[[Tensor], list[Tensor]] = lambda weight: [weight.flatten(1)]
    block_shape: Callable[[Shape, tuple[int, int]], Shape] = lambda shape, block: block[: len(shape)]


def _is_linear(module: nn.Module, attribute: str, shape: Shape) -> bool:
    if not isinstance(module, nn.Linear) or attribute not in _WEIGHT_NAMES:
        return False
    return shape == (module.out_features, module.in_features)


def _is_conv1d(module: nn.Module, attribute: str, shape: Shape) -> bool:
    # By name: the class belongs to a library that need not be installed.
    named = any(base.__name__ == "Conv1D" for base in type(module).__mro__)
    return named and hasattr(module, "nf") and attribute == "weight" and len(shape) == 2


def _is_conv(module: nn.Module, attribute: str, shape: Shape, transposed: bool = False) -> bool:
    if not isinstance(module, _ConvNd) or module.transposed != transposed or attribute not in _WEIGHT_NAMES:
        return False
    first, second = module.out_channels, module.in_channels
    if transposed:
        first, second = second, first
    # The whole shape: the magnitudes of a weight-norm parametrisation, [out, 1, 1, ...], are no kernels.
    return shape == (first, second // module.groups, *module.kernel_size)


def _is_in_proj(module: nn.Module, attribute: str, shape: Shape) -> bool:
    if not isinstance(module, nn.MultiheadAttention) or attribute != "in_proj_weight":
        return False
    return shape == (3 * module.embed_dim, module.embed_dim)


def _is_separate(module: nn.Module, attribute: str, shape: Shape) -> bool:
    if not isinstance(module, nn.MultiheadAttention) or attribute not in _SEPARATE:
        return False
    return shape == (module.embed_dim, getattr(module, _SEPARATE[attribute]))


CONV = LayerKind("conv", True, _is_conv)

_KINDS = (
    # Two dimensions alone: a matrix of more would fold back to its shape, and be no linear layer's.
    LayerKind("linear", True, _is_linear, lambda s: (MatrixDims(s[0], s[1]),)),
    # Hugging Face's `Conv1D`, which stores the transpose.
    LayerKind(
        "transposed_linear",
        True,
        _is_conv1d,
        lambda s: (MatrixDims(s[1], s[0]),),
        lambda m, s: m[0].t().reshape(s),
        lambda weight: [weight.t()],
        lambda shape, block: block[::-1],
    ),
    CONV,
    # Stored as [in, out / groups, *kernel].
    LayerKind(
        "conv_transpose",
        True,
        partial(_is_conv, transposed=True),
        lambda s: CONV.matrices((s[1], s[0], *s[2:])),
        lambda m, s: m[0].reshape(s[1], s[0], *s[2:]).transpose(0, 1),
        lambda weight: CONV.unfold(weight.transpose(0, 1)),
    ),
    # Attention's q, k and v in one tensor are three matrices.
    LayerKind(
        "attention_in",
        True,
        _is_in_proj,
        lambda s: (MatrixDims(s[0] // 3, s[1]),) * 3,
        lambda m, s: torch.cat(m).reshape(s),
        lambda weight: list(weight.chunk(3)),
    ),
    LayerKind("attention", True, _is_separate),
    # The rest is generated only by name.
    LayerKind("embedding", False, lambda m, a, s: isinstance(m, nn.Embedding | nn.EmbeddingBag) and a == "weight"),
    # One row an entry and a single column, which needs no code. A scalar is a vector of one.
    LayerKind(
        "vector",
        False,
        lambda module, attribute, shape: len(shape) < 2,
        matrices=lambda s: (MatrixDims(math.prod(s), 1),),
        unfold=lambda weight: [weight.reshape(-1, 1)],
    ),
    LayerKind("matrix", False, lambda module, attribute, shape: True),
)
KINDS: Mapping[str, LayerKind] = MappingProxyType({kind.name: kind for kind in _KINDS})
"""Every layer kind by name; the first that claims a tensor has it, and the last claims all that is left."""


def layer_kind(module: nn.Module, attribute: str, shape: Shape) -> LayerKind:
    """The kind of the tensor that `module` holds as `attribute`."""
    return next(kind for kind in KINDS.values() if kind.claims(module, attribute, shape))
