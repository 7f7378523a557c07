"""Factors of periodic g-nets: sines and cosines of codes with coefficients, for many g-nets in one operator.

A *side* is the left or the right factor of a tile. With codes X, code weights U, angles A = X U + phase and
coefficients s and t, a side is the thin matrix `[s sin A + t cos A, s cos A - t sin A]`. Let `g` and `h` be the
gradients of the two halves. With `along = g sin A + h cos A` and `across = g cos A - h sin A`, the gradients of s, t
and A are `ds = sum_i along`, `dt = sum_i across` and `dA = s across - t along`, where i are the rows of the side.

A backend computes all sides of a training step in one call, and all gradients in another call: `waves.cpp` on a CPU,
`waves_triton` on a GPU. `Side.in_parts` uses PyTorch's operators, for higher derivatives, forward mode, `torch.func`,
and compiled or exported graphs.

Suffixes: T tiles, G groups (tiles with equal code weights), n rows of a side, p width of codes, H features, U 1 or T.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from gbfunc.hypernets.kernels import native
from gbfunc.types import Kernel

Tensors: TypeAlias = tuple[Tensor, ...]


class Side(NamedTuple):
    """The left factors (for rows) or the right factors (for columns) of many tiles, given by codes and leaves."""

    codes: Tensor  # codes of the matrix's rows, or of its columns, [U, n, p]
    weight: Tensor  # code weights [T, p, H], or [G, p, H] for G groups of tiles that have equal code weights
    phase: Tensor | None = None  # term of the angles A, [T, H]; None means 0
    sine: Tensor | None = None  # the coefficients s [T, H]; None means 1
    cosine: Tensor | None = None  # the coefficients t [T, H]; None means 0
    scale: Tensor | None = None  # factor [T] of the coefficients s and t; None means 1
    groups: Tensor | None = None  # [T]: index of every tile's group; None if every tile has its own code weights
    cosine_first: bool = False  # whether `s cos A - t sin A` is the left half of the factors
    period: int = 0  # period of the codes (`period_of`); 0 if unknown

    def in_parts(self) -> Tensor:
        """Compute the factors [T, n, 2 H] with PyTorch's operators."""
        weight_THp = (self.weight if self.groups is None else self.weight[self.groups]).mT
        codes = self.codes[0] if len(self.codes) == 1 else self.codes
        n = codes.shape[-2]
        m = self.period or n

        # Return sines and cosines [T, H, n] of the codes' angles. IREE rejects codes of width 0: use zeros.
        def turns(codes: Tensor, phase: Tensor | None) -> tuple[Tensor, Tensor]:
            size = *weight_THp.shape[:-1], codes.shape[-2]
            angle = weight_THp @ codes.mT if codes.shape[-1] else codes.new_zeros(size)
            angle = angle if phase is None else angle + phase.unsqueeze(-1)
            return torch.sin(angle), torch.cos(angle)

        sin, cos = turns(codes if m == n else codes[..., :m, :], self.phase)
        scale = None if self.scale is None else self.scale[:, None]
        s, t = (x if x is None else (x if scale is None else x * scale).unsqueeze(-1) for x in (self.sine, self.cosine))
        if m < n:
            d, c = turns(codes[..., ::m, :] - codes[..., :1, :], None)
            s, t = (c, d) if s is None else (s * c, s * d) if t is None else (s * c - t * d, s * d + t * c)
            s, t, sin, cos = s.unsqueeze(-1), t.unsqueeze(-1), sin.unsqueeze(-2), cos.unsqueeze(-2)
        if s is None:
            halves = sin, cos
        elif t is None:
            halves = sin * s, cos * s
        else:
            halves = sin * s + cos * t, cos * s - sin * t
        if m < n:
            halves = tuple(x.flatten(-2)[..., :n] for x in halves)
        return torch.cat(halves[::-1] if self.cosine_first else halves, -2).mT


