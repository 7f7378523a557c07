"""Tensor parallelism: rank p generates and applies a piece `W_p` of a layer's weight W, with the styles of torch.

    column parallel   y_p = x W_p^T          W_p: some rows of W       gradient of x: sum over ranks
    row parallel      y = sum_p x_p W_p^T    W_p: some columns of W    output: sum over ranks

(`ColwiseParallel` and `RowwiseParallel`; Shoeybi et al., 2019.) With factors `W = L R^T` of k columns, ranks sum the
*thin* product: in a row-parallel layer `x_p R_p` [tokens, k], and in a column-parallel layer the gradient of `x R`.
Then ranks send k numbers per token instead of as many as the layer is wide. Weights and their gradients are never sent:
each rank computes a summand of the genome's gradient, and the summands are added over ranks.

gbfunc computes linear layers and embeddings, unless a subclass changes their forward. Pieces may differ in size. Torch
computes all other layers and styles (`SequenceParallel`, `PrepareModuleInput`) with DTensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.distributed.tensor.parallel.style import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from gbfunc.layers.install import layer_form, transposed
from gbfunc.parallel.activations import Wire, chunk_sizes, scale_gradient
from gbfunc.parallel.collectives import Sizes, gather_objects
from gbfunc.parallel.mesh import Mesh
from gbfunc.parallel.tensor_layers import Split, install_layer
from gbfunc.pnet.describe import skeleton_of
from gbfunc.tiling import Piece
from gbfunc.types import Params

Styles = Mapping[str, ParallelStyle]
"""Styles by name of module, with wildcards, as in torch's `parallelize_module`."""


