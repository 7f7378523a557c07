"""Genomes as QR codes: there, and back by another library, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

import gbfunc as gb
from gbfunc.cli import main
from gbfunc.exporting.qr import read_qr, write_qr

_, _, image = (pytest.importorskip(name) for name in ("segno", "zxingcpp", "PIL.Image"))
PAGE = "https://a.org/"


def noise(size: int) -> bytes:
    return bytes(torch.randint(256, (size,), generator=torch.Generator().manual_seed(size)).tolist())


@pytest.mark.parametrize("size", [1, 2, 3, 100, 850, 1_500, 2_200])
def test_bytes_come_back_bit_for_bit(tmp_path: Path, size: int) -> None:
    write_qr(tmp_path / "code.png", noise(size), PAGE)
    assert read_qr(tmp_path / "code.png") == noise(size)
    # Ink on a transparent ground.
    code = image.open(tmp_path / "code.png").convert("LA")
    code.putalpha(code.getchannel("L").point(lambda v: 255 - v))
    code.save(tmp_path / "ink.png")
    assert read_qr(tmp_path / "ink.png") == noise(size)


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    path, segno = tmp_path / "code.png", pytest.importorskip("segno")
    with pytest.raises(ValueError, match="up to 2,203 bytes with this address, got a genome of 2,204 bytes"):
        write_qr(path, noise(2_204), PAGE)
    for page in ("", "https://a.org/#b", "https://\u00e4.org"):
        with pytest.raises(ValueError, match="address of the page"):
            write_qr(path, noise(9), page)

    def refused(words: str) -> None:
        with pytest.raises(ValueError, match=words):
            read_qr(path)

    image.new("L", (50, 50), 255).save(path)
    refused("must show one QR code, got 0")
    image.new("L", (6_000, 6_000)).save(path)
    refused("expected at most 33,554,432 pixels, got 6000 x 6000")
    path.write_bytes(b"no picture")
    refused("is not a valid picture")
    for text in ("https://a.org/", "https://a.org/#", "https://a.org/#not a genome"):
        segno.make_qr(text).save(str(path))
        refused("must be a code of gbfunc export with a genome")
    with pytest.raises(FileNotFoundError):
        read_qr(tmp_path / "none.png")


def test_commands_take_a_code_for_a_genome(tmp_path: Path, command: Any) -> None:
    small = ["--pnet-config", '{"hidden": [12]}', "--genome-params", "150", "--epochs", "1", "--dtype", "int7"]
    assert main(["train", *small, "--seed", "0", "--out", str(tmp_path)]) == 0
    genome, code, page, svg = (
        str(tmp_path / name) for name in ("genome.safetensors", "code.png", "net.html", "code.svg")
    )

    def said_by(*words: str, status: int = 0) -> str:
        said = command([*words], status)
        assert status == 0 or not said.out
        return said.err if status else said.out

    expected = said_by("eval", "--genome", genome)
    # Where the bytes of the file go, whose sum it is.
    assert f"{Path(genome).stat().st_size:,} bytes on disk as int7" in expected
    assert "(plan)" in expected and "(scales)" in expected
    said_by("export", "--genome", genome, "--out", code, "--qr", PAGE)
    assert read_qr(code) == Path(genome).read_bytes()
    assert "net.html: " in said_by("export", "--genome", code, "--out", page)
    for place in (code, page):
        assert said_by("eval", "--genome", place) == expected
    Path(page).write_text("<html>", encoding="utf-8")
    write_qr(svg, noise(50), PAGE)
    assert b"<svg" in Path(svg).read_bytes()
    assert "net.html must be a page with a genome: expected" in said_by("eval", "--genome", page, status=2)
    assert "expected an image in pixels" in said_by("eval", "--genome", svg, status=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "code.png"], "pass the page's address as --qr PAGE"),
        (["--out", "net.html", "--weights", "dense"], "--weights and --to are for programs"),
        (["--out", "net.html", "--pnet", "gpt"], "a page has the pnet of the genome's file, mlp: drop --pnet gpt"),
        (["--out", "code.png", "--qr", PAGE, "--task", "mnist"], "the task of the genome's file, digits: drop"),
        (["--out", "code.txt", "--qr", PAGE], "must end in .png or .svg"),
        (["--out", "net.html", "--genome", "none.safetensors"], "no genome file at 'none.safetensors'"),
    ],
)
def test_wrong_options_get_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any, options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = gb.make_plan(net := torch.nn.Linear(64, 10), gb.periodic(2))
    gb.save("genome.safetensors", plan, gb.init_genome(plan, net, seed=0), metadata={"task": "digits", "pnet": "mlp"})
    said = command(["export", "--genome", "genome.safetensors", *options], 2).err
    assert message in said and said.count("\n") == 1
