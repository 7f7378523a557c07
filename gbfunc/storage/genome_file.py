"""Self-describing genome files, `genome.safetensors`, without pickle.

A file is checked before it is loaded. Truncated or corrupted data, wrong names or shapes, values that are not finite,
and excessive declared sizes raise `ValueError`.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gbfunc.files import replace_file
from gbfunc.formats import AUTO, STORED_DTYPES, Steps, Stored, check_steps, compact, document, layout, stored_as
from gbfunc.formats.compact import Compact
from gbfunc.formats.rounding import BITS, is_stat, narrow_stats
from gbfunc.formats.steps import numbers_of_codes
from gbfunc.formats.symbols import PIECE
from gbfunc.genome import check_genome, unflat_genome
from gbfunc.plan import Plan
from gbfunc.plan.serial import check_readable
from gbfunc.trees import BUFFERS, DIRECT, TensorSpec, compare_trees, stored_tensors
from gbfunc.types import DTYPES, Genome, GenomeLike, Params, TensorMap

_MARKS = {"plan", "format"}  # Entries that a genome's header must have


def save(
    path: str | os.PathLike[str], plan: Plan, genome: GenomeLike, dtype: Stored | None = None, metadata: Any = None
) -> int:
    """Writes a genome and its plan to a file from which the p-net's weights can be regenerated.

    Args:
        path: the file; the write is atomic (temporary file, fsync, rename) and replaces an existing file.
        plan: the plan.
        genome: a `Genome` or `TrainState`.
        dtype: how numbers are rounded in the file. `load` converts them back to the plan's dtypes, and
            `make_train_step(rounding=)` trains with the same rounding.
            * `"float16"`, `"bfloat16"` (or torch's dtypes): the dtype of g-nets and direct parameters;
            * `"int2"` to `"int8"`: integers of 2 to 8 bits, with a scale and a zero point per row, tile or leaf. Direct
              vectors are float16. Running statistics have 16 bits if means stay exact to 1/64 standard deviation;
            * the result of `allocate_steps`: trained numbers and running statistics are integers times quantization
              steps, with one step for the numbers of a leaf that belong to the same tensor of the p-net;
            * None: the plan's `stored` dtype, which plans of `load` do not have, otherwise the p-net's dtypes.
        metadata: any JSON, such as names of classes; `load_metadata` returns it.

    Returns:
        Number of bytes written. Equal arguments give equal files. A warning is issued if `load` will need `max_params`,
        or if `dtype` rounds all numbers of a direct parameter to 0.

    Raises:
        ValueError: if the genome does not fit the plan, or has a value that is not finite, too large for `dtype` or, in
            a g-net, too small; if a type of g-net or an encoding is not registered (`gb.register`); if the metadata
            is not JSON; if the metadata or the plan is longer than a file may hold.
        OSError: if the file cannot be written; a previous file is intact.
    """
    check_genome(plan, genome)
    if isinstance(dtype, Mapping):
        raise TypeError(f"dtype must be a name such as 'float16', got {dtype}: write metadata={dtype}")
    dtype = plan.default_dtype() if dtype is None else dtype
    name = None if dtype is None else stored_as(dtype)
    if name == AUTO and not isinstance(dtype, Steps):
        raise ValueError("dtype='auto' lacks steps: pass train_step.stored(state), or those of gb.allocate_steps")
    flat = stored_tensors(genome)
    compare_trees(plan.leaves, flat, "the genome does not fit the plan")
    _check_values(flat, "the genome")
    stored = {} if name == AUTO else layout.stored_leaves(flat, name, narrow_stats(flat))
    for key, leaf in stored.items():
        if leaf.dtype != flat[key].dtype and not is_stat(key):
            _check_range(key, flat[key].abs(), leaf)
    check_readable(plan.tensors)
    text = document(plan, metadata)
    if isinstance(dtype, Steps):
        check_steps(plan, dtype)
        data, sizes = compact.pack(text, plan, flat, dtype)
        symbols = PIECE * (int.from_bytes(data[len(data) - sizes.codes :][:2], "little") - 1)
        if symbols > (most := layout.Allowed.by(len(data)).symbols):
            what = f"the file has over {symbols:,} codes with steps; gb.load accepts {most:,} in a file of its size"
            enough = max(symbols, sum(x.numel() for x in flat.values()), numbers_of_codes(plan))
            warnings.warn(f"{what}: load the file with max_params={enough}", UserWarning, stacklevel=2)
    elif name in BITS:
        data, _ = compact.pack(text, plan, flat, name)
    else:
        by_dtype = layout.names_by_dtype(stored).items()
        with torch.autocast("cpu", enabled=False):
            tensors = {dtype: torch.cat([stored[k].reshape(-1) for k in names]) for dtype, names in by_dtype}
        header = layout.file_header(text, flat, stored, _digest(text, tensors))
        data = b"".join([header, *(x.view(torch.uint8).numpy().data for x in tensors.values())])
    replace_file(Path(path), data)
    return len(data)


def load(
    path: str | os.PathLike[str],
    *,
    factories: Sequence[Callable[..., Any]] = (),
    max_pnet_bytes: int = 64 << 30,
    max_params: int | None = None,
) -> tuple[Plan, Genome]:
    """Reads and checks a file written by `save`; returns the plan and the genome on the CPU.

    A small file can declare a huge genome, so declared sizes are checked before tensors are read. A file of n bytes
    takes at most about 50 MB + 1,000 n bytes of memory and 0.3 s + n microseconds, unless `max_params` allows more.

    Args:
        path: the file.
        factories: the functions passed to `from_module`, if the plan has g-nets of `from_module`. A file has no code.
        max_pnet_bytes: maximum size of the p-net that the file declares; a small file can declare a huge p-net.
        max_params: maximum number of the genome's parameters. If None, 2^20 parameters and 16 more per byte of the file
            are allowed, or 2^18 parameters and 1.5 more per byte in a file with quantization steps.

    Raises:
        FileNotFoundError: if there is no file.
        ValueError: if the file is not a valid genome, with the reason.
    """
    with _opened(path, max_params) as file:
        plan = Plan.from_json(file.document, tuple(factories))
        _check_sizes(plan, max_pnet_bytes, file)
        flat = file.leaves(plan)
        _check_values(flat, "it")
    return plan, unflat_genome(plan, flat, {b.name: flat[f"{BUFFERS}{b.name}"] for b in plan.buffers})


def load_metadata(path: str | os.PathLike[str]) -> Any:
    """Returns the metadata of a genome file, or None without metadata; raises the errors of `load`."""
    with _opened(path) as file:
        return layout.read_document(file.document).get("metadata")


def load_dtype(path: str | os.PathLike[str]) -> Stored | None:
    """Returns the `dtype` passed to `save`, or None if the file has the plan's dtypes; raises the errors of `load`."""
    with _opened(path) as file:
        return file.stored(Plan.from_json) if isinstance(file, Compact) else file.dtype


@contextmanager
def _opened(path: str | os.PathLike[str], max_params: int | None = None) -> Iterator[Compact | _Plain]:
    if not Path(path).exists():
        raise FileNotFoundError(f"no genome file at {os.fspath(path)!r}")
    try:
        yield _open(Path(path), max_params)
    except (SafetensorError, ValueError, OSError, MemoryError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:1000]
        raise ValueError(f"{os.fspath(path)!r} is not a valid genome: {reason}") from error


def is_genome(path: Path) -> bool:
    """Return whether a file is marked as a genome; raises `SafetensorError` for files of other formats."""
    with path.open("rb") as file:
        if file.read(len(compact.MAGIC)) == compact.MAGIC:
            return True
    with safe_open(path, framework="pt") as file:
        return _MARKS <= (file.metadata() or {}).keys()


def _open(path: Path, max_params: int | None) -> Compact | _Plain:
    if not path.is_file():
        raise ValueError("expected a file, got a folder or a device")
    allowed = layout.Allowed.by(path.stat().st_size, max_params)
    with path.open("rb") as file:
        start = file.read(8)
        if start.startswith(compact.MAGIC):
            return Compact.parse(start + file.read(), allowed)
        if (size := int.from_bytes(start, "little")) > path.stat().st_size:
            raise ValueError("it is neither a genome nor a safetensors file")
        layout.check_most("its header", size, "bytes", "mostHeader")
    with safe_open(path, framework="pt", device="cpu") as file:
        metadata = file.metadata() or {}
        # Copy tensors: safetensors maps the file into memory, where a change of the file would change the tensors.
        tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 (not a dict)
    if not _MARKS <= metadata.keys():
        raise ValueError("it is a safetensors file, but not a genome (no gbfunc plan in its header)")
    if metadata["format"] != layout.FORMAT:
        raise ValueError(f"its format must be {layout.FORMAT!r}, got {metadata['format']!r}: update gbfunc")
    if (name := metadata.get("numbers")) is not None and name not in STORED_DTYPES:
        raise ValueError(f"its dtype is {name!r}, known here are {', '.join(STORED_DTYPES)}")
    document, _ = layout.inflate(base64.b85decode(metadata["plan"]), allowed)
    return _Plain(document, name, metadata.get("sha256", ""), tensors, allowed)


class _Plain(NamedTuple):
    document: str
    dtype: str | None  # Dtype of trained leaves in the file; None means the plan's dtypes
    digest: str  # SHA-256 of plan and tensors, read from the file's header
    tensors: Params  # {dtype: vector of all leaves that the file stores in this dtype}
    allowed: layout.Allowed

    def leaves(self, plan: Plan) -> Params:
        expected = plan.leaves
        stored = layout.stored_leaves(expected, self.dtype)
        names = layout.names_by_dtype(stored)
        lengths = {dtype: [stored[k].numel() for k in names[dtype]] for dtype in names}
        specs = {dtype: TensorSpec((sum(lengths[dtype]),), DTYPES[dtype]) for dtype in names}
        compare_trees(specs, self.tensors, "its tensors are not those of its plan")
        if _digest(self.document, self.tensors) != self.digest:
            raise ValueError("its digest does not fit its content: the file is damaged, copy it again")
        pieces = {k: x for d in names for k, x in zip(names[d], self.tensors[d].split(lengths[d]), strict=True)}
        # Copy each leaf: a view of one leaf would keep all leaves of the same dtype in memory.
        return {k: x.reshape(expected[k].shape).to(expected[k].dtype, copy=True) for k, x in pieces.items()}


def _digest(plan_json: str, tensors: TensorMap) -> str:
    digest = hashlib.sha256(plan_json.encode())
    for name in sorted(tensors):
        digest.update(f"\n{name} {tensors[name].dtype} {tuple(tensors[name].shape)}\n".encode())
        digest.update(tensors[name].view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check_sizes(plan: Plan, limit: int, file: Compact | _Plain) -> None:
    size = sum(t.numel * DTYPES[t.dtype].itemsize for t in plan.tensors) + plan.buffer_bytes
    if size > limit:
        raise ValueError(
            f"it declares a p-net of {size:,} bytes, over the limit of {limit:,}: pass max_pnet_bytes if you trust it"
        )
    pieces = len(plan.tensors) + len(plan.buffers)
    numbers = sum(t.numel for t in plan.direct) + sum(math.prod(b.shape) for b in plan.buffers)
    for e in plan.ensembles:
        leaves = e.hypernet.leaves(e.dims).values()
        of_tile, of_group = (sum(math.prod(x.shape) for x in leaves if x.scope == s) for s in ("tile", "group"))
        tiles = max(span.slot.grid.n_tiles for span in e.spans)
        codes = tiles * (e.dims.rows * e.dims.row_width + e.dims.cols * e.dims.col_width) * plan.dtype.itemsize
        if codes > limit or (tiles > 1 and not of_tile):
            raise ValueError(f"it declares codes of {codes:,} bytes in {tiles:,} tiles")
        pieces, numbers = pieces + len(leaves) * len(e.spans), numbers + e.n_tiles * of_tile
        file.allowed.check("pieces", pieces)
        file.allowed.check("numbers", numbers)
        numbers += e.n_groups * of_group
    file.allowed.check("pieces", pieces)
    file.allowed.check("numbers", numbers)
    if isinstance(file, Compact) and file.bits == compact.STEPS:
        file.allowed.check("numbers", numbers_of_codes(plan))


def _check_range(name: str, size: Tensor, stored: Tensor) -> None:
    if not bool(torch.isfinite(stored).all()):
        raise ValueError(f"{name!r} holds {float(size.max()):g}, too large a number for {stored.dtype}")
    # Numbers smaller than the rounding error of the leaf's largest number may become 0.
    lost = size[(stored == 0) & (size > torch.finfo(stored.dtype).eps / 2 * size.amax())] if size.numel() else size
    words, cure = f"too small a number for {stored.dtype}: it would be 0", "dtype='bfloat16' holds smaller ones"
    if lost.numel() and not name.startswith(DIRECT):
        raise ValueError(f"{name!r} holds {float(lost.max()):g}, {words}; {cure}")
    # Only warn: biases of attention keys may be as tiny as that, because their exact gradients are 0. Python shows
    # equal words once, so leave out the values, which differ from checkpoint to checkpoint.
    if lost.numel() and not bool(stored.any()):
        warnings.warn(f"every number in {name!r} is {words}; {cure}", UserWarning, stacklevel=3)


def _check_values(flat: TensorMap, what: str) -> None:
    for name, tensor in flat.items():
        buffer = name.startswith(BUFFERS)
        # Buffers may hold infinities on purpose (attention masks); trained leaves may not.
        if bool(torch.isnan(tensor).any()) if buffer else not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{what} must be finite, got {'NaN' if buffer else 'values not finite'} in {name!r}")
