"""Messages between server and clients: a genome, or the update of a genome, as arrays that Flower sends.

Suffix P: the numbers of a genome and of its buffers, in the order of their names.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord  # pyright: ignore[reportMissingImports]
from numpy.typing import NDArray

from gbfunc import Genome, Plan, __version__
from gbfunc.formats import BITS, Compact, pack
from gbfunc.formats.layout import Allowed
from gbfunc.genome import check_genome
from gbfunc.trees import stored_tensors, unflatten_tree
from gbfunc.types import GenomeLike, Params
from gbfunc.untrusted import parse_array

Vector = NDArray[np.float32]

NUMBERS, CODES, PLACES = "genome", "codes", "places"
"""Names of a message's arrays: numbers (all [P], or the K largest), packed integers, positions of the K largest."""

# Pack integers as in a genome's file, but with an empty plan: server and clients already have the plan.
_NO_PLAN = json.dumps({"version": 2, "hypernets": [], "encodings": [], "tensors": []}, separators=(",", ":"))

MOST_RUNS = 1 << 14
"""Largest number of run-length symbols in a message; each takes about a microsecond to write and to read."""

FORMATS = ("float32", "float16", *BITS)
"""Dtypes in which numbers may be sent. An update may also be sent as `topK`: only its K largest numbers."""


def difference(here: str, there: str) -> str | None:
    """Describe the first difference between two values of `Wire.identity` (gbfunc, base, plan); None if equal."""
    # Compare bases before plans: if bases differ, plans differ as well, but the error should name the base.
    for name, a, b in zip(("library", "base", "plan"), here.split("/"), f"{there}//".split("/"), strict=False):
        if a != b:
            cure = "all sides need one version of gbfunc, one genome file, and the pretrained network that it names"
            return f"another {name}: {a} here, {b or 'none'} at the server: {cure}"
    return None


def check_format(dtype: str, what: str = "dtype", *, change: bool = True) -> None:
    """Raise `ValueError` unless a dtype is in `FORMATS`, or, with `change=True` (updates), is `topK`."""
    if dtype not in FORMATS and not (change and re.fullmatch(r"top[1-9]\d*", dtype)):
        more = ", or topK for the K largest numbers" if change else ""
        raise ValueError(f"{what} must be one of {', '.join(FORMATS)}{more}, got {dtype!r}")


