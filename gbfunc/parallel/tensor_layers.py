"""Layers whose matrix is split over tensor ranks: column and row parallel, on factors or on a piece of the weight.

    by rows (column parallel)    y_p = x W_p^T          with factors    y_p = (x R) L_p^T
    by columns (row parallel)    y = sum_p x_p W_p^T    with factors    y = (sum_p x_p R_p) L^T

Suffixes: i tile rows (nr), j tile columns (nc), r and c rows and columns of a tile, k rank, B batch rows.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from gbfunc.costs import OPERATIONS_PER_BYTE, dense_flops, thin_flops
from gbfunc.layers.factored import FactoredWeight, from_thin, thin_product
from gbfunc.parallel.activations import Wire, chunk_sizes, scale_gradient
from gbfunc.parallel.collectives import Sizes
from gbfunc.tiling import TileGrid


class Split(NamedTuple):
    """How a layer is split over the ranks.

    Attributes:
        name: of the layer.
        dims: rows (outputs, or words) and columns of its matrix.
        by: `"rows"` of its matrix (column parallel: outputs), or `"columns"` (row parallel: inputs).
        sizes: rows or columns of every rank.
        ranges: those of this rank.
        into: layout of a plain input.
        out: layout of the output.
        local: whether the output is a plain tensor, and not a DTensor.
        transposed: whether the layer stores the transpose of its matrix.
        wire: the ranks.
    """

    name: str
    dims: tuple[int, int]
    by: str
    sizes: Sizes
    ranges: tuple[tuple[int, int], ...]
    into: Any
    out: Any
    local: bool
    transposed: bool
    wire: Wire


def matrix_dims(name: str, module: nn.Module) -> tuple[int, int]:
    """Rows (outputs, or words) and columns of a layer's matrix; ValueError for a layer that has no such."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and isinstance(weight, Tensor):
        return weight.shape[1], weight.shape[0]
    raise ValueError(f"{name!r} is a {type(module).__name__}: only linear layers and embeddings are split")


def install_layer(layer: nn.Module, parallel: Any, split: Split) -> None:
    """Give a layer of the skeleton its parallel forward."""
    layer.__dict__["parallel"] = parallel
    layer.__dict__["split"] = split
    forward: Any = _embedding if isinstance(layer, nn.Embedding) else _by_rows if split.by == "rows" else _by_columns
    stock: Any = type(layer)
    layer.__class__ = type(stock.__name__, (stock,), {"__module__": stock.__module__, "forward": forward})


def _factors(layer: Any) -> FactoredWeight | None:
    """The layer's factors, unless its dense weight is in use already."""
    form = layer._modules.get("weight_form")
    return form if isinstance(form, FactoredWeight) and form.held is None else None


