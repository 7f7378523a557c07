"""The factors (*sides*, see `waves`) of periodic g-nets on a GPU, in Triton: forward in one launch, backward in two.

One array has the codes and leaves of all sides. A table has the address and sizes of each side in the array, and says
which programs compute the side. In forward, a program computes some features of some rows. In backward, a program sums
over some rows of a tile. A second launch adds these sums per tile, or over all tiles with equal code weights. No two
programs write to the same address, so results are reproducible. Sums have the dtype of the leaves.

Suffixes: T tiles, G groups of tiles, n rows of a side, p width of its codes, H features; i rows, h features, k columns.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Do not use `from __future__ import annotations`: the interpreter of Triton 3.1 cannot read annotations as strings.

# In forward, a program computes `_ROWS` rows and `_HIDDEN` features. In the first launch of backward, a program sums
# over `_PART` rows, for `_CODES` columns of codes; in the second, it adds `_SUMS` sums at once, for `_COLS` features.
_ROWS, _HIDDEN, _PART, _CODES, _COLS, _SUMS = 32, 8, 256, 16, 32, 32

# Columns of the table, which has one row per side: the side's first program in each of the three launches, its sizes,
# and the offsets of its tensors (-1 for None). `SUMS` is the offset of partial sums [T, blocks of rows, p + 2, H].
FORWARD, PARTIAL, TOTAL, TILES, GROUPS, ROWS, WIDTH, FEATURES, PARTS, CODE_STEP = map(tl.constexpr, range(10))
COSINE_FIRST, CODES, WEIGHT, PHASE, SINE, COSINE, SCALE, GROUP, OUT, SUMS = map(tl.constexpr, range(10, 20))
D_WEIGHT, D_PHASE, D_SINE, D_COSINE, FIELDS = map(tl.constexpr, range(20, 25))


@triton.jit
def _side(table, launch: tl.constexpr, SIDES: tl.constexpr) -> Any:
    """Return the address of the table's row for this program's side, and the program's index within the side."""
    firsts = tl.load(table + tl.arange(0, SIDES) * FIELDS + launch)
    of = table + (tl.sum((firsts <= tl.program_id(0)).to(tl.int32), axis=0) - 1) * FIELDS
    return of, tl.program_id(0) - tl.load(of + launch)


@triton.jit
def _coefficients(of, x, tile, h) -> Any:
    H, sine, cosine, scale = tl.load(of + FEATURES), tl.load(of + SINE), tl.load(of + COSINE), tl.load(of + SCALE)
    scale = tl.load(x + scale + tile, mask=scale >= 0, other=1.0)
    s = tl.load(x + sine + tile * H + h, mask=(h < H) & (sine >= 0), other=1.0)
    t = tl.load(x + cosine + tile * H + h, mask=(h < H) & (cosine >= 0), other=0.0)
    return s * scale, t * scale, scale


@triton.jit
def _turns(of, x, groups, tile, i, h) -> Any:
    n, p, H, group = tl.load(of + ROWS), tl.load(of + WIDTH), tl.load(of + FEATURES), tl.load(of + GROUP)
    phase = tl.load(of + PHASE)
    g = tl.load(groups + group + tile, mask=group >= 0, other=0) + tl.where(group < 0, tile, 0)
    codes = x + tl.load(of + CODES) + tile * tl.load(of + CODE_STEP) + i * p
    weights = x + tl.load(of + WEIGHT) + g * p * H + h
    phase_h = tl.load(x + phase + tile * H + h, mask=(h < H) & (phase >= 0), other=0.0)
    error = tl.zeros([h.shape[0], i.shape[0]], x.dtype.element_ty)
    angle = error + phase_h[:, None]
    for k in range(p):
        w_h = tl.load(weights + k * H, mask=h < H, other=0.0)
        term = w_h[:, None] * tl.load(codes + k, mask=i < n, other=0.0)[None, :]
        # Sum the rounding errors separately (Knuth, TAOCP 2, 4.2.2). Otherwise an angle of 20 would be wrong by 1e-6.
        total = angle + term
        added = total - angle
        error += (angle - (total - added)) + (term - added)
        angle = total
    sin, cos = tl.sin(angle), tl.cos(angle)
    return sin + error * cos, cos - error * sin


@triton.jit
def _halves(of, tile, i, h) -> Any:
    """Return offsets [h, i] of the factors' halves `s sin A + ...` and `s cos A - ...`, and a mask of valid entries."""
    n, H, first = tl.load(of + ROWS), tl.load(of + FEATURES), tl.load(of + COSINE_FIRST)
    at = tl.load(of + OUT) + (tile * 2 * H + h)[:, None] * n + i[None, :]
    return at + first * H * n, at + (1 - first) * H * n, (h < H)[:, None] & (i < n)[None, :]


