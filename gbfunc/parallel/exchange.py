"""Exchanges between ranks in a training step: generated tiles, sums of gradients, and the state of the training.

The loss is the mean over the global batch. A mean over ranks is `sum_i n_i x_i / sum_i n_i`, for rank i with n_i rows.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from gbfunc.genome import check_genome
from gbfunc.hypernets.ensemble import dense_tiles
from gbfunc.parallel.collectives import Sizes, all_gather, gather_objects, sum_ranks
from gbfunc.parallel.mesh import AxisName
from gbfunc.parallel.placement import Layout, sent_dtype
from gbfunc.plan import Ensemble
from gbfunc.trees import GNET, flatten_tree, unflatten_tree
from gbfunc.types import Factors, Params

Entries = tuple[tuple[str, bool], ...]
"""(path, whether the value is a number) for every value in `aux`, the loss function's second result."""


class Gather(NamedTuple):
    """Gathers the tiles or factors that the ranks generate.

    `counts` is False on a rank that has no row of the batch. This rank computes the loss of a row of zeros, because all
    ranks must run the collectives of backward. Zeros then replace the rank's gradients, which may be infinite.
    """

    layout: Layout
    counts: bool = True

    def no_tiles(self, e: Ensemble, leaves: Params) -> Tensor | Factors:
        """Return 0 tiles or factors (empty tensors) that depend on the leaves, so that backward runs collectives."""
        anchor = next(iter(leaves.values())).reshape(-1)[:0].sum()
        rows, cols, *_ = e.dims
        if self.layout.as_factors(e):
            k = e.hypernet.factor_width
            return Factors(anchor.new_zeros((0, rows, k)) + anchor, anchor.new_zeros((0, cols, k)) + anchor)
        return anchor.new_zeros((0, rows, cols)) + anchor

    def outputs(self, mine: Mapping[str, Tensor | Factors], sizes: Mapping[str, Sizes]) -> dict[str, Tensor | Factors]:
        """Gather the scaled tiles [tiles, rows, columns], or their factors, from all ranks, by name of the ensemble.

        `mine` has this rank's tiles: all tiles of several ensembles or, with `remat="layer"`, the tiles of one matrix.
        The result has the tiles of all ranks. `sizes` has the number of tiles on every rank.
        """
        ensembles = [e for e in self.layout.plan.ensembles if e.name in mine]
        sent = {e.name: self._sent(e, mine[e.name]) for e in ensembles}
        rows = [(x, sizes[name]) for name, tensors in sent.items() for x in tensors]
        found = all_gather(self.layout.mesh, [x for x, _ in rows], [n for _, n in rows])
        if not self.counts:
            # Make the gradient exactly zero, but keep the graph, so that backward runs the collectives.
            found = [torch.where(x.new_zeros((), dtype=torch.bool), x, x.detach()) for x in found]
        each = iter(found)
        return {name: Factors(next(each), next(each)) if len(xs) == 2 else next(each) for name, xs in sent.items()}

    def _sent(self, e: Ensemble, out: Tensor | Factors) -> list[Tensor]:
        as_factors = self.layout.as_factors(e)
        tensors = [*out] if isinstance(out, Factors) and as_factors else [dense_tiles(out)]
        dtype = sent_dtype(self.layout.plan, e, as_factors)
        return tensors if dtype is None else [x.to(dtype) for x in tensors]


def reduce_step(
    layout: Layout,
    rows: float,
    loss: Tensor,
    aux: Any,
    gradients: Params,
    buffers: Params,
    before: Mapping[str, Tensor],
    agreed: Entries,
) -> tuple[Tensor, Any, Params, Params, Tensor, Entries]:
    """Average the results of a step over the global batch, in one all-reduce, or in two if leaves are split over ranks.

    `loss`, `aux` (more results of the loss function) and `buffers` were computed from the `rows` rows of this rank.
    `gradients` are gradients of `rows * loss`. Gradients of split leaves are already summed over the axis `gnets`.
    Numbers and scalar tensors in `aux` are averaged; other values in `aux` are not exchanged. `before` has the buffers
    to average, with their values before the step. `agreed` lists the entries of the previous step's `aux`: the path of
    a value, and whether the value is averaged. If `aux` has other entries on a rank, all ranks compare their entries.

    Returns:
        Loss, aux, gradients, buffers, the norm of the full gradient, and the entries of aux.

    Raises:
        ValueError: if aux has non-scalar tensors, or different entries on different ranks, or if no rank has rows.
    """
    mesh, dtypes = layout.mesh, {k: g.dtype for k, g in gradients.items()}
    unrounded, gradients = gradients, {k: _wide(g) for k, g in gradients.items()}
    split = {k: g for k, g in gradients.items() if k in layout.split}
    if split:
        split = dict(zip(split, _sum_flat(layout, list(split.values()), "replicas"), strict=True))
    # The norm decides whether a step is skipped. So the norm, and thus its dtype, must be equal on all ranks.
    wide = any(g.dtype == torch.float64 for g in gradients.values())
    square = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=mesh.device)
    if mesh.axis("replicas").rank == 0:
        square = square + sum(torch.linalg.vector_norm(g).square() for g in split.values())
    accessors, leaves, structure = optree.tree_flatten_with_accessor(aux)
    numbers = [_number(x) for x in leaves]
    entries = tuple((at.codify("aux"), x is not None) for at, x in zip(accessors, numbers, strict=True))
    own = [x for x in numbers if x is not None]
    known = own if entries == agreed else [loss.new_zeros(()) for _, number in agreed if number]
    replicated = [k for k in gradients if k not in split]
    means = map(_wide, [loss, *known, *(decrease(x, buffers[k]) for k, x in before.items())])
    means = [x * rows if rows else torch.zeros_like(x) for x in means]
    # If `entries` differ from `agreed`, send NaN as the number of rows: the sum is NaN, and all ranks compare entries.
    sent = torch.tensor(float(rows) if entries == agreed else math.nan)
    n, square, *sums = _sum_flat(layout, [sent, square, *means, *(gradients[k] for k in replicated)], "world")
    if n.isnan():
        with mesh.uncounted():
            everywhere = gather_objects(mesh, entries)
            for rank, theirs in enumerate(everywhere):
                if theirs != everywhere[0]:
                    first, own_paths = ([path for path, _ in x] for x in (everywhere[0], theirs))
                    words = f"rank {rank} has {own_paths}, rank 0 {first}"
                    raise ValueError(f"aux must have the same entries on all ranks, of the same kind: {words}")
            return reduce_step(layout, rows, loss, aux, unrounded, buffers, before, entries)
    if not n > 0:
        raise ValueError("the global batch is empty: no rank has a row of it")
    reduced = iter([x / n.to(x.device) for x in sums])
    loss = next(reduced).to(loss.dtype)
    mean_aux = [x if y is None else next(reduced).to(y.dtype) for x, y in zip(leaves, numbers, strict=True)]
    buffers = buffers | {k: (x - next(reduced)).to(x.dtype) for k, x in before.items()}
    mean = {k: g / n.to(g) for k, g in split.items()} | dict(zip(replicated, reduced, strict=True))
    squares = [torch.linalg.vector_norm(mean[k]).square() for k in replicated]
    norm = (sum(squares, square / n.to(square).square())).sqrt()
    aux = optree.tree_unflatten(structure, mean_aux)
    return loss, aux, {k: mean[k].to(dtype) for k, dtype in dtypes.items()}, buffers, norm, entries


