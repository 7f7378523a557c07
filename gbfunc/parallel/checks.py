"""Checks that ranks agree: what must be equal everywhere is hashed, and the hashes are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from gbfunc.parallel.mesh import AxisName, Mesh
from gbfunc.parallel.wire import gather_numbers


def hash_of(x: Tensor | str) -> int:
    """63 bits of BLAKE2 over dtype, shape and bytes of a tensor, or over a text."""
    if isinstance(x, str):
        content = x.encode()
    else:
        flat = x.detach().cpu().contiguous().reshape(-1)
        content = f"{x.dtype} {tuple(x.shape)} ".encode() + flat.view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


def check_equal(mesh: Mesh, named: Mapping[str, Tensor | str], what: str, axis: AxisName = "world") -> None:
    """Compare tensors or texts, which have the same names everywhere, between the ranks of an axis.

    Args:
        mesh: the ranks; all of them must call.
        named: what must be equal, by name.
        what: what they are, and what to do about it, for the message.
        axis: along which.

    Raises:
        ValueError: on every rank, naming the ranks that differ from the axis' first, and what differs.
        CollectiveError: if a rank is missing.
    """
    if mesh.axis(axis).size == 1:
        return
    names = sorted(named)
    numbers = gather_numbers(mesh, [hash_of(named[k]) for k in names], axis)
    wrong = {r: [k for k, a, b in zip(names, own, numbers[0], strict=True) if a != b] for r, own in enumerate(numbers)}
    if found := [f"rank {_world_rank(mesh, axis, r)} in {', '.join(bad)}" for r, bad in wrong.items() if bad]:
        first = _world_rank(mesh, axis, 0)
        raise ValueError(f"{what}: different from rank {first} are {'; '.join(found)}")


def _world_rank(mesh: Mesh, axis: AxisName, index: int) -> int:
    if axis == "world":
        return index
    if axis == "data":
        return index * mesh.gnets + mesh.gnets_index
    return mesh.data_index * mesh.gnets + index
