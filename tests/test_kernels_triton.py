"""Triton kernels without a GPU: numbers by the interpreter, and compilation for GPUs."""

import inspect
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

triton: Any = pytest.importorskip("triton", reason="triton is not installed (extra `triton`, Linux only)")
form: Any = pytest.importorskip("gbfunc.hypernets.kernels.relu_triton")
waves: Any = pytest.importorskip("gbfunc.hypernets.kernels.waves_triton")

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(triton.__version__.startswith("3.1."), reason="the interpreter of Triton 3.1 reads wrong memory")
@pytest.mark.parametrize(
    ("file", "selected"),
    [
        ("test_kernels.py", "compiled and not reverse and (values or 130 or transforms_agree or not_a_number)"),
        ("test_kernels_waves.py", "compiled and not finite or large_sides or change_before"),
        ("support/interpreted_step.py", "step"),
    ],
)
def test_numbers_under_the_interpreter(file: str, selected: str) -> None:
    """Runs tests of kernels in a process that imports Triton as its interpreter."""
    options = ("-q", "-x", "-p", "no:cacheprovider", "-m", "", "-k", selected, f"tests/{file}")
    command = [sys.executable, "-m", "pytest", *options]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert "passed" in run.stdout and "skipped" not in run.stdout


def _compiled(kernel: Any, element: str, by_rows: bool, ones: tuple[str, ...], target: Any) -> Any:
    """A kernel as it is compiled where the sizes in `ones` are 1, which Triton then takes for constants."""
    from triton import language as tl
    from triton.compiler import ASTSource

    if type(kernel).__name__ != "JITFunction" or "constexprs" not in inspect.signature(ASTSource).parameters:
        pytest.skip("Triton interprets here, or is older than its present interface for compilation (3.3)")
    sums = "fp64" if element == "fp64" else "fp32"
    blocks = {
        "BY_ROWS": by_rows,
        "ROWS": 32,
        "COLS": 64,
        "HIDDEN": 16,
        "S": tl.float64 if sums == "fp64" else tl.float32,
    }
    blocks |= dict.fromkeys(ones, 1)
    fixed = {name: blocks[name] for name in kernel.arg_names if name in blocks}
    types = dict.fromkeys(kernel.arg_names, f"*{element}") | dict.fromkeys(("dv", "db"), f"*{sums}")
    types |= dict.fromkeys("RCrcH", "i32") | dict.fromkeys(fixed, "constexpr")
    signature = {name: types[name] for name in kernel.arg_names}
    return triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=fixed), target=target)


@pytest.mark.parametrize("element", ["fp32", "fp64"])
@pytest.mark.parametrize(
    ("backend", "architecture", "warp", "binary"), [("cuda", 90, 32, "cubin"), ("hip", "gfx942", 64, "hsaco")]
)
def test_kernels_compile_without_a_gpu(
    backend: str, architecture: Any, warp: int, binary: str, element: str, tmp_path: Path, monkeypatch: Any
) -> None:
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target = GPUTarget(backend, architecture, warp)
    sizes = ((), ("R", "C", "r", "c", "H"), ("H",), ("c", "C"))
    for kernel, directions in ((form.forward_kernel, (True,)), (form.backward_kernel, (True, False))):
        for by_rows, ones in product(directions, sizes):
            made = _compiled(kernel, element, by_rows, ones, target)
            assert made.asm[binary], (kernel, by_rows, ones)
            assert made.metadata.shared <= 4096  # All sums stay in registers.


@pytest.mark.parametrize("element", ["fp32", "fp64"])
@pytest.mark.parametrize("architecture", [80, 90])
def test_sides_compile_without_spills(architecture: int, element: str, tmp_path: Path, monkeypatch: Any) -> None:
    from triton.backends import nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    assembler = Path(nvidia.__path__[0]) / "bin" / "ptxas"
    if type(waves.forward_kernel).__name__ != "JITFunction" or not assembler.exists():
        pytest.skip("Triton interprets here, or has no ptxas")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    blocks = {"BLOCK": waves._ROWS, "H": waves._HIDDEN, "PART": waves._PART, "K": waves._CODES}
    blocks |= {"COLS": waves._COLS, "J": waves._SUMS, "SIDES": 8}
    for kernel in (waves.forward_kernel, waves.partial_kernel, waves.total_kernel):
        fixed = {name: blocks[name] for name in kernel.arg_names if name in blocks}
        types = {name: f"*{'i64' if name in ('table', 'groups') else element}" for name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=types | dict.fromkeys(fixed, "constexpr"), constexprs=fixed)
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
        assert made.asm["cubin"]
        place, target = tmp_path / "kernel.ptx", re.findall(r"\.target (\w+)", made.asm["ptx"])[0]
        place.write_text(made.asm["ptx"])
        command = [assembler, "-v", f"--gpu-name={target}", place, "-o", tmp_path / "kernel.cubin"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        spills = re.findall(r"(\d+) bytes spill", report)
        registers = re.findall(r"Used (\d+) registers", report)
        assert spills and set(spills) == {"0"} and int(registers[0]) <= 128, report


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_on_a_gpu(dtype: torch.dtype) -> None:
    from gbfunc.tiling import TileGrid
    from tests.support.kernel_cases import assert_alike, expected, found, inputs_of

    grid = TileGrid(300, 500, 70, 90)
    inputs = inputs_of(grid, 33, dtype=dtype)
    placed = tuple(x.detach().cuda().requires_grad_(x.requires_grad) for x in inputs)
    made = [x.cpu() for x in found("compiled", grid, placed)]
    assert_alike(made, expected(grid, inputs), 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps)
