"""What travels between server and clients: a genome, or the change of one, as arrays that Flower sends.

Suffixes: P numbers of a genome and of its buffers, in the order of their names.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord  # pyright: ignore[reportMissingImports]
from numpy.typing import NDArray

from gbfunc import Genome, Plan, __version__
from gbfunc.formats.compact import Compact, pack
from gbfunc.formats.rounding import BITS, rounded
from gbfunc.genome import check_genome
from gbfunc.trees import stored_tensors, unflatten_tree
from gbfunc.types import GenomeLike, Params

Vector = NDArray[np.float32]

NUMBERS, CODES, PLACES = "genome", "codes", "places"
"""Names of a record's arrays: numbers [P], bytes [n]; or numbers [k] and, as bits, their places, the others being 0."""

# Codes are written as a genome's file has them, which begins with its plan: both sides know theirs.
_NO_PLAN = json.dumps({"version": 2, "hypernets": [], "encodings": [], "tensors": []}, separators=(",", ":"))

MOST_RUNS = 1 << 14
"""Symbols that a message may have in runs: each takes some microseconds at both ends, more than training does."""

FORMATS = ("float32", "float16", *BITS)
"""What numbers may be sent as; changes also as `topK`, the K largest of them."""

_TOP = re.compile(r"top([1-9]\d*)")

_CURES = {
    "library": "gbfunc {here} here, {there} at the server: install the same version on both sides",
    "base": "{here} here, {there} at the server: load the pretrained network that the genome file names",
    "plan": "{here} here, {there} at the server: start all sides from the same genome file",
}
"""What is compared, in this order: a plan names its base, so that of another base is another plan, too."""


def identity(plan: Plan) -> str:
    """What both sides must have alike: version of the library, digests of base and plan, with `/` between them."""
    digest = plan.digest()[:16]
    return f"{__version__}/{'none' if plan.base is None else plan.base.digest[:16]}/{digest}"


def difference(here: str, there: str) -> str | None:
    """What two identities differ in, by name and with the cure; None where they are equal."""
    if here.count("/") != there.count("/"):
        return f"expected an identity such as {here!r} from the server, got {there!r}"
    for (name, cure), a, b in zip(_CURES.items(), here.split("/"), there.split("/"), strict=True):
        if a != b:
            return f"another {name}: {cure.format(here=a, there=b)}"
    return None


def check_format(dtype: str, what: str = "dtype", *, change: bool = True) -> None:
    """Raise `ValueError` for what is none of `FORMATS`, nor `topK` for a change."""
    if dtype not in FORMATS and not (change and _TOP.fullmatch(dtype)):
        more = ", or topK for the K largest numbers" if change else ""
        raise ValueError(f"{what} must be one of {', '.join(FORMATS)}{more}, got {dtype!r}")


