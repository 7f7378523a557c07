"""Layers whose matrix W is split over ranks. Rank p computes with its block W_p, or with the factors of W.

by rows (column parallel)    y_p = x W_p^T          with factors W = L R^T    y_p = (x R) L_p^T
by columns (row parallel)    y = sum_p x_p W_p^T    with factors W = L R^T    y = (sum_p x_p R_p) L^T
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from gbfunc.costs import OPERATIONS_PER_BYTE, dense_flops, thin_flops
from gbfunc.layers.factored import FactoredWeight, from_thin, thin_product
from gbfunc.layers.forms import dense_linear, weight_of
from gbfunc.parallel.activations import Wire, chunk_sizes, scale_gradient
from gbfunc.parallel.collectives import Sizes
from gbfunc.tiling import Piece, cut_piece, join_tiles


class Split(NamedTuple):
    """How a layer's matrix, inputs and outputs are split over ranks. A placement is `Replicate` or `Shard`."""

    by_rows: bool  # True if rows of the matrix (outputs, or words of an embedding) are split; False for columns
    sizes: Sizes  # Number of rows or columns on every rank
    piece: Piece  # This rank's block of the matrix
    dims: Mapping[str, int]  # {name of a parameter: the dimension along which the parameter is split}
    into: Any  # Placement of an input, if the input is a plain tensor
    out: Any  # Placement of the output
    local: bool  # Whether the output is a plain tensor instead of a DTensor
    transposed: bool  # Whether the layer stores the transpose of its matrix
    wire: Wire  # Exchanges activations with other ranks
    record: Callable[[Any, Tensor], None]  # Called with the placement and this rank's piece of each output


def install_layer(layer: nn.Module, split: Split) -> None:
    layer.__dict__["split"] = split
    forward: Any = _embedding if isinstance(layer, nn.Embedding) else _by_rows if split.by_rows else _by_columns
    stock: Any = type(layer)
    layer.__class__ = type(stock.__name__, (stock,), {"__module__": stock.__module__, "forward": forward})


def _local(x: Any) -> Any:
    return x.to_local() if isinstance(x, DTensor) else x


