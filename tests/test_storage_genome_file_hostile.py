"""Files made to harm: every one gets a ValueError, soon and without the memory it asks for."""

import copy
import json
import zlib
from base64 import b85decode, b85encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema.validators import extend
from torch import Tensor

import gbfunc as gb
from gbfunc.formats import genome_file_bytes, step_stream
from gbfunc.formats.layout import DOCUMENTS, SCHEMA
from gbfunc.formats.steps import LARGEST, LEAST, MOST
from gbfunc.formats.symbols import NARROWEST, PIECE, WIDEST, geometric, join
from gbfunc.plan import TensorPlan
from tests.support.forgery import Genuine, forged, joined, packed, refused, refused_cheaply, refused_or_usable


def test_a_forgery_without_a_fault_is_read(genuine: Genuine, tmp_path: Path) -> None:
    (tmp_path / "g").write_bytes(forged(genuine.plan.to_json(), genuine.tensors))
    assert gb.load(tmp_path / "g")[0] == genuine.plan


def instead(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda t: {**t, name: value}


NAN = torch.full((5,), torch.nan)
LEAVES: dict[str, tuple[Any, str]] = {
    "less": (lambda t: {k: v for k, v in t.items() if k != "direct/0.bias"}, r"float32 is \(75,\), expected \(80,\)"),
    "nan": (instead("direct/0.bias", NAN), "not finite in 'direct/0.bias'"),
    "infinite": (instead("direct/0.bias", 1 / torch.zeros(5)), "not finite in 'direct/0.bias'"),
    "nan buffer": (instead("buffers/1.running_var", NAN), "NaN in 'buffers/1.running_var'"),
}
TENSORS: dict[str, tuple[Any, str]] = {
    "no int64": (lambda t: {"float32": t["float32"]}, r"missing \['int64'\], unknown \[\]"),
    "no float32": (lambda t: {"int64": t["int64"]}, r"missing \['float32'\]"),
    "more": (instead("more", torch.zeros(1)), r"missing \[\], unknown \['more'\]"),
    "an empty one": (instead("float16", torch.zeros(0).half()), r"missing \[\], unknown \['float16'\]"),
    "longer": (
        lambda t: {**t, "float32": torch.cat([t["float32"], torch.ones(1)])},
        r"float32 is \(81,\), expected \(80,\)",
    ),
    "a scalar": (instead("int64", torch.tensor(0)), r"int64 is \(\), expected \(1,\)"),
    "a matrix": (lambda t: {**t, "float32": t["float32"][:, None]}, r"float32 is \(80, 1\), expected \(80,\)"),
    "exchanged": (lambda t: {"float32": t["int64"], "int64": t["float32"]}, r"float32 is \(1,\), expected \(80,\)"),
}
for dtype in (torch.float16, torch.complex64, torch.float8_e5m2):
    short = str(dtype).removeprefix("torch.")
    LEAVES[short] = instead("direct/0.bias", torch.zeros(5).to(dtype)), f"missing .., unknown .'{short}'."
    TENSORS[short] = (lambda t, d=dtype: {**t, "float32": t["float32"].to(d)}), f"float32 is {dtype}, expected"


@pytest.mark.parametrize("name", [*LEAVES, *(f"tensors: {name}" for name in TENSORS)])
def test_what_does_not_fit_the_plan(name: str, genuine: Genuine, tmp_path: Path) -> None:
    if name in LEAVES:
        change, words = LEAVES[name]
        tensors = joined(change(genuine.leaves))
    else:
        change, words = TENSORS[name.removeprefix("tensors: ")]
        tensors = change(genuine.tensors)
    refused_cheaply(forged(genuine.plan.to_json(), tensors), tmp_path, words)


@pytest.mark.parametrize("name", ["gnets", "direct", "buffers"])
def test_a_wrong_digest(name: str, genuine: Genuine, tmp_path: Path) -> None:
    leaves = {k: v + 1 if k.startswith(name) else v for k, v in genuine.leaves.items()}
    data = forged(genuine.plan.to_json(), joined(leaves), sha256=genuine.header["__metadata__"]["sha256"])
    refused(data, tmp_path, "its digest does not fit its content")


def test_formats_and_dtypes_that_are_unknown_or_others(genuine: Genuine, tmp_path: Path) -> None:
    for name in ("", "gbfunc-genome-2", "GBFUNC-GENOME-3"):
        data = forged(genuine.plan.to_json(), genuine.tensors, format=name)
        refused(data, tmp_path, f"its format must be 'gbfunc-genome-3', got '{name}'")
    for name in ("", "float64", "int8", "torch.float16"):
        data = forged(genuine.plan.to_json(), genuine.tensors, numbers=name)
        refused_cheaply(data, tmp_path, f"its dtype is '{name}', known here are float32, float16, bfloat16")
    for numbers in ("bfloat16", "float16"):
        wide = forged(genuine.plan.to_json(), genuine.tensors, numbers=numbers)
        refused_cheaply(wide, tmp_path, f"missing .'{numbers}'")


def coded(flags: int, text: str, rest: bytes = b"") -> bytes:
    """A file in codes of any document, with the sum that fits it."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zdict=DOCUMENTS)
    body = bytes([flags]) + packer.compress(text.encode()) + packer.flush() + rest
    return b"GB5" + body[:1] + zlib.crc32(body).to_bytes(4, "little") + body[1:]


def stream(parts: int, width: int = NARROWEST, symbols: int = 0, integer: int = 0) -> bytes:
    """Parts of one width, and symbols of one integer; the most frequent integer is 0."""
    entries = step_stream._header([0] * parts, LEAST, MOST) + step_stream._header([width] * parts, NARROWEST, WIDEST)
    reach, limits = geometric(width, LARGEST)
    symbol = reach + integer
    entries += [(limits[symbol], limits[symbol + 1] - limits[symbol], limits[-1])] * symbols
    return (-(-len(entries) // PIECE)).to_bytes(2, "little") + join(entries)


def tensor(plan: Any, name: str = "5.weight") -> Any:
    return next(t for t in plan["tensors"] if t["name"] == name)


def hypernet(plan: Any, **options: Any) -> None:
    plan["hypernets"] = [options for _ in plan["hypernets"]]


def huge(plan: Any, side: int, tile: int, kind: str = "periodic", code: Any = None) -> None:
    entry = tensor(plan)
    entry["shape"] = [side, side]
    (slot,) = entry["slots"]
    plan["encodings"].append(code or {"type": "binary"})
    slot[1:] = [len(plan["encodings"]) - 1, len(plan["encodings"]) - 1, 1.0, 0.0, "", tile, tile]
    if kind == "constant":
        plan["hypernets"].append({"type": "constant", "value": 0.0})
        slot[0] = len(plan["hypernets"]) - 1


def another_kind(plan: Any) -> None:
    entry = tensor(plan, "0.weight")
    entry["kind"], entry["slots"][0][1:] = "transposed_linear", [0, 0, 1.0, 0.0, "", 2, 2]


HOSTILE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "direct": (
        lambda p: tensor(p, "5.bias").__setitem__("shape", [10**6, 10**6]),
        "declares a p-net of 4,000,0.* bytes, over the limit",
    ),
    "buffer": (
        lambda p: p["buffers"][0].__setitem__(1, [10**9, 10**4]),
        "declares a p-net of .* bytes, over the limit",
    ),
    "too many tiles": (lambda p: huge(p, 1 << 17, 1), "tiles; a file holds at most"),
    "constant tiles": (lambda p: huge(p, 4000, 1, "constant"), "declares codes of"),
    "one-hot": (lambda p: huge(p, 100_000, 100_000, "periodic", {"type": "one_hot"}), "declares codes of"),
    "grid": (
        lambda p: huge(p, 9, 9, code={"type": "grid", "dims": [2**31] * 99, "code": "gray", "bandwidth": 6.0}),
        "1 to 16 axis lengths >= 1, got 99",
    ),
    "features": (lambda p: hypernet(p, type="periodic", features=2**31), "declares .* numbers, and"),
    "module": (lambda p: hypernet(p, type="module", factory="os:system"), "needs the g-net factory 'os:system'"),
    "a side that no tensor has": (lambda p: tensor(p, "5.bias").__setitem__("shape", [0, 1 << 63]), "expected a shape"),
    "half a kernel": (
        lambda p: tensor(p, "0.weight")["slots"][0].__setitem__(slice(4, 8), [0.0, "", 2, 10]),
        "must have a multiple of 9 kernel positions, got 10",
    ),
    "another kind": (another_kind, "cannot have shape|do not fold"),
    "no kind": (lambda p: tensor(p).__setitem__("kind", "nothing"), "unknown kind 'nothing'"),
    "no dtype": (lambda p: tensor(p).__setitem__("dtype", "float7"), "must have a dtype .*, got float7"),
    "no code": (lambda p: tensor(p)["slots"][0].__setitem__(1, -1), "expected a slot"),
    "scale": (lambda p: tensor(p)["slots"][0].__setitem__(3, 1e300), "must be at most 1e"),
    "version": (lambda p: p.__setitem__("version", 3), "expected a plan of version 2, got version 3"),
    "same name twice": (lambda p: tensor(p).__setitem__("name", "0.bias"), "must have different names"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_sizes_that_the_file_does_not_bear_out(name: str, genuine: Genuine, tmp_path: Path) -> None:
    plan, (change, words) = genuine.json, HOSTILE[name]
    change(plan)
    refused_cheaply(forged(json.dumps(plan), genuine.tensors), tmp_path, words)


def test_plans_and_headers_that_are_none(genuine: Genuine, tmp_path: Path) -> None:
    deep = "[" * 100_000, '{"a":' * 100_000
    for plan in ("", "{", "null", "[]", "3", '"x"', "{}", '{"version":2}', "1" * 5_000, "\ud7ff", *deep):
        refused_cheaply(forged(plan, genuine.tensors), tmp_path, "")
    for length in (0, 1, 99_999_999, 3 << 20, 1 << 40, 2**64 - 1):
        refused_cheaply(length.to_bytes(8, "little") + genuine.data[8:], tmp_path, "")
    for header in (*deep, '{"a":{"dtype":"F32","shape":[' + "9" * 400 + "]}}"):
        refused_cheaply(len(header).to_bytes(8, "little") + header.encode(), tmp_path, "")
    for shape in ([2**62, 4], [2**40], [0, 2**62]):
        text = json.dumps({**genuine.header, "float32": {**genuine.header["float32"], "shape": shape}}).encode()
        refused_cheaply(len(text).to_bytes(8, "little") + text + genuine.body, tmp_path, "")


VALID = packed('{"a":1}')
NONE = "its plan cannot be unpacked"
PACKED: dict[str, tuple[str, str]] = {
    "bomb of spaces": (packed(b" " * (1 << 25)), "4,194,305 bytes or more as JSON"),
    "nothing": ("", NONE),
    "not the alphabet": ('"' + VALID[1:], "bad base85 character"),
    "more than 32 bits": ("~" * 5 + VALID, "base85 overflow"),
    "not ASCII": ("ü" + VALID[1:], "ASCII"),
    "no stream": (b85encode(b"\xffnothing of zlib's").decode(), f"{NONE}: Error -3"),
    "a cut stream": (b85encode(b85decode(VALID)[:-2]).decode(), f"{NONE}: it is cut"),
    "not UTF-8": (packed(b"\xff\xfe"), f"{NONE}: 'utf-8' codec"),
    "too many characters": ("0" * (9 << 20), "its header has 9,437,.* bytes; a file holds at most"),
}


@pytest.mark.parametrize("name", PACKED)
def test_plans_that_are_not_packed_as_they_should_be(name: str, genuine: Genuine, tmp_path: Path) -> None:
    plan, words = PACKED[name]
    check = refused if len(plan) > 1 << 20 else refused_cheaply
    check(forged(genuine.plan.to_json(), genuine.tensors, plan=plan), tmp_path, words)


MANY = 16_384
"""Most tensors that are read."""


def linear(i: int, rows: int = 2, cols: int = 2, **more: Any) -> Any:
    return {"name": f"{i:x}", "shape": [rows, cols], "kind": "linear", "slots": [[0, 0, 0, 1.0]], **more}


def plan_json(tensors: list[Any], hypernet: Any = None, encoding: Any = None, **more: Any) -> str:
    hypernets, encodings = [hypernet or {"type": "periodic", "features": 1}], [encoding or {"type": "binary"}]
    plan = {"version": 2, "hypernets": hypernets, "encodings": encodings, "tensors": tensors, **more}
    return json.dumps(plan, separators=(",", ":"))


def test_what_is_not_read_is_not_written(tmp_path: Path) -> None:
    shapes = [(2 + i // 100, 2 + i % 100) for i in range(9_000)]
    with pytest.raises(ValueError, match="the genome has 36,000 leaves; a file holds at most 32,768"):
        genome_file_bytes(gb.Plan.from_json(plan_json([linear(i, *shape) for i, shape in enumerate(shapes)])))
    many = gb.Plan(tuple(TensorPlan(f"{i}", (1,), "float32", "vector") for i in range(MANY + 1)))
    genome = gb.Genome({}, {t.name: torch.ones(1) for t in many.tensors}, {})
    with pytest.raises(ValueError, match="the plan has 16,385 names of tensors; a file holds at most 16,384"):
        gb.save(tmp_path / "g", many, genome)
    assert list(tmp_path.iterdir()) == [] and "cannot be saved: the plan has 16,385" in many.report()


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(node, dict | list):
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            yield from places(node[key], (*path, key))


def planted(node: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = copy.deepcopy(value)


ODD = [None, True, False, -1, 0, 1, 2, 7, 1.5, -0.0, 1e308, float("nan"), float("inf"), 2**31, 2**63, 10**30, "", "x"]
ODD += ["binary", "periodic", "float64", "vector", [], {}, [1], [[]], [1, 1], {"type": "binary"}, {"type": "constant"}]
ODD += [{"type": "constant", "value": 1e308}, {"type": "periodic", "features": 2, "frequency": 1e308}]


INTEGERS = jsonschema.Draft7Validator.TYPE_CHECKER.redefine("integer", lambda _, x: type(x) is int)
VALIDATOR = extend(jsonschema.Draft7Validator, type_checker=INTEGERS)(SCHEMA)


@settings(max_examples=250)
@given(st.data())
def test_a_plan_with_anything_anywhere(genuine: Genuine, data: st.DataObject) -> None:
    plan = genuine.json
    for _ in range(data.draw(st.integers(0, 2))):
        planted(plan, data.draw(st.sampled_from(list(places(plan)))), data.draw(st.sampled_from(ODD)))
    path = genuine.folder / "anything"
    path.write_bytes(coded(9, json.dumps(plan), stream(9)))
    refused_or_usable(path)
    path.write_bytes(forged(json.dumps(plan), genuine.tensors))
    if (read := refused_or_usable(path)) is not None:
        assert read.report() and gb.Plan.from_json(read.to_json()) == read
    try:
        gb.Plan.from_json(json.dumps(plan))
    except ValueError:
        return
    VALIDATOR.validate(plan)