class Wire:
    """Converts genomes of one plan to vectors, and vectors to arrays in a message of Flower.

    Floating-point buffers (running statistics) are sent with the genome. Other buffers, such as counters of batches,
    are not sent: the receiver takes them from the genome `like`. The text `identity` has the version of gbfunc and
    hashes of base and plan. Server and client must have equal texts.

    Raises `ValueError` if the genome `like` does not fit the plan, or has complex numbers.
    """

    def __init__(self, plan: Plan, like: GenomeLike) -> None:
        check_genome(plan, like)
        base = "none" if plan.base is None else plan.base.digest[:16]
        self.identity = f"{__version__}/{base}/{plan.digest()[:16]}"
        self._like, self._named = Genome(like.gnets, like.direct, like.buffers), stored_tensors(like)
        if left := [k for k, x in self._named.items() if x.is_complex()]:
            raise ValueError(f"messages must have real numbers, got complex numbers in {', '.join(left)}")
        self._sent = {k: x for k, x in sorted(self._named.items()) if x.is_floating_point()}
        self.size = sum(x.numel() for x in self._sent.values())
        self._place_bits = max(1, (self.size - 1).bit_length())
        # Cache a round's message and the last reply: in simulations, many nodes unpack one message, and each its reply.
        allowed = Allowed.by(0, plan.genome_params)
        self._decode = lru_cache(2)(lambda data: self._flat(Compact.parse(data, allowed).leaves(plan)))

    def vector(self, genome: GenomeLike) -> Vector:
        return self._flat(stored_tensors(genome))

    def genome(self, vector: Vector) -> Genome:
        return unflatten_tree({k: x.clone() for k, x in self._named.items()} | self._leaves(vector), self._like)

    def _flat(self, named: Params) -> Vector:
        return np.concatenate([named[k].float().reshape(-1).numpy() for k in self._sent])

    def _leaves(self, vector: Vector) -> Params:
        flat = torch.from_numpy(np.array(vector, np.float32)).split([x.numel() for x in self._sent.values()])
        return {k: p.reshape(x.shape).to(x.dtype) for (k, x), p in zip(self._sent.items(), flat, strict=True)}

    def pack(self, vector: Vector, dtype: str) -> ArrayRecord:
        """Pack a vector of all numbers into arrays; raise `ValueError` for numbers outside the dtype's range.

        `dtype` is one of `FORMATS`, or `"topK"`. With `"int2"` to `"int8"`, numbers are quantized as in a genome's
        file. With `"topK"`, only the K numbers of largest magnitude are sent, in float16 and with their positions
        (sparsification with memory: Stich et al., 2018).
        """
        check_format(dtype)
        vector = _finite(vector)
        if dtype in BITS:
            rest = {k: torch.zeros_like(x) for k, x in self._named.items() if k not in self._sent}
            data, _ = pack(_NO_PLAN, None, rest | self._leaves(vector), dtype, MOST_RUNS)
            return ArrayRecord({CODES: Array(np.frombuffer(data, np.uint8))})
        if dtype in FORMATS:
            return ArrayRecord({NUMBERS: Array(_finite(vector, dtype))})
        count = min(self.size, int(dtype.removeprefix("top")))
        places = np.sort(np.argpartition(np.abs(vector), -count)[-count:])
        bits = (places[:, None] >> np.arange(self._place_bits) & 1).astype(np.uint8)
        return ArrayRecord({NUMBERS: Array(_finite(vector[places], "float16")), PLACES: Array(np.packbits(bits))})

    def unpack(self, arrays: ArrayRecord) -> Vector:
        """Unpack arrays into a vector; raise `ValueError` for damaged arrays, or a genome of a different plan."""
        found = {name: parse_array(array.data, name) for name, array in arrays.items()}
        if [*found] == [CODES]:
            vector = self._decode(found[CODES].tobytes()).copy()
        elif [*found] == [NUMBERS, PLACES]:
            vector = self._placed(*found.values())
        elif [*found] != [NUMBERS]:
            raise ValueError(f"expected a record with one array, {NUMBERS!r} or {CODES!r}, got {[*found]}")
        elif (numbers := found[NUMBERS]).dtype.kind != "f" or numbers.shape != (self.size,):
            raise ValueError(f"expected {self.size:,} numbers, got {numbers.dtype} {numbers.shape}")
        else:
            vector = numbers
        return _finite(vector)

    def _placed(self, numbers: NDArray[Any], places: NDArray[Any]) -> Vector:
        count, width = len(numbers) if numbers.ndim else 0, self._place_bits
        if numbers.dtype != np.float16 or places.dtype != np.uint8 or places.shape != (-(-count * width // 8),):
            raise ValueError(f"expected numbers in float16 with {width} bits of place each, got {numbers.dtype} "
                             f"{numbers.shape} with {places.dtype} {places.shape}")  # fmt: skip
        found = np.unpackbits(places, count=count * width).reshape(count, width) @ (1 << np.arange(width))
        if (np.diff(found) <= 0).any() or (count and found[-1] >= self.size):
            raise ValueError(f"expected increasing places below {self.size:,}, got others")
        vector = np.zeros(self.size, np.float32)
        vector[found] = numbers
        return vector


def _finite(vector: NDArray[Any], dtype: str = "float32") -> NDArray[Any]:
    with np.errstate(over="ignore"):
        narrow = vector.astype(dtype)
    if bad := int((~np.isfinite(narrow)).sum()):
        raise ValueError(f"{bad} of the genome's {len(vector):,} numbers are not finite in {dtype}")
    return narrow
