"""What the distributed bench counts is what goes over the wire, and nothing outlives it."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp
from torch.utils._python_dispatch import TorchDispatchMode

import gbfunc as gb
from gbfunc.cli import main
from gbfunc.cli.bench import print_wire
from gbfunc.lab.bench.cases import Case, Scale
from gbfunc.lab.bench.dense_parallel import CollectiveBytes
from gbfunc.lab.bench.links import RankError, can_make_links, open_loopback, open_switch, run_ranks
from gbfunc.lab.bench.schemes import PURPOSES, SCHEMES
from gbfunc.lab.bench.variants import first_net, genome_step, loss_fn, plain_step, plan_of
from gbfunc.lab.bench.wire import (
    CASES,
    PLACEMENTS,
    VARIANTS,
    ByVariant,
    Measured,
    Pace,
    expected_seconds,
    measure_peaks,
    measure_ranks,
    rows_of,
)
from gbfunc.plots import grouped_bars
from tests.support import ranks as test_ranks
from tests.support import wire_cases
from tests.test_distributed import assert_equal

CASE = CASES["quick"]["mlp"]
LR = 1e-2
needs_links = pytest.mark.skipif(not can_make_links(), reason="network namespaces need root, ip and tc")


RANKS = {"mlp": 2, "mlp_tensor": 2, "gpt_tensor": 4, "gpt_tensor_32": 4}


def measure_loopback(*names: str) -> ByVariant:
    """All variants of cases of as many ranks, on the loopback."""
    orders: list[tuple[Scale, str]] = [("quick", name) for name in names]
    return measure_ranks(orders, RANKS[names[0]], ["loopback"], Pace(0.05, 3, 100.0), LR)


@lru_cache
def measured_on(ranks: int) -> ByVariant:
    """All cases of so many ranks: measured once, as a rank takes seconds to start."""
    if not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("FSDP2 of torch 2.5 needs a GPU")
    return measure_loopback(*(name for name, n in RANKS.items() if n == ranks))


@pytest.fixture
def found() -> ByVariant:
    return measured_on(RANKS["mlp"])


def ranks_of(found: ByVariant, variant: str) -> list[Measured]:
    return found[CASE.name, "loopback"][variant]


def mean(measured: list[Measured], by: str) -> float:
    return sum(getattr(m, by) for m in measured) / len(measured)


# What is counted.


def dense_bytes() -> int:
    return 4 * sum(p.numel() for p in CASE.net().parameters())


def generated_bytes() -> int:
    assert CASE.periodic is not None
    return 4 * sum(t.numel for t in gb.make_plan(CASE.net(), CASE.periodic.hypernet).generated)


@pytest.mark.process
def test_the_dense_schemes_count_what_their_formulas_say(found: ByVariant) -> None:
    # On two ranks half of everything leaves a rank in each pass, and an all-reduce is two passes.
    assert mean(ranks_of(found, "ddp"), "counted_bytes") == dense_bytes()
    # FSDP2 gathers for forward and for backward, and reduce-scatters.
    assert mean(ranks_of(found, "fsdp2"), "counted_bytes") == pytest.approx(1.5 * dense_bytes(), rel=0.01)
    torchgb = mean(ranks_of(found, "torchgb"), "counted_bytes")
    assert torchgb == dense_bytes() + generated_bytes() / 2


@pytest.mark.process
@needs_links
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_interface_sends_what_is_counted(variant: str, found: ByVariant) -> None:
    measured = ranks_of(found, variant)
    counted = mean(measured, "counted_bytes")
    if variant == "fsdp2":
        # Gloo's reduce-scatter is an all-reduce of the whole, of which it keeps a part: it sends twice what it must.
        counted += dense_bytes() / 2
    wire = measured[0].wire_bytes
    # A segment of the loopback has 66 bytes of headers, and so has every acknowledgement.
    most = 1.05 * counted + 8_000
    for _ in range(2):
        if wire >= most:
            # A busy machine acknowledges late, and TCP sends again what has arrived: the least is what must be sent.
            wire = min(wire, ranks_of(measure_loopback("mlp"), variant)[0].wire_bytes)
    assert counted < wire < most


@pytest.mark.process
def test_placements_send_less_than_ddp(found: ByVariant) -> None:
    ddp = mean(ranks_of(found, "ddp"), "counted_bytes")
    sent = {p: mean(ranks_of(found, p), "counted_bytes") for p in PLACEMENTS}
    ratio = ranks_of(found, "replicated")[0].ratio_params
    assert ratio is not None
    assert sent["replicated"] == pytest.approx(ddp / ratio, rel=0.05, abs=200)
    assert sent["factors"] < sent["sharded"] < 1.05 * ddp + 4_000


def losses_of_one(case: Case, genome: bool) -> list[float]:
    """Losses of the first steps in one process, of the dense p-net or of the library's step on a genome."""
    net = first_net(case)
    if genome:
        assert case.periodic is not None
        step = genome_step(plan_of(net, case.periodic), net, case.batch(), LR)
    else:
        step = plain_step(lambda: loss_fn(net, case.batch()), net.parameters(), LR)
    return [float(step()) for _ in range(3)]


