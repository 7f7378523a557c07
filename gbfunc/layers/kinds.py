"""Weight tensors as matrices: which tensors belong to a kind of layer, and how they fold. A new kind is one entry."""

import math
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gbfunc.types import MatrixDims

Shape = tuple[int, ...]
DELTA = "delta"
"""The name of a delta beside a layer that hides its weight (`gbfunc.layers.beside`)."""
_SEPARATE = {"q_proj_weight": "embed_dim", "k_proj_weight": "kdim", "v_proj_weight": "vdim"}
"""Projections of an `nn.MultiheadAttention` with inputs of different widths."""


class LayerKind(NamedTuple):
    """The weight tensor of one kind of layer as one or more matrices [rows, columns].

    Rows are output channels and columns input channels (times kernel positions, innermost) in every layout. By default
    a tensor [out, in, *kernel] is one matrix [out, in * prod(kernel)].

    Attributes:
        name: the kind's name in plans and files.
        selected: whether the default selection generates tensors of this kind.
        claims: `(module, attribute, shape) -> bool`, whether a tensor is of this kind.
        matrices: `shape -> (MatrixDims, ...)`.
        fold: `(matrices, shape) -> tensor` of that shape.
        unfold: `tensor -> matrices`, the inverse of `fold`.
        block_shape: `(shape, (rows, columns)) -> shape` of a folded block of its one matrix.
    """

    name: str
    selected: bool
    claims: Callable[[nn.Module, str, Shape], bool]
    matrices: Callable[[Shape], tuple[MatrixDims, ...]] = lambda s: (MatrixDims(s[0], math.prod(s[1:]), s[2:]),)
    fold: Callable[[list[Tensor], Shape], Tensor] = lambda m, s: m[0].reshape(s)
    unfold: Callable[[Tensor], list[Tensor]] = lambda weight: [weight.flatten(1)]
    block_shape: Callable[[Shape, tuple[int, int]], Shape] = lambda shape, block: block[: len(shape)]


def _weights_of(
    layers: type[nn.Module] | tuple[type[nn.Module], ...],
    shape_of: Callable[[Any], Shape],
    names: Collection[str] = ("weight", "weight_v", "weight_orig"),
) -> Callable[[nn.Module, str, Shape], bool]:
    """Claim a tensor of these layers by its name, those of legacy weight and spectral norm too, and its whole shape.

    The magnitudes of weight norm, [out, 1, 1, ...], have another shape.
    """
    return lambda module, name, shape: isinstance(module, layers) and name in names and shape == shape_of(module)


def _is_conv1d(module: nn.Module, attribute: str, shape: Shape) -> bool:
    # By name: the class belongs to a library that need not be installed.
    named = any(base.__name__ == "Conv1D" for base in type(module).__mro__)
    return named and hasattr(module, "nf") and attribute == "weight" and len(shape) == 2


def _is_separate(module: nn.Module, attribute: str, shape: Shape) -> bool:
    there = isinstance(module, nn.MultiheadAttention) and attribute in _SEPARATE
    return there and shape == (module.embed_dim, getattr(module, _SEPARATE[attribute]))


_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CONV = LayerKind(
    "conv", True, _weights_of(_CONVS, lambda m: (m.out_channels, m.in_channels // m.groups, *m.kernel_size))
)

_KINDS = (
    LayerKind("linear", True, _weights_of(nn.Linear, lambda m: (m.out_features, m.in_features))),
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
        _weights_of(
            (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
            lambda m: (m.in_channels, m.out_channels // m.groups, *m.kernel_size),
        ),
        lambda s: CONV.matrices((s[1], s[0], *s[2:])),
        lambda m, s: m[0].reshape(s[1], s[0], *s[2:]).transpose(0, 1),
        lambda weight: CONV.unfold(weight.transpose(0, 1)),
    ),
    # Attention's q, k and v in one tensor are three matrices.
    LayerKind(
        "attention_in",
        True,
        _weights_of(nn.MultiheadAttention, lambda m: (3 * m.embed_dim, m.embed_dim), ("in_proj_weight",)),
        lambda s: (MatrixDims(s[0] // 3, s[1]),) * 3,
        lambda m, s: torch.cat(m).reshape(s),
        lambda weight: list(weight.chunk(3)),
    ),
    LayerKind("attention", True, _is_separate),
    LayerKind("beside", True, lambda module, attribute, shape: attribute == DELTA and not hasattr(module, DELTA)),
    # The rest is generated only by name.
    LayerKind("embedding", False, lambda m, a, s: isinstance(m, nn.Embedding | nn.EmbeddingBag) and a == "weight"),
    # One row per entry and a single column, which needs no code. A scalar is a vector of one.
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
"""Every layer kind by name; a tensor is of the first kind that claims it, and the last kind claims any tensor."""


def layer_kind(module: nn.Module, attribute: str, shape: Shape) -> LayerKind:
    """The kind of the tensor that `module` holds as `attribute`."""
    return next(kind for kind in KINDS.values() if kind.claims(module, attribute, shape))
