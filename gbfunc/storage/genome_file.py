"""The genome as one self-describing file, `genome.safetensors`. No pickle.

All leaves of a dtype are one tensor in it; the plan, compressed JSON in the header, knows their shapes. Everything is
checked on the way in: a file that is cut short, flipped, misnamed, misshapen, not finite or that declares absurd sizes
gives a `ValueError`, and nothing is loaded.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes

from gbfunc.files import replace_file
from gbfunc.genome import check_genome
from gbfunc.plan import DTYPES, FORMAT, NUMBERS, Plan, file_layout, file_metadata, file_tensors, unpack_plan
from gbfunc.types import Genome, GenomeLike, Params, TensorMap

_MAX_PNET_BYTES = 64 << 30


def _digest(plan_json: str, tensors: Params) -> str:
    """SHA-256 of the plan and of every tensor's name, dtype, shape and bytes."""
    digest = hashlib.sha256(plan_json.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _flat(genome: GenomeLike) -> Params:
    flat = {f"gnets/{e}/{k}": v for e, leaves in genome.gnets.items() for k, v in leaves.items()}
    flat |= {f"direct/{k}": v for k, v in genome.direct.items()}
    flat |= {f"buffers/{k}": v for k, v in genome.buffers.items()}
    return {k: v.detach().to("cpu", copy=True).contiguous() for k, v in flat.items()}


def _joined(plan: Plan, flat: TensorMap, numbers: torch.dtype | None) -> Params:
    """The tensors of the file [n], by dtype, out of the leaves.

    Raises:
        ValueError: if a trained leaf holds a number that is too large for the dtype in which it is stored.
    """
    layout = file_layout(plan, numbers)
    stored = {name: flat[name].to(dtype).reshape(-1) for name, (_, dtype) in layout.items()}
    for name, leaf in stored.items():
        if leaf.dtype != flat[name].dtype and not bool(torch.isfinite(leaf).all()):
            raise ValueError(f"{name!r} holds {float(flat[name].abs().max()):g}, too large a number for {leaf.dtype}")
    return {
        key: torch.cat([leaf for leaf in stored.values() if leaf.dtype == dtype])
        for key, (_, dtype) in file_tensors(layout).items()
    }


def _split(plan: Plan, tensors: TensorMap, numbers: torch.dtype | None) -> Params:
    """Undo `_joined`: leaves in their own dtypes, each with memory of its own."""
    rest, flat, own = dict(tensors), {}, file_layout(plan)
    for name, (shape, dtype) in file_layout(plan, numbers).items():
        key, length = str(dtype).removeprefix("torch."), math.prod(shape)
        flat[name] = rest[key][:length].reshape(shape).to(own[name][1], copy=True)
        rest[key] = rest[key][length:]
    return flat


def save(path: str | os.PathLike[str], plan: Plan, genome: GenomeLike, numbers: torch.dtype | None = None) -> int:
    """Write a genome with its plan: all that is needed to build the p-net's weights again.

    The file appears whole or not at all (temporary file, fsync, rename).

    Args:
        path: where to; a file that is there is replaced.
        plan: the plan.
        genome: a `Genome` or `TrainState`.
        numbers: `torch.float16` or `torch.bfloat16` stores g-nets and direct parameters of a wider dtype in this one,
            each rounded to the nearest; buffers stay as they are. `load` gives the plan's own dtypes back.

    Returns:
        Bytes written; the same genome gives the same bytes.

    Raises:
        ValueError: if the genome does not fit the plan, holds values that are not finite or too large for `numbers`,
            or if the plan is longer than a file may hold.
        OSError: if the file cannot be written; what was there before is intact.
    """
    if numbers is not None and numbers not in NUMBERS.values():
        raise ValueError(f"numbers must be None or one of {', '.join(map(str, NUMBERS.values()))}, got {numbers!r}")
    check_genome(plan, genome)
    flat = _flat(genome)
    _check_fits(file_layout(plan), flat)
    _check_values(flat, "the genome")
    tensors = _joined(plan, flat, numbers)
    data = _ordered(to_bytes(tensors, file_metadata(plan, _digest(plan.to_json(), tensors), numbers)))
    replace_file(Path(path), data)
    return len(data)


def _ordered(data: bytes) -> bytes:
    """The same file with its metadata in order: safetensors writes it in another order every time."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return data[:8] + text.ljust(size) + data[8 + size :]


def load(
    path: str | os.PathLike[str],
    *,
    factories: Sequence[Callable[..., Any]] = (),
    max_pnet_bytes: int = _MAX_PNET_BYTES,
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
        ValueError: if what is there is not a sound genome, saying what is wrong.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"no genome file at {os.fspath(path)!r}")
    if not Path(path).is_file():
        raise ValueError(f"{os.fspath(path)!r} is not a sound genome: it is not a file")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            if "plan" not in metadata or "format" not in metadata:
                raise ValueError("it is a safetensors file, but not a genome (no gbfunc plan in its header)")
            if metadata["format"] != FORMAT:
                raise ValueError(f"its format is {metadata['format']!r}, the one known here is {FORMAT!r}")
            if (name := metadata.get("numbers")) is not None and name not in NUMBERS:
                raise ValueError(f"its numbers are {name!r}, known here are {', '.join(NUMBERS)}")
            numbers = None if name is None else NUMBERS[name]
            text = unpack_plan(metadata["plan"])
            plan = Plan.from_json(text, tuple(factories))
            shapes = {k: tuple(file.get_slice(k).get_shape()) for k in file.keys()}  # noqa: SIM118 (not a dict)
            _check_size(plan, max_pnet_bytes, sum(map(math.prod, shapes.values())))
            # Copies: what safetensors returns is the mapped file, which others may change.
            tensors = {k: file.get_tensor(k).clone() for k in shapes}
        _check_fits(file_tensors(file_layout(plan, numbers)), tensors)
        if _digest(text, tensors) != metadata.get("sha256"):
            raise ValueError("its digest does not fit its content: the file is damaged")
        flat = _split(plan, tensors, numbers)
        _check_values(flat, "it")
    except (SafetensorError, ValueError, OSError, MemoryError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)!r} is not a sound genome: {error}") from error
    gnets: dict[str, Params] = {}
    for name, tensor in flat.items():
        if name.startswith("gnets/"):
            ensemble, leaf = name.removeprefix("gnets/").split("/", 1)
            gnets.setdefault(ensemble, {})[leaf] = tensor
    direct, buffers = (
        {k.removeprefix(p): v for k, v in flat.items() if k.startswith(p)} for p in ("direct/", "buffers/")
    )
    return plan, Genome(gnets, direct, buffers)


def _check_size(plan: Plan, limit: int, numbers: int) -> None:
    """Refuse sizes that the file does not bear out, before anything of such a size is made."""
    size = sum(t.numel * DTYPES[t.dtype].itemsize for t in plan.tensors) + plan.buffer_bytes
    if size > limit:
        raise ValueError(
            f"it declares a p-net of {size:,} bytes, over the limit of {limit:,}: pass max_pnet_bytes if you trust it"
        )
    slots = [slot for tensor in plan.tensors for slot in tensor.slots]
    if (needed := sum(slot.tile_params for slot in slots)) > numbers:
        raise ValueError(f"it declares g-nets of {needed:,} parameters or more, but holds {numbers:,} numbers in all")
    for slot in slots:
        dims = slot.dims
        codes = slot.grid.n_tiles * (dims.rows * dims.row_width + dims.cols * dims.col_width) * plan.dtype.itemsize
        if codes > limit or (slot.grid.n_tiles > 1 and not slot.tile_params):
            raise ValueError(f"it declares codes of {codes:,} bytes in {slot.grid.n_tiles:,} tiles")


def _check_fits(expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]], found: TensorMap) -> None:
    if expected.keys() != found.keys():
        missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        raise ValueError(f"its tensors are not those of its plan: missing {missing}, unknown {unknown}")
    for name, (shape, dtype) in expected.items():
        if tuple(found[name].shape) != shape:
            raise ValueError(f"tensor {name!r} has shape {tuple(found[name].shape)}, its plan says {shape}")
        if found[name].dtype != dtype:
            raise ValueError(f"tensor {name!r} has dtype {found[name].dtype}, its plan says {dtype}")


def _check_values(flat: TensorMap, what: str) -> None:
    for name, tensor in flat.items():
        # Buffers may hold infinities on purpose (attention masks); trained leaves may not.
        if not name.startswith("buffers/") and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{what} holds values that are not finite in {name!r}")
        if name.startswith("buffers/") and bool(torch.isnan(tensor).any()):
            raise ValueError(f"{what} holds NaN in {name!r}")
