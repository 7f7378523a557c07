"""What happens before torch is imported, and Ctrl-C and SIGTERM while it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gbfunc.startup import is_command_line, wait_passively

# Stands before torch on the path, says that its import has begun, and takes long.
SLOW_TORCH = "import sys, time\nprint('importing', flush=True)\ntime.sleep(60)\n"


@pytest.mark.parametrize(
    ("argv", "original", "expected"),
    [
        (["/usr/bin/gbfunc", "demo"], ["python", "/usr/bin/gbfunc", "demo"], True),
        (["-m", "demo"], ["python", "-m", "gbfunc", "demo"], True),
        (["-m"], ["python", "-u", "-m", "gbfunc", "train"], True),
        (["-m"], ["python", "-m", "pytest", "gbfunc"], False),
        (["script.py"], ["python", "script.py", "gbfunc"], False),
        ([], [], False),
    ],
)
def test_the_command_line_is_known(argv: list[str], original: list[str], expected: bool) -> None:
    assert is_command_line(argv, original) is expected


@pytest.mark.parametrize(
    ("environ", "argv", "policy"),
    [
        ({}, ["gbfunc", "demo"], "passive"),
        ({"OMP_WAIT_POLICY": "active"}, ["gbfunc", "demo"], "active"),
        ({"GOMP_SPINCOUNT": "9"}, ["gbfunc", "demo"], None),
        ({}, ["gbfunc", "bench"], None),
    ],
)
def test_threads_wait_passively_unless_the_user_says_how(
    environ: dict[str, str], argv: list[str], policy: str | None
) -> None:
    wait_passively(environ, argv)
    assert environ.get("OMP_WAIT_POLICY") == policy


@pytest.mark.process
@pytest.mark.parametrize(("start", "policy"), [(["-m", "gbfunc", "demo"], "passive"), (["-c", "import gbfunc"], None)])
def test_only_the_command_line_sets_the_environment(start: list[str], policy: str | None, tmp_path: Path) -> None:
    # A torch that only tells what it finds when it is imported.
    (tmp_path / "torch.py").write_text("import os, sys\nprint(os.environ.get('OMP_WAIT_POLICY'))\nsys.exit(0)\n")
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")}
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).resolve().parents[1])])
    done = subprocess.run(
        [sys.executable, *start],
        env=env | {"PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{policy}\n"


@pytest.mark.process
@pytest.mark.parametrize(
    ("argv", "code", "expected"),
    [
        (["--help"], 0, "Train neural networks through a genomic bottleneck."),
        (["train", "--help"], 0, "--genome-params INT"),
        (["--version"], 0, "gbfunc "),
        (["trane"], 2, "gbfunc: error: no command 'trane' (did you mean train?)"),
        (["bench", "--nope"], 2, "gbfunc: error: bench has no option --nope"),
    ],
)
def test_help_and_wrong_options_need_no_torch(argv: list[str], code: int, expected: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).resolve().parents[1])])
    command = [sys.executable, "-m", "gbfunc", *argv]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code and expected in done.stdout + done.stderr


@pytest.mark.process
@pytest.mark.parametrize(("signum", "words"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "stopped by SIGTERM")])
def test_signals_during_the_imports_end_with_a_line(signum: int, words: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(SLOW_TORCH)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).resolve().parents[1])])
    process = subprocess.Popen(
        [sys.executable, "-m", "gbfunc", "demo"],
        env=os.environ | {"PYTHONPATH": path},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Ignored where a shell has put the tests into the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None and process.stdout.readline() == "importing\n"
    process.send_signal(signum)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signum and errors == f"gbfunc: {words}\n"
