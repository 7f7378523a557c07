"""The compact file of a genome: numbers as codes (integers of 2 to 8 bits), or as multiples of quantization steps.

A file holds, in this order:

    3 bytes    "GB5"
    1 byte     bits of a code; plus 16 if running means are float16 and variances bfloat16; plus 32 for a file of runs
    4 bytes    CRC-32 of the preceding byte and the rest of the file
    document   the plan and the metadata as JSON, in one stream of raw deflate
    plain      leaves that have no codes, in the order of `names_by_dtype`: wider dtypes first
    codes      all other leaves, sorted by name: scales (bfloat16), zero points and codes, as in `rounding`

Up to `MAX_SYMBOLS` codes are written as *runs*, which an entropy coder compresses (`symbols`): a run of the scales'
exponents, one of the scales' mantissas, one of zero points, and one of codes per leaf. More codes would take long to
read. The file then has uncompressed scales, and zero points and codes packed bit by bit or, if shorter, by deflate.

With quantization steps (`steps`), the fourth byte has 9 instead of the bits of a code, and the codes are a stream of
`step_stream`. The byte has 64 more if the stream includes running statistics of norms and their counters of batches.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gbfunc.formats.layout import Allowed, deflate, inflate, names_by_dtype, stored_leaves
from gbfunc.formats.rounding import BITS, Codes, block_size, decode, encode, narrow_stats
from gbfunc.formats.statistics import counters_of
from gbfunc.formats.step_stream import pack_steps, unpack_steps
from gbfunc.formats.steps import EXPECTED_BITS, EXPECTED_PART_BITS, Steps, parts_of
from gbfunc.formats.symbols import MAX_SYMBOLS, Reader, Run, most_runs_bytes, pack_runs
from gbfunc.types import DTYPES, Params, TensorMap

MAGIC = b"GB5"
HEAD = len(MAGIC) + 1 + 4
_NARROW, _RUNS, _STATISTICS = 16, 32, 64
STEPS = 9
_EMPTY = np.empty(0, np.uint8)
EXPONENT = 122  # Most likely exponent of a scale, the centre of the exponents' run: 2^-5, with bfloat16's bias of 127
_MIDDLE = {bits: np.array([1 << (bits - 1)], np.uint8) for bits in range(2, 9)}


class Sizes(NamedTuple):
    """The number of bytes of each section of a compact file."""

    document: int
    plain: Mapping[str, int]  # Bytes of each leaf without codes
    codes: int  # Bytes of all codes, scales, zero points and quantization steps
    bits: Mapping[str, float]  # Bits of each leaf's codes, without scales, zero points and quantization steps


def pack(
    document: str, plan: Any, leaves: TensorMap, stored: str | Steps, most: int = MAX_SYMBOLS
) -> tuple[bytes, Sizes]:
    """Packs a document (JSON of plan and metadata) and leaves: (file, `Sizes`); ValueError for too large numbers.

    Up to `most` codes of 2 to 8 bits are stored as runs. More codes are packed, which is faster but takes more bytes.
    """
    narrow = narrow_stats(leaves)
    if isinstance(stored, Steps):
        plain = _leaves_without_steps(plan, leaves, narrow, stored.statistics)
        flags = STEPS + _STATISTICS * stored.statistics
        codes, own = pack_steps(plan, leaves, stored)
    else:
        plain, bits = stored_leaves(leaves, stored, narrow), BITS[stored]
        coded = {name: encode(leaves[name], bits) for name in sorted(leaves.keys() - plain.keys())}
        for name, found in coded.items():
            if not bool(torch.isfinite(found.scales).all()):
                raise ValueError(f"{name!r} holds {float(leaves[name].abs().max()):g}, too large a number for {stored}")
        runs = _fits_runs([leaves[name] for name in coded], most)
        flags = bits + _RUNS * runs
        codes, own = (_pack_runs if runs else _pack_symbols)(coded, bits)
    text = deflate(document)
    numbers = b"".join(_bytes(plain[name]) for names in names_by_dtype(plain).values() for name in names)
    checked = bytes([flags + _NARROW * narrow]) + text + numbers + codes
    sizes = Sizes(len(text), {name: x.nbytes for name, x in plain.items()}, len(codes), own)
    return MAGIC + checked[:1] + zlib.crc32(checked).to_bytes(4, "little") + checked[1:], sizes


def _leaves_without_steps(plan: Any, leaves: TensorMap, narrow: bool, statistics: bool) -> Params:
    coded = {part.leaf for part in parts_of(plan, statistics)}
    coded |= {*counters_of(plan)} if statistics else set()
    # Only buffers remain. As in "int8" files, running statistics have 16 bits, and all other buffers are unchanged.
    return stored_leaves({k: x for k, x in leaves.items() if k not in coded}, "int8", narrow)


def most_bytes(document: str, leaves: TensorMap, bits: int) -> Sizes:
    """Returns upper bounds of a file's `Sizes` from the shapes of leaves; running statistics count as 16 bits."""
    plain = {name: x.nbytes for name, x in stored_leaves(leaves, f"int{bits}").items()}
    coded = {name: x for name, x in leaves.items() if name not in plain}
    blocks, numbers = sum(map(_blocks, coded.values())), sum(x.numel() for x in coded.values())
    if _fits_runs(list(coded.values())):
        size = most_runs_bytes((15 + bits) * blocks + bits * numbers, 3 * blocks + numbers, 3 + len(coded))
    else:
        size = 2 * blocks + math.ceil(bits * (blocks + numbers) / 8)
    own = {name: float(bits * x.numel()) for name, x in coded.items()}
    return Sizes(len(deflate(document)), plain, size, own)


