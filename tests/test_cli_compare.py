"""`gbfunc compare` from end to end on real digits, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gbfunc.cli import main
from gbfunc.lab.compare import METHODS, PRETRAINED_METHODS, REFERENCES

QUICK = ["compare", "--sizes", "300", "--quick", "--methods", "periodic", "smaller_dense"]


def test_compare_writes_rows_and_a_figure_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a" / "b"
    assert main([*QUICK, "--out", str(out)]) == 0
    told = capsys.readouterr()
    results = json.loads((out / "compare.json").read_text())
    assert {"machine", "threads", "torch", "choices", "rows"} == results.keys()
    assert [(r["method"], r["size"], r["seed"]) for r in results["rows"]] == [
        ("periodic", 300, 0),
        ("smaller_dense", 300, 0),
    ]
    for row in results["rows"]:
        files = [p for p in (out / "nets").iterdir() if row["method"] in p.name]
        assert [p.stat().st_size for p in files] == [row["bytes"]] and row["bytes"] <= row["budget"]
        assert f"{100 * row['test']:.2f}" in told.out and 0 < row["val"] <= 1
    assert f"{row['budget']:,} bytes" in told.out and "digits" in told.out
    assert (out / "tradeoff.png").read_bytes().startswith(b"\x89PNG")
    assert len(told.err.splitlines()) == 4 and "\x1b" not in told.err + told.out

    before = (out / "compare.json").read_bytes()
    assert main([*QUICK, "--out", str(out)]) == 0
    again = capsys.readouterr()
    assert again.out == told.out and again.err == "" and (out / "compare.json").read_bytes() == before


def test_budgets_in_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    budgets = ["--bytes", "2500", "1600", "2500", "--quick", "--methods", "periodic", "int8"]
    assert main(["compare", *budgets, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "compare.json").read_text())["rows"]
    assert [(r["method"], r["budget"]) for r in rows] == [(m, b) for b in (1_600, 2_500) for m in ("periodic", "int8")]
    assert all(0.9 * row["budget"] <= row["bytes"] <= row["budget"] for row in rows)
    assert [row["size"] for row in rows if row["method"] == "periodic"] == [
        row["params"] for row in rows if row["method"] == "periodic"
    ]
    told = capsys.readouterr().out
    assert "1,600 bytes" in told and "2,500 bytes" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "magic"], "--methods magic: unknown; expected some of periodic "),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--epochs", "0"], "--epochs must be at least 1, got 0"),
        (["--threads", "-1"], "--threads must be at least 1, got -1"),
        (["--sizes", "5"], "a genome of 5 parameters cannot be reached"),
        (["--bytes", "300"], "at most 300 bytes cannot be reached: the smallest genome's file has"),
        (["--bytes", "0"], "genome_bytes must be an int >= 1, got 0"),
        (["--bytes", "2000", "--sizes", "300"], "give at most one of --sizes and --bytes, got 300 and 2000"),
        (["--task", "mnist"], "--data-dir"),
    ],
)
def test_errors_are_one_line(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *options, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error and not (tmp_path / "out").exists()


def test_foreign_results_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "compare.json").write_text("{}")
    assert main([*QUICK, "--out", str(tmp_path)]) == 2
    assert "is not the result of a comparison" in capsys.readouterr().err
    assert (tmp_path / "compare.json").read_text() == "{}"


def test_help_names_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    words = capsys.readouterr().out
    assert [name for name in (*METHODS, *PRETRAINED_METHODS, *REFERENCES) if name not in words] == []