def period_of(codes_Unp: Tensor) -> int:
    """Find a period m of codes: `code[b m + o] = code[b m] + code[o] - code[0]` for every b, and every o below m.

    With a period m, the sines of all n codes follow from the sines of m + n / m codes (addition theorem). Bits and
    pixel coordinates have short periods, and n is a period of any codes. Returns the period that takes the least time.
    """
    n = codes_Unp.shape[1]
    numbers = torch.arange(n, device=codes_Unp.device)

    def fits(m: int) -> bool:
        pair = codes_Unp[:, numbers // m * m], codes_Unp[:, numbers % m]
        same = [(codes_Unp == x) & (y == codes_Unp[:, :1]) for x, y in (pair, pair[::-1])]
        return bool((same[0] | same[1]).all())

    def work(m: int) -> float:
        return -(-n // m) * (-(-m // 16) + 3) + (m + n / m) / 2

    changed = (codes_Unp != codes_Unp[:, :1]).any(0)
    runs = changed.int().argmax(0)[changed.any(0)].tolist()
    return next(m for m in sorted({n, *runs}, key=work) if m == n or fits(m))


def have_memory(tensors: Iterable[Tensor]) -> bool:
    """Return whether compiled code can read the tensors. False in `vmap`, and for meta, fake or subclassed tensors."""
    try:
        for x in tensors:
            if type(x) not in (Tensor, nn.Parameter) or x.is_meta:
                return False
            x.data_ptr()
    except RuntimeError:  # raised inside `torch.func` and `torch.autograd.grad(is_grads_batched=True)`
        return False
    return True


def is_plain_needed() -> bool:
    """Return whether only PyTorch's operators can be used, because `torch.compile` or forward mode is active."""
    return torch.compiler.is_compiling() or forward_ad._current_level >= 0


_THREAD_WORK = 2**14  # Use one more thread for every 2^14 sines and cosines

Pull = Callable[[Sequence[Tensor]], list[Tensor]]
# Returns factors [T, n, 2 H], stored as [T, 2 H, n], and a function that computes the gradients of the leaves.
Backend = Callable[[Sequence[Side]], tuple[list[Tensor], Pull]]


def _native(sides: Sequence[Side]) -> tuple[list[Tensor], Pull]:
    fields: list[int] = []
    outputs: list[Tensor] = []
    kept: list[Tensor] = []  # tensors that must stay alive, because backward reads their memory
    for side in sides:
        tiles, (groups, width, features) = len(side.weight if side.groups is None else side.groups), side.weight.shape
        rows = side.codes.shape[1]
        # Store factors as [T, 2 H, n]: if 2 H is small, products of factors are faster than with [T, n, 2 H].
        out = side.weight.new_empty_strided((tiles, rows, 2 * features), (2 * features * rows, 1, rows))
        outputs.append(out)
        for x in side[:7]:
            if x is not None and not x.is_contiguous():
                kept.append(x := x.contiguous())
            fields.append(0 if x is None else x.data_ptr())
        step = 0 if side.codes.shape[0] == 1 else rows * width
        fields += (out.data_ptr(), 0, 0, 0, 0, tiles, groups, rows, width, features, step)
        fields += (side.cosine_first, side.period or max(rows, 1))
    waves = array("q", fields)  # Ten times faster than an array of ctypes.
    threads = min(torch.get_num_threads(), 1 + sum([x.numel() for x in outputs]) // _THREAD_WORK)

    # `pull` must not refer to the outputs, whose graph refers to `pull`: a cycle would delay freeing memory.
    dtype = sides[0].weight.dtype

    def run(direction: str, waves: array[int]) -> None:
        function = native.function(f"waves_{direction}", dtype)
        function(ctypes.c_void_p(waves.buffer_info()[0]), ctypes.c_int64(len(sides)), threads)

    def pull(cotangents: Sequence[Tensor], kept: list[Tensor] = kept) -> list[Tensor]:
        again, gradients = waves[:], list[Tensor]()
        strides = [(g.shape[1] * g.shape[2], 1, g.shape[1]) for g in cotangents]
        same = zip(cotangents, strides, strict=True)
        cotangents = [g if g.stride() == stride else g.mT.contiguous().mT for g, stride in same]
        firsts = range(7, len(again), len(again) // len(sides))  # index of the first gradient pointer of each side
        for first, side, g in zip(firsts, sides, cotangents, strict=True):
            again[first] = g.data_ptr()
            for i, x in enumerate(side[1:5], first + 1):
                if x is not None:
                    gradients.append(d := torch.empty_like(x, memory_format=torch.contiguous_format))
                    again[i] = d.data_ptr()
        run("backward", again)
        return gradients

    run("forward", waves)
    return outputs, pull


def _backend(sides: Sequence[Side], leaves: Sequence[Tensor], kernel: Kernel) -> Backend | None:
    # Use operators in `torch.func`'s transforms, which reject the autograd function `_Waves` for all leaves.
    if is_plain_needed() or torch._C._are_functorch_transforms_active():
        return None
    kinds = {(x.dtype, x.device.type) for x in (*leaves, *[side.codes for side in sides])}
    (dtype, device), *others = kinds
    if others or dtype not in (torch.float32, torch.float64) or not have_memory(leaves):
        return None
    if not native.has_kernels(device, kernel):
        return None
    if device == "cpu":
        return _native
    from gbfunc.hypernets.kernels.waves_triton import backend

    return backend


class _Waves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backend: Backend, sides: Sequence[Side], *leaves: Tensor) -> Tensors:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.sides, (outputs, ctx.pull) = sides, backend(sides)
        ctx.save_for_backward(*leaves)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        leaves = ctx.saved_tensors  # Raises RuntimeError if a leaf was modified after forward
        if not torch.is_grad_enabled() and have_memory(cotangents):
            return None, None, *ctx.pull(cotangents)

        def in_parts(*leaves: Tensor) -> Tensors:
            rest, names = iter(leaves), Side._fields[1:5]
            filled = ({k: next(rest) for k in names if getattr(side, k) is not None} for side in ctx.sides)
            return tuple(side._replace(**own).in_parts() for side, own in zip(ctx.sides, filled, strict=True))

        pull: Any = torch.func.vjp(in_parts, *leaves)[1]
        return None, None, *pull(cotangents)


def waves(sides: Sequence[Side], *, kernel: Kernel = "auto") -> list[Tensor]:
    """Compute the factors [T, n, 2 H] of each side, differentiable in leaves to any order. All sides have one dtype.

    In transforms, in compiled graphs, and for tensors that no backend accepts, PyTorch's operators are used.
    Raises RuntimeError for `kernel="compiled"` on a CPU without a working C++ compiler.
    """
    leaves = [x for side in sides for x in side[1:5] if x is not None]
    if leaves and (backend := _backend(sides, leaves, kernel)) is not None:
        factors: Any = _Waves.apply(backend, sides, *leaves)
        return list(factors)
    return [side.in_parts() for side in sides]
