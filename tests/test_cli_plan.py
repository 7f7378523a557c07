"""`gbfunc plan --ranks`: layouts on standard output, units, and one clear error each."""

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gbfunc as gb
from gbfunc.cli import main
from gbfunc.cli.job import parse_bytes
from gbfunc.cli.parser import parse
from gbfunc.cli.ranks import parse_mesh
from gbfunc.parallel.planner import DeviceSpec
from tests.support.planner_cases import make_case
from tests.support.tensor_cases import next_token

SMALL = ["plan", "--compression", "5", "--sizes", "64", "32", "32", "10"]


def test_plan_lists_layouts(tmp_path: Path, command: Any) -> None:
    out = command([*SMALL, "--ranks", "4", "--memory", "16GB", "--link", "100Gbit", "--batch-size", "64"]).out
    assert "whole model" in out
    assert "dense, FSDP" in out
    path = tmp_path / "device.json"
    path.write_text(DeviceSpec(memory=1e4).to_json())
    assert "0 layouts of 2 ranks fit" in command([*SMALL, "--ranks", "2", "--device", str(path)]).out


def test_rows_are_options_of_a_training() -> None:
    pnet, plan, batch = make_case()
    found = gb.plan_parallel(plan, pnet, batch, ranks=4, loss_fn=next_token)
    table = found.report(most=100).split("\n\n")[0].splitlines()[1:]
    assert len(table) == len(found.fits) and any("--remat layer" in row for row in table)
    for row, planned in zip(table, found.fits, strict=True):
        layout = planned.layout
        options = parse(["train", *shlex.split(row[row.index("--mesh") :])]).execution
        axes = {"data": 1, "pipeline": 1, "gnets": 1, "tensor": 1} | parse_mesh(options.mesh)
        assert axes == layout.sizes and options.pipeline == layout.schedule and options.remat == layout.remat
        assert (options.microbatches or 1) == layout.microbatches
        assert options.placement == (layout.placement if layout.sizes["gnets"] > 1 else "auto")


def test_layers_of_an_own_p_net_are_split_as_a_function_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_styles", raising=False)
    Path("own_styles.py").write_text(
        "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel\n"
        "def styles(pnet):\n    return {'0': ColwiseParallel(), '2': RowwiseParallel()}\n"
        "def none(pnet):\n    return None\n"
    )
    refused = command([*SMALL, "--ranks", "2"]).out
    assert "--mesh tensor=2: " in refused and "parallel={'up': ColwiseParallel()" in refused
    assert "--mesh tensor=2\n" in command([*SMALL, "--ranks", "2", "--parallel", "own_styles:styles"]).out
    told = command([*SMALL, "--ranks", "2", "--parallel", "own_styles:none"], 2).err
    assert "--parallel own_styles:none must return styles by the names of modules, got None" in told


def test_units_of_memory_and_of_a_link() -> None:
    for text, expected in (("16GB", 16e9), ("1.5 GiB", 1.5 * 2**30), ("100B", 100.0)):
        assert parse_bytes("--memory", text) == expected
    for text, expected in (("100Gbit", 12.5e9), ("800 kbit/s", 1e5), ("12.5GB/s", 12.5e9)):
        assert parse_bytes("--link", text, rate=True) == expected


@pytest.mark.process
@pytest.mark.skipif(torch.__version__ < "2.6", reason="a process that was in a gloo group of torch 2.5 may never end")
def test_calibrate_prints_a_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("gbfunc.lab.bench.report._measure_ceilings", lambda device: (2e9, 3e9))
    assert main(["bench", "--calibrate"]) == 0
    device = DeviceSpec.from_json(capsys.readouterr().out)
    assert (device.flops, device.bandwidth) == (2e9, 3e9)
    assert device.link > 0 and device.memory > 1e8 and device.latency > 0
