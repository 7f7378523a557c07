"""Readers of images, arrays and JSON from untrusted sources.

Each reader checks the size that a file declares before memory is allocated, and raises a `ValueError` of one line for
any invalid content.
"""

import io
import json
import math
import os
import warnings
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from gbfunc.extras import import_extra

MAX_PIXELS = 1 << 25
"""Largest number of pixels of an image: 33.5 million, which take 100 MB as RGB."""
MAX_BYTES = 1 << 28
"""Largest number of bytes of a file, and of the arrays that a file contains: 256 MiB."""
MAX_DEPTH = 100
"""Largest number of nested lists and objects in a JSON document."""

# Allow only these formats: for PostScript, Pillow would start another program.
_FORMATS = ("PNG", "JPEG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "AVIF", "JPEG2000")
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


@contextmanager
def one_error(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Convert any error in the context to a `ValueError` (or FileNotFoundError) of one line that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f"no such {what}: {os.fspath(path)}") from None
    except Exception as error:  # For a damaged file, a decoder can raise nearly any exception.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{os.fspath(path)} is not a valid {what}: {reason}") from error


def read_picture(path: str | os.PathLike[str], mode: str, what: str = "picture") -> Any:
    """Read an image file as a Pillow image in mode `"L"` (8-bit grey) or `"RGB"`. Error messages call the file `what`.

    The image is rotated according to its EXIF data, 16-bit pixels are scaled to 8 bits, and transparency becomes white.

    Raises:
        ImportError: if Pillow is not installed.
        FileNotFoundError: if the file does not exist.
        ValueError: unless the file is an image of at most `MAX_PIXELS` pixels with 8 or 16 bits.
    """
    image = import_extra("PIL.Image", "reading a picture", "gbfunc[qr]")
    turn = import_extra("PIL.ImageOps", "reading a picture", "gbfunc[qr]").exif_transpose
    with one_error(path, what), warnings.catch_warnings():
        # Ignore Pillow's warnings about large images, which are refused below, and about metadata, which is unused.
        warnings.simplefilter("ignore")
        _check_bytes(Path(path).stat().st_size)
        with image.open(path, formats=[x for x in _FORMATS if image.init() or x in image.OPEN]) as picture:
            if (pixels := math.prod(picture.size)) > MAX_PIXELS:
                size = " x ".join(map(str, picture.size))
                raise ValueError(f"expected at most {MAX_PIXELS:,} pixels, got {size} = {pixels:,}: resize the image")
            picture.load()
            turn(picture, in_place=True)
            sixteen = picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format in ("PNG", "PPM"))
            if sixteen:
                picture = image.fromarray((np.asarray(picture) / 257).round().astype(np.uint8))
            elif picture.mode in ("I", "F"):
                raise ValueError(f"expected pixels of 8 or 16 bits, got mode {picture.mode}, which has no white")
            if picture.has_transparency_data:
                white = image.new("RGBA", picture.size, "white")
                white.alpha_composite(picture.convert("RGBA"))
                picture = white
            return picture.convert(mode)


def read_arrays(
    path: str | os.PathLike[str], max_bytes: int = MAX_BYTES, only: Collection[str] | None = None
) -> dict[str, NDArray[Any]]:
    """Read the arrays of a `.npz` file by name. The array of a `.npy` file gets the name `""`.

    If `only` is given, only arrays with these names are read.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: unless the file has arrays of booleans, integers or real numbers that take at most `max_bytes` bytes
            in the file and in memory.
    """
    with one_error(path, "file of arrays"), open(path, "rb") as file:
        _check_bytes(size := os.fstat(file.fileno()).st_size, max_bytes)
        if file.read(2) != b"PK":
            file.seek(0)
            return {"": _read_npy(file, size)}
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            _check_bytes(sum(member.file_size for member in members), max_bytes)
            names = [member.filename.removesuffix(".npy") for member in members]
            if len({*names}) < len(names):
                raise ValueError(f"expected different names of arrays, got {names}")
            arrays = {}
            for name, member in zip(names, members, strict=True):
                if only is None or name in only:
                    with archive.open(member) as inner:
                        arrays[name] = _read_npy(inner, member.file_size)
            return arrays


def parse_array(content: bytes, name: str = "array") -> NDArray[Any]:
    """Read an array from the bytes of a `.npy` file. Raise the errors of `read_arrays`, with `name` for the path."""
    with one_error(name, "array"):
        return _read_npy(io.BytesIO(content), len(content))


def _read_npy(file: IO[bytes], size: int) -> NDArray[Any]:
    version = npy.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"expected version 1.0 or 2.0 of the .npy format, got {'.'.join(map(str, version))}")
    shape, fortran, dtype = _HEADERS[version](file)
    if dtype.kind not in "biuf":
        raise ValueError(f"expected booleans, integers or real numbers, got {dtype}")
    declared, present = math.prod(shape) * dtype.itemsize, size - file.tell()
    if min(shape, default=0) < 0 or declared != present:
        raise ValueError(f"expected {declared:,} bytes for shape {shape} of {dtype}, got {present:,}")
    data = bytearray(file.read(declared))
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def parse_json(content: bytes | str, name: str, max_bytes: int = MAX_BYTES, **options: Any) -> Any:
    """Read a JSON document of at most `max_bytes` bytes and `MAX_DEPTH` levels, with finite numbers and unique keys.

    For any other text, raises `ValueError` with the document's `name`. `options` are passed to `json.loads`, and may
    replace the checks of numbers and keys.
    """
    with one_error(name, "JSON document"):
        _check_bytes(len(content), max_bytes)
        checks = {"parse_constant": _refuse, "parse_float": _finite, "object_pairs_hook": _distinct}
        value = json.loads(content, **{**checks, **options})
        _check_depth(value, MAX_DEPTH)
        return value


def _check_bytes(size: int, most: int = MAX_BYTES) -> None:
    if size > most:
        raise ValueError(f"expected at most {most:,} bytes, got {size:,}")


def _refuse(text: str) -> float:
    raise ValueError(f"expected finite numbers, got {text[:30]}")


def _finite(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _refuse(text)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(value := dict(pairs)) < len(pairs):
        raise ValueError(f"expected distinct keys, got {[key for key, _ in pairs]!r:.200}")
    return value


def _check_depth(value: Any, levels: int) -> None:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if inner and not levels:
        raise ValueError(f"expected at most {MAX_DEPTH} levels of lists and objects, got more")
    for x in inner:
        _check_depth(x, levels - 1)