def expected_bytes(document: str, plan: Any) -> Sizes:
    leaves, parts = plan.leaves, parts_of(plan)
    plain = {k: x.nbytes for k, x in _leaves_without_steps(plan, leaves, True, True).items()}
    bits = {name: EXPECTED_BITS * leaves[name].numel() for name in (*(part.leaf for part in parts), *counters_of(plan))}
    codes = math.ceil((EXPECTED_PART_BITS * len(parts) + sum(bits.values())) / 8) + 3
    return Sizes(len(deflate(document)), plain, codes, bits)


def _blocks(leaf: Tensor) -> int:
    return leaf.numel() // max(1, block_size(tuple(leaf.shape)))


def _fits_runs(coded: list[Tensor], most: int = MAX_SYMBOLS) -> bool:
    return sum(x.numel() + 3 * _blocks(x) for x in coded) <= most


def _pack_runs(coded: Mapping[str, Codes], bits: int) -> tuple[bytes, dict[str, float]]:
    scales = np.concatenate([_EMPTY, *(x.scales.view(torch.int16).numpy() for x in coded.values())])
    zeros = np.concatenate([_EMPTY, *(x.zeros.numpy() for x in coded.values())])
    about = [
        Run(scales >> 7, 8, np.array([EXPONENT])),
        Run(scales & 127, 7, _MIDDLE[7]),
        Run(zeros, bits, _MIDDLE[bits]),
    ]
    runs = [Run(x.codes.numpy().reshape(-1), bits, x.zeros.numpy().repeat(x.codes.shape[1])) for x in coded.values()]
    data, costs = pack_runs(about + runs)
    return data, dict(zip(coded, costs[len(about) :], strict=True))


def _pack_symbols(coded: Mapping[str, Codes], bits: int) -> tuple[bytes, dict[str, float]]:
    scales = b"".join(_bytes(code.scales) for code in coded.values())
    symbols = np.concatenate([x.numpy().reshape(-1) for code in coded.values() for x in (code.zeros, code.codes)])
    digits = np.unpackbits(symbols[:, None], axis=1)[:, 8 - bits :]
    coder = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    data = min(np.packbits(digits).tobytes(), coder.compress(symbols.tobytes()) + coder.flush(), key=len)
    return scales + data, {name: 8 * len(data) / len(symbols) * x.codes.numel() for name, x in coded.items()}