@triton.jit
def forward_kernel(table, x, groups, out, SIDES: tl.constexpr, BLOCK: tl.constexpr, H: tl.constexpr):
    """Compute `[s sin A + t cos A, s cos A - t sin A]`, `A = X U + phase`, for BLOCK rows and H features of a tile."""
    of, item = _side(table, FORWARD, SIDES)  # pyright: ignore[reportGeneralTypeIssues]
    blocks, across = tl.cdiv(tl.load(of + ROWS), BLOCK), tl.cdiv(tl.load(of + FEATURES), H)
    tile, block = item // (blocks * across), item % (blocks * across)
    i, h = block % blocks * BLOCK + tl.arange(0, BLOCK), block // blocks * H + tl.arange(0, H)
    sin, cos = _turns(of, x, groups, tile, i, h)
    s, t, _ = _coefficients(of, x, tile, h)
    sines, cosines, there = _halves(of, tile, i, h)
    tl.store(out + sines, s[:, None] * sin + t[:, None] * cos, mask=there)
    tl.store(out + cosines, s[:, None] * cos - t[:, None] * sin, mask=there)


@triton.jit
def partial_kernel(
    table, x, groups, d_out, sums,
    SIDES: tl.constexpr, BLOCK: tl.constexpr, H: tl.constexpr, PART: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """For H features of a tile, sum the gradients of s, of t and of K code weights over a block of PART rows."""
    of, item = _side(table, PARTIAL, SIDES)  # pyright: ignore[reportGeneralTypeIssues]
    n, p, features, row_blocks = tl.load(of + ROWS), tl.load(of + WIDTH), tl.load(of + FEATURES), tl.load(of + PARTS)
    across, pieces = tl.cdiv(features, H), tl.maximum(tl.cdiv(p, K), 1)
    tile, item = item // (row_blocks * across * pieces), item % (row_blocks * across * pieces)
    part, item = item // (across * pieces), item % (across * pieces)
    h, first_k, ks = item // pieces * H + tl.arange(0, H), item % pieces * K, tl.arange(0, K)
    s, t, _ = _coefficients(of, x, tile, h)
    codes = x + tl.load(of + CODES) + tile * tl.load(of + CODE_STEP)
    d_weights, ds, dt = tl.zeros([K, H], x.dtype.element_ty), s * 0, s * 0
    for first in range(part * PART, tl.minimum(part * PART + PART, n), BLOCK):
        i = first + tl.arange(0, BLOCK)
        sin, cos = _turns(of, x, groups, tile, i, h)
        sines, cosines, there = _halves(of, tile, i, h)
        g, q = tl.load(d_out + sines, mask=there, other=0.0), tl.load(d_out + cosines, mask=there, other=0.0)
        along, turned = g * sin + q * cos, g * cos - q * sin
        dA = s[:, None] * turned - t[:, None] * along
        ds, dt = ds + tl.sum(along, axis=1), dt + tl.sum(turned, axis=1)
        for k in range(tl.minimum(p - first_k, K)):
            code_i = tl.load(codes + i * p + first_k + k, mask=i < n, other=0.0)
            d_weights += tl.where(ks[:, None] == k, tl.sum(dA * code_i[None, :], axis=1)[None, :], 0.0)
    to = sums + tl.load(of + SUMS) + (tile * row_blocks + part) * (p + 2) * features + h
    there = (first_k + ks < p)[:, None] & (h < features)[None, :]
    tl.store(to[None, :] + (first_k + ks)[:, None] * features, d_weights, mask=there)
    if first_k == 0:
        tl.store(to + p * features, ds, mask=h < features)
        tl.store(to + (p + 1) * features, dt, mask=h < features)


@triton.jit
def total_kernel(table, x, groups, sums, out, SIDES: tl.constexpr, COLS: tl.constexpr, J: tl.constexpr):
    """Add up partial sums: the gradients of COLS code weights, or of phase, s and t for COLS features."""
    of, item = _side(table, TOTAL, SIDES)  # pyright: ignore[reportGeneralTypeIssues]
    T, p, H, row_blocks = tl.load(of + TILES), tl.load(of + WIDTH), tl.load(of + FEATURES), tl.load(of + PARTS)
    group, per_tile = tl.load(of + GROUP), tl.cdiv(H, COLS)
    sums, step, cols, rows = sums + tl.load(of + SUMS), (p + 2) * H, tl.arange(0, COLS), tl.arange(0, J)
    if item < T * per_tile:
        tile, h = item // per_tile, item % per_tile * COLS + cols
        ds, dt = tl.zeros([COLS], x.dtype.element_ty), tl.zeros([COLS], x.dtype.element_ty)
        for part in range(row_blocks):
            along = sums + (tile * row_blocks + part) * step + p * H + h
            ds += tl.load(along, mask=h < H, other=0.0)
            dt += tl.load(along + H, mask=h < H, other=0.0)
        s, t, scale = _coefficients(of, x, tile, h)
        to, phase, sine, cosine = tile * H + h, tl.load(of + D_PHASE), tl.load(of + D_SINE), tl.load(of + D_COSINE)
        tl.store(out + phase + to, s * dt - t * ds, mask=(h < H) & (phase >= 0))
        tl.store(out + sine + to, ds * scale, mask=(h < H) & (sine >= 0))
        tl.store(out + cosine + to, dt * scale, mask=(h < H) & (cosine >= 0))
    else:
        pieces, item = tl.cdiv(p * H, COLS), item - T * per_tile
        g, col = item // pieces, item % pieces * COLS + cols
        total = tl.zeros([COLS], x.dtype.element_ty)
        first, end = tl.where(group < 0, g, 0) * row_blocks, tl.where(group < 0, g + 1, T) * row_blocks
        for start in range(first, end, J):
            j = start + rows
            of_group = tl.load(groups + group + j // row_blocks, mask=(j < end) & (group >= 0), other=-1) == g
            there = (of_group | (group < 0)) & (j < end)
            found = tl.load(
                sums + j[:, None] * step + col[None, :], mask=there[:, None] & (col < p * H)[None, :], other=0.0
            )
            total += tl.sum(found, axis=0)
        tl.store(out + tl.load(of + D_WEIGHT) + g * p * H + col, total, mask=col < p * H)


@lru_cache(maxsize=64)
def _tabled(sides: tuple[Any, ...], device: torch.device) -> tuple[Tensor, list[int], list[list[int]], int]:
    """Describe sides to the kernels.

    Return four values: the table of sides; the number of programs in each of the three launches; two lists with the
    sizes of all outputs and of all leaf gradients; and the size of the array of partial sums.
    """
    programs, rows, sizes = [0, 0, 0], list[list[int]](), {k: list[int]() for k in ("x", "group", "out", "d", "sums")}

    def place(array: str, shape: tuple[int, ...] | None) -> int:
        if shape is None:
            return -1
        sizes[array].append(prod(shape))
        return sum(sizes[array][:-1])

    for *shapes, group, cosine_first in sides:
        (U, n, p), (G, _, H) = shapes[:2]
        T, row_blocks, across = group[0] if group else G, max(1, -(-n // _PART)), -(-H // _HIDDEN)
        at = [*(place("x", shape) for shape in shapes), place("group", group), place("out", (T, 2 * H, n))]
        at += [place("sums", (T, row_blocks, p + 2, H)), *(place("d", shape) for shape in shapes[1:5])]
        rows.append([*programs, T, G, n, p, H, row_blocks, 0 if U == 1 else n * p, cosine_first, *at])
        programs[0] += T * -(-n // _ROWS) * across
        programs[1] += T * row_blocks * across * max(1, -(-p // _CODES))
        programs[2] += T * -(-H // _COLS) + G * -(-(p * H) // _COLS)
    rows += [[2**62] * FIELDS.value] * (-len(rows) % 2 ** max(0, (len(rows) - 1).bit_length()))
    table = torch.tensor(rows, dtype=torch.int64, device=device)
    return table, programs, [sizes["out"], sizes["d"]], sum(sizes["sums"])


def _launch(kernel: Any, programs: int, *arguments: Any) -> None:
    if programs:
        with torch.cuda.device_of(arguments[0]):
            kernel[(programs,)](*arguments)


def backend(sides: Sequence[Any]) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], list[Tensor]]]:
    """Compute the factors of each `Side`. Also return a function that computes the gradients of the leaves."""
    shapes = tuple((*(None if x is None else tuple(x.shape) for x in side[:7]), side.cosine_first) for side in sides)
    table, programs, (of_outputs, of_leaves), of_sums = _tabled(shapes, sides[0].weight.device)
    x = torch.cat([x.reshape(-1) for side in sides for x in side[:6] if x is not None])
    indices = [side.groups for side in sides if side.groups is not None]
    groups, count = torch.cat(indices) if indices else table, len(table)
    out = x.new_empty(sum(of_outputs))
    _launch(forward_kernel, programs[0], table, x, groups, out, count, _ROWS, _HIDDEN)
    outputs = [
        part.view(-1, 2 * side.weight.shape[2], side.codes.shape[1]).mT
        for part, side in zip(out.split(of_outputs), sides, strict=True)
    ]

    def pull(cotangents: Sequence[Tensor]) -> list[Tensor]:
        d_out = torch.cat([g.mT.reshape(-1) for g in cotangents])
        sums, gradients = x.new_empty(of_sums), x.new_empty(sum(of_leaves))
        _launch(partial_kernel, programs[1], table, x, groups, d_out, sums, count, _ROWS, _HIDDEN, _PART, _CODES)
        _launch(total_kernel, programs[2], table, x, groups, sums, gradients, count, _COLS, _SUMS)
        leaves = [x for side in sides for x in side[1:5] if x is not None]
        return [part.view(leaf.shape) for part, leaf in zip(gradients.split(of_leaves), leaves, strict=True)]

    return outputs, pull
