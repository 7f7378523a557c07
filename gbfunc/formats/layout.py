"""The layout of `genome.safetensors`. File sizes can be computed without a genome, from leaves on the meta device.

    8 bytes    length of the header
    header     JSON, padded to 8 bytes: format, plan, SHA-256 of plan and data; dtype, shape and offsets per tensor
    data       one tensor [n] per dtype, wider dtypes first: all leaves of this dtype, concatenated by name

The plan in the header is compressed JSON in base85, whose characters JSON does not escape. Genomes in codes of 2 to 8
bits have another layout (`compact`).
"""

from __future__ import annotations

import base64
import json
import zlib
from importlib.resources import files
from typing import Any, NamedTuple

from gbfunc.formats.rounding import stored_dtype
from gbfunc.types import DTYPES, JSON, Params, TensorMap, dtype_name
from gbfunc.untrusted import parse_json

FORMAT = "gbfunc-genome-3"

_FILES = files("gbfunc.formats")
# JSON Schema (draft 7) of the document in a file. Python and exported HTML pages apply the schema's limits.
SCHEMA: JSON = json.loads(_FILES.joinpath("schema.json").read_text("ascii"))
LIMITS: dict[str, Any] = SCHEMA["limits"]


class Allowed(NamedTuple):
    """Limits of a file's content, because a small file could declare content that takes much time and memory."""

    numbers: int  # Numbers in all leaves. The same limit holds for numbers in the codes of all rows and columns.
    symbols: int  # Integers in a stream with quantization steps
    pieces: int  # Tensors and buffers of the p-net, plus one for each pair of a leaf and a tensor that uses the leaf
    containers: int  # Number of dicts and lists in the document

    @staticmethod
    def by(n_bytes: int, max_params: int | None = None) -> Allowed:
        if max_params is not None:
            return Allowed(max_params, max_params, LIMITS["mostTensors"] * 8, LIMITS["mostLists"])
        names = ("Numbers", "Symbols", "Pieces", "Containers")
        return Allowed(*(LIMITS[f"free{x}"] + int(LIMITS[f"{x.lower()}PerByte"] * n_bytes) for x in names))

    def check(self, what: str, count: int) -> None:
        if count > (most := getattr(self, what)):
            more = "pass max_params=, the parameters that you allow, if you trust it"
            raise ValueError(f"it declares {count:,} {what}, and a file of its size may have {most:,}: {more}")


# Names of dtypes in safetensors
_CODES = dict(zip(DTYPES, ("I64", "F64", "C64", "F32", "I32", "BF16", "F16", "I16", "I8", "U8", "BOOL"), strict=True))


def stored_leaves(leaves: TensorMap, dtype: str | None, narrow: bool = True) -> Params:
    """Converts leaves to the dtypes that `stored_dtype` returns for `dtype` and `narrow`; omits leaves with None."""
    check_most("the genome", len(leaves), "leaves", "mostLeaves")
    dtypes = {name: stored_dtype(name, x, dtype, narrow) for name, x in leaves.items()}
    return {name: x.to(dtypes[name]) for name, x in leaves.items() if dtypes[name] is not None}


def names_by_dtype(stored: TensorMap) -> dict[str, list[str]]:
    """Sorts the names of leaves in the order of a file: by dtype, wider dtypes first, and then by name."""
    names: dict[str, list[str]] = {dtype: [] for dtype in DTYPES}
    for name in sorted(stored):
        names[dtype_name(stored[name].dtype)].append(name)
    return {dtype: found for dtype, found in names.items() if found}


def file_header(plan_json: str, leaves: TensorMap, stored: TensorMap, digest: str = "0" * 64) -> bytes:
    """Builds length and header. `leaves` have the plan's dtypes, `stored` the file's dtypes. `digest` is a SHA-256."""
    narrowed = {dtype_name(x.dtype) for k, x in stored.items() if x.dtype != leaves[k].dtype}
    about = {"numbers": narrowed.pop()} if narrowed else {}
    metadata = {"format": FORMAT, **about, "plan": pack_plan(plan_json), "sha256": digest}
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for dtype, names in names_by_dtype(stored).items():
        start, end = end, end + sum(stored[name].nbytes for name in names)
        shape = [sum(stored[name].numel() for name in names)]
        header[dtype] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


# Preset dictionary of zlib: words of typical documents. Do not change it: existing files would become unreadable.
DOCUMENTS = _FILES.joinpath("words.txt").read_bytes().rstrip()


def pack_plan(text: str) -> str:
    """Packs a plan's JSON by `deflate` and base85; raises ValueError if the plan is longer than a file may hold."""
    packed = base64.b85encode(deflate(text)).decode()
    check_most("the plan", len(packed), "bytes when packed", "mostPacked")
    return packed


def deflate(text: str) -> bytes:
    """Packs a plan's JSON into a raw deflate stream, which marks its end; ValueError if the plan is too large."""
    _check_size(data := text.encode())
    check_limits(json.loads(text))
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zdict=DOCUMENTS)
    return packer.compress(data) + packer.flush()


def inflate(data: bytes, allowed: Allowed) -> tuple[str, int]:
    """Undoes `deflate`: returns the text, and how many bytes follow the stream; ValueError for invalid data."""
    unpacker = zlib.decompressobj(-15, zdict=DOCUMENTS)
    try:
        text = unpacker.decompress(data, LIMITS["mostPlan"] + 1)
        _check_size(text)
        allowed.check("containers", text.count(b"{") + text.count(b"["))
        if not unpacker.eof:
            raise ValueError("it is cut short, copy the file again")
        return text.decode(), len(unpacker.unused_data)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"its plan cannot be unpacked: {error}") from error


def check_most(owner: str, count: int, what: str, limit: str) -> None:
    if count > LIMITS[limit]:
        raise ValueError(f"{owner} has {count:,} {what}; a file holds at most {LIMITS[limit]:,}: make a smaller plan")


def _check_size(data: bytes) -> None:
    check_most("the plan", len(data), "bytes or more as JSON", "mostPlan")
    for mark, what in (b"{", "Dicts"), (b"[", "Lists"), (b",", "Commas"):
        check_most("the plan", data.count(mark), f"{what.lower()} as JSON", f"most{what}")


def read_document(text: str) -> JSON:
    if not isinstance(data := parse_json(text, "the document"), dict):
        raise ValueError(f"expected a plan as a JSON object, got {type(data).__name__}")
    return data


def check_limits(data: JSON) -> None:
    """Raises ValueError if a plan has so many tensors, dimensions or layers that it would take long to read."""
    tensors, hypernets = data["tensors"], data["hypernets"]
    shapes = [t["shape"] for t in tensors] + [b[1] for b in data.get("buffers", [])]
    options = [value for h in hypernets for value in h.values() if isinstance(value, list)]
    for count, what, limit in (
        (len(shapes) + sum(len(t.get("aliases", [])) for t in tensors), "names of tensors", "mostTensors"),
        (len(hypernets), "hypernetworks", "mostTensors"),
        (len(data["encodings"]), "encodings", "mostTensors"),
        (max(map(len, shapes), default=0), "dimensions in a shape", "mostDims"),
        (max(map(len, options), default=0), "layers in a g-net", "mostLayers"),
    ):
        check_most("the plan", count, what, limit)
