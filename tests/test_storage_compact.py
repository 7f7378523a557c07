"""Genomes in codes of 2 to 8 bits, and metadata: what a file gives back, and files made to harm."""

import hashlib
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gbfunc as gb
from gbfunc.formats import genome_file_bytes
from gbfunc.formats.layout import DOCUMENTS, deflate
from gbfunc.formats.rounding import rounded
from gbfunc.storage.genome_file import load_dtype
from tests.support.forgery import Genuine, leaves_of, refused, refused_cheaply, refused_or_usable
from tests.support.step_cases import random_steps
from tests.support.trees_equal import bytes_of, copy_tree, same_bits
from tests.support.zoo import ZOO, genome_of

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def bodies(genuine: Genuine) -> dict[str, bytes]:
    found = {}
    for name, stored in {"int6": "int6", "steps": random_steps(genuine.plan, genuine.genome)}.items():
        gb.save(genuine.folder / "codes", genuine.plan, genuine.genome, stored)
        data = (genuine.folder / "codes").read_bytes()
        found[name] = data[3:4] + data[8:]
        assert forged(found[name]) == data
    return found


def forged(body: bytes) -> bytes:
    return b"GB5" + body[:1] + zlib.crc32(body).to_bytes(4, "little") + body[1:]


def test_codes_that_are_mostly_alike_take_less_than_their_bits(tmp_path: Path) -> None:
    plan = gb.make_plan(torch.nn.Linear(64, 64), rules=[(".", None)])
    weight = torch.zeros(64, 64)
    weight[::7, ::5] = torch.randn(10, 13, generator=torch.Generator().manual_seed(0))
    genome = gb.Genome({}, {"weight": weight, "bias": torch.zeros(64)}, {})
    assert gb.save(tmp_path / "g", plan, genome, "int8") < 64 * 64 / 2
    assert same_bits(leaves_of(gb.load(tmp_path / "g")[1]), rounded(leaves_of(genome), "int8"))


def test_the_words_of_a_format_stay_as_they_are() -> None:
    assert hashlib.sha256(DOCUMENTS).hexdigest()[:16] == "515c1ab3d5ba3441"
    # What deflate can reach from the end of a long document.
    assert len(DOCUMENTS) <= 2**15 - 262


@pytest.mark.parametrize(
    ("name", "digest"), {"gpt": "2f7e285a744c4629", "lenet5": "94a341f5120582ec", "mnist": "ec30b7420512c027"}.items()
)
def test_files_that_exist_are_read(name: str, digest: str, tmp_path: Path) -> None:
    path = ROOT / f"notebooks/pages/{name}.genome"
    plan, genome = gb.load(path)
    found = hashlib.sha256()
    for leaf_name, leaf in sorted(leaves_of(genome).items()):
        found.update(f"{leaf_name} {leaf.dtype} {tuple(leaf.shape)}\n".encode() + bytes_of(leaf))
    assert found.hexdigest()[:16] == digest
    gb.save(tmp_path / "again", plan, genome, load_dtype(path), gb.load_metadata(path))
    assert same_bits(leaves_of(gb.load(tmp_path / "again")[1]), leaves_of(genome))


def test_running_statistics_take_16_bits_where_these_are_enough(tmp_path: Path) -> None:
    _, plan, genome = genome_of(ZOO["conv_bn"])
    genome = copy_tree(genome)
    mean, var = genome.buffers["1.running_mean"], genome.buffers["1.running_var"]
    mean.copy_(torch.tensor([0.3, -1e-7, 0.0, 500.0, 1.0]))
    var.copy_(torch.tensor([3.3, 1e-11, 0.0, 3e7, 1.0]))
    size = gb.save(tmp_path / "g", plan, genome, "int4")
    assert size <= genome_file_bytes(plan, "int4")
    read = gb.load(tmp_path / "g")[1]
    assert same_bits(read.buffers["1.running_var"], var.bfloat16().float())
    assert same_bits(read.buffers["1.running_mean"], mean.half().float())
    assert same_bits(read.buffers["1.num_batches_tracked"], genome.buffers["1.num_batches_tracked"])
    # A mean far from zero for its deviation, out of range or infinite: all are as they are, as in older files.
    for large in (5003.0, 7e4, float("inf")):
        mean[4], mean[0] = large, 0.1
        assert gb.save(tmp_path / "wide", plan, genome, "int4") == size + 2 * 10
        read = gb.load(tmp_path / "wide")[1]
        assert same_bits(read.buffers, genome.buffers)
        assert same_bits(leaves_of(read), rounded(leaves_of(genome), "int4"))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(json_values, st.sampled_from([None, "int3"]))
def test_any_json_is_metadata(genuine: Genuine, value: Any, dtype: str | None) -> None:
    path, bare = genuine.folder / "any", genuine.folder / "bare"
    size = gb.save(path, genuine.plan, genuine.genome, dtype, metadata=value)
    assert gb.save(bare, genuine.plan, genuine.genome, dtype) <= size
    assert gb.load_metadata(path) == value and gb.load_metadata(bare) is None
    (plan, genome), (_, expected) = gb.load(path), gb.load(bare)
    assert plan == genuine.plan and plan.to_json() == genuine.plan.to_json() and same_bits(genome, expected)


