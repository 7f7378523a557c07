"""What compiles the ReLU tile: C++ on a CPU, `torch.compile` elsewhere, and what happens where there is no compiler."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from gbfunc.hypernets.kernels import compiled as compiled_module
from gbfunc.hypernets.kernels import native, relu_tile, relu_tiles
from gbfunc.hypernets.kernels.relu_tile import COMPILE_WORK
from gbfunc.tiling import TileGrid
from tests.support.kernel_cases import NEEDS_COMPILER, Shape, check, draw, with_gradients

# Inductor imports parts of torch that torch itself deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


# --- C++ -----------------------------------------------------------------------------------------------------------


@NEEDS_COMPILER
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    "grid", [TileGrid(70, 9, 70, 9), TileGrid(45, 600, 40, 300), TileGrid(130, 30, 13, 7)], ids=["one", "wide", "many"]
)
def test_any_number_of_threads_and_parts_makes_the_matrix(
    grid: TileGrid, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_THREAD_WORK", 1)
    _, *leaves = draw((grid.n_tiles, grid.tile_rows, grid.tile_cols, 11))
    leaves, g = [x.requires_grad_() for x in leaves], torch.randn(grid.rows, grid.cols, dtype=torch.float64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        W = relu_tiles(*leaves, kernel="compiled", grid=grid)
        found = [W, *torch.autograd.grad(W, leaves, g)]
    finally:
        torch.set_num_threads(before)
    W = relu_tiles(*leaves, kernel="reference", grid=grid)
    for x, expected in zip(found, [W, *torch.autograd.grad(W, leaves, g)], strict=True):
        torch.testing.assert_close(x, expected, rtol=1e-12, atol=1e-12)


@NEEDS_COMPILER
def test_what_is_not_a_number_is_not_hidden() -> None:
    _, A, B, v, b = draw((2, 5, 9, 3), dtype=torch.float32)
    A[1, 2, 0] = torch.nan
    for kernel in ("reference", "eager", "compiled"):
        tiles = relu_tiles(A, B, v, b, kernel=kernel)
        assert tiles[1, 2].isnan().all(), kernel
        assert tiles.isnan().sum() == 9, kernel


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of compiled kernels, and a process that has loaded none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library.cache_clear()
    native.working_library.cache_clear()
    yield tmp_path / "gbfunc"
    native.library.cache_clear()
    native.working_library.cache_clear()


@NEEDS_COMPILER
def test_processes_that_compile_at_once_leave_one_kernel(cache: Path) -> None:
    program = "from gbfunc.hypernets.kernels.native import library; library()"
    started = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3)]
    assert [process.wait(100) for process in started] == [0, 0, 0]
    (kernel,) = cache.iterdir()
    made = kernel.stat().st_mtime_ns
    case = draw((1, 2, 3, 4), dtype=torch.float32)
    check(with_gradients(case, "compiled"), case, 1e-5)
    assert [x.stat().st_mtime_ns for x in cache.iterdir()] == [made]


@NEEDS_COMPILER
def test_a_home_that_cannot_be_written_is_no_obstacle(cache: Path, tmp_path: Path, monkeypatch: Any) -> None:
    cache.write_text("a file where the folder should be")
    monkeypatch.setattr(native.tempfile, "gettempdir", lambda: str(tmp_path))
    case = draw((1, 2, 3, 4), dtype=torch.float32)
    check(with_gradients(case, "compiled"), case, 1e-5)


def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CXX", "no-such-compiler")
    return "found none of CXX='no-such-compiler' on the path"


def _bad_compiler(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CXX", f"{sys.executable} -c 'raise SystemExit(3)'")
    return "failed on the ReLU kernel"


@pytest.mark.parametrize("broken", [_no_compiler, _bad_compiler])
@pytest.mark.usefixtures("cache")
def test_auto_falls_back_with_one_warning(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = broken(monkeypatch)
    _, A, B, v, b = draw((7, 60, 51, 50), dtype=torch.float32)
    assert A.numel() * B.shape[1] >= COMPILE_WORK
    with pytest.warns(RuntimeWarning, match="(?s)" + expected + ".*install a C\\+\\+ compiler") as caught:
        found = relu_tiles(A, B, v, b)
        relu_tiles(A[:, 1:], B, v, b)
    assert sum(w.category is RuntimeWarning for w in caught) == 1
    torch.testing.assert_close(found, relu_tiles(A, B, v, b, kernel="eager"), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=expected):
        relu_tiles(A, B, v, b, kernel="compiled")


@pytest.mark.parametrize("without_memory", [FakeTensorMode(), torch.device("meta")], ids=["fake", "meta"])
def test_tensors_without_memory_stay_out_of_compiled_programs(without_memory: Any) -> None:
    with without_memory:
        shapes = ((2, 3, 5), (2, 4, 5), (2, 5), (2,))
        leaves = tuple(torch.ones(s, requires_grad=True) for s in shapes)
        tiles = relu_tiles(*leaves, kernel="compiled")
        gradients = torch.autograd.grad(tiles.sum(), leaves)
    assert tiles.shape == (2, 3, 4)
    assert [x.shape for x in gradients] == [x.shape for x in leaves]


# --- torch.compile, on a CPU as it is elsewhere -----------------------------------------------------------------------


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice that is made for a device that is no CPU."""
    monkeypatch.setattr(relu_tile, "_settled", lambda kernel, *_: kernel)


@NEEDS_COMPILER
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("shape", "dtype", "relative"),
    [
        ((1, 1, 1, 1), torch.float32, 1e-5),
        ((3, 19, 17, 5), torch.float32, 1e-5),
        ((3, 18, 5, 4), torch.bfloat16, torch.finfo(torch.bfloat16).eps),
    ],
)
def test_fused_form_equals_the_oracle(shape: Shape, dtype: torch.dtype, relative: float) -> None:
    case = draw(shape, 1, dtype)
    check(with_gradients(case, "compiled"), case, relative)


@pytest.mark.usefixtures("elsewhere")
def test_the_fused_form_falls_back_with_one_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import torch._inductor.compile_fx  # noqa: F401
    from torch._inductor import config

    caches = (compiled_module.working_forms, compiled_module._has_compiler)
    for cached in caches:
        cached.cache_clear()
    _, A, B, v, b = draw((2, 6, 5, 4), dtype=torch.float32)
    with config.patch({"cpp.cxx": ("no-such-compiler",), "fx_graph_cache": False}):
        with pytest.warns(RuntimeWarning, match="torch.compile does not work on 'cpu'") as caught:
            found = relu_tiles(A, B, v, b)
            relu_tiles(A[:, 1:], B, v, b)
        assert sum(w.category is RuntimeWarning for w in caught) == 1
        torch.testing.assert_close(found, relu_tiles(A, B, v, b, kernel="eager"), rtol=0, atol=0)
        with pytest.raises(Exception, match="no-such-compiler|InvalidCxxCompiler|C\\+\\+ compiler"):
            relu_tiles(A[:, 2:], B, v, b, kernel="compiled")
    for cached in caches:
        cached.cache_clear()
