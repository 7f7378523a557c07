"""Counts the bytes of a genome's file per tensor of the p-net, from shapes or from the values of a genome."""

import json
import math
from collections import Counter
from typing import Any

import numpy as np

from gbfunc.formats import compact
from gbfunc.formats.layout import deflate, file_header, pack_plan, stored_leaves
from gbfunc.formats.rounding import BITS
from gbfunc.formats.steps import AUTO, Steps, Stored, stored_as
from gbfunc.trees import BUFFERS, DIRECT, GNET, compare_trees, stored_tensors
from gbfunc.types import GenomeLike
from gbfunc.untrusted import parse_json

PLAN, METADATA, SCALES, CONTAINER = "(plan)", "(metadata)", "(scales)", "(container)"


def document(plan: Any, metadata: Any) -> str:
    """Returns the JSON of a plan with the metadata as one more entry; ValueError if the metadata is not JSON."""
    text = plan.to_json()
    if metadata is None:
        return text
    try:
        words = json.dumps(metadata, separators=(",", ":"), allow_nan=False)
        parse_json(words, "metadata")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"metadata must be JSON, dicts and lists of texts and finite numbers: {error}") from error
    return f'{text[:-1]},"metadata":{words}}}'


def file_bytes(
    plan: Any, dtype: Stored | None = None, genome: GenomeLike | None = None, metadata: Any = None
) -> dict[str, int]:
    """Counts the bytes of a genome's file by name; the sum is the size of the file that `save` writes.

    Keys are tensors and buffers of the p-net, `(ENSEMBLE)` for leaves that several tiles share, `(plan)`, `(metadata)`,
    `(scales)` for scales, zero points and quantization steps, and `(container)` for all other bytes. Leaves share a
    compressed stream in proportion to their bits; tensors share a leaf in proportion to their numbers in the leaf. For
    "int2" to "int8" without a genome, the result is an upper bound; for "auto", an estimate. For arguments, see `save`.
    """
    dtype = plan.default_dtype(genome is None) if dtype is None else dtype
    name, leaves = None if dtype is None else stored_as(dtype), plan.leaves
    if genome is not None:
        leaves = stored_tensors(genome)
        compare_trees(plan.leaves, leaves, "the genome does not fit the plan")
    text = document(plan, metadata)
    bare = text if metadata is None else plan.to_json()
    by_name, shares = Counter[str](), {}
    for leaf, owners in owners_of(plan).items():
        numel = max(1, sum(n for _, n in owners))
        shares[leaf] = [(owner, n / numel) for owner, n in owners]
    if name == AUTO or name in BITS:
        if genome is None:
            auto = name == AUTO
            sizes = compact.expected_bytes(text, plan) if auto else compact.most_bytes(text, leaves, BITS[name])
        elif dtype == AUTO:
            raise ValueError("'auto' lacks steps: pass train_step.stored(state), or those of gb.allocate_steps")
        else:
            sizes = compact.pack(text, plan, leaves, dtype if isinstance(dtype, Steps) else name)[1]
        packed = sizes.document if bare is text else len(deflate(bare))
        by_name += {PLAN: packed, METADATA: sizes.document - packed, CONTAINER: compact.HEAD}
        plain, codes = sizes.plain, [(SCALES, max(0.0, 8 * sizes.codes - sum(sizes.bits.values())))]
        codes += [(owner, bits * share) for leaf, bits in sizes.bits.items() for owner, share in shares[leaf]]
        ends = np.cumsum([0.0, *(bits for _, bits in codes)])
        places = np.round(ends / (ends[-1] or 1.0) * sizes.codes).astype(int)
        for (owner, _), size in zip(codes, np.diff(places).tolist(), strict=True):
            by_name[owner] += size
    else:
        stored = stored_leaves(leaves, name)
        plain = {leaf: x.nbytes for leaf, x in stored.items()}
        head, packed = len(file_header(text, leaves, stored)), len(pack_plan(bare))
        extra = 0 if bare is text else len(pack_plan(text)) - packed
        by_name += {PLAN: packed, METADATA: extra, CONTAINER: head - packed - extra}
    for leaf, size in plain.items():
        for owner, share in shares[leaf]:
            by_name[owner] += round(size * share)
    return dict(by_name)


def genome_file_bytes(plan: Any, dtype: Stored | None = None) -> int:
    return sum(file_bytes(plan, dtype).values())


def owners_of(plan: Any) -> dict[str, list[tuple[str, int]]]:
    """Returns for each leaf `[(tensor, count), ...]`: its tensors in the order of rows, and their counts of numbers."""
    owners = {f"{DIRECT}{t.name}": [(t.name, t.numel)] for t in plan.direct}
    owners |= {f"{BUFFERS}{b.name}": [(b.name, math.prod(b.shape))] for b in plan.buffers}
    for e in plan.ensembles:
        for name, leaf in e.leaves.items():
            each = math.prod(leaf.shape)
            tiles = [(plan.tensors[s.tensor].name, s.slot.grid.n_tiles * each) for s in e.spans]
            shared = e.hypernet.shares and leaf.scope == "group"
            owners[f"{GNET}{e.name}/{name}"] = [(f"({e.name})", e.n_groups * each)] if shared else tiles
    return owners