def assert_learns_alike(ranks: list[Measured], case: Case, genome: bool) -> None:
    losses = [m.losses for m in ranks]
    actual = [sum(of_ranks) / len(ranks) for of_ranks in zip(*losses, strict=True)]
    expected = losses_of_one(case, genome)
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=2e-4, atol=2e-4)


@pytest.mark.process
@pytest.mark.parametrize("variant", ["ddp", "fsdp2", *PLACEMENTS])
def test_ranks_learn_what_one_process_does(variant: str, found: ByVariant) -> None:
    assert_learns_alike(ranks_of(found, variant), CASE, variant in PLACEMENTS)


@pytest.mark.process
def test_torchgb_s_scheme_learns(found: ByVariant) -> None:
    losses = [m.losses for m in ranks_of(found, "torchgb")]
    assert sum(own[-1] for own in losses) < sum(own[0] for own in losses)


def test_a_collective_without_a_formula_is_refused() -> None:
    count = CollectiveBytes()
    schema = type("Op", (), {"_schema": type("Schema", (), {"name": "c10d::gather_"})()})
    assert isinstance(count, TorchDispatchMode)
    with pytest.raises(NotImplementedError, match="no count for the collective 'gather_'"):
        count.__torch_dispatch__(schema(), (), ([torch.ones(2)],))


# Layers that ranks share.


SHARED = [(name, n, v) for name, n in RANKS.items() if name != "mlp" for v in CASES["quick"][name].variants]


def shared_layers(name: str, ranks: int) -> dict[str, list[Measured]]:
    """All variants of a case."""
    return measured_on(ranks)[CASES["quick"][name].name, "loopback"]


def purpose(measured: list[Measured], name: str) -> float:
    return sum(m.purposes[name] for m in measured) / len(measured)


@pytest.mark.process
@pytest.mark.parametrize(("name", "ranks", "variant"), SHARED)
def test_ranks_that_share_layers_learn_what_one_process_does(name: str, ranks: int, variant: str) -> None:
    assert_learns_alike(shared_layers(name, ranks)[variant], CASES["quick"][name], SCHEMES[variant].kind == "genome")


@pytest.mark.process
@pytest.mark.parametrize("width", [128, pytest.param(2048, marks=pytest.mark.slow)])
def test_an_mlp_on_tensor_ranks_is_that_of_one_process(width: int) -> None:
    expected = wire_cases.train(None, width)
    for found in test_ranks.run_ranks(2, "wire_cases:run", arguments={"width": width, "tensor": 2}, timeout=120):
        assert_equal(found, expected, 1e-12)


@pytest.mark.process
@pytest.mark.parametrize(("name", "ranks", "variant"), SHARED)
def test_all_that_is_sent_has_a_purpose(name: str, ranks: int, variant: str) -> None:
    measured = shared_layers(name, ranks)[variant]
    by_purpose = {p: purpose(measured, p) for p in PURPOSES}
    assert sum(by_purpose.values()) == pytest.approx(mean(measured, "counted_bytes"), rel=1e-3)
    assert by_purpose["weights" if SCHEMES[variant].kind == "genome" else "genome"] == 0 < by_purpose["activations"]


@pytest.mark.process
def test_an_mlp_s_thin_products_are_an_eighth_of_its_activations() -> None:
    found = shared_layers("mlp_tensor", 2)
    # The output of the row-parallel layer [64, 128], all-reduced by two ranks; 4 features make factors of width 8.
    assert purpose(found["dense_tensor"], "activations") == mean(found["dense_tensor"], "counted_bytes") == 64 * 128 * 4
    assert purpose(found["tensor"], "activations") == 64 * 8 * 4


@pytest.mark.process
def test_a_gpt_sends_a_third_of_fsdp_and_tensor_parallelism() -> None:
    found = shared_layers("gpt_tensor", 4)
    dense = found["dense_tensor_fsdp"]
    net = first_net(CASES["quick"]["gpt_tensor"])
    split = sum(p.numel() for p in net.parameters() if p.ndim > 1)
    # Half of a rank's half of the matrices goes out for forward and for backward, and their gradients once.
    assert purpose(dense, "weights") == pytest.approx(3 / 2 * 4 * split / 2, rel=0.1)
    for variant in ("tensor_data", "tensor_data_remat"):
        assert mean(found[variant], "counted_bytes") < mean(dense, "counted_bytes") / 3


