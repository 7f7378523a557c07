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

from gbfunc.kernels.reference import compute_dtype, hidden_sums

_GROUPS = 2
"""Sums that run side by side in a CPU's vector loop. Each is a chain of additions that waits for itself; two that share
their loads took 11 instead of 16 ms (tiles) and 21 instead of 37 ms (sums) for 441 tiles of 98 x 98, H = 32."""


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


# Compiled are the bare reductions, in parts. Whatever follows one inside a compiled function (a bias, a product, a
# `cat`) takes the parts' loops apart: half as long again, against a tenth for the same in eager passes over a cache.


def _tile_parts(A_TrH: Tensor, B_THc: Tensor, v_TH: Tensor) -> list[Tensor]:
    rows = _cut(A_TrH.shape[1], _GROUPS, A_TrH.device)
    return [hidden_sums(A_TrH[:, i], B_THc.mT, v_TH) for i in rows]


def _active_sums(g_Trc: Tensor, A_TrH: Tensor, nB_TcH: Tensor) -> list[Tensor]:
    """`reference_sums` of A and -B: `a > -b` spares the addition in `a + b > 0`, and is the same in floating point."""
    g_Trc = g_Trc.to(compute_dtype(A_TrH.dtype)).unsqueeze(-1)
    rows = _cut(A_TrH.shape[1], _GROUPS, A_TrH.device)
    return [torch.where(A_TrH[:, i].unsqueeze(-2) > nB_TcH.unsqueeze(-3), g_Trc[:, i], 0).sum(-2) for i in rows]


def _sums(
    g_Trc: Tensor, A_TrH: Tensor, B_TcH: Tensor, nA_TrH: Tensor, nB_TcH: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    # Two loops that each read g along its rows: with strides the second took 12 instead of 8 ms, the copy included.
    g_Tcr = g_Trc.mT.contiguous() if g_Trc.device.type == "cpu" else g_Trc.mT
    return _active_sums(g_Trc, A_TrH, nB_TcH), _active_sums(g_Tcr, B_TcH, nA_TrH)


def _finish(parts: list[Tensor], A_TrH: Tensor, v_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of A from its sums S, `S v`, and its part of that of v, `sum_i A S`."""
    dA_TrH, dv_TH = torch.empty_like(A_TrH), v_TH.new_zeros(v_TH.shape, dtype=compute_dtype(v_TH.dtype))
    for i, part in zip(_cut(A_TrH.shape[1], _GROUPS, A_TrH.device), parts, strict=True):
        torch.mul(part, v_TH.unsqueeze(1), out=dA_TrH[:, i])
        dv_TH += part.mul_(A_TrH[:, i]).sum(1)
    return dA_TrH, dv_TH


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
    fused_tiles, fused_sums = _compile(_tile_parts), _compile(_sums)

    # Detached, because the guards of a compiled function tell apart tensors that require grad. The copies put the index
    # of the vector loop last in memory: without them the loads are strided and the loops take twice as long.
    def tiles_form(A: Tensor, B: Tensor, v: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            parts = fused_tiles(A.detach().contiguous(), B.detach().mT.contiguous(), v.detach().contiguous())
            W_Trc = A.new_empty(tiles, rows, cols)
            for i, part in zip(_cut(rows, _GROUPS, device), parts, strict=True):
                torch.add(part, b.detach()[:, None, None], out=W_Trc[:, i])
            return W_Trc

    def gradients_form(g: Tensor, A: Tensor, B: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            g, A, B, v = (x.detach().contiguous() for x in (g, A, B, v))
            a_parts, b_parts = fused_sums(g, A, B, -A, -B)
            (dA, dv), (dB, dv_too) = _finish(a_parts, A, v), _finish(b_parts, B, v)
            return dA, dB, (dv + dv_too).to(v.dtype), g.sum((-2, -1), dtype=dv.dtype).to(v.dtype)

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