class Compact(NamedTuple):
    """The content of a compact file: the document, and the bytes of the leaves."""

    document: str
    bits: int
    flags: int
    numbers: bytes
    allowed: Allowed

    @staticmethod
    def parse(data: bytes, allowed: Allowed) -> Compact:
        checked = data[len(MAGIC) : len(MAGIC) + 1] + data[HEAD:]
        if len(data) < HEAD or data[HEAD - 4 : HEAD] != zlib.crc32(checked).to_bytes(4, "little"):
            raise ValueError("its checksum does not fit its content: the file is damaged, copy it again")
        flags, rest = checked[0], checked[1:]
        bits = flags & ~(_NARROW | _RUNS)
        bits = STEPS if bits == STEPS + _STATISTICS else bits
        if bits not in (*BITS.values(), STEPS):
            raise ValueError(f"it has codes of {bits} bits, known here are 2 to 8")
        document, n = inflate(rest, allowed)
        return Compact(document, bits, flags, rest[len(rest) - n :], allowed)

    def leaves(self, plan: Any) -> Params:
        expected, (plain, codes) = plan.leaves, self._split(plan)
        at, flat = 0, {}
        for dtype, names in names_by_dtype(plain).items():
            for name in names:
                end = at + plain[name].nbytes
                flat[name] = _tensor(self.numbers[at:end], DTYPES[dtype])
                at = end
        if self.bits == STEPS:
            flat |= self._unpack_steps(plan, codes)[0]
        else:
            coded = {name: expected[name] for name in sorted(expected.keys() - plain.keys())}
            read = (self._read_runs if self.flags & _RUNS else self._read_symbols)(codes, [*coded.values()])
            for name, scales_N, zeros_N, numbers in zip(coded, *read, strict=True):
                like = coded[name]
                codes_NK = numbers.reshape(-1, max(1, block_size(tuple(like.shape))))
                flat[name] = decode(Codes(codes_NK, scales_N, zeros_N), like)
        return {name: x.reshape(expected[name].shape).to(expected[name].dtype) for name, x in flat.items()}

    def stored(self, read_plan: Callable[[str], Any]) -> str | Steps:
        if self.bits != STEPS:
            return f"int{self.bits}"
        plan = read_plan(self.document)
        return self._unpack_steps(plan, self._split(plan)[1])[1]

    def _unpack_steps(self, plan: Any, codes: bytes) -> tuple[Params, Steps]:
        return unpack_steps(plan, codes, bool(self.flags & _STATISTICS), self.allowed)

    def _split(self, plan: Any) -> tuple[Params, bytes]:
        narrow = bool(self.flags & _NARROW)
        if self.bits == STEPS:
            plain = _leaves_without_steps(plan, plan.leaves, narrow, bool(self.flags & _STATISTICS))
        else:
            plain = stored_leaves(plan.leaves, f"int{self.bits}", narrow)
        at = sum(x.nbytes for x in plain.values())
        if at > len(self.numbers):
            raise ValueError(f"it holds {len(self.numbers):,} bytes of numbers, expected {at:,} or more")
        return plain, self.numbers[at:]

    def _read_runs(self, data: bytes, coded: list[Tensor]) -> tuple[Sequence[Tensor], ...]:
        counts = [_blocks(x) for x in coded]
        blocks, numbers = sum(counts), sum(x.numel() for x in coded)
        if not _fits_runs(coded):
            raise ValueError(f"it has {numbers:,} codes in runs, which are too many")
        reader = Reader(data, 3 + len(coded) + 3 * blocks + numbers)
        exponents = reader.run(blocks, 8, np.array([EXPONENT])).astype(np.int16)
        scales = torch.from_numpy(exponents << 7 | reader.run(blocks, 7, _MIDDLE[7])).view(torch.bfloat16)
        zeros = torch.from_numpy(reader.run(blocks, self.bits, _MIDDLE[self.bits])).split(counts)
        codes = []
        for like, zeros_N in zip(coded, zeros, strict=True):
            centres = zeros_N.numpy().repeat(like.numel() // max(1, len(zeros_N)))
            codes.append(torch.from_numpy(reader.run(like.numel(), self.bits, centres)))
        reader.close()
        return scales.split(counts), zeros, codes

    def _read_symbols(self, data: bytes, coded: list[Tensor]) -> tuple[Sequence[Tensor], ...]:
        counts = [_blocks(x) for x in coded]
        end = 2 * sum(counts)
        if end > len(data):
            raise ValueError(f"it holds {len(data):,} bytes of scales, expected {end:,} or more")
        scales = _tensor(data[:end], torch.bfloat16).split(counts)
        lengths = [n for x, count in zip(coded, counts, strict=True) for n in (count, x.numel())]
        pieces = torch.from_numpy(_unpack_symbols(data[end:], sum(lengths), self.bits)).split(lengths)
        return scales, pieces[::2], pieces[1::2]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def _tensor(data: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if len(data) else torch.empty(0, dtype=dtype, device="cpu")


def _unpack_symbols(data: bytes, count: int, bits: int) -> NDArray[np.uint8]:
    if len(data) == math.ceil(count * bits / 8):
        digits = np.unpackbits(np.frombuffer(data, np.uint8), count=count * bits).reshape(count, bits)
        return np.packbits(np.pad(digits, ((0, 0), (8 - bits, 0))), axis=1).reshape(-1)
    if count > 8 * len(data):
        raise ValueError(f"it holds {len(data):,} bytes of codes, too few for {count:,}")
    decoder = zlib.decompressobj(-15)
    with suppress(zlib.error):
        symbols = np.frombuffer(bytearray(decoder.decompress(data, count + 1)), np.uint8)
        if len(symbols) == count and decoder.eof and not decoder.unused_data and symbols.max(initial=0) < 2**bits:
            return symbols
    raise ValueError(f"its {len(data):,} bytes of codes are not those of {count:,} codes of {bits} bits")
