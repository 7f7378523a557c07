"""The tile of a ReLU g-net as fused reductions, made by `torch.compile`: C++ on a CPU, Triton on a GPU.

Suffixes: T tiles; r, c rows and columns of a tile; H hidden units. Memory is O(T r c).
"""

from __future__ import annotations

import functools
import itertools
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gbfunc.kernels.reference import compute_dtype, reference_tiles

_GROUPS = 2
"""Sums that run side by side in a CPU's vector loop. Each is a chain of additions that waits for itself; two that share
their loads took 15 instead of 19 ms (tiles) and 25 instead of 37 ms (sums) for 441 tiles of 98 x 98, H = 32."""

_LANES = 8
"""Numbers in a vector, from which on a cut of the hidden units leaves whole vectors."""


class CompiledForms(NamedTuple):
    """Forward and backward reductions, compiled for one shape.

    Attributes:
        tiles: [T, r, H], [T, c, H], [T, H], [T] -> tiles [T, r, c].
        gradients: cotangent [T, r, c], [T, r, H], [T, c, H], [T, H] -> gradients [T, r, H], [T, c, H], [T, H], [T].
    """

    tiles: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    gradients: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def _cut(size: int, groups: int, device: torch.device) -> list[slice]:
    """Cut a dimension into equal groups, and what is left over; a GPU has enough to do with one."""
    n = size // groups if device.type == "cpu" else 0
    ends = [*range(0, n * groups, n), n * groups, size] if n else [0, size]
    return [slice(a, b) for a, b in itertools.pairwise(ends) if b > a]


def _tiles(A_TrH: Tensor, B_TcH: Tensor, v_TH: Tensor, b_T: Tensor) -> Tensor:
    # With the index of the vector loop last in memory: strided loads take twice as long.
    B_THc = B_TcH.mT.contiguous()
    rows = _cut(A_TrH.shape[1], _GROUPS, A_TrH.device)
    return torch.cat([reference_tiles(A_TrH[:, i], B_THc.mT, v_TH, b_T) for i in rows], 1)


def _active_sums(g_Trc: Tensor, A_TrH: Tensor, nB_TcH: Tensor) -> Tensor:
    """`reference_sums` of A and -B: `a > -b` spares the addition in `a + b > 0`, and is the same in floating point."""
    dtype, hidden = compute_dtype(A_TrH.dtype), A_TrH.shape[2]
    rows = _cut(A_TrH.shape[1], _GROUPS, A_TrH.device)
    units = _cut(hidden, _GROUPS if hidden % (_GROUPS * _LANES) == 0 else 1, A_TrH.device)

    def some(i: slice, h: slice) -> Tensor:
        active = A_TrH[:, i, h].unsqueeze(-2) > nB_TcH[..., h].unsqueeze(-3)
        return torch.where(active, g_Trc[:, i].to(dtype).unsqueeze(-1), 0).sum(-2)

    return torch.cat([torch.cat([some(i, h) for h in units], 2) for i in rows], 1)


def _gradients(
    g_Trc: Tensor, A_TrH: Tensor, B_TcH: Tensor, v_TH: Tensor, nA_TrH: Tensor, nB_TcH: Tensor
) -> tuple[Tensor, ...]:
    # Two loops that each read g along its rows: with strides the second took 12 instead of 8 ms, the copy included.
    g_Tcr = g_Trc.mT.contiguous() if g_Trc.device.type == "cpu" else g_Trc.mT
    SA_TrH, SB_TcH = _active_sums(g_Trc, A_TrH, nB_TcH), _active_sums(g_Tcr, B_TcH, nA_TrH)
    dv_TH, v_T1H = (A_TrH * SA_TrH).sum(1) + (B_TcH * SB_TcH).sum(1), v_TH.unsqueeze(1)
    db_T = g_Trc.to(SA_TrH.dtype).sum((-2, -1))
    return tuple(x.to(v_TH.dtype) for x in (SA_TrH * v_T1H, SB_TcH * v_T1H, dv_TH, db_T))


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
    fused_tiles, fused_gradients = _compile(_tiles), _compile(_gradients)

    # Detached, because the guards of a compiled function tell apart tensors that require grad.
    def tiles_form(A: Tensor, B: Tensor, v: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            return fused_tiles(*(x.detach().contiguous() for x in (A, B, v, b)))

    def gradients_form(g: Tensor, A: Tensor, B: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            g, A, B, v = (x.detach().contiguous() for x in (g, A, B, v))
            return fused_gradients(g, A, B, v, -A, -B)

    return CompiledForms(tiles_form, gradients_form)


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
        forms.gradients(forms.tiles(A_TrH, B_TcH, A_TrH[:, 0], A_TrH[:, 0, 0]), A_TrH, B_TcH, A_TrH[:, 0])
    except Exception as error:  # as above
        warnings.warn(
            f"the fused ReLU kernel did not compile ({type(error).__name__}); using the slower eager kernel",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return forms
