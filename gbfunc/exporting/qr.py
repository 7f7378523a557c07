"""A genome as a QR code: the address of a page that grows it, with the file in its fragment."""

import io
import os
from pathlib import Path
from typing import Any

from gbfunc.exporting.page import embedded, from_address, in_address
from gbfunc.extras import import_extra
from gbfunc.files import replace_file
from gbfunc.untrusted import read_picture

_MOST = 2_953
"""Characters of the largest code, of version 40, at its lowest level of correction (ISO/IEC 18004)."""


def write_qr(path: str | os.PathLike[str], genome: bytes, page: str) -> None:
    """Draw the code of `PAGE#genome` as a PNG or an SVG, by the suffix of its path.

    Raises `ImportError` without segno, `ValueError` for a genome too large for a code, or another address or suffix.
    """
    place = Path(path)
    if place.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"a QR code is a .png or an .svg, got {place.name!r}")
    if not page or "#" in page or not page.isascii():
        raise ValueError(f"the address of the page must be plain text without a fragment (#...), got {page!r}")
    segno = import_extra("segno", "a QR code", "gbfunc[qr]")
    text = f"{page}#{in_address(genome)}"
    if len(text) > _MOST:
        most = (_MOST - len(page) - 1) * 3 // 4
        more = f"with this address, the genome has {len(genome):,}"
        raise ValueError(f"a QR code holds genomes of up to {max(0, most):,} bytes {more}")
    drawn = io.BytesIO()
    segno.make_qr(text, mode="byte", error="L").save(drawn, kind=place.suffix[1:].lower(), scale=4)
    replace_file(place, drawn.getvalue())


def read_qr(path: str | os.PathLike[str]) -> bytes:
    """Read the genome's file from a picture of a code; `ImportError` without zxing-cpp or Pillow, or as `open`."""
    zxing = import_extra("zxingcpp", "reading a QR code", "gbfunc[qr]")
    codes: list[Any] = zxing.read_barcodes(read_picture(path, "L"), formats=zxing.BarcodeFormat.QRCode)
    if len(codes) != 1:
        raise ValueError(f"{os.fspath(path)!r} must show one QR code, it shows {len(codes)}")
    _, mark, fragment = codes[0].text.partition("#")
    try:
        if mark and fragment:
            return from_address(fragment)
    except ValueError:
        pass
    raise ValueError(f"the code in {os.fspath(path)!r} holds no genome: {codes[0].text[:60]!r}")


def shipped_genome(path: Path) -> bytes:
    """Read the genome's file from a page, or from a picture of a code; raises as `read_qr`."""
    if path.suffix.lower() == ".svg":
        raise ValueError(f"{path} is no picture in pixels, of which codes are read: make it a .png")
    if path.suffix.lower() != ".html":
        return read_qr(path)
    try:
        return embedded(path.read_text(encoding="utf-8"))[0]
    except ValueError as error:
        raise ValueError(f"{path} holds no genome: {error}") from error
