"""A plan as a table: every tensor with what it is, and where the bytes of its genome's file go."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from gbfunc.plan import compact
from gbfunc.plan.file_layout import deflate, file_header, pack_plan, stored_leaves
from gbfunc.plan.rounding import BITS
from gbfunc.plan.slots import BufferPlan, TensorPlan
from gbfunc.plan.steps import AUTO, Steps, Stored, stored_as
from gbfunc.trees import BUFFERS, DIRECT, GNET, compare_trees, stored_tensors
from gbfunc.types import GenomeLike

PLAN, METADATA, SCALES, CONTAINER = "(plan)", "(metadata)", "(scales)", "(container)"
_COLUMNS = ("tensor", "shape", "role", "by", "tiles", "parameters", "bytes", "note")


_WIDTH, _SHORT_NOTE, _SHORT_NAME = 100, 12, 20
_FEW_TILES, _FEW_FACTORED, _LARGE_TILE = 25, 9, 48


def document(plan: Any, metadata: Any) -> str:
    """The plan's JSON, with the metadata as one more entry, which a plan does not read; `ValueError` if not JSON."""
    text = plan.to_json()
    if metadata is None:
        return text
    try:
        words = json.dumps(metadata, separators=(",", ":"), allow_nan=False)
        json.loads(words, object_pairs_hook=_once)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"metadata must be JSON: {error}") from error
    return f'{text[:-1]},"metadata":{words}}}'


