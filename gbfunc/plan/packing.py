"""A plan's JSON as text for a file's header: compressed, in an alphabet that JSON need not escape."""

from __future__ import annotations

import base64
import zlib

MAX_PLAN_BYTES = 4 << 20
"""Largest JSON of a plan that a file may hold, some 30,000 tensors: a few kB of zeros, unpacked, fill any memory."""

# What plans are made of, the most frequent last, so that a small plan's own text need not spell it out. It is part of
# the format: with other words, older files cannot be read.
_WORDS = (
    b'{"type":"module","factory":"{"type":"xox","genes":{"type":"low_rank","rank":{"type":"stochastic","hidden":['
    b'{"type":"gnet","hidden":[32],"activation":"relu","share":"kind"{"type":"one_hot"},{"type":"gray"}'
    b'{"type":"per_axis","channels":,"positions":,"n_positions":"dtype":"bfloat16","aliases":["'
    b']],"buffers":[["running_mean",[],"float32",true],["running_var",["num_batches_tracked",[],"int64",true],["'
    b'"note":"generated: direct vectors would take over a quarter of the target""note":"included"'
    b'{"name":".weight","shape":[,"kind":"embedding","kind":"attention_in","kind":"conv",at most 00 bytes'
    b'{"version":1,"hypernets":[{"type":"constant"},{"type":"periodic","features":00,"frequency":[1.0,0.5]}],'
    b'"encodings":[{"type":"grid","dims":[,"code":"coordinate","bandwidth":6.0},{"type":"binary"}],"tensors":['
    b'{"name":".bias","shape":[],"kind":"vector","note":"by rule","slots":[[1,00,1,0,0,1.0,0.0]]},'
    b'{"name":".weight","shape":[00,00],"kind":"linear","note":"by rule","slots":[[0,00,00,0,0,0.0,0.0]]},'
    b'{"name":".bias","shape":[],"kind":"vector"}],"target":"at most 00 parameters"}'
)


def pack_plan(text: str) -> str:
    """Base85 (the alphabet of `base64.b85encode`) of zlib of a plan's JSON; about a fifth as long.

    The same text gives the same result wherever the same zlib is in use; any result is read everywhere.

    Raises:
        ValueError: if it is longer than `unpack_plan` reads.
    """
    data = text.encode()
    if len(data) > MAX_PLAN_BYTES:
        raise ValueError(f"the plan has {len(data):,} bytes as JSON; a file holds at most {MAX_PLAN_BYTES:,}")
    packer = zlib.compressobj(level=9, zdict=_WORDS)
    return base64.b85encode(packer.compress(data) + packer.flush()).decode()


def unpack_plan(packed: str) -> str:
    """Undo `pack_plan`.

    Raises:
        ValueError: for anything that it did not write, before more than `MAX_PLAN_BYTES` are unpacked.
    """
    if len(packed) > 2 * MAX_PLAN_BYTES:
        raise ValueError(f"its plan takes {len(packed):,} characters, more than one of {MAX_PLAN_BYTES:,} bytes needs")
    unpacker = zlib.decompressobj(zdict=_WORDS)
    try:
        data = base64.b85decode(packed)
        # An incomplete last group decodes to less than it says.
        if base64.b85encode(data).decode() != packed:
            raise ValueError("its last characters are none that base85 ends with")
        text = unpacker.decompress(data, MAX_PLAN_BYTES + 1)
        if len(text) > MAX_PLAN_BYTES:
            raise ValueError(f"it is longer than {MAX_PLAN_BYTES:,} bytes when unpacked")
        if not unpacker.eof:
            raise ValueError("it is cut short")
        if unpacker.unused_data:
            raise ValueError(f"{len(unpacker.unused_data):,} bytes follow it")
        return text.decode()
    except (ValueError, zlib.error) as error:
        raise ValueError(f"its plan cannot be unpacked: {error}") from error
