"""The tile of a ReLU g-net as fused reductions, made by `torch.compile`: Triton on a GPU.

Suffixes: T tiles; r, c rows and columns of a tile; H hidden units. Memory is O(T r c).
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gbfunc.hypernets.kernels.reference import reference_sums, reference_tiles


class CompiledForms(NamedTuple):
    """Forward and backward reductions, compiled for one shape.

    Attributes:
        tiles: [T, r, H], [T, c, H], [T, H], [T] -> tiles [T, r, c].
        sums: cotangent [T, r, c], [T, r, H], [T, c, H] -> its sums over active columns and rows, [T, r, H], [T, c, H].
    """

    tiles: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    sums: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _sums(g_Trc: Tensor, A_TrH: Tensor, B_TcH: Tensor) -> tuple[Tensor, Tensor]:
    return reference_sums(g_Trc, A_TrH, B_TcH), reference_sums(g_Trc.mT, B_TcH, A_TrH)


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for the shapes of the first call.

    Static shapes ran the forward pass three times as fast as dynamic ones. The function gets a code object of its own,
    because Dynamo counts recompilations per code object and would stop at the eighth tile shape.
    """
    code = function.__code__.replace()
    own = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    return torch.compile(own, fullgraph=True, dynamic=False)


@functools.cache
def compiled_forms(
    tiles: int, rows: int, cols: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> CompiledForms:
    """Build both reductions for one shape; each compiles when it is first called.

    Raises:
        Exception: on the first call, whatever `torch.compile` raises when it finds no working compiler.
    """
    fused_tiles, fused_sums = _compile(reference_tiles), _compile(_sums)

    # Detached, because the guards of a compiled function tell apart tensors that require grad. The copy puts the index
    # of the inner loop last in memory, so that neighbours read neighbours.
    def tiles_form(A: Tensor, B: Tensor, v: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            return fused_tiles(A.detach().contiguous(), B.detach().mT.contiguous().mT, v.detach(), b.detach())

    def sums_form(g: Tensor, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return fused_sums(*(x.detach().contiguous() for x in (g, A, B)))

    return CompiledForms(tiles_form, sums_form)


@functools.cache
def _has_compiler(device_type: str) -> bool:
    """Whether `torch.compile` works for this kind of device: compiles and runs a one-line function, once."""
    try:
        torch.compile(lambda x: x + 1, fullgraph=True, dynamic=False)(torch.zeros(16, device=device_type))
    except Exception as error:  # a missing compiler shows in many ways, and each has the same cure
        warnings.warn(
            f"torch.compile does not work on {device_type!r} ({type(error).__name__}), so large ReLU ensembles use the "
            "slower eager kernel; install a C++ compiler, or ask for kernel='eager' to silence this",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


@functools.cache
def working_forms(
    tiles: int, rows: int, cols: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> CompiledForms | None:
    """Compile both reductions for one shape now, or say by None, after one warning, that this cannot be done here."""
    if not _has_compiler(device.type):
        return None
    forms = compiled_forms(tiles, rows, cols, hidden, dtype, device)
    A_TrH = torch.zeros(tiles, rows, hidden, dtype=dtype, device=device)
    B_TcH = torch.zeros(tiles, cols, hidden, dtype=dtype, device=device)
    try:
        forms.sums(forms.tiles(A_TrH, B_TcH, A_TrH[:, 0], A_TrH[:, 0, 0]), A_TrH, B_TcH)
    except Exception as error:  # as above
        warnings.warn(
            f"the fused ReLU kernel did not compile ({type(error).__name__}); using the slower eager kernel",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return forms