def _dense(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    own, split, ranks = weight_of(layer, "weight"), layer.split, layer.split.wire.axis.size
    if own is None:
        return dense_linear(_local(layer.weight), split.transposed, x, bias)
    form = own.form
    if not isinstance(form, FactoredWeight):
        return own.linear(x, bias)
    if own.formed is not None:  # Other code has read `layer.weight`, so the weight exists: use it
        weight = scale_gradient(own.formed, ranks)
        return F.linear(x, split.piece.of(weight.t() if form.transposed else weight), bias)
    cut = cut_piece(form.grid, split.piece)
    tiles: Any = [*(cut.tiles or ())]
    tiles = slice(tiles[0], tiles[-1] + 1) if tiles[-1] - tiles[0] == len(tiles) - 1 else tiles
    left, right = (scale_gradient(factor, ranks)[tiles] for factor in (own.inputs["left"], own.inputs["right"]))
    return F.linear(x, cut.crop(join_tiles(left @ right.mT, cut.grid)), bias)


def _thin(layer: Any, batch: int, width: int, sent: bool) -> tuple[Tensor, Tensor] | None:
    """Return factors if the layer is faster with factors than with its weight, else None. `sent` counts messages."""
    own, split = weight_of(layer, "weight"), layer.split
    if own is None or not isinstance(form := own.form, FactoredWeight) or own.formed is not None:
        return None
    left = own.inputs["left"]
    (nr, nc), k = form.tiles, left.shape[-1]
    rows, cols, ranks = form.grid.rows, form.grid.cols, split.wire.axis.size
    balance = OPERATIONS_PER_BYTE.get(left.device.type, OPERATIONS_PER_BYTE["cpu"])
    byte = balance * 2 * left.element_size() * batch * sent
    pieces = (ranks, 1) if split.by_rows else (1, ranks)
    thin = thin_flops(rows, cols, k, (nr, nc), batch, pieces) + byte * nr * nc * k
    pays = not form.auto or thin < dense_flops(rows, cols, k, batch) / ranks + byte * width
    return form.by_tile(own.inputs) if pays else None


def _by_rows(layer: Any, input: Tensor) -> Any:
    split: Split = layer.split
    wire, bias = split.wire, _local(layer.bias)
    x, at, sizes = _incoming(split, input)
    if isinstance(at, Shard) and at.dim in (-1, x.ndim - 1):
        x, at = wire.move(x, "split", "replicated", -1, sizes), Replicate()
    width = x.shape[-1]
    factors = _thin(layer, x.numel() // max(1, width), width, x.requires_grad)
    start: Any = ("split", at.dim, sizes) if isinstance(at, Shard) else ("replicated",)
    move: Any = start[0], "partial gradient", *start[1:]
    if factors is None:
        y = _dense(layer, wire.move(x, *move), bias)
        return _outgoing(split, y, Shard(y.ndim - 1), split.sizes)
    # `TensorParallel.place` divides gradients of factors by the number of ranks, for the later sum over ranks.
    # Multiply a gradient by the number of ranks where each rank computes only a summand of the gradient.
    replicated = isinstance(at, Replicate) and x.requires_grad
    left, right = factors
    thin = thin_product(x, right if replicated else scale_gradient(right, wire.axis.size), (0, width))
    if replicated or isinstance(at, Shard):
        thin = wire.move(thin, *move)
    y = from_thin(thin, scale_gradient(left, wire.axis.size), split.piece.rows)
    y = y if bias is None else y + bias.to(y.dtype)
    return _outgoing(split, y, Shard(y.ndim - 1), split.sizes)


def _by_columns(layer: Any, input: Tensor) -> Any:
    split: Split = layer.split
    wire, bias, cols, rows = split.wire, layer.bias, split.piece.cols, split.piece.shape[0]
    x, at, _ = _incoming(split, input, last=True)
    if isinstance(at, Replicate):
        x = wire.move(x, "replicated", "split", -1, split.sizes)
    if x.shape[-1] != cols[1] - cols[0]:
        raise ValueError(f"expected {cols[1] - cols[0]} of {sum(split.sizes)} features here, got {tuple(x.shape)}")
    factors = _thin(layer, math.prod(x.shape[:-1]), rows, True)
    if factors is None:
        summand = _dense(layer, x, None)
    else:
        summand = thin_product(x, scale_gradient(factors[1], wire.axis.size), cols)
    y, at, sizes = _summed(split, summand)
    # If rows of y are split, each rank computes a summand of the gradients of left factor and bias (see `_by_rows`).
    factor = float(wire.axis.size) if isinstance(at, Shard) else 1.0
    if factors is not None:
        y = from_thin(y, scale_gradient(factors[0], factor), ((0, rows),))
    if bias is not None:
        y = y + scale_gradient(bias, factor).to(y.dtype)
    return _outgoing(split, y, at, sizes)


def _embedding(layer: Any, input: Tensor) -> Any:
    split: Split = layer.split
    own, index, padding = weight_of(layer, "weight"), _local(input), layer.padding_idx
    if own is not None and isinstance(own.form, FactoredWeight):
        # Every rank computes all rows from the factors, which costs less than sending the rows.
        return _outgoing(split, own.embedding(index, padding), Replicate())
    weight = _local(layer.weight) if own is None else own.dense()
    if not split.by_rows:
        return _outgoing(split, F.embedding(index, weight, padding), Shard(index.ndim), split.sizes)
    ((first, last),) = split.piece.rows
    here = (index >= first) & (index < last)
    # A rank without words looks up a row of zeros in the padded weight, which is connected to the graph. Otherwise this
    # rank's backward would run no collectives, and the other ranks would wait forever.
    table = weight if len(weight) else F.pad(weight, (0, 0, 0, 1))
    rows = F.embedding(torch.where(here, index - first, 0), table)
    if padding is not None:
        # The row with the index `padding_idx` has no gradient.
        rows = torch.where((index == padding % sum(split.sizes)).unsqueeze(-1), rows.detach(), rows)
    summand = torch.where(here.unsqueeze(-1), rows, torch.zeros_like(rows))
    return _outgoing(split, *_summed(split, summand))


def _summed(split: Split, summand: Tensor) -> tuple[Tensor, Any, Sizes]:
    out, wire = split.out, split.wire
    if isinstance(out, Shard) and out.dim % summand.ndim != summand.ndim - 1:
        sizes = chunk_sizes(summand.shape[out.dim], wire.axis.size)
        return wire.move(summand, "partial", "split", out.dim, sizes), out, sizes
    return wire.move(summand, "partial", "replicated"), Replicate(), ()


def _incoming(split: Split, input: Tensor, last: bool = False) -> tuple[Tensor, Any, Sizes]:
    """Return the local input, its placement, and all ranks' lengths. With `last`, only the features may be split."""
    wire = split.wire
    if isinstance(input, DTensor):
        at = input.placements[0]
        if not isinstance(at, Replicate | Shard) or (last and isinstance(at, Shard) and at.dim != input.ndim - 1):
            at = Shard(input.ndim - 1) if last else Replicate()
            input = input.redistribute(placements=(at,))
        sizes = chunk_sizes(input.shape[at.dim], wire.axis.size) if isinstance(at, Shard) else ()
        x = input.to_local()
        if isinstance(at, Shard) and x.shape[at.dim] != sizes[wire.axis.rank]:
            raise ValueError(
                f"expected a part of {sizes[wire.axis.rank]} of {input.shape[at.dim]} along dimension {at.dim}, got "
                f"{tuple(x.shape)}: make DTensors of uneven parts with shape= and stride="
            )
        return x, at, sizes
    at = split.into
    if not isinstance(at, Shard):
        return input, at, ()
    dim = at.dim % input.ndim
    if last and dim != input.ndim - 1:
        raise ValueError(f"a row-parallel layer takes inputs that are replicated or split along features, got {at}")
    return input, Shard(dim), () if last else wire.sizes_of(input.shape[dim])


def _outgoing(split: Split, y: Tensor, at: Any, sizes: Sizes = ()) -> Any:
    wire = split.wire
    at, want = (Shard(p.dim % y.ndim) if isinstance(p, Shard) else p for p in (at, split.out))
    if at != want and isinstance(at, Shard):
        y, at = wire.move(y, "split", "replicated", at.dim, sizes), Replicate()
    if at != want and isinstance(want, Shard):
        sizes = chunk_sizes(y.shape[want.dim], wire.axis.size)
        y, at = wire.move(y, "replicated", "split", want.dim, sizes), want
    if at != want:
        raise ValueError(f"output_layouts of a layer must be Replicate() or Shard(dim), got {want}")
    split.record(at, y)
    return y if split.local else wire.joined(y, at, sizes)
