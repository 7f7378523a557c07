"""The compiled ReLU tile: its C++ loop, and what happens where nothing can be compiled."""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from gbfunc.hypernets.kernels import native
from gbfunc.hypernets.kernels.relu import relu_matrix
from gbfunc.hypernets.kernels.waves import Side, waves
from gbfunc.tiling import TileGrid
from tests.support.kernel_cases import GRIDS, NEEDS_COMPILER, assert_alike, expected, found, inputs_of
from tests.support.ranks import run_ranks

INPUTS = inputs_of(GRIDS[0], dtype=torch.float32)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of compiled kernels, and a process that has loaded none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached = (native.library, native.function, native.has_kernels, native._is_available)
    for function in cached:
        function.cache_clear()
    yield tmp_path / "gbfunc"
    for function in cached:
        function.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that copies the kernels, which the process has compiled: to be asked for before `cache`."""
    kernels = native.library()._name
    if Path(kernels).exists():
        copying = f'for made; do :; done; sleep 1; cp {shlex.quote(kernels)} "$made"'
        monkeypatch.setenv("CXX", shlex.join(["sh", "-c", copying, "sh"]))


_WIDTHS = ("DEFAULT", "AVX2", "AVX512")


@pytest.mark.process
@NEEDS_COMPILER
@pytest.mark.parametrize("width", _WIDTHS)
def test_every_width_of_vectors_makes_the_matrix(
    width: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    here = torch.backends.cpu.get_cpu_capability()
    if width not in _WIDTHS[: 1 + (_WIDTHS.index(here) if here in _WIDTHS else 0)]:
        pytest.skip(f"this machine has {here}")
    if width != here:  # What is compiled for this machine is at hand.
        request.getfixturevalue("cache")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: width)
    # Odd edges, and a matrix for which large pages are asked.
    for grid, hidden in ((TileGrid(45, 61, 13, 37), 19), (TileGrid(1030, 1030, 100, 100), 3)):
        for dtype, tolerance in ((torch.float32, 1e-4), (torch.float64, 1e-12)):
            inputs = inputs_of(grid, hidden, dtype=dtype)
            assert_alike(found("compiled", grid, inputs), expected(grid, inputs), tolerance)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        codes, weight, phase, sine, cosine = (
            x.to(dtype) for x in map(torch.randn, ((1, 150, 6), (3, 6, 37), (3, 37), (3, 37), (3, 37)))
        )
        leaves = [x.requires_grad_() for x in (weight, phase, sine, cosine)]
        side = Side(codes, leaves[0], leaves[1], leaves[2], leaves[3])
        one, other = (waves([side], kernel=kernel)[0] for kernel in ("compiled", "eager"))
        made, parts = ([x, *torch.autograd.grad(x, leaves, torch.ones_like(x))] for x in (one, other))
        assert_alike(made, parts, tolerance)


@pytest.mark.process
@NEEDS_COMPILER
@pytest.mark.usefixtures("compiled")
def test_processes_that_compile_at_once_leave_one_kernel(cache: Path) -> None:
    assert run_ranks(3, "kernel_cases:compile_kernels") == [True, True, True]
    (kernel,) = cache.iterdir()
    made = kernel.stat().st_mtime_ns
    assert_alike(found("compiled", GRIDS[0], INPUTS), expected(GRIDS[0], INPUTS), 1e-5)
    assert [x.stat().st_mtime_ns for x in cache.iterdir()] == [made]


@NEEDS_COMPILER
@pytest.mark.usefixtures("compiled")
def test_a_home_that_cannot_be_written_is_no_obstacle(cache: Path, tmp_path: Path, monkeypatch: Any) -> None:
    cache.write_text("a file where the folder should be")
    monkeypatch.setattr(native.tempfile, "gettempdir", lambda: str(tmp_path))
    assert_alike(found("compiled", GRIDS[0], INPUTS), expected(GRIDS[0], INPUTS), 1e-5)


def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CXX", "no-such-compiler")
    return "found none of CXX='no-such-compiler' on the path"


def _bad_compiler(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CXX", f"{sys.executable} -c 'raise SystemExit(3)'")
    return "failed on the kernels"


@pytest.mark.parametrize("broken", [_no_compiler, _bad_compiler])
@pytest.mark.usefixtures("cache")
def test_auto_falls_back_with_one_warning(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = broken(monkeypatch)
    grid = TileGrid(420, 51, 60, 51)
    inputs, more = inputs_of(grid, 50), inputs_of(TileGrid(420, 60, 60, 60), 50)
    with pytest.warns(RuntimeWarning, match="(?s)" + words + ".*install a C\\+\\+ compiler") as caught:
        made = relu_matrix(*inputs, grid=grid)
        relu_matrix(*more)
    assert sum(w.category is RuntimeWarning for w in caught) == 1
    assert torch.equal(made, relu_matrix(*inputs, grid=grid, kernel="eager"))
    with pytest.raises(RuntimeError, match=words):
        relu_matrix(*inputs, kernel="compiled")


@pytest.mark.parametrize("without_memory", [FakeTensorMode(), torch.device("meta")], ids=["fake", "meta"])
def test_tensors_without_memory_stay_out_of_compiled_programs(without_memory: Any) -> None:
    with without_memory:
        inputs = tuple(torch.ones(x.shape, requires_grad=x.requires_grad) for x in INPUTS)
        matrix = relu_matrix(*inputs, grid=GRIDS[0], kernel="compiled")
        gradients = torch.autograd.grad(matrix.sum(), inputs[2:])
    assert matrix.shape == (GRIDS[0].rows, GRIDS[0].cols)
    assert [x.shape for x in gradients] == [x.shape for x in inputs[2:]]


@pytest.mark.usefixtures("cache")
def test_a_gpu_without_triton_falls_back_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find_spec", lambda _: None)
    with pytest.warns(RuntimeWarning, match="need Triton.*install triton") as caught:
        assert not any(native.has_kernels("cuda", kernel) for kernel in ("auto", "compiled"))
    assert len(caught) == 1
