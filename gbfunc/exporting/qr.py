"""QR codes of addresses `PAGE#GENOME`: PAGE is a page that runs networks, GENOME the file of a genome as text."""

import io
import os
from pathlib import Path
from typing import Any

from gbfunc.exporting.page import embedded, from_address, in_address
from gbfunc.extras import import_extra
from gbfunc.files import replace_file
from gbfunc.untrusted import read_picture

_MOST = 2_953
"""Characters in the largest QR code (version 40) with the lowest level of error correction (ISO/IEC 18004)."""


def write_qr(path: str | os.PathLike[str], genome: bytes, page: str) -> None:
    """Write the QR code of the address `PAGE#GENOME` to a PNG or SVG file, depending on the suffix of the path.

    Raises `ImportError` if segno is missing, and `ValueError` for a wrong address or suffix, or a genome too large.
    """
    place = Path(path)
    if place.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"the path of a QR code must end in .png or .svg, got {place.name!r}")
    if not page or "#" in page or not page.isascii():
        raise ValueError(f"the address of the page must be plain text without a fragment (#...), got {page!r}")
    segno = import_extra("segno", "a QR code", "gbfunc[qr]")
    text = f"{page}#{in_address(genome)}"
    if len(text) > _MOST:
        most = (_MOST - len(page) - 1) * 3 // 4
        more = f"with this address, got a genome of {len(genome):,} bytes"
        raise ValueError(f"a QR code holds up to {max(0, most):,} bytes {more}")
    image = io.BytesIO()
    segno.make_qr(text, mode="byte", error="L").save(image, kind=place.suffix[1:].lower(), scale=4)
    replace_file(place, image.getvalue())


def read_qr(path: str | os.PathLike[str]) -> bytes:
    """Read a genome's file from an image of a QR code; ValueError for other images, ImportError without zxing-cpp."""
    zxing = import_extra("zxingcpp", "reading a QR code", "gbfunc[qr]")
    codes: list[Any] = zxing.read_barcodes(read_picture(path, "L"), formats=zxing.BarcodeFormat.QRCode)
    if len(codes) != 1:
        raise ValueError(f"{os.fspath(path)!r} must show one QR code, got {len(codes)}")
    _, mark, fragment = codes[0].text.partition("#")
    try:
        if mark and fragment:
            return from_address(fragment)
    except ValueError:
        pass
    raise ValueError(f"{os.fspath(path)!r} must be a code of gbfunc export with a genome, got {codes[0].text[:60]!r}")


def shipped_genome(path: Path) -> bytes:
    """Read a genome's file from a page, or from an image of a QR code; errors are those of `read_qr`."""
    if path.suffix.lower() == ".svg":
        raise ValueError(f"expected an image in pixels, got {path}: convert the image to .png")
    if path.suffix.lower() != ".html":
        return read_qr(path)
    try:
        return embedded(path.read_text(encoding="utf-8"))[0]
    except ValueError as error:
        raise ValueError(f"{path} must be a page with a genome: {error}") from error
