"""The layout of `genome.safetensors`; of leaves on the meta device it gives the size of a file that is not yet there.

    8 bytes    length of the header
    header     JSON, padded to 8 bytes: format, plan, SHA-256; dtype, shape and place of every tensor
    data       one tensor [n] per dtype, wider ones first: its leaves in the order of their names

The plan in the header is compressed JSON, in an alphabet that JSON need not escape. Genomes in codes of 2 to 8 bits are
other files: `compact`.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType

import torch

from gbfunc.plan.rounding import stored_dtype
from gbfunc.plan.serial import check_limits
from gbfunc.plan.slots import DTYPES, dtype_name
from gbfunc.types import Params, TensorMap

FORMAT, COMPACT = "gbfunc-genome-2", "gbfunc-genome-3"

# What is read at most: a few kB of zeros, unpacked, fill any memory; an empty dict or list, three characters of JSON,
# takes 64 bytes; a leaf, of one number perhaps, takes 20 us.
MAX_PLAN_BYTES, _MAX_DICTS, _MAX_LISTS = 4 << 20, 1 << 16, 1 << 18
_MAX_PACKED = MAX_PLAN_BYTES // 2
MAX_HEADER_BYTES = _MAX_PACKED + (1 << 12)
MAX_LEAVES = 1 << 15

_CODES = dict(zip(DTYPES, ("I64", "F64", "C64", "F32", "I32", "BF16", "F16", "I16", "I8", "U8", "BOOL"), strict=True))
"""What safetensors calls the dtypes."""


def stored_leaves(leaves: TensorMap, dtype: str | None, narrow: bool = True) -> Params:
    """The leaves as they are stored, but for those in codes: trained ones of a wider floating-point dtype in `dtype`.

    `narrow` is whether running statistics, where others are codes, are in 16 bits. Raises `ValueError` for more leaves
    than are read.
    """
    if len(leaves) > MAX_LEAVES:
        raise ValueError(f"the genome has {len(leaves):,} leaves; a file holds at most {MAX_LEAVES:,}")
    dtypes = {name: stored_dtype(name, x, dtype, narrow) for name, x in leaves.items()}
    return {name: x.to(dtypes[name]) for name, x in leaves.items() if dtypes[name] is not None}


def file_parts(stored: TensorMap) -> dict[str, list[torch.Tensor]]:
    """What the tensors of the file [n] join, by dtype: the leaves in the order of their names, flattened."""
    parts: dict[str, list[torch.Tensor]] = {}
    for name in sorted(stored):
        parts.setdefault(dtype_name(stored[name].dtype), []).append(stored[name].reshape(-1))
    return {dtype: parts[dtype] for dtype in DTYPES if dtype in parts}


def file_header(plan_json: str, leaves: TensorMap, stored: TensorMap, digest: str = "0" * 64) -> bytes:
    """All that stands before the data, from the plan and its leaves in the plan's dtypes and as they are stored.

    Their narrower dtype is named only where some leaf has it. Raises `ValueError` for a plan larger than what is read.
    """
    check_limits(json.loads(plan_json))
    narrowed = {dtype_name(x.dtype) for k, x in stored.items() if x.dtype != leaves[k].dtype}
    about = {"numbers": narrowed.pop()} if narrowed else {}
    metadata = {"format": FORMAT, **about, "plan": pack_plan(plan_json), "sha256": digest}
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, parts in file_parts(stored).items():
        start, end = end, end + sum(x.nbytes for x in parts)
        shape = [sum(x.numel() for x in parts)]
        header[name] = {"dtype": _CODES[name], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


# What plans are made of, the most frequent last, so that a small plan's text need not spell it out. It is part of
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


# Frequent text in compact files of format 3, which hold what `gbfunc train` says of task and inputs too.
FORMER_WORDS = (
    b'"hypernets":[{"type":"periodic","features":,"frequency":[0.5,1.0]},{"type":"constant"},{"type":"periodic",'
    b'"features":,"frequency":[1.0,0.5]}],"encodings":[{"type":"binary"},{"type":"grid","dims":[1,28,28],"code":'
    b'"coordinate","bandwidth":6.0}],"tensors":[{"name":"0.weight","shape":[00,00],"kind":"linear","note":"by rule",'
    b'"slots":[[0,00,00,0,1,0.0,0.0]]},{"name":"0.bias","shape":[00],"kind":"vector","note":"by rule","slots":'
    b'[[1,00,1,0,0,1.0,0.0]]},{"name":"2.weight","shape":[10,00],"kind":"linear","note":"by rule","slots":'
    b'[[2,10,00,0,0,0.0,0.0]]},{"name":"2.bias","shape":[10],"kind":"vector"}],"target":"at most 00 parameters"'
    b'"task_config":{"vocabulary":"pretrained":"env":"task":"package."pnet":"hf:bert","pnet_config":{"width":"layers":'
    b'"heads":"hidden":["pnet":"actor_critic","interface":[[4],2,false,0,0,"choice"]"task":"text","pnet":"gpt",'
    b'"interface":[[64],65,true]"task":"trec","pnet":"hf:","interface":[[64],6,false,"classes":["ABBR","DESC","ENTY",'
    b'"HUM","LOC","NUM"]"task":"cifar10","pnet":"allconv","interface":[[3,32,32],10],"mean":[125.,122.,113.],"std":'
    b'[63.,62.,66.],"classes":["airplane","automobile","bird","cat","deer","dog","frog","horse","ship","truck"]'
    b'"task":"fashion-mnist","pnet":"mlp","interface":[[1,28,28],10],"mean":72.9,"std":90.0,"classes":["T-shirt/top",'
    b'"Trouser","Pullover","Dress","Coat","Sandal","Shirt","Sneaker","Bag","Ankle boot"]}},"metadata":{"task":"digits",'
    b'"pnet":"mlp","interface":[[1,8,8],10],"mean":4.8,"std":6.0,"metadata":{"task":"mnist","pnet":"mlp","interface":'
    b'[[1,28,28],10],"mean":33.3,"std":78.'
) + _WORDS


# The same of format 4, whose plans are shorter.
_WORDS_4 = FORMER_WORDS + (
    b'{"version":2,"hypernets":[{"type":"gnet","hidden":[32],"activation":"relu"},{"type":"xox","genes":{"type":"bilinear",'
    b'"features":2,"share":"shapes"},{"type":"low_rank","rank":4},{"type":"periodic","features":9,"share":"layers"},'
    b'{"type":"constant","value":1.0},{"type":"periodic","features":9,"share":"shapes","frequency":2.5}],"encodings":'
    b'[{"type":"gray"},{"type":"table","dtype":"int8","shape":[,"data":"},{"type":"binary"}],"tensors":['
    b'{"name":"tokens.weight","shape":[64,128],"kind":"embedding","aliases":["head.weight"]},{"name":"positions.weight",'
    b'{"name":"blocks.0.attention_norm.weight","shape":[128]},{"name":"blocks.0.attention_norm.bias","shape":[128]},'
    b'{"name":"blocks.0.qkv.weight","shape":[384,128],"slots":[[0,0,0,0.02,0.0,"blocks.*.qkv.weight:0:384x128",64,64]]},'
    b'{"name":"blocks.0.out.weight","blocks.*.out.weight:0:128x128","blocks.0.mlp_norm.weight","blocks.0.up.weight",'
    b'"blocks.*.up.weight:0:512x128",64,64]]},{"name":"blocks.0.down.weight","blocks.*.down.weight:0:128x512",64,64]]},'
    b'{"name":"blocks.layers.0.self_attn.in_proj_weight","shape":[192,64],"kind":"attention_in","slots":[[0,0,0,0.08,0.0,'
    b'"blocks.layers.*.self_attn.in_proj_weight:1:64x64",16,16],[.self_attn.in_proj_bias","shape":[.self_attn.out_proj.'
    b'weight","shape":[.linear1.weight","shape":[.linear1.bias","shape":[.linear2.weight","shape":[.linear*.weight:0:'
    b'.norm1.weight","shape":[.norm1.bias","shape":[.norm2.weight","shape":["base":true},{"name":"encoder.layer.0.attention.'
    b'self.query.weight","encoder.layer.0.attention.output.dense.weight","encoder.layer.0.intermediate.dense.weight",'
    b'"classifier.weight","classifier.bias"],"base":["{"name":"stem.weight","shape":[16,3,3,3],"slots":[[0,0,1,0.2,0.0,"'
    b'{"name":"stem_norm.weight","blocks.0.first.weight","blocks.0.first_norm.weight","blocks.0.second.weight",'
    b'"blocks.0.second_norm.bias","shortcut","head.weight","head.bias","actor.0.weight","critic.0.weight"'
    b'"note":"generated: direct vectors would take over a quarter of the target","slots":[[1,0,0,0.1]]},'
    b'"buffers":[["running_mean",[96],"float32",true],["1.running_var",[96],"float32",true],["1.num_batches_tracked",[],'
    b'"int64",true],["4.running_mean",[16],"float32",true],["target":"at most 10,000 parameters"}'
    b'],"metadata":{"task":"cifar10","pnet":"resnet20","interface":[[3,32,32],10],"mean":[125.3,122.9,113.8],"std":[62.9,'
    b'62.0,66.7],"classes":["airplane",,"metadata":{"task":"mnist","pnet":"lenet5","interface":[[1,28,28],10],"mean":33.3,'
    b'"std":78.{"version":2,"hypernets":[{"type":"periodic","features":12,"frequency":[0.5,1.0]},{"type":"constant"},'
    b'{"type":"periodic","features":16,"frequency":[1.0,0.5]}],"encodings":[{"type":"binary"},{"type":"grid","dims":[1,28,28],'
    b'"code":"coordinate","bandwidth":6.0}],"tensors":[{"type":"constant"},{"type":"periodic","features":8},{"type":'
    b'"periodic","features":3}],"encodings":[{"type":"binary"},{"type":"per_axis","channels":{"type":"binary"},"positions":'
    b'{"type":"grid","dims":[3,3],"code":"coordinate","bandwidth":2.0},"n_positions":9}],"tensors":['
    b'{"name":"0.weight","shape":[6,1,5,5],"slots":[[0,0,1,0.1]]},{"name":"0.bias","shape":[100],"note":"by rule",'
    b'"slots":[[1,0,0,1.0]]},{"name":"2.weight","shape":[10,100],"note":"by rule","slots":[[2,0,0,0.01]]},'
    b'{"name":"4.bias","shape":[10],"slots":[[0,0,0,0.02]]},{"name":"2.bias","shape":[10]}],'
    b'"target":"at most 1,000 bytes"}'
)

_DOCUMENTS = "\n".join(files("gbfunc.plan").joinpath("documents.txt").read_text("ascii").splitlines()).encode()

WORDS: Mapping[int, bytes] = MappingProxyType({4: _WORDS_4, 5: _WORDS_4 + _DOCUMENTS})
"""Of compact files, by their format: in format 5 with whole documents of usual trainings (`documents.txt`), of which
others differ in some numbers. Nothing of it may change, and deflate looks 32 kB back."""


def pack_plan(text: str) -> str:
    """Base85 (the alphabet of `base64.b85encode`) of zlib of a plan's JSON; about a fifth as long.

    The same text gives the same result wherever the same zlib is in use; any result is read everywhere. Raises
    `ValueError` for one that is longer than what is read.
    """
    data = text.encode()
    _check_size(data)
    packer = zlib.compressobj(level=9, zdict=_WORDS)
    packed = base64.b85encode(packer.compress(data) + packer.flush()).decode()
    if len(packed) > _MAX_PACKED:
        raise ValueError(f"the plan has {len(packed):,} characters when packed; a file holds at most {_MAX_PACKED:,}")
    return packed


def unpack_plan(packed: str) -> str:
    """Undo `pack_plan`; `ValueError` for anything else, before more than `MAX_PLAN_BYTES` are unpacked."""
    unpacker = zlib.decompressobj(zdict=_WORDS)
    try:
        data = base64.b85decode(packed)
        # An incomplete last group decodes to less than it says.
        if base64.b85encode(data).decode() != packed:
            raise ValueError("its last characters are none that base85 ends with")
        text = unpacker.decompress(data, MAX_PLAN_BYTES + 1)
        _check_size(text)
        if not unpacker.eof:
            raise ValueError("it is cut short")
        if unpacker.unused_data:
            raise ValueError(f"{len(unpacker.unused_data):,} bytes follow it")
        return text.decode()
    except (ValueError, zlib.error) as error:
        raise ValueError(f"its plan cannot be unpacked: {error}") from error


def deflate(text: str) -> bytes:
    """A plan's JSON as a raw deflate stream, which says itself where it ends; raises as `file_header`."""
    check_limits(json.loads(text))
    data = text.encode()
    _check_size(data)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zdict=WORDS[5])
    packed = packer.compress(data) + packer.flush()
    if len(packed) > _MAX_PACKED:
        raise ValueError(f"the plan has {len(packed):,} bytes when packed; a file holds at most {_MAX_PACKED:,}")
    return packed


def inflate(data: bytes, words: bytes) -> tuple[str, int]:
    """Undo `deflate`, and count the bytes that follow; `ValueError` for anything else, as `unpack_plan`."""
    unpacker = zlib.decompressobj(-15, zdict=words)
    try:
        text = unpacker.decompress(data, MAX_PLAN_BYTES + 1)
        _check_size(text)
        if not unpacker.eof:
            raise ValueError("it is cut short")
        return text.decode(), len(unpacker.unused_data)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"its plan cannot be unpacked: {error}") from error


def _check_size(data: bytes) -> None:
    if len(data) > MAX_PLAN_BYTES:
        raise ValueError(f"the plan is longer than {MAX_PLAN_BYTES:,} bytes as JSON, the most that a file holds")
    if data.count(b"{") > _MAX_DICTS or data.count(b"[") > _MAX_LISTS:
        raise ValueError(f"the plan has over {_MAX_DICTS:,} dicts or {_MAX_LISTS:,} lists as JSON")
