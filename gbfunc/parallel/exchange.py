"""Exchanges of a layout: outputs of generation, the sums at the end of a step, and whole states.

The loss is the mean over the global batch, so every rank counts by its rows: sum_i n_i x_i / sum_i n_i.
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
"""Paths of the leaves of an aux, each with True for a number."""


class Gather(NamedTuple):
    """The exchange of one call of a generator: from this rank's outputs to the outputs of every rank.

    A rank without a row of the batch does not count (`counts`). The rank computes the loss of a made-up row to take
    part in the collectives of backward, and its gradients become zeros, even if they are not finite.
    """

    layout: Layout
    counts: bool = True

    def no_tiles(self, e: Ensemble, leaves: Params) -> Tensor | Factors:
        """The outputs of a rank that holds none of an ensemble's tiles.

        They depend on the leaves, as other ranks wait in the collectives of this rank's backward.
        """
        anchor = next(iter(leaves.values())).reshape(-1)[:0].sum()
        rows, cols, *_ = e.dims
        if self.layout.as_factors(e):
            k = e.hypernet.factor_width
            return Factors(anchor.new_zeros((0, rows, k)) + anchor, anchor.new_zeros((0, cols, k)) + anchor)
        return anchor.new_zeros((0, rows, cols)) + anchor

    def outputs(self, mine: Mapping[str, Tensor | Factors], sizes: Mapping[str, Sizes]) -> dict[str, Tensor | Factors]:
        """Every rank's outputs of ensembles, from the scaled tiles [t, r, c] or factors that this rank holds.

        `sizes` are the numbers of tiles on every rank, of whole ensembles or of one slot each.
        """
        ensembles = [e for e in self.layout.plan.ensembles if e.name in mine]
        parts = {e.name: self._sent(e, mine[e.name]) for e in ensembles}
        sent = [(part, sizes[name]) for name, of in parts.items() for part in of]
        found = all_gather(self.layout.mesh, [x for x, _ in sent], [of for _, of in sent])
        if not self.counts:
            # The same values, and a gradient of exact zeros: the graph stays, for the others wait in it.
            found = [torch.where(x.new_zeros((), dtype=torch.bool), x, x.detach()) for x in found]
        rest = iter(found)
        return {name: Factors(next(rest), next(rest)) if len(of) == 2 else next(rest) for name, of in parts.items()}

    def _sent(self, e: Ensemble, out: Tensor | Factors) -> list[Tensor]:
        as_factors = self.layout.as_factors(e)
        parts = [*out] if isinstance(out, Factors) and as_factors else [dense_tiles(out)]
        dtype = sent_dtype(self.layout.plan, e, as_factors)
        return parts if dtype is None else [part.to(dtype) for part in parts]


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
    """Computes means over the global batch, in one all-reduce (and one of the split leaves along the data axis).

    `loss`, `aux` and `buffers` are from this rank's `rows`; gradients are of `rows` times the loss, of split leaves
    already summed over the g-net axis. Numbers and scalar tensors of `aux` are averaged; other values stay this rank's.
    The buffers `before` the step, equal on all ranks, are those to average. `agreed` are the entries of aux of the
    previous step: a rank with other entries makes all ranks compare theirs.

    Returns:
        Loss, aux, gradients, buffers, the norm of the whole gradient, and the entries of aux.

    Raises:
        ValueError: for an aux with tensors that are no scalars, entries that differ between ranks, or an empty batch.
    """
    mesh, dtypes = layout.mesh, {k: g.dtype for k, g in gradients.items()}
    given, gradients = gradients, {k: _wide(g) for k, g in gradients.items()}
    split = {k: g for k, g in gradients.items() if k in layout.split}
    if split:
        split = dict(zip(split, _sum_flat(layout, list(split.values()), "replicas"), strict=True))
    # In the gradients' dtype, since ranks must decide by the same bits.
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
    means = map(_wide, [loss, *known, *(taken_off(x, buffers[k]) for k, x in before.items())])
    means = [x * rows if rows else torch.zeros_like(x) for x in means]
    # Rows that are no number say that a rank has other entries.
    sent = torch.tensor(float(rows) if entries == agreed else math.nan)
    n, square, *sums = _sum_flat(layout, [sent, square, *means, *(gradients[k] for k in replicated)], "world")
    if n.isnan():
        with mesh.uncounted():
            everywhere = gather_objects(mesh, entries)
            for rank, there in enumerate(everywhere):
                if there != everywhere[0]:
                    first, own_paths = ([path for path, _ in x] for x in (everywhere[0], there))
                    words = f"rank {rank} has {own_paths}, rank 0 {first}"
                    raise ValueError(f"aux must have the same entries on all ranks, and numbers in the same: {words}")
            return reduce_step(layout, rows, loss, aux, given, buffers, before, entries)
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


def taken_off(before: Tensor, after: Tensor) -> Tensor:
    """The difference, in which what stays, infinities too, stays bit for bit."""
    return torch.where(after == before, torch.zeros_like(before), before - after)


def _number(x: Any) -> Tensor | None:
    if isinstance(x, Tensor):
        if x.ndim:
            raise ValueError(f"with a mesh, aux must be scalars to be averaged over ranks, got {tuple(x.shape)}")
        return x if x.is_floating_point() else x.float()
    return torch.tensor(float(x)) if isinstance(x, int | float) else None


def weighted_mean(layout: Layout, weight: Tensor, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The sum of a number over all ranks, and means of tensors with it as weight, in one all-reduce."""
    if layout.mesh.world == 1:
        return weight, tensors
    # In 32 bits, since everything is sent in the widest dtype.
    weighted = (wide * weight.to(wide) for wide in map(_wide, tensors))
    total, *sums = _sum_flat(layout, [weight.float(), *weighted], "world")
    return total, [(x / total.to(x)).to(like.dtype) for x, like in zip(sums, tensors, strict=True)]


