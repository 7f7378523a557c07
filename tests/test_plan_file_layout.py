"""A plan as text in a file's header: it comes back whole, and what is not so packed is refused soon and cheaply."""

from __future__ import annotations

import gzip
import json
import zlib
from base64 import b85encode
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gbfunc.formats.layout import MAX_PLAN_BYTES, pack_plan, unpack_plan
from tests.support.forgery import Genuine, forged, packed, refused, refused_cheaply
from tests.support.plans import PLANS

every_plan = pytest.mark.parametrize("name", PLANS)


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Genuine:
    return Genuine(tmp_path_factory.mktemp("genome") / "genome.safetensors")


@given(st.text() | st.sampled_from(sorted(PLANS)).map(lambda name: PLANS[name][1].to_json()))
def test_what_is_packed_is_unpacked(text: str) -> None:
    short = pack_plan(text)
    assert unpack_plan(short) == text and pack_plan(text) == short
    # As it stands in a file: nothing is escaped.
    assert json.dumps(short) == f'"{short}"'


@every_plan
def test_packing_makes_a_plan_short(name: str) -> None:
    text = PLANS[name][1].to_json()
    assert len(pack_plan(text)) < len(text) / 1.7


def test_the_longest_plan_that_is_packed() -> None:
    longest = "x" * MAX_PLAN_BYTES
    assert unpack_plan(pack_plan(longest)) == longest
    with pytest.raises(ValueError, match="longer than 4,194,304 bytes as JSON"):
        pack_plan(longest + "x")


def bomb(size: int, inner: bytes = b" ") -> str:
    """So many bytes, in a thousandth of them."""
    return packed(inner * (size // len(inner)))


VALID = packed('{"a":1}')
PACKED: dict[str, tuple[str, str]] = {
    "bomb of spaces": (bomb(1 << 25), "longer than 4,194,304 bytes as JSON"),
    "bomb of brackets": (bomb(1 << 25, b"["), "longer than 4,194,304 bytes as JSON"),
    "bomb in a bomb": (packed(bomb(1 << 25)), "not a plan|Expecting value|cannot be unpacked"),
    "just too long": (bomb((4 << 20) + 1), "longer than 4,194,304 bytes as JSON"),
    "nothing": ("", "its plan cannot be unpacked"),
    "one character": ("0", "its plan cannot be unpacked"),
    "not the alphabet": ('"' + VALID[1:], "its plan cannot be unpacked: bad base85 character"),
    "a space": (VALID + " ", "its plan cannot be unpacked: bad base85 character"),
    "a line's end": (VALID + "\n", "its plan cannot be unpacked: bad base85 character"),
    "more than 32 bits": ("~" * 5 + VALID, "its plan cannot be unpacked: base85 overflow"),
    "not ASCII": ("ü" + VALID[1:], "its plan cannot be unpacked: .*ASCII"),
    "a lone last character": (VALID[: len(VALID) // 5 * 5] + "0", "its plan cannot be unpacked"),
    "JSON as it is": ('{"version":1}', "its plan cannot be unpacked"),
    "hexadecimal": (zlib.compress(b"{}").hex(), "its plan cannot be unpacked"),
    "no stream": (b85encode(b"nothing of zlib's").decode(), "its plan cannot be unpacked: Error -3"),
    "only its beginning": (b85encode(zlib.compress(b"{}")[:2]).decode(), "its plan cannot be unpacked: it is cut"),
    "without its checksum": (b85encode(zlib.compress(b"{}")[:-4]).decode(), "its plan cannot be unpacked: it is cut"),
    "gzip": (b85encode(gzip.compress(b"{}")).decode(), "its plan cannot be unpacked: Error -3"),
    "trailing": (b85encode(zlib.compress(b"{}") + b"x").decode(), "its plan cannot be unpacked: 1 bytes follow it"),
    "two streams": (b85encode(zlib.compress(b"{}") * 2).decode(), "its plan cannot be unpacked: 10 bytes follow it"),
    "not UTF-8": (packed(b"\xff\xfe"), "its plan cannot be unpacked: 'utf-8' codec"),
}


@pytest.mark.parametrize(("plan", "words"), PACKED.values(), ids=PACKED)
def test_plans_that_are_not_packed_as_they_should_be(plan: str, words: str, genuine: Genuine, tmp_path: Path) -> None:
    refused_cheaply(forged(genuine.plan.to_json(), genuine.tensors, plan=plan), tmp_path, words)


def test_a_plan_of_too_many_characters(genuine: Genuine, tmp_path: Path) -> None:
    data = forged(genuine.plan.to_json(), genuine.tensors, plan="0" * (9 << 20))
    refused(data, tmp_path, "its header has 9,437,.* bytes, over the limit")


@given(st.data())
def test_damage_to_the_packed_plan_is_found(genuine: Genuine, data: st.DataObject) -> None:
    """Whatever zlib makes of it, the bytes of another plan do not have the file's digest."""
    plan = genuine.header["__metadata__"]["plan"]
    at, by = data.draw(st.integers(0, len(plan) - 1)), data.draw(st.characters(codec="ascii", categories=["L", "N"]))
    for other in (plan[:at] + by + plan[at:], plan[:at] + plan[at + 1 :], plan[:at] + by + plan[at + 1 :], plan[:at]):
        if other != plan:
            header = {**genuine.header, "__metadata__": {**genuine.header["__metadata__"], "plan": other}}
            text = json.dumps(header).encode()
            refused(len(text).to_bytes(8, "little") + text + genuine.body, genuine.folder)