class PackedColwiseParallel(ColwiseParallel):
    """Column parallelism for a layer whose outputs are several equal parts (queries, keys, values): splits each part.

    Args:
        parts: number of parts.
        heads: number of attention heads in each part; ranks get entire heads. None for a layer without heads.
        **options: as for `ColwiseParallel`.
    """

    def __init__(self, parts: int = 3, heads: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.parts, self.heads = parts, heads


class DividedAttributes(ParallelStyle):
    """Divides attributes of a module (such as its number of heads) by the number of tensor ranks.

    Args:
        *names: the attributes.
    """

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def divide(self, module: nn.Module, ranks: int) -> None:
        for name in self.names:
            n = getattr(module, name)
            _check_divides(ranks, n, f"{name} of a {type(module).__name__}")
            setattr(module, name, n // ranks)

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        self.divide(module, device_mesh.size())
        return module


def _check_divides(ranks: int, n: int, what: str) -> None:
    if n % ranks:
        fits = ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
        raise ValueError(f"{what}: {n} cannot be split over {ranks} tensor ranks, {fits} would fit")


def _check_layer(name: str, module: Any, owners: Mapping[int, str]) -> None:
    if not transposed(module) and not isinstance(module, nn.Linear | nn.Embedding):
        raise ValueError(f"{name!r} must be a linear layer or embedding to be split, got a {type(module).__name__}")
    if id(module.weight) not in owners:
        raise ValueError(f"{name!r} must have a parameter as its weight to be split, got a parametrized weight")
    if getattr(module, "max_norm", None) is not None:
        raise ValueError(f"{name!r} must not change its weight to be split, got max_norm={module.max_norm}")


class TensorParallel:
    """Splits the layers of a p-net over the tensor axis of a mesh, with the styles that `resolve` returns."""

    local_rows: int | None = None  # This rank's number of rows of the p-net's output; None if rows are not split
    by_class = False  # True if the last dimension of the p-net's output (classes) is split over ranks

    def __init__(
        self, pnet: nn.Module, styles: Mapping[str, ParallelStyle], mesh: Mesh, wire: type[Wire] = Wire
    ) -> None:
        self.wire = wire(mesh, mesh.axis("tensor"))
        self.ranks, self._rank = self.wire.axis.size, self.wire.axis.rank
        # For each split parameter, by name: this rank's piece of the matrix, and the shape of this rank's parameter.
        self._styles, self.pieces, self.shapes = styles, dict[str, Piece](), dict[str, tuple[int, ...]]()
        self._splits: dict[str, Split] = {}
        # For each split parameter, by name: the placement, and the lengths of the pieces on all ranks.
        self._placements: dict[str, tuple[Any, Sizes]] = {}
        # Gradients that ranks compare in the first step; None afterwards.
        self._compared: dict[str, list[Tensor]] | None = {}
        self.splits_inputs = any(map(_splits_inputs, styles.values()))
        owners = {id(p): n for n, p in pnet.named_parameters()}
        scratch = skeleton_of(pnet)
        for name, style in styles.items():
            module: Any = pnet.get_submodule(name)
            ours = isinstance(style, ColwiseParallel | RowwiseParallel)
            if ours:
                _check_layer(name, module, owners)
            if ours and layer_form(module) is not None:
                split = self._splits[name] = self._split(name, module, style)
                for key, dim in split.dims.items():
                    own = getattr(module, key)
                    piece = split.piece if key == "weight" else Piece(split.piece.rows, (0, 1))
                    self._record(owners[id(own)], piece, Shard(dim), split.sizes, own.shape)
            elif not isinstance(style, DividedAttributes):
                self._by_torch(name, scratch.get_submodule(name), style)

    def _split(self, name: str, module: Any, style: Any) -> Split:
        flipped = transposed(module)
        rows, cols = module.weight.shape[::-1] if flipped else module.weight.shape
        # `ColwiseParallel` splits rows of a linear weight [out, in], but columns of an embedding [words, width].
        by_rows = isinstance(style, ColwiseParallel) != isinstance(module, nn.Embedding)
        parts, length = 1, rows if by_rows else cols
        if isinstance(style, PackedColwiseParallel):
            parts = style.parts
            if length % parts or not by_rows:
                raise ValueError(f"{name!r} must have {parts} equal parts of outputs, got {length} outputs")
            what = f"{name!r}, {'heads' if style.heads else 'outputs of a part'}"
            _check_divides(self.ranks, style.heads or length // parts, what)
        sizes = chunk_sizes(length // parts, self.ranks)
        start = self.wire.start(sizes)
        ranges = tuple((p + start, p + start + sizes[self._rank]) for p in range(0, length, max(1, length // parts)))
        piece = Piece(ranges, (0, cols)) if by_rows else Piece(((0, rows),), ranges[0])
        dims = {"weight": int(by_rows == flipped)}
        if by_rows and getattr(module, "bias", None) is not None:
            dims["bias"] = 0
        layouts, sizes = (style.input_layouts[0], style.output_layouts[0]), tuple(parts * n for n in sizes)
        local = style.use_local_output
        return Split(by_rows, sizes, piece, dims, *layouts, local, flipped, self.wire, self.record_output)

    def _record(self, name: str, piece: Piece, placement: Any, sizes: Sizes, shape: Any) -> None:
        if self.pieces.setdefault(name, piece) != piece:
            raise ValueError(f"{name!r} is tied between layers that split it in different ways: give them one style")
        self._placements[name], self.shapes[name] = (placement, sizes), self._shape(shape, placement.dim, sizes)

    def _shape(self, full: Any, dim: int, sizes: Sizes) -> tuple[int, ...]:
        return *full[:dim], sizes[self._rank], *full[dim + 1 :]

    def adapt(self, skeleton: nn.Module) -> frozenset[str]:
        """Install parallel layers in a copy of the p-net. Return names of parameters that become pieces or DTensors."""
        for name, style in self._styles.items():
            module = skeleton.get_submodule(name)
            if name in self._splits:
                install_layer(module, self._splits[name])
            else:
                self._by_torch(name, module, style)
        return frozenset(self._placements)

    def shrink(self, skeleton: nn.Module) -> None:
        """Shrink the parameters of a copy of the p-net to this rank's pieces, so that `torch.export` can trace it.

        Raises ValueError for a style whose inputs or outputs are DTensors, or are split along rows or the sequence.
        """
        for name, style in self._styles.items():
            layer: Any = skeleton.get_submodule(name)
            if isinstance(style, DividedAttributes):
                style.divide(layer, self.ranks)
                continue
            split = self._splits.get(name)
            layouts = () if split is None else (split.into, split.out)
            if split is None or not split.local or any(isinstance(x, Shard) and x.dim != -1 for x in layouts):
                raise ValueError(
                    f"in a pipeline {name!r} must have a column or row parallel style whose inputs and outputs are "
                    f"replicated or split along features, got {type(style).__name__}: torch's tracer takes no other"
                )
            words = isinstance(layer, nn.Embedding)
            features = split.out if words or split.by_rows else split.into
            # An embedding that is split over words returns the full width: its weight need not shrink for the trace.
            if isinstance(features, Shard) and not (words and split.by_rows):
                for key, dim in split.dims.items():
                    full = getattr(layer, key)
                    piece = full.new_empty(self._shape(full.shape, dim, split.sizes))
                    setattr(layer, key, nn.Parameter(piece, full.requires_grad))
            if split.transposed:
                layer.nf = layer.weight.shape[1]

    def _by_torch(self, name: str, module: nn.Module, style: Any) -> None:
        if isinstance(style, DividedAttributes):
            style.divide(module, self.ranks)
            return
        known = {id(p) for p in module.parameters() if isinstance(p, DTensor)}
        parallelize_module(module, self.wire.mesh.tensor_mesh, style)
        for key, parameter in module.named_parameters():
            if not isinstance(parameter, DTensor) or id(parameter) in known:
                continue
            full, placement = f"{name}.{key}" if name else key, parameter.placements[0]
            self._placements[full] = placement, ()
            if isinstance(placement, Shard):
                sizes = chunk_sizes(parameter.shape[placement.dim], self.ranks)
                start = self.wire.start(sizes)
                ranges: Any = [(0, n) for n in (*parameter.shape, 1)[:2]]
                ranges[placement.dim] = start, start + sizes[self._rank]
                self._record(full, Piece((ranges[0],), ranges[1]), placement, sizes, parameter.shape)

        def record(_: nn.Module, args: Any, out: Any) -> None:
            if isinstance(out, DTensor):
                self.record_output(out.placements[0], out.to_local())
            elif isinstance(style, SequenceParallel):
                self.record_output(style.sequence_sharding[0], out)

        def even(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            # Make a DTensor: torch would assume that plain tensors have equal lengths on all ranks.
            if isinstance(args[0], DTensor):
                return args
            dim = style.sequence_sharding[0].dim % args[0].ndim
            return (self.wire.joined(args[0], Shard(dim), self.wire.sizes_of(args[0].shape[dim])), *args[1:])

        module.register_forward_hook(record, prepend=True)
        if isinstance(style, SequenceParallel):
            module.register_forward_pre_hook(even, prepend=True)

    def record_output(self, placement: Any, local: Tensor) -> None:
        """Record the placement of a layer's output. The last record tells how the input of the loss is split."""
        split = isinstance(placement, Shard) and placement.dim not in (-1, local.ndim - 1)
        self.local_rows = math.prod(local.shape[:-1]) if split else None
        self.by_class = isinstance(placement, Shard) and not split

    def backward(self) -> AbstractContextManager[Any]:
        """Return the context for backward: `loss_parallel` if classes of the output are split, else a null context."""
        # The caller may have entered `loss_parallel`, which torch cannot nest: do not enter again.
        handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", {})
        active = torch.ops.aten._log_softmax.default in handlers
        return loss_parallel() if self.by_class and not active else nullcontext()

    def compare(self, loss: Tensor) -> None:
        """In the first step, raise ValueError if the loss, or a gradient that must be equal, differs between ranks."""
        if self._compared is None:
            return
        gradients, self._compared = self._compared, None
        norms = {k: math.hypot(*map(float, map(torch.linalg.vector_norm, xs))) for k, xs in gradients.items() if xs}
        if self.local_rows is None:
            norms["the loss"] = float(loss.detach())
        for rank, other in zip(self.wire.axis.ranks, gather_objects(self.wire.mesh, norms, "tensor"), strict=True):
            for name, norm in norms.items():
                difference = abs(norm - other.get(name, math.nan))
                # The tolerance covers rounding errors in half precision.
                if not difference <= 1e-3 * max(abs(norm), 1e-30) and math.isfinite(norm):
                    raise ValueError(
                        f"{name} must be equal on all ranks, got {norm:.6g} on rank {self.wire.mesh.rank} and "
                        f"{other.get(name)} on rank {rank}: give layers on a part of the sequence a style "
                        "(SequenceParallel()), and dropout parts of equal size, which draw the same random numbers"
                    )

    def place(self, tensors: Params) -> Params:
        """Make DTensors of pieces. Divide all gradients except those of pieces by `ranks`, because a sum follows."""
        placed = dict(tensors)
        for name, x in tensors.items():
            weight, _, key = name.rpartition("_form.")
            if name in self._placements:
                placed[name] = _AsDTensor.apply(x, self.wire, *self._placements[name])
            # Divide except for pieces. Factors are no pieces: layers undo the division where ranks use different parts.
            elif x.requires_grad and (weight not in self.pieces or key in ("left", "right")):
                seen = None
                if self._compared is not None and not weight and name.rpartition(".")[0] not in self._splits:
                    seen = self._compared.setdefault(f"the norm of the gradient of {name}", [])
                placed[name] = scale_gradient(x, 1 / self.ranks, seen)
        return placed


def _splits_inputs(style: ParallelStyle) -> bool:
    layouts = getattr(style, "input_layouts", None) or getattr(style, "sequence_sharding", None) or ()
    row = isinstance(style, RowwiseParallel)
    return not row and any(isinstance(layout, Shard) and layout.dim != -1 for layout in layouts)


def resolve(pnet: nn.Module, styles: Styles) -> dict[str, ParallelStyle]:
    """Return the style of every module whose name matches a pattern of `styles`, as in `parallelize_module`.

    Raises:
        TypeError: for a value that is not a style.
        ValueError: for a pattern that names no module.
    """
    found: dict[str, ParallelStyle] = {}
    for pattern, style in styles.items():
        if not isinstance(style, ParallelStyle):
            raise TypeError(f"parallel[{pattern!r}] must be a ParallelStyle of torch, got {type(style).__name__}")
        tokens = pattern.split(".")
        names = [n for n, _ in pnet.named_modules() if bool(n) == bool(pattern) and n.count(".") == pattern.count(".")]
        matches = [n for n in names if all(map(fnmatch, n.split("."), tokens))]
        if not matches:
            raise ValueError(f"parallel[{pattern!r}] names no module; on that level there are {names[:12]}")
        found |= dict.fromkeys(matches, style)
    return found


class _AsDTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Wire, placement: Any, sizes: Sizes) -> Tensor:
        ctx.placement, ctx.ranks = placement, wire.axis.size
        return wire.joined(x.detach(), placement, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0]
        if not isinstance(grad, DTensor):
            return grad, None, None, None
        (found,) = grad.placements
        if isinstance(ctx.placement, Shard) and found != ctx.placement:
            grad, found = grad.redistribute(placements=(ctx.placement,)), ctx.placement
        local = grad.to_local()
        # Ranks sum this gradient later: divide a replicated gradient (equal on all ranks), but no sharded gradient.
        return (local / ctx.ranks if isinstance(found, Replicate) else local), None, None, None
