"""The genome as one self-describing file, `genome.safetensors`. No pickle.

Everything is checked on the way in: a file that is cut short, flipped, misnamed, misshapen, not finite or that declares
absurd sizes gives a `ValueError`, and nothing is loaded.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gbfunc.files import replace_file
from gbfunc.genome import check_genome
from gbfunc.plan import DTYPES, STORED_DTYPES, Plan
from gbfunc.plan.file_layout import (
    FORMAT,
    MAX_HEADER_BYTES,
    MAX_LEAVES,
    file_header,
    file_parts,
    stored_dtype,
    stored_leaves,
    unpack_plan,
)
from gbfunc.plan.slots import dtype_name
from gbfunc.trees import TensorSpec, compare_trees, flatten_tree
from gbfunc.types import Genome, GenomeLike, Params, TensorMap


def save(path: str | os.PathLike[str], plan: Plan, genome: GenomeLike, dtype: torch.dtype | None = None) -> int:
    """Write a genome with its plan: all that is needed to build the p-net's weights again.

    The file appears whole or not at all (temporary file, fsync, rename).

    Args:
        path: where to; a file that is there is replaced.
        plan: the plan.
        genome: a `Genome` or `TrainState`.
        dtype: `torch.float16` or `torch.bfloat16` stores g-nets and direct parameters of a wider dtype in this one,
            each rounded to the nearest; buffers stay as they are. `load` gives the plan's dtypes back.

    Returns:
        Bytes written; the same genome gives the same bytes.

    Raises:
        ValueError: if the genome does not fit the plan, holds values that are not finite or too large for `dtype`,
            or if the plan is longer than a file may hold.
        OSError: if the file cannot be written; what was there before is intact.
    """
    if dtype is not None and dtype not in STORED_DTYPES.values():
        raise ValueError(f"dtype must be None or one of {', '.join(map(str, STORED_DTYPES.values()))}, got {dtype!r}")
    check_genome(plan, genome, buffers=False)
    flat = {k: x.detach().cpu() for k, x in flatten_tree(Genome(genome.gnets, genome.direct, genome.buffers)).items()}
    compare_trees(plan.leaves, flat, "the genome does not fit the plan")
    _check_values(flat, "the genome")
    stored = stored_leaves(flat, dtype)
    for name, leaf in stored.items():
        if leaf.dtype != flat[name].dtype and not bool(torch.isfinite(leaf).all()):
            raise ValueError(f"{name!r} holds {float(flat[name].abs().max()):g}, too large a number for {dtype}")
    text = plan.to_json()
    tensors = {name: torch.cat(parts) for name, parts in file_parts(stored).items()}
    header = file_header(text, flat, stored, _digest(text, tensors))
    data = b"".join([header, *(x.view(torch.uint8).numpy().data for x in tensors.values())])
    replace_file(Path(path), data)
    return len(data)


def load(
    path: str | os.PathLike[str], *, factories: Sequence[Callable[..., Any]] = (), max_pnet_bytes: int = 64 << 30
) -> tuple[Plan, Genome]:
    """Read what `save` wrote, with everything checked.

    Args:
        path: the file.
        factories: the factories of `from_module`, where the plan uses any: a file alone runs no code.
        max_pnet_bytes: largest p-net that the file may declare; a small file can declare a huge one.

    Returns:
        The plan and the genome, on the CPU.

    Raises:
        FileNotFoundError: if there is nothing at `path`.
        ValueError: if what is there is not a valid genome, saying what is wrong.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"no genome file at {os.fspath(path)!r}")
    try:
        plan, flat = _read(Path(path), factories, max_pnet_bytes)
    except (SafetensorError, ValueError, OSError, MemoryError, RuntimeError) as error:
        raise ValueError(f"{os.fspath(path)!r} is not a valid genome: {error}") from error
    gnets = {e.name: {k: flat[f"gnets/{e.name}/{k}"] for k in e.leaves} for e in plan.ensembles if e.leaves}
    direct = {t.name: flat[f"direct/{t.name}"] for t in plan.direct}
    return plan, Genome(gnets, direct, {b.name: flat[f"buffers/{b.name}"] for b in plan.buffers})


