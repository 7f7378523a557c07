"""What happens before torch is imported, and Ctrl-C and SIGTERM while it is."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Stands before torch on the path, says that its import has begun and what it finds, and takes long.
SLOW_TORCH = "import os, sys, time\nprint(os.environ.get('OMP_WAIT_POLICY'), flush=True)\ntime.sleep(60)\n"


def start(folder: Path, torch: str, *words: str, **environ: str) -> subprocess.Popen[str]:
    (folder / "torch.py").write_text(torch)
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")}
    env |= {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), **environ}
    return subprocess.Popen(
        [sys.executable, *words],
        env=env,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Ignored where a shell has put the tests into the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "environ", "policy"),
    [
        (["-m", "gbfunc", "demo"], {}, "passive"),
        (["-m", "gbfunc", "demo"], {"OMP_WAIT_POLICY": "active"}, "active"),
        (["-m", "gbfunc", "demo"], {"GOMP_SPINCOUNT": "9"}, "None"),
        (["-m", "gbfunc", "bench"], {}, "None"),
        (["-c", "import gbfunc as gb; gb.grid"], {}, "None"),
    ],
)
def test_threads_of_commands_wait_passively(
    words: list[str], environ: dict[str, str], policy: str, tmp_path: Path
) -> None:
    out, _ = start(tmp_path, SLOW_TORCH.replace("time.sleep(60)", "sys.exit(0)"), *words, **environ).communicate()
    assert out == f"{policy}\n"


@pytest.mark.process
@pytest.mark.parametrize(
    ("argv", "code", "expected"),
    [
        ([], 0, "Train neural networks through a genomic bottleneck."),
        (["train", "--task", "mnist", "--help"], 0, "(default: 0.04)"),
        (["--version"], 0, "gbfunc "),
        (["trane"], 2, "gbfunc: error: no command 'trane' (did you mean train?)"),
        (["train", "--epochs", "0"], 2, "gbfunc: error: --epochs must be at least 1, got 0"),
        (["train", "--task", "nope"], 2, "gbfunc: error: no task 'nope': choose one of digits, mnist, "),
        (["eval", "--genome", "x", "--data-dir", "/nope"], 2, "--data-dir: no such file or folder: /nope\n"),
        (["train", "--task", "mnist", "--data-dir", "/nope"], 2, "--data-dir: no such file or folder: /nope\n"),
        (["train", "--task", "own:task", "--data-dir", "/nope"], 1, "torch was imported"),
    ],
)
def test_help_and_wrong_options_need_no_torch(argv: list[str], code: int, expected: str, tmp_path: Path) -> None:
    process = start(tmp_path, "raise SystemExit('torch was imported')\n", "-m", "gbfunc", *argv)
    out, err = process.communicate()
    assert process.returncode == code and expected in out + err


@pytest.mark.process
@pytest.mark.parametrize(("signum", "words"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "stopped by SIGTERM")])
def test_signals_during_the_imports_end_with_a_line(signum: int, words: str, tmp_path: Path) -> None:
    process = start(tmp_path, SLOW_TORCH, "-m", "gbfunc", "demo")
    assert process.stdout is not None and process.stdout.readline() == "passive\n"
    process.send_signal(signum)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signum and errors == f"gbfunc: {words}\n"


@pytest.mark.process
def test_it_trains_without_the_modules_that_windows_lacks(tmp_path: Path) -> None:
    lacks = "import sys; sys.modules |= dict.fromkeys(['fcntl', 'resource', 'grp', 'pwd', 'termios'])"
    runs = "from gbfunc.cli import main; sys.exit(main(['demo', '--epochs', '1', '--out', 'demo']))"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", f"{lacks}; {runs}"], cwd=tmp_path, env=env, check=True, timeout=240)
    assert (tmp_path / "demo/genome.safetensors").exists()
