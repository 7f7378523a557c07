"""Compiled kernels for a CPU, and the tile of a ReLU g-net (`relu.cpp`): one pass forward and one backward, no tiles.

Suffixes: R, C rows and columns of a matrix; T tiles; r, c rows and columns of a tile; H hidden units.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from gbfunc.files import replace_file
from gbfunc.hypernets.kernels.eager import warn_of_use
from gbfunc.tiling import TileGrid

_SOURCES = sorted(x for x in Path(__file__).parent.iterdir() if x.suffix in (".cpp", ".h"))
_AVX2 = ("-mavx2", "-mfma")
_FLAGS = {"AVX2": _AVX2, "AVX512": (*_AVX2, "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl")}
"""Flags by vector extension. Not -march=native, because different machines may share a home folder."""


def _command() -> list[str]:
    named = shlex.split(os.environ.get("CXX", ""))
    compiler = next(filter(None, map(shutil.which, named[:1] or ["c++", "g++", "clang++"])), None)
    if compiler is None:
        looked_for = f"CXX={os.environ['CXX']!r}" if named else "c++, g++ and clang++"
        raise RuntimeError(f"the compiled kernels need a C++ compiler, found none of {looked_for} on the path")
    flags = ["-std=c++17", "-O3", "-shared", "-fPIC", *_FLAGS.get(torch.backends.cpu.get_cpu_capability(), ())]
    # Apple's compiler has no OpenMP; there the loops run on one thread.
    return [compiler, *named[1:], *flags, *([] if sys.platform == "darwin" else ["-fopenmp"])]


@functools.cache
def library() -> ctypes.CDLL:
    """Load the kernels from the cache or compile them in seconds; raises RuntimeError if no compiler works."""
    command = _command()
    # One file per version of the sources and the command.
    sources = [str(x) for x in _SOURCES if x.suffix == ".cpp"]
    digest = hashlib.sha256(b"".join(x.read_bytes() for x in _SOURCES) + repr(command).encode()).hexdigest()[:16]
    place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gbfunc" / f"kernels_{digest}.so"
    if place.exists():
        return ctypes.CDLL(str(place))
    # A private folder: nobody else can place a library there.
    with tempfile.TemporaryDirectory(prefix="gbfunc-") as folder:
        made = Path(folder) / place.name
        run = subprocess.run([*command, *sources, "-o", str(made)], capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"{shlex.join(command)} failed on the kernels: {run.stderr.strip()[-2000:]}")
        # Without a cache each process compiles a library, which stays loaded after its file is deleted.
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            replace_file(place, made.read_bytes())
            return ctypes.CDLL(str(place))
        return ctypes.CDLL(str(made))


@functools.cache
def is_available(*, warn: bool = True) -> bool:
    """Return whether the compiled kernels are available; warns once with the reason if not."""
    try:
        library()
    except (OSError, RuntimeError) as error:
        if warn:
            warn_of_use(str(error), "a C++ compiler")
        return False
    return True


_THREAD_WORK = 2**16  # Hidden activations per additional thread, about 10 us


def _sides(X: Tensor, Y: Tensor, *leaves: Tensor) -> array[int]:
    """Pack `Sides` of `relu.cpp`: the arrays, code widths, and strides between the codes of tiles."""
    steps = [0 if len(x) == 1 else x[0].numel() for x in (X, Y)]
    return array("q", [*map(Tensor.data_ptr, (X, Y, *leaves)), X.shape[2], Y.shape[2], *steps])


def _call(direction: str, grid: TileGrid, v: Tensor, parts: int, *arguments: Tensor | array[int]) -> None:
    sizes = array("q", (grid.rows, grid.cols, grid.tile_rows, grid.tile_cols, v.shape[1], parts))
    places = [x.data_ptr() if isinstance(x, Tensor) else x.buffer_info()[0] for x in (*arguments, sizes)]
    threads = min(torch.get_num_threads(), 1 + grid.numel * v.shape[1] // _THREAD_WORK)
    kind = {torch.float32: "f32", torch.float64: "f64"}[v.dtype]
    getattr(library(), f"relu_{direction}_{kind}")(*map(ctypes.c_void_p, places), threads)


def _parts(grid: TileGrid) -> int:
    """Return the number of parts per tile; enough work items to balance threads of uneven speed."""
    return max(1, min(-(-4 * torch.get_num_threads() // grid.n_tiles), grid.tile_rows // 16))


def matrix(inputs: Sequence[Tensor], grid: TileGrid) -> Tensor:
    """Generate the matrix [R, C] from X, Y, U, V, u, v and b, as `relu_matrix` takes them."""
    *sides, v, b = (x.detach().contiguous() for x in inputs)
    W_RC = v.new_empty(grid.rows, grid.cols)
    _call("forward", grid, v, _parts(grid), _sides(*sides), v, b, W_RC)
    return W_RC


def gradients(g: Tensor, inputs: Sequence[Tensor], grid: TileGrid) -> tuple[Tensor, ...]:
    """Compute the gradients of U, V, u, v and b from the gradient of the matrix [R, C]."""
    g, *sides, v, b = (x.detach().contiguous() for x in (g, *inputs))
    # Each part of a tile accumulates separate sums.
    parts = _parts(grid)
    sums = [x.new_zeros(parts, *x.shape) for x in (*sides[2:], v, b)]
    _call("backward", grid, v, parts, g, _sides(*sides), v, array("q", map(Tensor.data_ptr, sums)))
    return tuple(x.sum(0) if parts > 1 else x[0] for x in sums)
