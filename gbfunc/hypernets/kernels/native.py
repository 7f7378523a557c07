"""Kernels in C++, compiled when they are first used."""

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
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from gbfunc.files import replace_file
from gbfunc.types import Kernel

_SOURCES = sorted(x for x in Path(__file__).parent.iterdir() if x.suffix in (".cpp", ".h"))
_AVX2 = ("-mavx2", "-mfma")
# Do not use -march=native: the cache may be in a home folder that machines with different processors use.
_FLAGS = {"AVX2": _AVX2, "AVX512": (*_AVX2, "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl")}


@functools.cache
def library() -> ctypes.CDLL:
    """Load the compiled kernels. The first call on a machine compiles them; RuntimeError without a working compiler."""
    named = shlex.split(os.environ.get("CXX", ""))
    compiler = next(filter(None, map(shutil.which, named[:1] or ["c++", "g++", "clang++"])), None)
    if compiler is None:
        looked_for = f"CXX={os.environ['CXX']!r}" if named else "c++, g++ and clang++"
        raise RuntimeError(f"the compiled kernels need a C++ compiler, found none of {looked_for} on the path")
    # Apple's compiler lacks OpenMP, so the loops run on one thread.
    flags = ["-std=c++17", "-O3", "-shared", "-fPIC", *([] if sys.platform == "darwin" else ["-fopenmp"])]
    command = [compiler, *named[1:], *flags, *_FLAGS.get(torch.backends.cpu.get_cpu_capability(), ())]
    # The file name contains a hash of sources and command, so changed kernels are compiled again.
    sources = [str(x) for x in _SOURCES if x.suffix == ".cpp"]
    digest = hashlib.sha256(b"".join(x.read_bytes() for x in _SOURCES) + repr(command).encode()).hexdigest()[:16]
    place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gbfunc" / f"kernels_{digest}.so"
    if place.exists():
        return ctypes.CDLL(str(place))
    # Compile in a private folder, where no other user can replace the library.
    with tempfile.TemporaryDirectory(prefix="gbfunc-") as folder:
        built = Path(folder) / place.name
        run = subprocess.run([*command, *sources, "-o", str(built)], capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"{shlex.join(command)} failed on the kernels: {run.stderr.strip()[-2000:]}")
        # If the cache cannot be written, load the temporary file. The library stays loaded after the file is deleted.
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            replace_file(place, built.read_bytes())
        return ctypes.CDLL(str(place if place.exists() else built))


@functools.cache
def _is_available(device_type: str) -> bool:
    try:
        if device_type == "cpu":
            library()
        elif find_spec("triton") is None:
            raise RuntimeError("the kernels of a GPU need Triton")
    except (OSError, RuntimeError) as error:
        cure = "install a C++ compiler" if device_type == "cpu" else "install triton (gbfunc[triton])"
        words = f"{error}; slower operators of PyTorch replace the kernels; {cure}, or ask for kernel='eager'"
        warnings.warn(f"{words} to silence this", RuntimeWarning, stacklevel=4)
        return False
    return True


@functools.cache
def has_kernels(device_type: str, kernel: Kernel) -> bool:
    """Return whether `kernel` selects compiled kernels on this type of device: C++ on "cpu", Triton on "cuda"."""
    if kernel not in ("auto", "compiled") or device_type not in ("cpu", "cuda"):
        return False
    return (kernel == "compiled" and device_type == "cpu") or _is_available(device_type)


@functools.cache
def function(name: str, dtype: torch.dtype) -> Any:
    """Return the compiled function `name` for float32 or float64."""
    return getattr(library(), f"{name}_{'f32' if dtype == torch.float32 else 'f64'}")