def _read(path: Path, factories: Sequence[Callable[..., Any]], max_pnet_bytes: int) -> tuple[Plan, Params]:
    """The plan and all leaves of a file."""
    if not path.is_file():
        raise ValueError("it is not a file")
    with path.open("rb") as file:
        if (size := int.from_bytes(file.read(8), "little")) > MAX_HEADER_BYTES:
            raise ValueError(f"its header has {size:,} bytes, over the limit of {MAX_HEADER_BYTES:,}")
    with safe_open(path, framework="pt", device="cpu") as file:
        metadata = file.metadata() or {}
        if "plan" not in metadata or "format" not in metadata:
            raise ValueError("it is a safetensors file, but not a genome (no gbfunc plan in its header)")
        if metadata["format"] != FORMAT:
            raise ValueError(f"its format is {metadata['format']!r}, the one known here is {FORMAT!r}")
        if (name := metadata.get("numbers")) is not None and name not in STORED_DTYPES:
            raise ValueError(f"its dtype is {name!r}, known here are {', '.join(STORED_DTYPES)}")
        dtype = None if name is None else STORED_DTYPES[name]
        text = unpack_plan(metadata["plan"])
        plan = Plan.from_json(text, tuple(factories))
        held = {key: math.prod(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 (not a dict)
        _check_sizes(plan, max_pnet_bytes, held.get(dtype_name(stored_dtype(plan.dtype, dtype)), 0))
        # Copies: what safetensors returns is the mapped file, which others may change.
        tensors = {key: file.get_tensor(key).clone() for key in held}
    stored = stored_leaves(plan.leaves, dtype)
    parts = file_parts(stored)
    lengths = {key: [part.numel() for part in parts[key]] for key in parts}
    expected = {key: TensorSpec((sum(lengths[key]),), DTYPES[key]) for key in parts}
    compare_trees(expected, tensors, "its tensors are not those of its plan")
    if _digest(text, tensors) != metadata.get("sha256"):
        raise ValueError("its digest does not fit its content: the file is damaged")
    pieces = {key: iter(tensors[key].split(lengths[key])) for key in parts}
    flat = {
        # A copy, so that no leaf keeps the memory of all others.
        name: next(pieces[dtype_name(like.dtype)]).reshape(like.shape).to(plan.leaves[name].dtype, copy=True)
        for name, like in sorted(stored.items())
    }
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
        _check_values(flat, "it")
    return plan, flat


def _digest(plan_json: str, tensors: TensorMap) -> str:
    """SHA-256 of the plan and of every tensor's name, dtype, shape and bytes."""
    digest = hashlib.sha256(plan_json.encode())
    for name in sorted(tensors):
        digest.update(f"\n{name} {tensors[name].dtype} {tuple(tensors[name].shape)}\n".encode())
        digest.update(tensors[name].view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check_sizes(plan: Plan, limit: int, numbers: int) -> None:
    """Refuse sizes that the file does not bear out, before anything of such a size is made."""
    size = sum(t.numel * DTYPES[t.dtype].itemsize for t in plan.tensors) + plan.buffer_bytes
    if size > limit:
        raise ValueError(
            f"it declares a p-net of {size:,} bytes, over the limit of {limit:,}: pass max_pnet_bytes if you trust it"
        )
    needed = leaves = 0
    for e in plan.ensembles:
        sizes = [math.prod(leaf.shape) for leaf in e.hypernet.leaves(e.dims).values() if leaf.scope == "tile"]
        tiles = max(span.slot.grid.n_tiles for span in e.spans)
        codes = tiles * (e.dims.rows * e.dims.row_width + e.dims.cols * e.dims.col_width) * plan.dtype.itemsize
        if codes > limit or (tiles > 1 and not sum(sizes)):
            raise ValueError(f"it declares codes of {codes:,} bytes in {tiles:,} tiles")
        needed, leaves = needed + e.n_tiles * sum(sizes), leaves + len(sizes)
        if needed > numbers:
            raise ValueError(f"it declares g-nets of more parameters than the {numbers:,} of their dtype that it holds")
        if leaves > MAX_LEAVES:
            raise ValueError(f"it declares {leaves:,} leaves or more; a file holds at most {MAX_LEAVES:,}")


def _check_values(flat: TensorMap, what: str) -> None:
    for name, tensor in flat.items():
        buffer = name.startswith("buffers/")
        # Buffers may hold infinities on purpose (attention masks); trained leaves may not.
        if bool(torch.isnan(tensor).any()) if buffer else not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{what} holds {'NaN' if buffer else 'values that are not finite'} in {name!r}")