def _once(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError(f"two keys of a dict have one name in it, of {[key for key, _ in pairs]}")


def file_bytes(
    plan: Any, dtype: Stored | None = None, genome: GenomeLike | None = None, metadata: Any = None
) -> dict[str, int]:
    """Where the bytes of a genome's file go; their sum is the size of the file that `save` writes of the same.

    Codes take as many bytes as their values need. With a genome the bytes are exact; without one those of `"int2"` to
    `"int8"` are the most that any has, and those of `"auto"` what is to be expected. Where several tensors share a
    byte, or a stream of codes, each gets its part of it.

    Args:
        plan: the plan.
        dtype: as of `save`.
        genome: what would be saved, where its values matter.
        metadata: as of `save`.

    Returns:
        Bytes by name: tensors and buffers of the p-net, `(ensemble)` for what tiles share, and `(plan)`, `(metadata)`,
        `(scales)` of codes, and `(container)`, which is all that is left.

    Raises:
        ValueError: as `save`, for a plan that cannot be saved or a genome that does not fit it.
    """
    name, leaves = None if dtype is None else stored_as(dtype), plan.leaves
    if genome is not None:
        leaves = stored_tensors(genome)
        compare_trees(plan.leaves, leaves, "the genome does not fit the plan")
    text, bare = document(plan, metadata), plan.to_json()
    owners, parts = _owners(plan), Counter[str]()
    if name == AUTO or name in BITS:
        if name in BITS:
            given = text, leaves, BITS[name]
            sizes = compact.most_bytes(*given) if genome is None else compact.pack(*given)[1]
        elif genome is None:
            sizes = compact.expected_bytes(text, plan)
        elif isinstance(dtype, Steps):
            sizes = compact.pack_with_steps(text, plan, leaves, dtype)[1]
        else:
            raise ValueError(f"{AUTO!r} says nothing of steps: give those of gb.allocate_steps")
        packed = len(deflate(bare))
        parts += {PLAN: packed, METADATA: sizes.document - packed, CONTAINER: sizes.head}
        plain, codes = sizes.plain, [(SCALES, sizes.scales)]
        for leaf, bits in sizes.bits.items():
            at = 0
            for owner, n in owners[leaf]:
                codes.append((owner, float(bits[at : at + n].sum()) if isinstance(bits, np.ndarray) else n * bits))
                at += n
        for owner, size in _whole_bytes(codes, sizes.codes):
            parts[owner] += size
    else:
        stored = stored_leaves(leaves, name)
        plain = {leaf: x.nbytes for leaf, x in stored.items()}
        head, packed = len(file_header(text, leaves, stored)), len(pack_plan(bare))
        extra = len(pack_plan(text)) - packed
        parts += {PLAN: packed, METADATA: extra, CONTAINER: head - packed - extra}
    for leaf, size in plain.items():
        numel = sum(n for _, n in owners[leaf])
        for owner, n in owners[leaf]:
            parts[owner] += size // max(1, numel) * n
    return dict(parts)


def genome_file_bytes(plan: Any, dtype: Stored | None = None) -> int:
    """Bytes of a genome's file, header included, as of `file_bytes` without a genome."""
    return sum(file_bytes(plan, dtype).values())


def report(plan: Any, dtype: Stored | None, genome: GenomeLike | None, metadata: Any) -> str:
    """As `Plan.report`."""
    name = None if dtype is None else stored_as(dtype)
    stored = "" if name is None else " in codes" if name == AUTO else f" as {name}"
    parts: dict[str, int] = {}
    try:
        parts = file_bytes(plan, dtype, genome, metadata)
        size = sum(parts.values())
        most = "" if genome is not None else "at most " if name in BITS else "about " * (name == AUTO)
        on_disk = f"{most}{size:,} bytes on disk{stored} (header and buffers included)"
        in_bytes = f", {plan.dense_bytes / size:.1f}x in bytes"
    except (ValueError, RuntimeError) as error:
        if genome is not None:
            raise
        # A g-net from a function that has no import path trains, but has no file; nor has a size beyond torch's.
        on_disk, in_bytes = f"not to be saved: {error}", ""
    base, beside = plan.base, ", beside the base" * (plan.base is not None)
    lines = [
        *_table(plan, parts),
        "",
        f"whole model  dense {plan.pnet_params:,} parameters, {plan.dense_bytes:,} bytes",
        f"             genome {plan.genome_params:,} parameters, {on_disk}",
        f"             ratio {plan.ratio_params:.1f}x in parameters{in_bytes}{beside}",
    ]
    if base is not None:
        new = [t for t in plan.tensors if not t.base]
        head = sum(s.tile_params for t in new for s in t.slots) + sum(t.numel for t in plan.direct)
        named, deltas = f"{base.name}, " * bool(base.name), sum(t.base for t in plan.tensors)
        lines += [
            f"base         {named}{base.params:,} parameters, {base.bytes:,} bytes: frozen, and not in the genome",
            f"genome       deltas of {deltas} tensors {plan.genome_params - head:,} parameters; "
            f"{len(new)} new tensors {head:,}",
        ]
    if plan.target:
        lines.append(f"asked for    {plan.target}")
    if poor := _poor(plan):
        lines.append(f"little rank  {', '.join(poor)}: may not learn; gb.periodic() does")
    return "\n".join(lines)


def _poor(plan: Any) -> list[str]:
    """Large tensors in few tiles of a type that gives each little rank (measured: notebooks/results/types.md)."""
    return [
        f"{t.name} ({slot.hypernet.type}, {slot.grid.n_tiles} tiles)"
        for t in plan.tensors
        for slot in t.slots
        if slot.hypernet.spreads and not t.base and min(slot.dims[:2]) >= _LARGE_TILE
        if slot.grid.n_tiles < (_FEW_FACTORED if slot.hypernet.factorised else _FEW_TILES)
    ]


def _table(plan: Any, parts: Mapping[str, int]) -> list[str]:
    """Every tensor, and every other part of the file, under a head and a rule; [] without tensors."""
    counts = Counter[str]()
    for owners in _owners(plan).values():
        for owner, n in owners:
            counts[owner] += n
    rows: dict[str, dict[str, str]] = {}
    for t in plan.tensors:
        made: dict[str, str] = {}
        if t.slots:
            sizes: dict[str, set[int]] = {}
            for slot in t.slots:
                sizes.setdefault(slot.hypernet.type, set()).update({slot.hypernet.size or 0} - {0})
            types = [f"{k}({', '.join(map(str, sorted(n)))})" if n else k for k, n in sorted(sizes.items())]
            grids = {f"{s.grid.n_tiles} of {s.grid.tile_rows}x{s.grid.tile_cols}" for s in t.slots}
            several = f"{len(t.slots)} x " if len(t.slots) > 1 else ""
            made = {"by": ", ".join(types), "tiles": several + ", ".join(sorted(grids))}
        rows[t.name] = {"shape": _dims(t), "role": t.role, "parameters": f"{counts[t.name]:,}", "note": t.note, **made}
        rows |= {alias: {"role": "tied", "by": f"to {t.name}", "parameters": "0"} for alias in t.aliases}
    for e in plan.ensembles:
        if e.hypernet.shares:
            name = f"({e.name})"
            rows[name] = {"role": "shared", "by": "code weights", "parameters": f"{counts[name]:,}"}
    for b in plan.buffers:
        rows[b.name] = {"shape": _dims(b), "role": "buffer", "parameters": f"({counts[b.name]:,})"}
    if not rows:
        return []
    rows |= {name: {} for name in parts if name not in rows}
    for name, row in rows.items():
        row["tensor"], row["bytes"] = name, f"{parts.get(name, 0):,}" if parts else ""
    return _fitted(list(rows.values()))


def _fitted(rows: list[dict[str, str]]) -> list[str]:
    """Rows as lines of at most `_WIDTH` characters where that can be.

    Notes go below, and long names lose their beginning, as far as that leaves none like another.
    """
    notes: list[str] = []
    lines = _lines(rows)
    if len(lines[1]) > _WIDTH:
        for row in rows:
            if len(note := row.get("note", "")) > _SHORT_NOTE:
                notes += [note] * (note not in notes)
                row["note"] = f"[{notes.index(note) + 1}]"
        lines = _lines(rows)
    if (over := len(lines[1]) - _WIDTH) > 0:
        names = [row["tensor"] for row in rows]
        most = max(_SHORT_NAME, max(map(len, names)) - over)
        # As short as they say which tensor is meant: layers are told apart by numbers in their middle.
        sizes = range(most, max(map(len, names)))
        ends = ([x if len(x) <= n else f"...{x[3 - n :]}" for x in names] for n in sizes)
        short = next((found for found in ends if len(set(found)) == len(names)), names)
        lines = _lines([row | {"tensor": name} for row, name in zip(rows, short, strict=True)])
    return [line.rstrip() for line in lines] + [f"[{i}] {note}" for i, note in enumerate(notes, 1)]


def _lines(rows: list[dict[str, str]]) -> list[str]:
    columns = []
    for name in _COLUMNS:
        cells = [row.get(name, "") for row in rows]
        if any(cells) or name in _COLUMNS[:4]:
            width = max(map(len, [name, *cells]))
            place = str.rjust if name in ("parameters", "bytes") else str.ljust
            columns.append([place(cell, width) for cell in (name, "-" * width, *cells)])
    return ["  ".join(line) for line in zip(*columns, strict=True)]


def _dims(tensor: TensorPlan | BufferPlan) -> str:
    return "x".join(map(str, tensor.shape)) or "1"


def _owners(plan: Any) -> dict[str, list[tuple[str, int]]]:
    """Whose the numbers of each leaf are, and how many of each, in their order."""
    owners = {f"{DIRECT}{t.name}": [(t.name, t.numel)] for t in plan.direct}
    owners |= {f"{BUFFERS}{b.name}": [(b.name, math.prod(b.shape))] for b in plan.buffers}
    for e in plan.ensembles:
        for name, leaf in e.leaves.items():
            each = math.prod(leaf.shape)
            tiles = [(plan.tensors[s.tensor].name, s.slot.grid.n_tiles * each) for s in e.spans]
            shared = e.hypernet.shares and leaf.scope == "group"
            owners[f"{GNET}{e.name}/{name}"] = [(f"({e.name})", e.n_groups * each)] if shared else tiles
    return owners


def _whole_bytes(parts: Iterable[tuple[str, float]], total: int) -> Iterable[tuple[str, int]]:
    """Parts of a stream in proportion to their bits, as bytes whose sum is `total`."""
    parts = list(parts)
    ends = np.cumsum([0.0, *(bits for _, bits in parts)])
    places = np.round(ends / (ends[-1] or 1.0) * total).astype(int)
    # Where nothing takes any, the first has it.
    places[-1] = total
    return [(owner, int(size)) for (owner, _), size in zip(parts, np.diff(places), strict=True)]
