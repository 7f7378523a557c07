"""`gbfunc compare` from end to end on real digits, and its errors."""

import json
from pathlib import Path

import pytest

from gbfunc.cli import main

QUICK = ["compare", "--sizes", "300", "--quick", "--methods", "periodic", "smaller_dense"]


def test_compare_writes_rows_and_a_figure_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a" / "b"
    assert main([*QUICK, "--out", str(out)]) == 0
    told = capsys.readouterr()
    results = json.loads((out / "compare.json").read_text())
    assert {"machine", "threads", "torch", "choices", "rows"} == results.keys()
    run = [(r["method"], r["size"], r["seed"]) for r in results["rows"]]
    assert run == [("periodic", 300, 0), ("smaller_dense", 300, 0)]
    for row in results["rows"]:
        files = [p for p in (out / "nets").iterdir() if row["method"] in p.name]
        assert [p.stat().st_size for p in files] == [row["bytes"]] and row["bytes"] <= row["budget"]
        assert f"{100 * row['test']:.2f}" in told.out and 0 < row["val"] <= 1
    assert f"{row['budget']:,} bytes" in told.out and "digits" in told.out
    searched = [choice["searched"] for choice in results["choices"]]
    assert "steps of search" in told.out and all(f"{n:,}" in told.out for n in searched)
    assert searched == [sum(t["steps"] for t in choice["tried"]) for choice in results["choices"]] and min(searched) > 0
    assert (out / "tradeoff.png").read_bytes().startswith(b"\x89PNG")
    assert len(told.err.splitlines()) == 4 and "\x1b" not in told.err + told.out

    before = (out / "compare.json").read_bytes()
    assert main([*QUICK, "--out", str(out)]) == 0
    again = capsys.readouterr()
    assert again.out == told.out and again.err == "" and (out / "compare.json").read_bytes() == before


def test_budgets_in_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    budgets = ["--bytes", "2500", "1600", "2500", "--quick", "--methods", "periodic", "periodic_int7"]
    assert main(["compare", *budgets, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "compare.json").read_text())["rows"]
    expected = [(m, b) for b in (1_600, 2_500) for m in ("periodic", "periodic_int7")]
    assert [(r["method"], r["budget"]) for r in rows] == expected
    assert all(0.9 * row["budget"] <= row["bytes"] <= row["budget"] for row in rows)
    assert all(row["size"] == row["params"] for row in rows if row["method"] == "periodic")
    told = capsys.readouterr().out
    assert "1,600 bytes" in told and "2,500 bytes" in told
