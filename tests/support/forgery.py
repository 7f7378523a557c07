"""Files that look like genomes: a valid one, and what somebody could make of it."""

import hashlib
import json
import tracemalloc
import zlib
from base64 import b85encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

import gbfunc as gb
from tests.support.trees_equal import bytes_of
from tests.support.zoo import ZOO, genome_of

MOST = 16 << 20
"""Bytes that Python and NumPy may take to refuse a file of a few KB."""


class Genuine:
    """A valid file, with the plan and the genome that are in it."""

    def __init__(self, path: Path) -> None:
        self.folder = path.parent
        _, self.plan, self.genome = genome_of(ZOO["conv_bn"])
        gb.save(path, self.plan, self.genome)
        self.data = path.read_bytes()

    @property
    def leaves(self) -> dict[str, Tensor]:
        return leaves_of(self.genome)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return joined(self.leaves)

    @property
    def json(self) -> Any:
        return json.loads(self.plan.to_json())

    @property
    def header(self) -> Any:
        return json.loads(self.data[8 : 8 + int.from_bytes(self.data[:8], "little")])

    @property
    def body(self) -> bytes:
        return self.data[8 + int.from_bytes(self.data[:8], "little") :]

    def copy_to(self, folder: Path) -> Path:
        path = folder / "genome.safetensors"
        path.write_bytes(self.data)
        return path


def leaves_of(genome: gb.Genome) -> dict[str, Tensor]:
    flat = {f"gnets/{e}/{k}": v for e, leaves in genome.gnets.items() for k, v in leaves.items()}
    flat |= {f"direct/{k}": v for k, v in genome.direct.items()}
    return flat | {f"buffers/{k}": v for k, v in genome.buffers.items()}


def joined(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name in sorted(leaves):
        flat, dtype = leaves[name].flatten(), str(leaves[name].dtype).removeprefix("torch.")
        tensors[dtype] = torch.cat([tensors[dtype], flat]) if dtype in tensors else flat
    return tensors


def packed(plan: str | bytes) -> str:
    """Any text, as a file's plan is packed; without the words that spare a valid one some bytes."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return b85encode(packer.compress(plan if isinstance(plan, bytes) else plan.encode()) + packer.flush()).decode()


def forged(plan: str, tensors: Mapping[str, Tensor], /, **metadata: str) -> bytes:
    """A file with any plan and tensors, and the digest that fits them."""
    digest = hashlib.sha256(plan.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(bytes_of(tensor))
    header = {"format": "gbfunc-genome-3", "plan": packed(plan), "sha256": digest.hexdigest(), **metadata}
    return save({k: v.clone().contiguous() for k, v in tensors.items()}, header)


def refused(data: bytes, folder: Path, words: str = "", **options: Any) -> str:
    """What `load` says in a ValueError of these bytes, which are no genome."""
    path = folder / "forged"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"(?s)is not a valid genome: .*{words}") as caught:
        gb.load(path, **options)
    return str(caught.value)


def refused_cheaply(data: bytes, folder: Path, words: str, most: int = MOST) -> str:
    assert len(data) < 1 << 20
    tracemalloc.start()
    try:
        said = refused(data, folder, words)
        assert tracemalloc.get_traced_memory()[1] < most
        return said
    finally:
        tracemalloc.stop()


def refused_or_usable(path: Path) -> gb.Plan | None:
    """The plan of a file of anything, which is refused (None), or holds what can be used."""
    try:
        read, genome = gb.load(path)
    except ValueError as error:
        assert "is not a valid genome" in str(error)
        return None
    assert gb.generate(read, genome).keys() == {t.name for t in read.tensors}
    return read