def decrease(before: Tensor, after: Tensor) -> Tensor:
    """Return `before - after`. The result is 0 where both are equal, also where both are infinite (as in masks)."""
    return torch.where(after == before, torch.zeros_like(before), before - after)


def _number(x: Any) -> Tensor | None:
    if isinstance(x, Tensor):
        if x.ndim:
            raise ValueError(f"with a mesh, aux must be scalars to be averaged over ranks, got {tuple(x.shape)}")
        return x if x.is_floating_point() else x.float()
    return torch.tensor(float(x)) if isinstance(x, int | float) else None


def weighted_mean(layout: Layout, weight: Tensor, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the sum of `weight` (such as a number of rows) over ranks, and the weighted means of `tensors`."""
    if layout.mesh.world == 1:
        return weight, tensors
    # `_sum_flat` sends all tensors in the widest dtype: a float64 weight would double the bytes of float32 tensors.
    weighted = (wide * weight.to(wide) for wide in map(_wide, tensors))
    total, *sums = _sum_flat(layout, [weight.float(), *weighted], "world")
    return total, [(x / total.to(x)).to(like.dtype) for x, like in zip(sums, tensors, strict=True)]


def _wide(x: Tensor) -> Tensor:
    # In half precision, products with the number of rows could overflow, and would be rounded before the sum.
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def _sum_flat(layout: Layout, tensors: list[Tensor], axis: AxisName) -> list[Tensor]:
    if layout.mesh.axis(axis).size == 1:
        return tensors
    real = [torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach() for x in tensors]
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in real) else torch.float32
    flat = torch.cat([x.to(layout.mesh.device, dtype).reshape(-1) for x in real])
    totals = sum_ranks(layout.mesh, flat, axis).split([x.numel() for x in real])
    sums = [total.reshape(x.shape).to(x.device, x.dtype) for total, x in zip(totals, real, strict=True)]
    return [torch.complex(*y.unbind(-1)) if x.is_complex() else y for x, y in zip(tensors, sums, strict=True)]


def shard_state(layout: Layout, state: Any) -> Any:
    """Return the training state with only this rank's rows of the split leaves and of these leaves' optimizer state."""
    check_genome(layout.plan, state)
    if not layout.sharded:
        return state
    flat = flatten_tree(state)
    for name, leaf in _split_tensors(layout, flat).items():
        # Copy the rows, because a view would keep the memory of all rows in use.
        flat[name] = flat[name][layout.split[leaf]].clone() if flat[name].ndim else flat[name]
    return unflatten_tree(flat, state)


def gather_state(layout: Layout, state: Any) -> Any:
    """Undo `shard_state`: return the state with all rows on every rank. All ranks must call."""
    check_genome(layout.plan, state, layout.shapes)
    if not layout.sharded:
        return state
    flat = flatten_tree(state)
    split = _split_tensors(layout, flat)
    tiles = [layout.sizes[leaf.removeprefix(GNET).rpartition("/")[0]] for leaf in split.values()]
    sizes = [n if flat[name].ndim else (1,) * len(n) for name, n in zip(split, tiles, strict=True)]
    pieces = [torch.atleast_1d(flat[name].detach()).to(layout.mesh.device) for name in split]
    for name, n_tiles, gathered in zip(split, tiles, all_gather(layout.mesh, pieces, sizes), strict=True):
        # A scalar (such as Adam's step) is equal on all ranks that have tiles of the leaf: take the first rank's.
        x = flat[name]
        flat[name] = (gathered if x.ndim else gathered[next(r for r, n in enumerate(n_tiles) if n)]).to(x.device)
    return unflatten_tree(flat, state)


def _split_tensors(layout: Layout, flat: Params) -> dict[str, str]:
    leaf_of = {k: k if k.startswith(GNET) else k.removeprefix("opt/leaves/").rpartition("/")[0] for k in sorted(flat)}
    return {name: leaf for name, leaf in leaf_of.items() if leaf in layout.split}
