"""A plan as a table for a person."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from gbfunc.hypernets import ensemble_params
from gbfunc.plan.ensembles import Ensemble
from gbfunc.plan.slots import DTYPES, BufferPlan, TensorPlan

_HEAD = ("tensor", "shape", "role", "by", "tiles", "parameters", "bytes", "note")
_COUNTS = ("parameters", "bytes")


def _row(tensor: TensorPlan, itemsize: int) -> tuple[str, ...]:
    shape = "x".join(map(str, tensor.shape)) or "1"
    if not tensor.slots:
        size = tensor.numel * DTYPES[tensor.dtype].itemsize
        return (tensor.name, shape, "direct", "", "", f"{tensor.numel:,}", f"{size:,}", tensor.note)
    by = {f"{s.hypernet.type}({s.hypernet.size})" if s.hypernet.size else s.hypernet.type for s in tensor.slots}
    grids = {f"{s.grid.n_tiles} of {s.grid.tile_rows}x{s.grid.tile_cols}" for s in tensor.slots}
    parts = f"{len(tensor.slots)} x " if len(tensor.slots) > 1 else ""
    count = sum(s.tile_params for s in tensor.slots)
    return (
        *(tensor.name, shape, "generated", ", ".join(sorted(by)), parts + ", ".join(sorted(grids))),
        *(f"{count:,}", f"{count * itemsize:,}", tensor.note),
    )


def tensor_table(
    tensors: Sequence[TensorPlan], ensembles: Sequence[Ensemble], buffers: Sequence[BufferPlan], dtype: torch.dtype
) -> list[str]:
    """Lines of a table: every tensor with its role, tiles, parameters and bytes.

    Args:
        tensors: the parameters of the p-net.
        ensembles: their ensembles.
        buffers: the buffers of the p-net.
        dtype: of the g-nets.
    """
    rows = []
    for tensor in tensors:
        rows.append(_row(tensor, dtype.itemsize))
        rows += [(a, "", "tied", f"to {tensor.name}", "", "0", "0", "") for a in tensor.aliases]
    for e in ensembles:
        if e.hypernet.shares:
            count = ensemble_params(e.hypernet, e.dims, 0, e.n_groups)
            rows.append(
                (f"({e.name})", "", "shared", "code weights", "", f"{count:,}", f"{count * dtype.itemsize:,}", "")
            )
    for b in buffers:
        numel = math.prod(b.shape)
        shape = "x".join(map(str, b.shape)) or "1"
        rows.append((b.name, shape, "buffer", "", "", f"({numel:,})", f"{numel * DTYPES[b.dtype].itemsize:,}", ""))
    if not rows:
        return []
    used = [i for i in range(len(_HEAD)) if i < 4 or any(row[i] for row in rows)]
    widths = {i: max(len(row[i]) for row in (_HEAD, *rows)) for i in used}

    def line(row: tuple[str, ...]) -> str:
        cells = (row[i].rjust(widths[i]) if _HEAD[i] in _COUNTS else row[i].ljust(widths[i]) for i in used)
        return "  ".join(cells).rstrip()

    return [line(_HEAD), "  ".join("-" * widths[i] for i in used), *map(line, rows)]