def _dense(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """The product with this rank's piece of a weight that is not thin."""
    form = layer._modules.get("weight_form")
    split: Split = layer.split
    if isinstance(form, FactoredWeight):
        if form.held is None:
            return F.linear(x, _piece_of(form, split), bias)
        weight = scale_gradient(form.held, split.wire.axis.size)
        weight = weight.t() if form.transposed else weight
        piece = (
            torch.cat([weight[a:b] for a, b in split.ranges])
            if split.by == "rows"
            else weight[:, slice(*split.ranges[0])]
        )
        return F.linear(x, piece, bias)
    if form is not None:
        return form.linear(x, bias)
    weight = layer.weight.to_local()
    return F.linear(x, weight.t() if split.transposed else weight, bias)


def _piece_of(form: FactoredWeight, split: Split) -> Tensor:
    """This rank's piece of a factored weight's matrix."""
    ranks = split.wire.axis.size
    left, right = scale_gradient(form.left, ranks), scale_gradient(form.right, ranks)
    rows = split.ranges if split.by == "rows" else ((0, form.grid.rows),)
    cols = split.ranges[0] if split.by == "columns" else (0, form.grid.cols)
    return torch.cat([_block(left, right, form.grid, a, b, *cols) for a, b in rows])


def _block(left: Tensor, right: Tensor, grid: TileGrid, a: int, b: int, c: int, d: int) -> Tensor:
    """Rows a..b and columns c..d of the matrix of factors, from the tiles that they meet."""
    r, q = grid.tile_rows, grid.tile_cols
    i, j = a // r, c // q
    tiles = left[i : -(-b // r), j : -(-d // q)] @ right[i : -(-b // r), j : -(-d // q)].mT
    matrix = tiles.transpose(1, 2).flatten(2).flatten(0, 1)
    return matrix[a - i * r : b - i * r, c - j * q : d - j * q]


def _thin_pays(form: FactoredWeight, split: Split, batch: int, width: int, sent: bool) -> bool:
    """Whether the thin products cost less than the piece itself, bytes on the wire included (`lazy="auto"`)."""
    if not form.auto:
        return True
    nr, nc, _, k = form.left.shape
    rows, cols, ranks = form.grid.rows, form.grid.cols, split.wire.axis.size
    balance = OPERATIONS_PER_BYTE.get(form.left.device.type, OPERATIONS_PER_BYTE["cpu"])
    byte = balance * 2 * form.left.element_size() * batch * sent
    parts = (ranks, 1) if split.by == "rows" else (1, ranks)
    thin = thin_flops(rows, cols, k, (nr, nc), batch, parts) + byte * nr * nc * k
    return thin < dense_flops(rows, cols, k, batch) / ranks + byte * width


def _by_rows(layer: Any, input: Tensor) -> Any:
    """Column parallel: this rank's outputs."""
    split: Split = layer.split
    wire, form, bias = split.wire, _factors(layer), layer.bias
    bias = None if bias is None else bias.to_local()
    x, at, sizes = _incoming(layer, input)
    if isinstance(at, Shard) and at.dim in (-1, x.ndim - 1):
        x, at = wire.split_to_whole(x, -1, sizes), Replicate()
    width = x.shape[-1]
    if form is not None and _thin_pays(form, split, x.numel() // max(1, width), width, x.requires_grad):
        # Pieces of the whole factors get summands of the gradient, what all ranks compute alike gets its part of it.
        left = scale_gradient(form.left, wire.axis.size)
        alike = isinstance(at, Replicate) and x.requires_grad
        right = form.right if alike else scale_gradient(form.right, wire.axis.size)
        thin = thin_product(x, right, (0, width))
        if alike:
            thin = wire.whole_in_part(thin)
        elif isinstance(at, Shard):
            thin = wire.split_in_part(thin, at.dim, sizes)
        y = from_thin(thin, left, split.ranges)
        y = y if bias is None else y + bias.to(y.dtype)
    else:
        x = wire.split_in_part(x, at.dim, sizes) if isinstance(at, Shard) else wire.whole_in_part(x)
        y = _dense(layer, x, bias)
    return _outgoing(layer, y, Shard(y.ndim - 1), split.sizes)


def _by_columns(layer: Any, input: Tensor) -> Any:
    """Row parallel: the sum over ranks of what each rank's inputs give."""
    split: Split = layer.split
    wire, form, bias = split.wire, _factors(layer), layer.bias
    x, at, _ = _incoming(layer, input, last=True)
    if isinstance(at, Replicate):
        x = wire.whole_to_split(x, -1, split.sizes)
    cols = split.ranges[0]
    if x.shape[-1] != cols[1] - cols[0]:
        raise ValueError(f"expected {cols[1] - cols[0]} of {sum(split.sizes)} features here, got {tuple(x.shape)}")
    rows = split.dims[0]
    if form is not None and not _thin_pays(form, split, math.prod(x.shape[:-1]), rows, True):
        form = None
    if form is not None:
        right = scale_gradient(form.right, wire.axis.size)
        part = thin_product(x, right, cols)
    else:
        part = _dense(layer, x, None)
    out = split.out if isinstance(split.out, Shard) and split.out.dim % part.ndim != part.ndim - 1 else Replicate()
    if isinstance(out, Shard):
        sizes, factor = chunk_sizes(part.shape[out.dim], wire.axis.size), float(wire.axis.size)
        y = wire.partial_to_split(part, out.dim, sizes)
    else:
        sizes, factor = (), 1.0
        y = wire.partial_to_whole(part)
    if form is not None:
        y = from_thin(y, scale_gradient(form.left, factor), ((0, rows),))
    if bias is not None:
        y = y + scale_gradient(bias, factor).to(y.dtype)
    return _outgoing(layer, y, out, sizes)


def _embedding(layer: Any, input: Tensor) -> Any:
    """Rows of the weight: looked up in whole factors by every rank, or each in its piece, and summed."""
    split: Split = layer.split
    wire, form = split.wire, layer._modules.get("weight_form")
    index = input.to_local() if isinstance(input, DTensor) else input
    if isinstance(form, FactoredWeight):
        # Generating the rows takes less than sending them.
        return _outgoing(layer, form.embedding(index, layer.padding_idx), Replicate(), ())
    weight = form.dense() if form is not None else layer.weight.to_local()
    if split.by == "columns":
        return _outgoing(layer, F.embedding(index, weight, layer.padding_idx), Shard(index.ndim), split.sizes)
    first, last = split.ranges[0]
    here = (index >= first) & (index < last)
    if layer.padding_idx is not None:
        # The row of padding has no gradient.
        padding = index == layer.padding_idx % sum(split.sizes)
    rows = F.embedding(
        torch.where(here, index - first, 0), weight if len(weight) else weight.new_zeros(1, weight.shape[1])
    )
    if layer.padding_idx is not None:
        rows = torch.where(padding.unsqueeze(-1), rows.detach(), rows)
    part = torch.where(here.unsqueeze(-1), rows, torch.zeros_like(rows))
    if isinstance(split.out, Shard) and split.out.dim % part.ndim != part.ndim - 1:
        sizes = chunk_sizes(part.shape[split.out.dim], wire.axis.size)
        return _outgoing(layer, wire.partial_to_split(part, split.out.dim, sizes), split.out, sizes)
    return _outgoing(layer, wire.partial_to_whole(part), Replicate(), ())


def _incoming(layer: Any, input: Tensor, last: bool = False) -> tuple[Tensor, Any, Sizes]:
    """A layer's local input, its placement (`Replicate` or `Shard`), and the lengths of the parts on all ranks."""
    split: Split = layer.split
    wire = split.wire
    if isinstance(input, DTensor):
        at = input.placements[0]
        usable = isinstance(at, Replicate) or (isinstance(at, Shard) and (not last or at.dim == input.ndim - 1))
        if not usable:
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
    if isinstance(at, Shard):
        dim = at.dim % input.ndim
        if dim == input.ndim - 1 and last:
            return input, Shard(dim), ()
        if last:
            raise ValueError(f"a row-parallel layer takes inputs that are whole or split along features, got {at}")
        return input, Shard(dim), wire.sizes_of(input.shape[dim])
    layer.parallel.watch(f"the input of {split.name}", input)
    return input, at, ()


def _outgoing(layer: Any, y: Tensor, at: Any, sizes: Sizes) -> Any:
    """A layer's output as its style has it."""
    split: Split = layer.split
    wire, want = split.wire, split.out
    want = Shard(want.dim % y.ndim) if isinstance(want, Shard) else want
    at = Shard(at.dim % y.ndim) if isinstance(at, Shard) else at
    if isinstance(at, Shard) and isinstance(want, Replicate):
        y, at = wire.split_to_whole(y, at.dim, sizes), want
    elif isinstance(at, Replicate) and isinstance(want, Shard):
        sizes = chunk_sizes(y.shape[want.dim], wire.axis.size)
        y, at = wire.whole_to_split(y, want.dim, sizes), want
    elif at != want and isinstance(at, Shard) and isinstance(want, Shard):
        y = wire.split_to_whole(y, at.dim, sizes)
        sizes = chunk_sizes(y.shape[want.dim], wire.axis.size)
        y, at = wire.whole_to_split(y, want.dim, sizes), want
    elif at != want:
        raise ValueError(f"output_layouts of a layer must be Replicate() or Shard(dim), got {want}")
    parallel = layer.parallel
    parallel.note(at, y)
    if split.local:
        return y
    if isinstance(at, Shard):
        return parallel.joined(y, at.dim, sizes)
    return DTensor.from_local(y, parallel.device_mesh, [at], run_check=False)
