"""Prints a plan as a table with the role of every tensor and the bytes of every part of the genome's file."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from gbfunc.formats.rounding import BITS
from gbfunc.formats.sizes import file_bytes, owners_of
from gbfunc.formats.steps import AUTO, Stored, stored_as
from gbfunc.hypernets import ensemble_params
from gbfunc.plan.slots import BufferPlan, TensorPlan
from gbfunc.types import GenomeLike

_COLUMNS = ("tensor", "shape", "role", "by", "tiles", "parameters", "bytes", "note")
_SHORT_NOTE = 12
_FEW_TILES, _FEW_FACTORED, _LARGE_TILE = 25, 9, 48


def report(plan: Any, dtype: Stored | None, genome: GenomeLike | None, metadata: Any) -> str:
    name = None if dtype is None else stored_as(dtype)
    stored = "" if name is None else " in codes" if name == AUTO else f" as {name}"
    n_bytes: dict[str, int] = {}
    try:
        n_bytes = file_bytes(plan, dtype, genome, metadata)
        size = sum(n_bytes.values())
        most = "" if genome is not None else "at most " if name in BITS else "about " * (name == AUTO)
        on_disk = f"{most}{size:,} bytes on disk{stored} (header and buffers included)"
        in_bytes = f", {plan.dense_bytes / size:.1f}x in bytes"
    except (ValueError, RuntimeError) as error:
        if genome is not None:
            raise
        # The genome cannot be saved, for example because the factory of a g-net has no import path: say why.
        on_disk, in_bytes = f"cannot be saved: {error}", ""
    base, beside = plan.base, ", beside the base" * (plan.base is not None)
    lines = [
        *_table(plan, n_bytes),
        "",
        f"whole model  dense {plan.pnet_params:,} parameters, {plan.dense_bytes:,} bytes",
        f"             genome {plan.genome_params:,} parameters, {on_disk}",
        f"             ratio {plan.ratio_params:.1f}x in parameters{in_bytes}{beside}",
    ]
    if base is not None:
        new = [t for t in plan.tensors if not t.base]
        head = sum(ensemble_params(s.hypernet, s.dims, s.grid.n_tiles, 0) for t in new for s in t.slots)
        head += sum(t.numel for t in plan.direct)
        named, deltas = f"{base.name}, " * bool(base.name), sum(t.base for t in plan.tensors)
        lines += [
            f"base         {named}{base.params:,} parameters, {base.bytes:,} bytes: frozen, and not in the genome",
            f"genome       deltas of {deltas} tensors {plan.genome_params - head:,} parameters; "
            f"{len(new)} new tensors {head:,}",
        ]
        if redrawn := [t.name for t in new if t.note.startswith("generated: direct")]:
            words = f"the given values are lost; a genome of {4 * sum(t.numel for t in new):,} parameters keeps them"
            lines.append(f"redrawn      {', '.join(redrawn)}: {words}")
    if beside := [t.name for t in plan.tensors if t.kind == "beside"]:
        lines.append(f"beside       {len(beside)} deltas stay beside layers that hide their weight; none can be merged")
    lines += [f"left out     {name}: {why}" for name, why in plan.left_out.items()]
    if plan.target:
        lines.append(f"asked for    {plan.target}")
    buffers = sum(n_bytes.get(b.name, 0) for b in plan.buffers)
    if "bytes" in plan.target and 2 * buffers > (size := sum(n_bytes.values())):
        lines.append(f"warning      buffers take {buffers:,} of {size:,} bytes: ask for more, or pass stored='auto'")
    if poor := _poor(plan):
        lines.append(f"warning      {', '.join(poor)}: too few tiles to learn well; choose gb.periodic() or more tiles")
    return "\n".join(lines)


def _poor(plan: Any) -> list[str]:
    """List large tensors that learn badly: each tile has a low rank, and tiles are few (notebooks/results/types.md)."""
    return [
        f"{t.name} ({slot.hypernet.type}, {slot.grid.n_tiles} tile{'s' * (slot.grid.n_tiles > 1)})"
        for t in plan.tensors
        for slot in t.slots
        # Do not warn about an embedding that is generated to reach the target: the embedding's note says so.
        if slot.hypernet.spreads and not t.base and "embedding" not in t.note and min(slot.dims[:2]) >= _LARGE_TILE
        if slot.grid.n_tiles < (_FEW_FACTORED if slot.hypernet.factorised else _FEW_TILES)
    ]


def _table(plan: Any, n_bytes: Mapping[str, int]) -> list[str]:
    counts = Counter[str]()
    for owners in owners_of(plan).values():
        for owner, n in owners:
            counts[owner] += n
    rows: dict[str, dict[str, str]] = {}
    for t in plan.tensors:
        tiles: dict[str, str] = {}
        if t.slots:
            sizes: dict[str, set[int]] = {}
            for slot in t.slots:
                sizes.setdefault(slot.hypernet.type, set()).update({slot.hypernet.size or 0} - {0})
            types = [f"{k}({', '.join(map(str, sorted(n)))})" if n else k for k, n in sorted(sizes.items())]
            grids = {f"{s.grid.n_tiles} of {s.grid.tile_rows}x{s.grid.tile_cols}" for s in t.slots}
            several = f"{len(t.slots)} x " if len(t.slots) > 1 else ""
            tiles = {"by": ", ".join(types), "tiles": several + ", ".join(sorted(grids))}
        rows[t.name] = {"shape": _dims(t), "role": t.role, "parameters": f"{counts[t.name]:,}", "note": t.note, **tiles}
        rows |= {alias: {"role": "tied", "by": f"to {t.name}", "parameters": "0"} for alias in t.aliases}
    for e in plan.ensembles:
        if e.hypernet.shares:
            name = f"({e.name})"
            what = "right factors" if e.hypernet.type == "low_rank" else "code weights"
            rows[name] = {"role": "shared", "by": what, "parameters": f"{counts[name]:,}"}
    for b in plan.buffers:
        rows[b.name] = {"shape": _dims(b), "role": "buffer", "parameters": f"({counts[b.name]:,})"}
    if not rows:
        return []
    rows |= {name: {} for name in n_bytes if name not in rows}
    for name, row in rows.items():
        row["tensor"], row["bytes"] = name, f"{n_bytes.get(name, 0):,}" if n_bytes else ""
    notes = list(dict.fromkeys(text for row in rows.values() if len(text := row.get("note", "")) > _SHORT_NOTE))
    columns = []
    for name in _COLUMNS:
        cells = [row.get(name, "") for row in rows.values()]
        cells = [f"[{notes.index(cell) + 1}]" if cell in notes else cell for cell in cells]
        if any(cells) or name in _COLUMNS[:4]:
            width = max(map(len, [name, *cells]))
            place = str.rjust if name in ("parameters", "bytes") else str.ljust
            columns.append([place(cell, width) for cell in (name, "-" * width, *cells)])
    lines = ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]
    return lines + [f"[{i}] {note}" for i, note in enumerate(notes, 1)]


def _dims(tensor: TensorPlan | BufferPlan) -> str:
    return "x".join(map(str, tensor.shape)) or "1"