@pytest.mark.process
@needs_links
@pytest.mark.parametrize(("name", "ranks", "variant"), SHARED)
def test_the_interface_sends_what_is_counted_of_shared_layers(name: str, ranks: int, variant: str) -> None:
    measured = shared_layers(name, ranks)[variant]
    counted = mean(measured, "counted_bytes")
    # Gloo sends a reduce-scatter as an all-reduce; small messages are acknowledged one by one.
    assert counted < measured[0].wire_bytes < 1.1 * counted + purpose(measured, "weights") / 3 + 20_000


@pytest.mark.slow
def test_the_peak_memory_of_a_rank_is_measured() -> None:
    if not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("FSDP2 of torch 2.5 needs a GPU")
    peaks = measure_peaks("quick", "gpt_tensor", 4, Pace(0.05, 3, 100.0))
    assert peaks.keys() == set(CASES["quick"]["gpt_tensor"].variants)
    assert all(0 < peak < 2**28 for peak in peaks.values())


# Rows.


def made_up(seconds: float, wire: float, counted: float, busiest: float | None = None) -> list[Measured]:
    own = Measured([seconds] * 3, wire, counted, counted if busiest is None else busiest, [1.0], None)
    return [own, own]


def test_the_expected_time_is_that_of_the_steps() -> None:
    # 1 MB at 10 Mbit/s takes 0.84 s, headers included, so 1 + 2 steps fit a pace of two seconds; at 100 Mbit/s 1 + 20.
    loopback: ByVariant = {("c", "loopback"): {"ddp": made_up(0.0, 1e6, 1e6)}}
    slow, fast = 1e6 * 8 / 1e7 * 1514 / 1448, 1e6 * 8 / 1e8 * 1514 / 1448
    found = expected_seconds(loopback, ["10mbit", "100mbit"], Pace(2.0, 20, 1.0))
    assert found == pytest.approx(3 * slow + 21 * fast)


def test_rows_are_measured_where_a_link_was_and_modelled_else() -> None:
    loopback = {"ddp": made_up(0.01, 1e6, 1e6), "fsdp2": made_up(0.02, 3e6, 1.5e6), "torchgb": made_up(0, 1, 1, 2)}
    there = {"ddp": made_up(0.1, 1.05e6, 1e6)}
    rows = rows_of({("c", "loopback"): loopback, ("c", "100mbit"): there}, "c", 2, "100mbit")
    ddp, fsdp, torchgb = rows
    assert (ddp["timing"], ddp["step_ms"], ddp["wire_bytes"], ddp["repeats"]) == (
        "measured",
        pytest.approx(100),
        1.05e6,
        3,
    )
    # 80 ms for a megabyte at 100 Mbit/s, and 66 bytes of headers for every 1,448.
    assert ddp["modelled_ms"] == pytest.approx(10 + 80 * 1514 / 1448)
    assert (fsdp["timing"], fsdp["wire_bytes"], fsdp["repeats"]) == ("modelled", None, 0)
    assert fsdp["step_ms"] == fsdp["modelled_ms"] == pytest.approx(20 + 240 * 1514 / 1448)
    assert (fsdp["step_ratio"], fsdp["bytes_ratio"]) == (pytest.approx(fsdp["step_ms"] / 100), 1.5)
    assert torchgb["modelled_ms"] == pytest.approx(2 * 8e-5 * 1514 / 1448)
    (alone, *_) = rows_of({("c", "loopback"): loopback}, "c", 2, "loopback")
    assert (alone["timing"], alone["modelled_ms"], alone["wire_ratio"]) == ("measured", None, 1.0)


# Nothing outlives it.


