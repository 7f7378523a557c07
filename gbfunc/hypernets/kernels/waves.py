"""Sines and cosines of codes, with their coefficients: the factors of periodic g-nets, of many of them in one operator.

A side of a tile with codes X, code weights U and coefficients s and t is, with A = X U + phase, the thin matrix
`[s sin A + t cos A, s cos A - t sin A]`. With `g` and `h` the cotangents of its halves, `along = g sin A + h cos A` and
`across = g cos A - h sin A`, the gradients are `ds = sum_i along`, `dt = sum_i across`, and `dA = s across - t along`.

On a CPU `waves.cpp` makes all sides of a step, and their gradients, in one call each. Further derivatives, forward
mode, `torch.func` and compiled or exported graphs use the expression in PyTorch, `Side.in_parts`.

Suffixes: T tiles, G groups of tiles, n rows of a side, p width of its codes, H features, U 1 or T.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gbfunc.hypernets.kernels import native
from gbfunc.hypernets.kernels.chunked import Tensors
from gbfunc.trees import have_memory
from gbfunc.types import Kernel


class Side(NamedTuple):
    """What one side of some tiles is made of.

    Attributes:
        codes: of the rows [U, n, p].
        weight: of the codes [T, p, H], or [G, p, H].
        phase: added to the angles [T, H]; None is 0.
        sine: the coefficients s [T, H]; None is 1.
        cosine: the coefficients t [T, H]; None is 0.
        scale: of the coefficients [T]; None is 1.
        groups: numbers in [0, G) of the tiles' code weights [T]; None where each tile has its own.
        cosine_first: whether the halves change places.
        period: what `period_of` found of the codes; 0 is none.
    """

    codes: Tensor
    weight: Tensor
    phase: Tensor | None = None
    sine: Tensor | None = None
    cosine: Tensor | None = None
    scale: Tensor | None = None
    groups: Tensor | None = None
    cosine_first: bool = False
    period: int = 0

    def in_parts(self) -> Tensor:
        """The side [T, n, 2 H], by operators of PyTorch; without T in all arguments, of one tile [n, 2 H]."""
        weight_Hp = (self.weight if self.groups is None else self.weight[self.groups]).mT
        codes_np, m = self.codes[0] if self.codes.ndim == 3 and len(self.codes) == 1 else self.codes, self.period
        n = codes_np.shape[-2]

        def turns(codes_np: Tensor, phase: Tensor | None) -> tuple[Tensor, Tensor]:
            """Sines and cosines [T, H, n] of some codes."""
            # Codes of width 0 have a product that no IREE takes.
            size = *weight_Hp.shape[:-1], codes_np.shape[-2]
            angle = weight_Hp @ codes_np.mT if codes_np.shape[-1] else codes_np.new_zeros(size)
            angle = angle if phase is None else angle + phase.unsqueeze(-1)
            return torch.sin(angle), torch.cos(angle)

        sin, cos = turns(codes_np[..., :m, :] if m else codes_np, self.phase)
        s, t = (self._scaled(x) for x in (self.sine, self.cosine))
        if 0 < m < n:
            d, c = turns(codes_np[..., ::m, :] - codes_np[..., :1, :], None)
            s, t = (c, d) if s is None else (s * c, s * d) if t is None else (s * c - t * d, s * d + t * c)
            s, t, sin, cos = s.unsqueeze(-1), t.unsqueeze(-1), sin.unsqueeze(-2), cos.unsqueeze(-2)
        if s is None:
            halves = sin, cos
        elif t is None:
            halves = sin * s, cos * s
        else:
            halves = sin * s + cos * t, cos * s - sin * t
        if 0 < m < n:
            halves = tuple(x.flatten(-2)[..., :n] for x in halves)
        return torch.cat(halves[::-1] if self.cosine_first else halves, -2).mT

    def _scaled(self, coefficient: Tensor | None) -> Tensor | None:
        if coefficient is None:
            return None
        return (coefficient if self.scale is None else coefficient * self.scale[:, None]).unsqueeze(-1)


def period_of(codes_Unp: Tensor) -> int:
    """The number m of rows such that row b m + o has the code of row b m, plus that of row o, less that of row 0.

    So have the bits of a number, and the coordinates of an image's pixels. The best of several m is taken by a count of
    the work that it leaves; all rows where there is none.
    """
    n = codes_Unp.shape[1]
    numbers = torch.arange(n, device=codes_Unp.device)

    def fits(m: int) -> bool:
        of_block, of_place = codes_Unp[:, numbers // m * m], codes_Unp[:, numbers % m]
        return bool(
            (
                (codes_Unp == of_block) & (of_place == codes_Unp[:, :1])
                | (codes_Unp == of_place) & (of_block == codes_Unp[:, :1])
            ).all()
        )

    changed = (codes_Unp != codes_Unp[:, :1]).any(0)
    runs = {int(column.nonzero()[0]) for column in changed.unbind(1) if column.any()}

    def work(m: int) -> float:
        return -(-n // m) * (-(-m // 16) + 3) + (m + n / m) / 2

    return min((m for m in {n, *runs} if m == n or (work(m) < work(n) and fits(m))), key=work)


_THREAD_WORK = 2**14
"""Sines and cosines that repay one more thread."""


_OUT = 7
"""Where the output is among the fields of a `Wave` of `waves.cpp`: after the side's tensors, before four gradients."""


