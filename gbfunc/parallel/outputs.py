"""From this rank's tiles (or factors) to everyone's, in one autograd node; small ensembles travel together.

The p-net waits for all of them. A form in which it waited for each weight at its first use, and each gradient left as
soon as backward knew it, took 0.88 to 1.08 times as long, 1.00 in the median (2 ranks; MLPs of 3 and 9 layers, a GPT;
100 to 1,000 Mbit/s): a slow wire takes ten times as long as the p-net, and on a fast one the processor is short.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gbfunc.hypernets.ensemble import dense_tiles
from gbfunc.parallel.graph import all_gather
from gbfunc.parallel.layout import Layout, sent_dtype
from gbfunc.parallel.wire import Sizes
from gbfunc.plan import Ensemble
from gbfunc.types import Factors, Params

BUCKET_BYTES = 2**20
"""Outputs of less than this, per rank, are sent together: below it a collective's latency is what it costs."""

Outputs = dict[str, Tensor | Factors]


def no_tiles(layout: Layout, e: Ensemble, leaves: Params) -> Tensor | Factors:
    """The outputs of a rank that owns none of an ensemble's tiles; they depend on the leaves all the same.

    Without a graph this rank's backward would never come to the collective in which the others wait for it.
    """
    anchor = next(iter(leaves.values())).reshape(-1)[:0].sum()
    rows, cols, *_ = e.dims
    if layout.as_factors(e):
        k = e.hypernet.factor_width
        return Factors(anchor.new_zeros((0, rows, k)) + anchor, anchor.new_zeros((0, cols, k)) + anchor)
    return anchor.new_zeros((0, rows, cols)) + anchor


def gather_outputs(layout: Layout, own: Outputs, *, mute: bool = False) -> Outputs:
    """Every rank's outputs of every ensemble, from this rank's own.

    Args:
        layout: who owns what.
        own: scaled tiles [t, r, c] or factors of the tiles this rank owns.
        mute: count this rank's gradients as zero.

    Raises:
        CollectiveError: if a rank is missing.
    """
    ensembles = [e for e in layout.plan.ensembles if e.name in own]
    pieces: list[Tensor] = []
    sizes: list[Sizes] = []
    for e in ensembles:
        parts = _sent(layout, e, own[e.name])
        pieces += parts
        sizes += [layout.sizes[e.name]] * len(parts)
    whole = iter(_gather_pieces(layout, pieces, sizes, mute))
    return {e.name: Factors(next(whole), next(whole)) if layout.as_factors(e) else next(whole) for e in ensembles}


def gather_slot(
    layout: Layout, e: Ensemble, own: Tensor | Factors, sizes: Sizes, *, mute: bool = False
) -> Tensor | Factors:
    """Every rank's outputs of one slot, from this rank's own; `sizes` are every rank's tiles of it.

    Raises:
        CollectiveError: if a rank is missing.
    """
    parts = _sent(layout, e, own)
    whole = all_gather(layout.mesh, parts, [sizes] * len(parts), mute=mute)
    return Factors(*whole) if len(whole) == 2 else whole[0]


def _sent(layout: Layout, e: Ensemble, out: Tensor | Factors) -> list[Tensor]:
    """What is gathered of an ensemble's outputs: factors or tiles, as the layout has it."""
    as_factors = layout.as_factors(e)
    parts = [*out] if isinstance(out, Factors) and as_factors else [dense_tiles(out)]
    dtype = sent_dtype(layout.plan, e, as_factors)
    return parts if dtype is None else [part.to(dtype) for part in parts]


def _gather_pieces(layout: Layout, pieces: list[Tensor], sizes: list[Sizes], mute: bool) -> list[Tensor]:
    """Tensors [t, ...] of this rank to [T, ...] of all: large ones as they are, small ones in flat buckets."""
    buckets = _buckets([(p.dtype, max(s) * _row_bytes(p)) for p, s in zip(pieces, sizes, strict=True)])
    sent: list[Tensor] = []
    rows: list[Sizes] = []
    for bucket in buckets:
        if len(bucket) == 1:
            sent.append(pieces[bucket[0]])
            rows.append(sizes[bucket[0]])
        else:
            sent.append(torch.cat([pieces[i].reshape(-1) for i in bucket]))
            numbers = [[n * math.prod(pieces[i].shape[1:]) for n in sizes[i]] for i in bucket]
            rows.append(tuple(map(sum, zip(*numbers, strict=True))))
    gathered = all_gather(layout.mesh, sent, rows, mute=mute)
    whole: dict[int, Tensor] = {}
    for bucket, flat in zip(buckets, gathered, strict=True):
        if len(bucket) == 1:
            whole[bucket[0]] = flat
            continue
        ranks = range(layout.mesh.gnets)
        widths = [math.prod(pieces[i].shape[1:]) for i in bucket]
        parts = flat.split([sizes[i][r] * w for r in ranks for i, w in zip(bucket, widths, strict=True)])
        for place, i in enumerate(bucket):
            whole[i] = torch.cat(parts[place :: len(bucket)]).reshape(-1, *pieces[i].shape[1:])
    return [whole[i] for i in range(len(pieces))]


def _row_bytes(piece: Tensor) -> int:
    return math.prod(piece.shape[1:]) * piece.element_size()


def _buckets(pieces: list[tuple[torch.dtype, int]]) -> list[list[int]]:
    """Which tensors travel together: the large alone, the small of a dtype, in order, until they are a bucket."""
    buckets: list[list[int]] = []
    small: dict[torch.dtype, list[int]] = {}
    held: dict[torch.dtype, int] = {}
    for i, (dtype, size) in enumerate(pieces):
        if size >= BUCKET_BYTES:
            buckets.append([i])
            continue
        small.setdefault(dtype, []).append(i)
        held[dtype] = held.get(dtype, 0) + size
        if held[dtype] >= BUCKET_BYTES:
            buckets.append(small.pop(dtype))
            del held[dtype]
    return [*buckets, *small.values()]