NO_JSON = [{1, 2}, float("nan"), [torch.ones(1)], b"x", {"a": float("inf")}, [{1: 0, "1": 1}]]


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_metadata_that_is_not_read_is_not_written(dtype: str | None, genuine: Genuine, tmp_path: Path) -> None:
    long: list[Any] = [([{}] * 70_000, "70,01. dicts as JSON"), ("x" * (4 << 20), "bytes or more as JSON")]
    for value, words in [*((value, "metadata must be JSON, dicts") for value in NO_JSON), *long]:
        with pytest.raises(ValueError, match=words):
            gb.save(tmp_path / "g", genuine.plan, genuine.genome, dtype, metadata=value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["int6", "steps"])
def test_every_cut_and_every_flipped_byte_is_found(name: str, genuine: Genuine, bodies: dict[str, bytes]) -> None:
    whole = forged(bodies[name])
    for at in range(0, len(whole), 5):
        refused(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :], genuine.folder)
        refused(whole[:at], genuine.folder)
    refused(whole + b"\0", genuine.folder)


@pytest.mark.parametrize("name", ["int6", "steps"])
@given(data=st.data())
def test_a_body_with_anything_anywhere(
    name: str, genuine: Genuine, bodies: dict[str, bytes], data: st.DataObject
) -> None:
    body = bodies[name]
    at, n = data.draw(st.integers(0, len(body))), data.draw(st.integers(0, 9))
    path = genuine.folder / "anything"
    path.write_bytes(forged(body[:at] + data.draw(st.binary(max_size=9)) + body[at + n :]))
    refused_or_usable(path)


def test_bodies_that_are_none(genuine: Genuine, bodies: dict[str, bytes], tmp_path: Path) -> None:
    plan, body = deflate(genuine.plan.to_json()), bodies["int6"]
    rest = body[1 + len(plan) :]
    flood = zlib.compressobj(9, zlib.DEFLATED, -15, 9)
    bomb = flood.compress(b" " * (1 << 25)) + flood.flush()
    ends = "expected codes that end with the data"
    for data, words in {
        b"\x00": "it has codes of 0 bits",
        b"\x01" + body[1:]: "it has codes of 1 bits, known here are 2 to 8",
        b"\x26" + body[1:]: ends,
        b"\x16" + body[1:]: "bytes of codes are not those of",
        body[:50]: "its plan cannot be unpacked: it is cut short",
        b"\x36" + bomb: "4,194,305 bytes or more as JSON",
        b"\x36" + b"\x01\x02\x00\xfd\xff{}" + rest: "expected the JSON of a plan",
        b"\x36" + plan: "it holds 0 bytes of numbers",
        b"\x36" + plan + rest[:20]: "it holds 20 bytes of numbers, expected 64 or more",
        b"\x16" + plan + rest[:70]: "it holds 6 bytes of scales, expected ",
        b"\x36" + plan + rest[:64]: f"declares|{ends}",
        b"\x36" + plan + rest[:-1]: ends,
        b"\x36" + plan + rest + b"\0": ends,
        b"\x36" + plan + rest + b"x" * 5000: ends,
    }.items():
        refused_cheaply(forged(data), tmp_path, words)
    many = gb.make_plan(torch.nn.Linear(1024, 512, bias=False), rules=[(".", None)])
    data = b"\x28" + deflate(many.to_json()) + bytes(60_000)
    refused_cheaply(forged(data), tmp_path, "codes in runs, which are too many")
    # A scale of 255 as exponent, where there are no runs.
    small = gb.make_plan(torch.nn.Linear(64, 1, bias=False), rules=[(".", None)])
    for scale in (b"\xc0\x7f", b"\x80\x7f"):
        data = b"\x08" + deflate(small.to_json()) + scale + b"\x00" + b"\x01" * 64
        refused_cheaply(forged(data), tmp_path, "not finite in 'direct/weight'")


def test_codes_that_unpack_to_more_or_larger_ones(tmp_path: Path) -> None:
    plan = gb.make_plan(torch.nn.Linear(64, 64), rules=[(".", None)])
    head = b"\x02" + deflate(plan.to_json()) + bytes(2 * 64 + 2 * 64)

    def coded(symbols: bytes) -> bytes:
        packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9)
        return forged(head + packer.compress(symbols) + packer.flush() + bytes(600))

    for symbols in (b"\x01" * 4160, b"\x01" * 4161, b"\x01" * (1 << 25), b"\x04" * 4160, b""):
        refused_cheaply(coded(symbols), tmp_path, "bytes of codes are not those of 4,160 codes of 2 bits")
    refused_cheaply(forged(head + bytes(400)), tmp_path, "it holds 400 bytes of codes, too few for 4,160")
