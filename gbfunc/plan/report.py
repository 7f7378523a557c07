"""A plan as a table for a person."""

from __future__ import annotations

from gbfunc.hypernets import ensemble_params
from gbfunc.plan.filesize import genome_file_bytes
from gbfunc.plan.slots import DTYPES, TensorPlan
from gbfunc.plan.spec import Plan

_HEAD = ("tensor", "shape", "role", "by", "tiles", "parameters", "bytes", "note")


def _row(tensor: TensorPlan, shared: int, itemsize: int) -> tuple[str, ...]:
    shape = "x".join(map(str, tensor.shape)) or "1"
    if not tensor.slots:
        size = tensor.numel * DTYPES[tensor.dtype].itemsize
        return (tensor.name, shape, "direct", "", "", f"{tensor.numel:,}", f"{size:,}", tensor.note)
    by = {f"{s.hypernet.type}({s.hypernet.size})" if s.hypernet.size else s.hypernet.type for s in tensor.slots}
    grids = {f"{s.grid.n_tiles} of {s.grid.tile_rows}x{s.grid.tile_cols}" for s in tensor.slots}
    parts = f"{len(tensor.slots)} x " if len(tensor.slots) > 1 else ""
    own = sum(s.tile_params for s in tensor.slots) + shared
    return (
        *(tensor.name, shape, "generated", ", ".join(sorted(by)), parts + ", ".join(sorted(grids))),
        *(f"{own:,}", f"{own * itemsize:,}", tensor.note),
    )


def plan_report(plan: Plan) -> str:
    """Every tensor with its role, tiles, parameters and bytes; then the whole model, counted both ways."""
    itemsize = plan.dtype.itemsize
    rows = []
    for tensor in plan.tensors:
        rows.append(_row(tensor, 0, itemsize))
        rows += [(a, "", "tied", f"to {tensor.name}", "", "0", "0", "") for a in tensor.aliases]
    for e in plan.ensembles:
        if e.hypernet.shares:
            count = ensemble_params(e.hypernet, e.dims, 0, e.n_groups)
            rows.append((f"({e.name})", "", "shared", "code weights", "", f"{count:,}", f"{count * itemsize:,}", ""))
    for b in plan.buffers:
        size = DTYPES[b.dtype].itemsize
        numel = 1
        for n in b.shape:
            numel *= n
        shape = "x".join(map(str, b.shape)) or "1"
        rows.append((b.name, shape, "buffer", "", "", f"({numel:,})", f"{numel * size:,}", ""))
    used = [i for i in range(len(_HEAD)) if i < 4 or any(row[i] for row in rows)]
    widths = {i: max(len(_HEAD[i]), *(len(row[i]) for row in rows)) for i in used} if rows else {}
    lines = []
    for row in (_HEAD, *rows) if rows else ():
        numbers = ("parameters", "bytes")
        cells = (row[i].rjust(widths[i]) if _HEAD[i] in numbers else row[i].ljust(widths[i]) for i in used)
        lines.append("  ".join(cells).rstrip())
        if row is _HEAD:
            lines.append("  ".join("-" * widths[i] for i in used))
    dense = plan.dense_bytes
    try:
        genome = genome_file_bytes(plan)
        on_disk = f"{genome:,} bytes on disk (header and buffers included)"
        in_bytes = f", {dense / genome:.1f}x in bytes"
    except ValueError as error:
        # A g-net from a function that has no import path: it trains, but has no file.
        on_disk, in_bytes = f"not to be saved: {error}", ""
    lines += [
        "",
        f"whole model  dense {plan.pnet_params:,} parameters, {dense:,} bytes",
        f"             genome {plan.genome_params:,} parameters, {on_disk}",
        f"             ratio {plan.ratio_params:.1f}x in parameters{in_bytes}",
    ]
    if plan.target:
        lines.append(f"asked for    {plan.target}")
    return "\n".join(lines)
