"""Any block of a parameter, from the tiles alone that it meets."""

from __future__ import annotations

import torch
from torch import Tensor

from gbfunc.generate.generator import Stack
from gbfunc.genome import Noise, check_genome
from gbfunc.layers import KINDS
from gbfunc.plan import DTYPES, Plan, TensorPlan
from gbfunc.tiling import Piece, TileGrid, cut_piece
from gbfunc.trees import flat_genome
from gbfunc.types import GenomeLike, Kernel


def generate_piece(
    plan: Plan,
    genome: GenomeLike,
    name: str,
    rows: slice = slice(None),
    cols: slice = slice(None),
    *,
    part: int | None = None,
    noise: Noise | None = None,
    kernel: Kernel = "auto",
) -> Tensor:
    """A block of one parameter's matrix, from the tiles alone that it meets: rows a..b and columns c..d.

    The matrix [R, C] has output channels in its rows and input channels times kernel positions in its columns,
    whatever the layer's layout (a vector is [R, 1]); of a tensor with a base, of its delta. Differentiable as
    `generate` is.

    Args:
        plan: the plan.
        genome: a `Genome` or `TrainState`.
        name: the parameter, generated or direct.
        rows: a slice of the rows without a step; of all parts below each other, or of one.
        cols: a slice of the columns without a step.
        part: which matrix of a parameter that is several (0, 1, 2 for a packed q, k, v); None is all.
        noise: as for `generate`.
        kernel: as for `generate`.

    Raises:
        ValueError: if the genome's leaves are not those of the plan, or there is no such parameter or part.
    """
    check_genome(plan, genome, buffers=False)
    tensor = next((t for t in plan.tensors if name in (t.name, *t.aliases)), None)
    if tensor is None:
        raise ValueError(f"{name!r} is no parameter of the plan; it has {[t.name for t in plan.tensors]}")
    grids = [TileGrid(m.rows, m.cols, m.rows, m.cols) for m in KINDS[tensor.kind].matrices(tensor.shape)]
    if part is not None and part not in range(len(grids)):
        raise ValueError(f"{name!r} has the parts {[*range(len(grids))]}, got {part!r}")
    if any(s.step not in (None, 1) for s in (rows, cols)):
        raise ValueError(f"rows and cols must be slices without a step, got {rows} and {cols}")
    chosen = [*range(len(grids))] if part is None else [part]
    (a, b, _), (c, d, _) = rows.indices(sum(grids[i].rows for i in chosen)), cols.indices(grids[0].cols)
    pieces, first = dict[int, Piece](), 0
    for i in chosen:
        start, stop = (min(max(n - first, 0), grids[i].rows) for n in (a, b))
        pieces[i] = Piece(((start, max(start, stop)),), (c, max(c, d)))
        first += grids[i].rows
    # Of an empty block, one part says the columns.
    met = [i for i in chosen if pieces[i].shape[0]] or chosen[:1]
    return torch.cat([_block(plan, genome, tensor, i, pieces[i], noise or {}, kernel) for i in met])


def _block(
    plan: Plan, genome: GenomeLike, tensor: TensorPlan, part: int, piece: Piece, noise: Noise, kernel: Kernel
) -> Tensor:
    if not tensor.slots:
        return piece.of(KINDS[tensor.kind].unfold(genome.direct[tensor.name])[part])
    slot, narrow = tensor.slots[part], DTYPES[tensor.dtype]
    e, number = next((e, i) for e in plan.ensembles for i, p in enumerate(e.spans) if p.slot is slot)
    stack = Stack(e, kernel, {number: cut_piece(slot.grid, piece)})
    like = next(iter(genome.gnets.get(e.name, {}).values()), torch.zeros((), dtype=plan.dtype, device="cpu"))
    evaluation = stack.evaluation(flat_genome(genome), noise.get(e.name), like.dtype, like.device)
    block = stack.split(evaluation)[0].matrix()
    block = block + slot.offset if slot.offset else block
    return block.to(narrow) if narrow.itemsize < plan.dtype.itemsize else block
