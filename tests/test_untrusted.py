"""Pictures, arrays and JSON from strangers: refused by what they declare, and in one line, whatever is wrong."""

import io
import re
import resource
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gbfunc.formats.layout import LIMITS
from gbfunc.untrusted import MAX_DEPTH, parse_array, parse_json, read_arrays, read_picture


def npy(array: np.ndarray) -> bytes:
    np.save(file := io.BytesIO(), array, allow_pickle=True)
    return file.getvalue()


def png(width: int, height: int, pixels: bytes = b"", more: bytes = b"") -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + more + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def refused(read: Any, *arguments: Any) -> str:
    """The one line of the refusal, which must not take 100 MB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError) as found:
        read(*arguments)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
    assert "\n" not in str(found.value)
    return str(found.value)


@pytest.mark.parametrize("kind", ["png", "gif", "jpeg", "webp", "tiff", "avif", "bmp", "ppm"])
def test_damaged_pictures_get_one_line(kind: str, tmp_path: Path) -> None:
    path, random = tmp_path / f"a.{kind}", np.random.RandomState(0)
    try:
        Image.fromarray(random.randint(0, 255, (40, 30, 3)).astype(np.uint8)).save(path)
    except (OSError, KeyError, ValueError):
        pytest.skip(f"this Pillow writes no {kind}")
    whole = path.read_bytes()
    assert read_picture(path, "RGB").size == (30, 40) and read_picture(path, "L").mode == "L"
    for i in range(60):
        damaged = bytearray(whole[: random.randint(len(whole))] if i % 2 else whole)
        for _ in range(3 if damaged else 0):
            damaged[random.randint(min(len(damaged), 80 if i % 3 else len(damaged)))] = random.randint(256)
        path.write_bytes(bytes(damaged))
        try:
            read_picture(path, "RGB")
        except ValueError as error:
            assert str(path) in str(error) and "\n" not in str(error)


@pytest.mark.parametrize("size", [(13_000, 13_000), (2**31 - 1, 2**31 - 1), (1, 2**30)])
def test_pictures_are_refused_by_their_pixels(size: tuple[int, int], tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png(*size, zlib.compress(bytes(1_000_000))))
    words = refused(read_picture, path, "L")
    assert "pixels" in words or "exceeds limit" in words


def test_pictures_of_other_formats_and_damaged_chunks(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    for content in (b"", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", png(2, 2), png(2, 2, more=b"\0" * 40)):
        path.write_bytes(content)
        assert "is not a valid picture" in refused(read_picture, path, "RGB")
    with pytest.raises(FileNotFoundError, match="no such picture: .*none.png"):
        read_picture(tmp_path / "none.png", "L")


def header(shape: str, descr: str = "<f8") -> bytes:
    words = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}".encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(words)) + words


ARRAYS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "magic"),
    "damaged header": (b"\x93NUMPY\1\0\4\0{(((", ""),
    "deep header": (b"\x93NUMPY\2\0" + struct.pack("<I", 5_000) + b"(" * 5_000, ""),
    "many numbers": (header("(1000000000000,)"), "expected 8,000,000,000,000 bytes .* got 0"),
    "more numbers than there are": (header("(3,)") + bytes(8), "expected 24 bytes for shape .* got 8"),
    "fewer": (header("(1,)") + bytes(9), "expected 8 bytes .* got 9"),
    "below zero": (header("(-1, -1)") + bytes(8), "expected 8 bytes"),
    "nothing each": (header("(1000000000000,)", "|V0"), "expected booleans, integers or real numbers"),
    "objects": (npy(np.array([{}], object)), "expected booleans, integers or real numbers, got object"),
    "text": (npy(np.array(["a"])), "expected booleans, integers or real numbers"),
    "version 3": (b"\x93NUMPY\3\0" + bytes(90), "version 1.0 or 2.0"),
    "no zip": (b"PK\3\4", "zip"),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_are_refused_by_their_header(kind: str, tmp_path: Path) -> None:
    content, words = ARRAYS[kind]
    (tmp_path / "a.npy").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("x.npy", content)
    for read, source in (read_arrays, tmp_path / "a.npy"), (read_arrays, tmp_path / "a.npz"), (parse_array, content):
        said = refused(read, source)
        assert kind == "no zip" or re.search(words, said), said


def test_archives(tmp_path: Path) -> None:
    path, arrays = tmp_path / "a.npz", {"a": np.arange(6).reshape(2, 3), "b": np.asfortranarray(np.eye(3)[:2])}
    np.savez(path, allow_pickle=True, **arrays)  # pyright: ignore[reportArgumentType]
    found = read_arrays(path)
    assert all(np.array_equal(found[name], x) for name, x in arrays.items()) and found["a"].flags.writeable
    np.save(tmp_path / "a.npy", np.float32(3))
    assert read_arrays(tmp_path / "a.npy")[""] == 3
    np.savez_compressed(path, a=np.zeros(1 << 20))
    assert "expected at most 8,192 bytes, got 8," in refused(read_arrays, path, 1 << 13)
    # Half a megabyte that unpacks to half a gigabyte.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file, file.open("x.npy", "w") as member:
        for _ in range(64):
            member.write(bytes(1 << 23))
    assert "expected at most 268,435,456 bytes, got 536,870,912" in refused(read_arrays, path)
    path.write_bytes(path.read_bytes()[:-40])
    refused(read_arrays, path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[" * 100_000, ""),
        ("[" * 101 + "1" + "]" * 101, "at most 100 levels"),
        ("1" * 1_000_000, "limit"),
        ("[1e400]", "expected finite numbers, got 1e400"),
        ('{"a": NaN}', "expected finite numbers, got NaN"),
        ('{"a": 1, "a": 2}', "expected distinct keys"),
        (b"\xff\xfe\xfd", ""),
        ("", "Expecting value"),
    ],
    ids=range(8),
)
def test_json(content: str | bytes, words: str) -> None:
    assert words in refused(parse_json, content, "a page")
    assert parse_json(b'{"a": [1.5, null]}', "a page") == {"a": [1.5, None]}
    # The web page reads its bound from the schema.
    assert LIMITS["mostDepth"] == MAX_DEPTH
