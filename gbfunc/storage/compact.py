"""A genome in codes of 2 to 8 bits as a file with little beside them: a safetensors file of one tensor of bytes.

It holds, one after the other:

    16 bytes   the beginning of the SHA-256 of all that follows
    1 byte     bits of a code; plus 16 where running means are float16, and variances bfloat16
    document   the plan as JSON, and the metadata: one stream of raw deflate
    plain      leaves that are not in codes, wider dtypes first, as `file_parts` joins them
    scales     bfloat16, of the leaves in codes in the order of their names
    symbols    zero points and codes of these leaves in the same order, in so many bits each; or in a stream of deflate
               (Huffman's codes alone, so at least one bit each), where that is shorter
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gbfunc.plan import DTYPES, Plan
from gbfunc.plan.file_layout import COMPACT, DIGEST_BYTES, compact_header, deflate, file_parts, inflate, stored_leaves
from gbfunc.plan.rounding import BITS, Codes, block_size, decode, encode, narrow_stats
from gbfunc.plan.slots import dtype_name
from gbfunc.types import Params, TensorMap

_NARROW = 16


def pack(document: str, leaves: TensorMap, bits: int) -> bytes:
    """The file of a document and of all leaves of its plan; `ValueError` for numbers that are too large."""
    dtype = f"int{bits}"
    narrow = narrow_stats(leaves)
    plain = stored_leaves(leaves, dtype, narrow)
    coded = []
    for name in sorted(leaves.keys() - plain.keys()):
        coded.append(encode(leaves[name], bits))
        if not bool(torch.isfinite(coded[-1].scales).all()):
            raise ValueError(f"{name!r} holds {float(leaves[name].abs().max()):g}, too large a number for {dtype}")
    symbols = [x.numpy().reshape(-1) for code in coded for x in (code.zeros, code.codes)]
    numbers = [x for parts in file_parts(plain).values() for x in parts] + [code.scales for code in coded]
    body = bytes([bits + _NARROW * narrow]) + deflate(document) + b"".join(map(_bytes, numbers))
    body += _pack_symbols(np.concatenate([np.empty(0, np.uint8), *symbols]), bits)
    data = hashlib.sha256(body).digest()[:DIGEST_BYTES] + body
    return compact_header(len(data)) + data


class Compact(NamedTuple):
    """What such a file holds: the document and, unread, the numbers after it."""

    document: str
    bits: int
    narrow: bool
    numbers: bytes

    @staticmethod
    def open(tensors: Mapping[str, Tensor]) -> Compact:
        """Read the tensors of a file; `ValueError` for damaged ones."""
        data = tensors[COMPACT]
        if data.dtype != torch.uint8 or data.ndim != 1 or len(tensors) > 1:
            raise ValueError(f"expected one tensor of bytes, got {len(tensors)}, of {data.dtype}, {tuple(data.shape)}")
        stored = data.numpy().tobytes()
        body = stored[DIGEST_BYTES:]
        if stored[:DIGEST_BYTES] != hashlib.sha256(body).digest()[:DIGEST_BYTES]:
            raise ValueError("its digest does not fit its content: the file is damaged")
        first = body[0] if body else 0
        if (bits := first & ~_NARROW) not in BITS.values():
            raise ValueError(f"it has codes of {bits} bits, known here are 2 to 8")
        document, rest = inflate(body[1:])
        return Compact(document, bits, first != bits, body[len(body) - rest :])

    def held(self, plan: Plan) -> int:
        """The most parameters of g-nets that it can hold: each takes at least a bit."""
        return 8 * len(self.numbers)

    def leaves(self, plan: Plan) -> Params:
        """The leaves of its plan; `ValueError` if it holds others."""
        plain = stored_leaves(plan.leaves, f"int{self.bits}", self.narrow)
        coded = {name: plan.leaves[name] for name in sorted(plan.leaves.keys() - plain.keys())}
        blocks = {name: max(1, block_size(tuple(x.shape))) for name, x in coded.items()}
        counts = {name: x.numel() // blocks[name] for name, x in coded.items()}
        start = sum(x.nbytes for x in plain.values())
        end = start + 2 * sum(counts.values())
        if end > len(self.numbers):
            raise ValueError(f"it holds {len(self.numbers):,} bytes of numbers, expected {end:,} or more")
        flat = self._plain(plain, plan)
        scales = iter(_tensor(self.numbers[start:end], torch.bfloat16).split(list(counts.values())))
        lengths = [n for name in coded for n in (counts[name], coded[name].numel())]
        symbols = _unpack_symbols(self.numbers[end:], sum(lengths), self.bits)
        pieces = iter(torch.from_numpy(symbols).split(lengths))
        for name, like in coded.items():
            zeros, codes = next(pieces), next(pieces)
            flat[name] = decode(Codes(codes.reshape(-1, blocks[name]), next(scales), zeros), like)
        return flat

    def _plain(self, plain: Params, plan: Plan) -> Params:
        at, flat = 0, {}
        for dtype in file_parts(plain):
            for name in sorted(name for name, x in plain.items() if dtype_name(x.dtype) == dtype):
                end = at + plain[name].nbytes
                leaf = _tensor(self.numbers[at:end], DTYPES[dtype]).reshape(plain[name].shape)
                flat[name], at = leaf.to(plan.leaves[name].dtype), end
        return flat


def _bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def _tensor(data: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)


def _pack_symbols(symbols: NDArray[np.uint8], bits: int) -> bytes:
    """Symbols in so many bits each, or in less."""
    digits = np.unpackbits(symbols[:, None], axis=1)[:, 8 - bits :]
    coder = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    return min(np.packbits(digits).tobytes(), coder.compress(symbols.tobytes()) + coder.flush(), key=len)


def _unpack_symbols(data: bytes, count: int, bits: int) -> NDArray[np.uint8]:
    """Undo `_pack_symbols`; `ValueError` for what does not hold `count` symbols."""
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