class _Kernels:
    """The compiled kernels on some sides; backward takes over what forward has written for them."""

    def __init__(self, sides: Sequence[Side]) -> None:
        self.sides = sides
        self._fields, self._threads, self._kind = array("q"), 1, "f32"
        # Must live until the last call.
        self._copies: list[Tensor] = []

    def forward(self, outputs: Sequence[Tensor]) -> None:
        """Fill the outputs, whose rows are last in memory."""
        fields: list[int] = []
        for side, out in zip(self.sides, outputs, strict=True):
            (tiles, rows, features), (groups, width, _) = out.shape, side.weight.shape
            for x in side[:_OUT]:
                if x is not None and not x.is_contiguous():
                    self._copies.append(x := x.contiguous())
                fields.append(0 if x is None else x.data_ptr())
            step = 0 if side.codes.shape[0] == 1 else rows * width
            fields += (out.data_ptr(), 0, 0, 0, 0, tiles, groups, rows, width, features // 2, step)
            fields += (side.cosine_first, side.period or max(rows, 1))
        self._fields = array("q", fields)  # Ten times faster than an array of ctypes.
        self._threads = 1 + sum([x.numel() for x in outputs]) // _THREAD_WORK
        self._kind = "f32" if outputs[0].dtype == torch.float32 else "f64"
        self._call("forward", self._fields)

    def backward(self, cotangents: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Fill the gradients of the leaves, from those of the outputs."""
        fields, places = self._fields[:], map(Tensor.data_ptr, gradients)
        firsts = range(_OUT, len(fields), len(fields) // len(self.sides))
        copies: list[Tensor] = []
        for first, side, g in zip(firsts, self.sides, cotangents, strict=True):
            _, rows, features = g.shape
            if g.stride() != (rows * features, 1, rows) and not (g := g.mT).is_contiguous():
                copies.append(g := g.contiguous())
            fields[first] = g.data_ptr()
            for i, x in enumerate(side[1:5], first + 1):
                if x is not None:
                    fields[i] = next(places)
        self._call("backward", fields)

    def _call(self, direction: str, fields: array[int]) -> None:
        function = getattr(native.library(), f"waves_{direction}_{self._kind}")
        threads = min(torch.get_num_threads(), self._threads)
        function(ctypes.c_void_p(fields.buffer_info()[0]), ctypes.c_int64(len(self.sides)), threads)


def _filled(sides: Sequence[Side], leaves: Sequence[Tensor]) -> list[Side]:
    """The sides with other leaves, those of one after those of the other."""
    found, names = iter(leaves), Side._fields[1:5]
    return [side._replace(**{k: next(found) for k in names if getattr(side, k) is not None}) for side in sides]


def _in_parts(sides: Sequence[Side], *leaves: Tensor) -> Tensors:
    return tuple(side.in_parts() for side in _filled(sides, leaves))


class _Waves(torch.autograd.Function):
    """Many sides at once, of plain tensors: no transform of `torch.func` comes here, not even one of other tensors."""

    @staticmethod
    def forward(ctx: Any, sides: Sequence[Side], *leaves: Tensor) -> Tensors:
        outputs: list[Tensor] = []
        for side in sides:
            tiles = (side.weight if side.groups is None else side.groups).shape[0]
            shape = tiles, side.codes.shape[1], 2 * side.weight.shape[2]
            # Rows last in memory: products with few columns are faster so.
            outputs.append(side.weight.new_empty_strided(shape, (shape[1] * shape[2], 1, shape[1])))
        ctx.kernels = _Kernels(sides)
        ctx.kernels.forward(outputs)
        ctx.save_for_backward(*leaves)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        leaves = ctx.saved_tensors  # Raises if one was changed: they are those of the sides.
        if torch.is_grad_enabled() or not have_memory(cotangents):
            pull: Any = torch.func.vjp(functools.partial(_in_parts, ctx.kernels.sides), *leaves)[1]
            return None, *pull(cotangents)
        gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in leaves]
        ctx.kernels.backward(cotangents, gradients)
        return None, *gradients


def _is_native(sides: Sequence[Side], leaves: Sequence[Tensor], kernel: Kernel) -> bool:
    """Whether the compiled program can make them, and is to."""
    if kernel not in ("auto", "compiled") or torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return False
    # The test by which torch refuses such a Function: a transform may be of the inputs of the p-net alone.
    if torch._C._are_functorch_transforms_active():
        return False
    dtype = leaves[0].dtype
    if dtype not in (torch.float32, torch.float64) or not all(x.is_cpu and x.dtype == dtype for x in leaves):
        return False
    alike = all(side.codes.dtype == dtype for side in sides) and have_memory(leaves)
    return alike and (kernel == "compiled" or native.is_available(warn=False))


def waves(sides: Sequence[Side], *, kernel: Kernel = "auto") -> list[Tensor]:
    """Make some sides [T, n, 2 H], differentiable to any order in their leaves.

    Args:
        sides: what they are made of; all of one dtype for the compiled form.
        kernel: "compiled" is one C++ loop for all sides, on a CPU, in float32 or float64; "auto" is that where there is
            a C++ compiler; other tensors, transforms and compiled graphs take the operators of PyTorch, as "eager" and
            "reference" do, the last with a sine for each row.

    Raises:
        RuntimeError: if "compiled" is asked for on a CPU, and there is no C++ compiler that works.
    """
    leaves = [x for side in sides for x in side[1:5] if x is not None]
    if leaves and _is_native(sides, leaves, kernel):
        made: Any = _Waves.apply(sides, *leaves)
        return list(made)
    return [(side._replace(period=0) if kernel == "reference" else side).in_parts() for side in sides]