def gone(pid: int) -> bool:
    """Whether a process has ended; one that only waits to be reaped has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def script(folder: Path, rank: int, then: str) -> list[str]:
    """Write down one's process, wait for the other's, then do something."""
    wait = f"while [ ! -s {folder}/{1 - rank} ]; do sleep 0.01; done"
    return ["bash", "-c", f"echo $$ > {folder}/{rank}; {wait}; {then}"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("then", "timeout", "message"),
    [
        ("echo out of luck >&2; exit 3", 60, "rank 1 of 2 ended with exit code 3: out of luck"),
        ("kill -9 $$", 60, "rank 1 of 2 ended with exit code -9"),
        ("exit 0", 1, r"ranks \[0\] of 2 had not ended after 1 s"),
    ],
)
def test_all_ranks_end_when_one_dies(then: str, timeout: float, message: str, tmp_path: Path) -> None:
    # What a rank has started itself must end too.
    child = f"sleep 600 & echo $! > {tmp_path}/child; mv {tmp_path}/child {tmp_path}/started; wait"
    begun = f"while [ ! -e {tmp_path}/started ]; do sleep 0.01; done; "
    with pytest.raises(RankError, match=message):
        run_ranks([script(tmp_path, 0, child), script(tmp_path, 1, begun + then)], timeout=timeout)
    pids = [int((tmp_path / name).read_text()) for name in ("0", "1", "started")]
    end = time.monotonic() + 20
    while not all(gone(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.01)
    assert all(gone(pid) for pid in pids)


@pytest.mark.process
def test_ranks_that_end_well_are_told_apart(tmp_path: Path) -> None:
    run_ranks([["bash", "-c", f"echo $A > {tmp_path}/{i}"] for i in range(3)], timeout=60, env={"A": "seen"})
    assert [(tmp_path / str(i)).read_text() for i in range(3)] == ["seen\n"] * 3


def namespaces(pid: int) -> set[str]:
    folder = Path("/run/netns")
    return {p.name for p in folder.iterdir() if p.name.startswith(f"gbfunc-{pid}-")} if folder.is_dir() else set()


@pytest.mark.process
@needs_links
def test_namespaces_are_deleted_after_an_error() -> None:
    with pytest.raises(KeyError), open_switch(2) as ports, open_loopback(2):
        assert len(namespaces(os.getpid())) == 4 and len({port.prefix for port in ports}) == 2
        ping = "import socket; socket.create_server(('10.213.77.2', 0)); print('bound')"
        done = subprocess.run([*ports[1].prefix, sys.executable, "-c", ping], capture_output=True, check=True)
        assert done.stdout == b"bound\n"
        raise KeyError
    assert not namespaces(os.getpid())


@pytest.mark.process
@needs_links
def test_namespaces_of_killed_processes_are_swept() -> None:
    code = "import os\nfrom gbfunc.lab.bench.links import open_switch\nwith open_switch(1): os.kill(os.getpid(), 9)"
    process = subprocess.Popen([sys.executable, "-c", code])
    process.wait()
    assert len(namespaces(process.pid)) == 2
    with open_loopback(1):
        assert not namespaces(process.pid)


# The command.


@pytest.mark.slow
def test_the_command_measures_and_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "--distributed", "--quick", "--cases", "mlp", "--ranks", "2", "--links", "loopback", "100mbit"]
    assert main([*argv, "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "wire.json").read_text())
    rows = results["rows"]
    assert [(row["link"], row["variant"]) for row in rows] == [
        (k, v) for k in ("loopback", "100mbit") for v in VARIANTS
    ]
    slow = rows[len(VARIANTS) :]
    assert {row["timing"] for row in slow} == {"measured" if can_make_links() else "modelled"}
    assert results["one_rank"][CASE.name].keys() == set(PLACEMENTS)
    assert all(row["step_ms"] > 0 and row["counted_bytes"] > 0 for row in rows)
    assert (tmp_path / "wire_mlp.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert all(word in out for word in (*VARIANTS, "100mbit", "gloo"))
    assert not namespaces(os.getpid())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--cases", "resnet18"],
            "--distributed --cases resnet18: unknown; expected some of mlp gpt mlp_tensor gpt_tensor",
        ),
        (["--ranks", "1"], "--ranks must be 2 or more, got 1"),
    ],
)
def test_the_command_refuses(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--distributed", *argv]) == 2
    assert message in capsys.readouterr().err


def test_a_model_says_that_it_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of({("c", "loopback"): {"ddp": made_up(0.01, 1e6, 1e6)}}, "c", 2, "10mbit")
    print_wire({"machine": "m", "torch": "t", "one_rank": {}, "rows": rows})
    assert "(846.5 ms)" in capsys.readouterr().out and math.isclose(rows[0]["step_ms"], 846.46, rel_tol=1e-3)


def test_grouped_bars() -> None:
    one = {"2 ranks": {"ddp": 4.0, "ours": 1.0}, "4 ranks": {"ours": 2.0}}
    figure = grouped_bars({"bytes": ("bytes (B)", one), "time": ("time (ms)", {"slow": {"ddp": 1.0}})})
    left, right = figure.axes
    assert (left.get_yscale(), left.get_ylabel(), right.get_title()) == ("log", "bytes (B)", "time")
    assert [bar.get_height() for bar in left.patches] == [4.0, 1.0, 2.0]  # pyright: ignore[reportAttributeAccessIssue]
    figure.savefig(out := io.BytesIO(), format="png", dpi=40)
    assert out.getvalue().startswith(b"\x89PNG")
    for nothing in ({}, {"a": ("b", {"c": {"d": 0.0}})}):
        with pytest.raises(ValueError, match="positive values"):
            grouped_bars(nothing)