class Wire:
    """Genomes of one plan as vectors, and these as what is sent.

    Buffers of floating point (running statistics) travel with the genome; others, such as counts of batches, do not.

    Args:
        plan: the plan.
        like: a genome of it: parts that do not travel are its own.

    Raises:
        ValueError: if they do not fit together, or for complex numbers, which messages do not hold.
    """

    def __init__(self, plan: Plan, like: GenomeLike) -> None:
        check_genome(plan, like)
        self.plan, self.identity = plan, identity(plan)
        self._like, named = Genome(like.gnets, like.direct, like.buffers), stored_tensors(like)
        self._named = {k: named[k] for k in sorted(named)}
        if left := [k for k, x in self._named.items() if x.is_complex()]:
            raise ValueError(f"messages hold real numbers, and of the genome {', '.join(left)} are complex")
        self._sent = {k: x for k, x in self._named.items() if x.is_floating_point()}
        self.size = sum(x.numel() for x in self._sent.values())
        self._last: tuple[bytes, Vector] | None = None

    def vector(self, genome: GenomeLike) -> Vector:
        """The numbers of a genome [P], float32."""
        named = stored_tensors(genome)
        return np.concatenate([named[k].float().reshape(-1).numpy() for k in self._sent])

    def genome(self, vector: Vector) -> Genome:
        """The genome of a vector [P], with tensors of its own."""
        named = {k: x.clone() for k, x in self._named.items()} | self._leaves(vector)
        return unflatten_tree(named, self._like)

    def _leaves(self, vector: Vector) -> Params:
        parts = torch.from_numpy(np.array(vector, np.float32)).split([x.numel() for x in self._sent.values()])
        return {k: p.reshape(x.shape).to(x.dtype) for (k, x), p in zip(self._sent.items(), parts, strict=True)}

    def pack(self, vector: Vector, dtype: str) -> ArrayRecord:
        """A vector [P] as a record of one array.

        Args:
            vector: finite numbers.
            dtype: one of `FORMATS`: `"float32"`, `"float16"`, or `"int2"` to `"int8"` for the codes of a genome's file:
                blocks with a scale each, biases in float16, all in one stream of as many bits as they need (of large
                networks a simpler one, as of large files); or
                `"topK"`, the K numbers of largest amount in float16, with their places, and 0 for the others
                (sparsification with memory: Stich et al., 2018).

        Raises:
            ValueError: for another dtype, or numbers that it does not hold.
        """
        check_format(dtype)
        if not np.isfinite(vector).all():
            raise ValueError(f"{int((~np.isfinite(vector)).sum())} of the genome's {len(vector):,} numbers not finite")
        if dtype in BITS:
            rest = {k: torch.zeros_like(x) for k, x in self._named.items() if k not in self._sent}
            data, _ = pack(_NO_PLAN, rest | self._leaves(vector), BITS[dtype], MOST_RUNS)
            return ArrayRecord({CODES: Array(np.frombuffer(data, np.uint8))})
        if dtype in FORMATS:
            places, chosen, narrow = None, vector, dtype
        else:
            places, narrow = self._largest(vector, dtype), "float16"
            chosen = vector[places]
        with np.errstate(over="ignore"):
            numbers = chosen.astype(narrow)
        if not np.isfinite(numbers).all():
            raise ValueError(f"the genome holds {np.abs(vector).max():g}, too large a number for {narrow}")
        if places is None:
            return ArrayRecord({NUMBERS: Array(numbers)})
        bits = (places[:, None] >> np.arange(self._place_bits) & 1).astype(np.uint8)
        return ArrayRecord({NUMBERS: Array(numbers), PLACES: Array(np.packbits(bits))})

    @property
    def _place_bits(self) -> int:
        return max(1, (self.size - 1).bit_length())

    def _largest(self, vector: Vector, dtype: str) -> NDArray[np.int64]:
        """Places of the K numbers of largest amount, in their order."""
        count = min(len(vector), int(dtype.removeprefix("top")))
        return np.sort(np.argpartition(np.abs(vector), -count)[-count:])

    def unpack(self, arrays: ArrayRecord) -> Vector:
        """The vector [P] of a record, float32.

        Raises:
            ValueError: for a record of another form, another genome's or a damaged one, or numbers that are not finite.
        """
        if [*arrays] not in ([NUMBERS], [CODES], [NUMBERS, PLACES]):
            raise ValueError(f"expected a record with one array, {NUMBERS!r} or {CODES!r}, got {[*arrays]}")
        array = next(iter(arrays.values())).numpy()
        if CODES in arrays:
            vector = self._decoded(array)
        elif PLACES in arrays:
            vector = self._placed(array, arrays[PLACES].numpy())
        else:
            if array.dtype.kind != "f" or array.shape != (self.size,):
                raise ValueError(f"expected {self.size:,} numbers, got {array.dtype} {array.shape}")
            vector = array.astype(np.float32)
        if not np.isfinite(vector).all():
            raise ValueError(f"{int((~np.isfinite(vector)).sum())} of {self.size:,} numbers are not finite")
        return vector

    def _placed(self, numbers: NDArray[Any], places: NDArray[Any]) -> Vector:
        """The vector with some numbers [k], their places as bits."""
        count, width = len(numbers) if numbers.ndim else 0, self._place_bits
        if numbers.dtype != np.float16 or places.dtype != np.uint8 or places.shape != (-(-count * width // 8),):
            raise ValueError(f"expected numbers in float16 with {width} bits of place each, got {numbers.dtype} "
                             f"{numbers.shape} with {places.dtype} {places.shape}")  # fmt: skip
        found = np.unpackbits(places, count=count * width).reshape(count, width) @ (1 << np.arange(width))
        if (np.diff(found) <= 0).any() or (count and found[-1] >= self.size):
            raise ValueError(f"expected rising places below {self.size:,}, got others")
        vector = np.zeros(self.size, np.float32)
        vector[found] = numbers
        return vector

    def _decoded(self, codes: NDArray[np.uint8]) -> Vector:
        """The vector of codes [n]; that of the last ones is kept, as many nodes of one process get the same."""
        if codes.dtype != np.uint8 or codes.ndim != 1:
            raise ValueError(f"expected codes as bytes [n], got {codes.dtype} {codes.shape}")
        data = codes.tobytes()
        if self._last is None or self._last[0] != data:
            leaves = Compact.parse(data).leaves(self.plan)
            self._last = data, np.concatenate([leaves[k].float().reshape(-1).numpy() for k in self._sent])
        return self._last[1].copy()

    def rounded(self, vector: Vector, dtype: str) -> Vector:
        """What `unpack` makes of what `pack` makes of a vector, without its bytes."""
        check_format(dtype)
        if dtype not in FORMATS:
            near, places = np.zeros_like(vector), self._largest(vector, dtype)
            near[places] = vector[places].astype(np.float16)
            return near
        if dtype not in BITS:
            return vector.astype(dtype).astype(np.float32)
        leaves = rounded(self._named | self._leaves(vector), dtype)
        return np.concatenate([leaves[k].float().reshape(-1).numpy() for k in self._sent])
