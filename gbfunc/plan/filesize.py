"""The layout of `genome.safetensors`, so that a plan knows its file's exact size before there is one."""

from __future__ import annotations

import json
import math
from typing import TypeAlias

import torch

from gbfunc.plan.packing import pack_plan
from gbfunc.plan.slots import DTYPES
from gbfunc.plan.spec import Plan

FORMAT = "gbfunc-genome-2"
# In the order of safetensors, which writes wider types first.
_CODES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


NUMBERS = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float16, torch.bfloat16)}
"""What trained leaves may be stored as, in place of their own dtype."""

Layout: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype by name."""


def file_layout(plan: Plan, numbers: torch.dtype | None = None) -> Layout:
    """Shape and dtype of every leaf in the file: `gnets/<ensemble>/<leaf>`, `direct/<name>`, `buffers/<name>`.

    Leaves of one dtype stand in the file as one tensor [n], in the order of their names, which is that of the result.

    Args:
        plan: the plan.
        numbers: what trained floating-point leaves of a wider dtype are stored as; None is their own dtype.
    """

    def stored(own: torch.dtype) -> torch.dtype:
        if numbers is None or not own.is_floating_point or numbers.itemsize >= own.itemsize:
            return own
        return numbers

    layout: Layout = {}
    for e in plan.ensembles:
        layout |= {f"gnets/{e.name}/{k}": (shape, stored(plan.dtype)) for k, shape in e.shapes.items()}
    layout |= {f"direct/{t.name}": (t.shape, stored(DTYPES[t.dtype])) for t in plan.direct}
    layout |= {f"buffers/{b.name}": (b.shape, DTYPES[b.dtype]) for b in plan.buffers}
    return dict(sorted(layout.items()))


def file_tensors(layout: Layout) -> Layout:
    """Shape [n] and dtype of the file's tensors, each named by its dtype, in the order of the file."""
    found = layout.values()
    lengths = {d: sum(math.prod(shape) for shape, own in found if own == d) for d in {own for _, own in found}}
    return {str(d).removeprefix("torch."): ((lengths[d],), d) for d in _CODES if d in lengths}


def file_metadata(plan: Plan, digest: str, numbers: torch.dtype | None = None) -> dict[str, str]:
    """What the header says beside the tensors; of the numbers only where some leaf is not stored in its own dtype.

    Raises:
        ValueError: if the plan cannot be saved.
    """
    narrower = numbers is not None and file_layout(plan, numbers) != file_layout(plan)
    about = {"numbers": str(numbers).removeprefix("torch.")} if narrower else {}
    return {"format": FORMAT, **about, "plan": pack_plan(plan.to_json()), "sha256": digest}


def genome_file_bytes(plan: Plan, numbers: torch.dtype | None = None) -> int:
    """Bytes of `genome.safetensors`, header included: 8 + the JSON header padded to 8 + the data.

    Args:
        plan: the plan.
        numbers: what trained leaves are stored as, as `save` has it.

    Raises:
        ValueError: if the plan cannot be saved.
    """
    header: dict[str, object] = {"__metadata__": file_metadata(plan, "0" * 64, numbers)}
    end = 0
    for name, (shape, dtype) in file_tensors(file_layout(plan, numbers)).items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return 8 + -(-len(text) // 8) * 8 + end