def _wide(x: Tensor) -> Tensor:
    # Numbers of half precision times rows would overflow, and be rounded twice.
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def _sum_flat(layout: Layout, tensors: list[Tensor], axis: AxisName) -> list[Tensor]:
    """Sums over the ranks of an axis, in one flat buffer of the widest dtype; each in its dtype again."""
    if layout.mesh.axis(axis).size == 1:
        return tensors
    real = [torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach() for x in tensors]
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in real) else torch.float32
    flat = torch.cat([x.to(layout.mesh.device, dtype).reshape(-1) for x in real])
    parts = sum_ranks(layout.mesh, flat, axis).split([x.numel() for x in real])
    sums = [part.reshape(x.shape).to(x.device, x.dtype) for part, x in zip(parts, real, strict=True)]
    return [torch.complex(*y.unbind(-1)) if x.is_complex() else y for x, y in zip(tensors, sums, strict=True)]


def shard_state(layout: Layout, state: Any) -> Any:
    """This rank's rows of a full state: of split leaves and their optimizer state. ValueError if it is not full."""
    check_genome(layout.plan, state)
    if not layout.sharded:
        return state
    flat = flatten_tree(state)
    for name, leaf in _split_tensors(layout, flat).items():
        # A copy: a view would keep all rows alive.
        flat[name] = flat[name][layout.split[leaf]].clone() if flat[name].ndim else flat[name]
    return unflatten_tree(flat, state)


def gather_state(layout: Layout, state: Any) -> Any:
    """The full state, on every rank, undoing `shard_state`; all ranks must call. ValueError if it is no part of one."""
    check_genome(layout.plan, state, layout.shapes)
    if not layout.sharded:
        return state
    flat = flatten_tree(state)
    split = _split_tensors(layout, flat)
    tiles = [layout.sizes[leaf.removeprefix(GNET).rpartition("/")[0]] for leaf in split.values()]
    sizes = [of if flat[name].ndim else (1,) * len(of) for name, of in zip(split, tiles, strict=True)]
    pieces = [torch.atleast_1d(flat[name].detach()).to(layout.mesh.device) for name in split]
    for name, of, gathered in zip(split, tiles, all_gather(layout.mesh, pieces, sizes), strict=True):
        # A number for all rows (the step of Adam) comes from a rank that has rows.
        x = flat[name]
        flat[name] = (gathered if x.ndim else gathered[next(r for r, n in enumerate(of) if n)]).to(x.device)
    return unflatten_tree(flat, state)


def _split_tensors(layout: Layout, flat: Params) -> dict[str, str]:
    """Split tensors of a state, the optimizer's too, each with its leaf, in one order everywhere."""
    leaf_of = {k: k if k.startswith(GNET) else k.removeprefix("opt/leaves/").rpartition("/")[0] for k in sorted(flat)}
    return {name: leaf for name, leaf in leaf_of.items() if leaf in layout.split}
