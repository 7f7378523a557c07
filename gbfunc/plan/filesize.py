"""The layout of `genome.safetensors`, so that a plan knows its file's exact size before there is one."""

from __future__ import annotations

import json
import math

import torch

from gbfunc.plan.slots import DTYPES
from gbfunc.plan.spec import Plan

FORMAT = "gbfunc-genome-1"
# In the order of safetensors, which writes wider types first and then goes by name.
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


def file_layout(plan: Plan) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor in the file: `gnets/<ensemble>/<leaf>`, `direct/<name>`, `buffers/<name>`."""
    layout = {}
    for e in plan.ensembles:
        layout |= {f"gnets/{e.name}/{k}": (shape, plan.dtype) for k, shape in e.shapes.items()}
    layout |= {f"direct/{t.name}": (t.shape, DTYPES[t.dtype]) for t in plan.direct}
    return layout | {f"buffers/{b.name}": (b.shape, DTYPES[b.dtype]) for b in plan.buffers}


def file_metadata(plan: Plan, digest: str) -> dict[str, str]:
    """What the header says beside the tensors."""
    return {"format": FORMAT, "plan": plan.to_json(), "sha256": digest}


def genome_file_bytes(plan: Plan) -> int:
    """Bytes of `genome.safetensors`, header included: 8 + the JSON header padded to 8 + the data."""
    header: dict[str, object] = {"__metadata__": file_metadata(plan, "0" * 64)}
    end = 0
    order = list(_CODES)
    layout = sorted(file_layout(plan).items(), key=lambda item: (order.index(item[1][1]), item[0]))
    for name, (shape, dtype) in layout:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return 8 + -(-len(text) // 8) * 8 + end
