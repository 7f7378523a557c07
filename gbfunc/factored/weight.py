"""A weight as a grid of factored tiles, applied as two thin products.

Shape suffixes: i tile row (nr of them), j tile column (nc), r and c rows and columns of a tile, k rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gbfunc.factored.interface import Report, new_lazy
from gbfunc.factored.lazy import LazyWeight


class FactoredWeight(LazyWeight):
    """A weight whose matrix has the tiles `L[i, j] @ R[i, j].T`; built by `factored_weight`."""

    _left: Tensor  # [nr, nc, r, k]
    _right: Tensor  # [nr, nc, c, k]
    _rows: int
    _cols: int
    _folded_transposed: bool

    @property
    def rows(self) -> int:
        """Rows of the matrix."""
        return self._rows

    @property
    def cols(self) -> int:
        """Columns of the matrix."""
        return self._cols

    def sources(self) -> tuple[Tensor, ...]:
        """The factors ([nr, nc, r, k], [nr, nc, c, k])."""
        return self._left, self._right

    def with_sources(self, sources: tuple[Tensor, ...]) -> FactoredWeight:
        """Other factors of the same shapes."""
        left, right = sources
        fixed = self._shape, self._rows, self._cols, self._folded_transposed, self._name, self._report
        return _assemble(left, right, *fixed)

    def dense(self) -> Tensor:
        """The weight in its own shape, generated in the factors' dtype even under autocast."""
        with torch.autocast(self._left.device.type, enabled=False):
            tiles_ijrc = self._left @ self._right.mT
        nr, nc, r, c = tiles_ijrc.shape
        matrix = tiles_ijrc.transpose(1, 2).reshape(nr * r, nc * c)[: self._rows, : self._cols]
        shape = self._shape
        if self._folded_transposed:
            return matrix.reshape(shape[1], shape[0], *shape[2:]).transpose(0, 1)
        return matrix.reshape(shape)

    def flipped(self) -> FactoredWeight:
        """The transposed matrix: the factors change places."""
        left, right = self._right.transpose(0, 1), self._left.transpose(0, 1)
        shape = (self._cols, self._rows)
        return _assemble(left, right, shape, self._cols, self._rows, False, self._name, self._report)

    def row_block(self, start: int, stop: int) -> FactoredWeight:
        """Rows start to stop; NotImplemented where a tile would be cut."""
        left, right = self._left, self._right
        r = left.shape[2]
        if left.shape[0] == 1:
            left = left[:, :, start:stop]
        elif start % r == 0 and (stop % r == 0 or stop == self._rows):
            tiles = slice(start // r, -(-stop // r))
            left, right = left[tiles], right[tiles]
        else:
            return NotImplemented
        shape = (stop - start, self._cols)
        return _assemble(left, right, shape, stop - start, self._cols, False, self._name, self._report)

    def apply_linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ W.T + bias` as two thin products: [..., cols] -> [..., rows]."""
        left, right = self._left, self._right
        nr, nc, r, k = left.shape
        c = right.shape[2]
        if nr == nc == 1:
            return F.linear(F.linear(x, right.flatten(0, 2).t()), left.flatten(0, 2), bias)
        lead = x.shape[:-1]
        batch = math.prod(lead)
        x_bn = F.pad(x.reshape(batch, self._cols), (0, nc * c - self._cols))
        x_jbc = x_bn.reshape(batch, nc, c).transpose(0, 1)
        thin = x_jbc @ right.permute(1, 2, 0, 3).reshape(nc, c, nr * k)
        # The sum over tile columns j is part of the second product, whose inner dimension is (j, k).
        thin_ibJ = thin.reshape(nc, batch, nr, k).permute(2, 1, 0, 3).reshape(nr, batch, nc * k)
        y_ibr = thin_ibJ @ left.transpose(2, 3).reshape(nr, nc * k, r)
        y = y_ibr.transpose(0, 1).reshape(*lead, nr * r)[..., : self._rows]
        # Under autocast the products are narrow and the bias is not; F.linear returns the narrow dtype.
        return y if bias is None else y + bias.to(y.dtype)

    def apply_conv(self, conv: Callable[..., Tensor], x: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        """A convolution with k filters per tile, then a 1x1 convolution; tiles must not cut kernels."""
        left, right = self._left, self._right
        nr, nc, r, k = left.shape
        c = right.shape[2]
        channels, kernel = self._shape[1], self._shape[2:]
        positions = math.prod(kernel)
        if options.pop("groups") != 1 or self._folded_transposed or self._shape[0] != self._rows or c % positions:
            return NotImplemented
        if x.ndim == len(kernel) + 1:
            y = self.apply_conv(conv, x.unsqueeze(0), bias, groups=1, **options)
            return y if y is NotImplemented else y.squeeze(0)
        if x.shape[1] != channels:
            raise ValueError(f"expected an input with {channels} channels for {self!r}, got shape {tuple(x.shape)}")
        ones = (1,) * len(kernel)
        padded = nc * (c // positions)
        x = x if padded == channels else F.pad(x, (0, 0) * len(kernel) + (0, padded - channels))
        filters = right.permute(1, 0, 3, 2).reshape(nc * nr * k, c // positions, *kernel)
        thin = conv(x, filters, None, groups=nc, **options)
        if nc > 1 and nr > 1:
            thin = thin.unflatten(1, (nc, nr, k)).transpose(1, 2).flatten(1, 3)
        mix = left.transpose(1, 2).reshape(nr * r, nc * k, *ones)
        if nr * r == self._rows:
            return conv(thin, mix, bias, groups=nr)
        y = conv(thin, mix, None, groups=nr)[:, : self._rows]
        return y if bias is None else y + bias.to(y.dtype).reshape(-1, *ones)

    def apply_embedding(self, index: Tensor, padding_idx: int | None) -> Tensor:
        """Rows of the left factors times the right factors: integers [...] -> [..., cols]."""
        left, right = self._left, self._right
        nr, nc, r, k = left.shape
        c = right.shape[2]
        flat = index.reshape(index.numel())
        # Rows of several tiles need each token's own right factors: past the weight's own size, form it.
        if nr > 1 and flat.shape[0] * k > self._rows:
            return NotImplemented
        table = left.transpose(1, 2).reshape(nr * r, nc * k)[: self._rows]
        rows_tjk = F.embedding(flat, table).reshape(-1 if flat.shape[0] else 0, nc, k)
        if nr == 1:
            y = (rows_tjk.transpose(0, 1) @ right[0].mT).transpose(0, 1)
        else:
            y = (rows_tjk.unsqueeze(2) @ right[flat // r].mT).squeeze(2)
        y = y.reshape(*index.shape, nc * c)[..., : self._cols]
        if padding_idx is not None:
            # Gradients of the padding row stop here, in both factors.
            y = torch.where((index == padding_idx).unsqueeze(-1), y.detach(), y)
        return y


def factored_weight(
    left: Tensor,
    right: Tensor,
    shape: Sequence[int],
    *,
    rows: int,
    cols: int,
    transposed: bool = False,
    name: str = "",
    report: Report | None = None,
) -> FactoredWeight:
    """Stand the factors of a matrix in for the dense weight that they generate.

    Tile (i, j) is `left[i, j] @ right[i, j].T`; tiles join row-major to [nr * r, nc * c], the matrix is the
    first `rows` rows and `cols` columns of that, and it folds to `shape`. Under `torch.compile`, call
    this inside the compiled function: the compiler does not take such a tensor as an argument.

    Args:
        left: Left factors [nr, nc, r, k], any fixed scale of the weight folded in.
        right: Right factors [nr, nc, c, k].
        shape: The weight's own shape: [rows, cols], or [rows, channels, *kernel] for a convolution.
        rows: Rows of the matrix, at most nr * r.
        cols: Columns of the matrix, at most nc * c.
        transposed: The weight is stored with its first two axes exchanged, as in Hugging Face's `Conv1D`.
        name: Name of the parameter, for `report`.
        report: Counts the operations which needed the dense weight, by (name, operation).

    Returns:
        A tensor of the given shape for the parameter dict of `torch.func.functional_call`.

    Raises:
        ValueError: The factors do not fit each other, the matrix, or the shape.
    """
    if left.ndim != 4 or right.ndim != 4 or left.shape[:2] != right.shape[:2] or left.shape[3] != right.shape[3]:
        raise ValueError(
            "expected factors [nr, nc, r, k] and [nr, nc, c, k], "
            f"got {tuple(left.shape)} and {tuple(right.shape)} for {name!r}"
        )
    nr, nc, r, _ = left.shape
    c = right.shape[2]
    if not ((nr - 1) * r < rows <= nr * r and (nc - 1) * c < cols <= nc * c):
        raise ValueError(f"expected a matrix that {nr} x {nc} tiles of {r} x {c} just cover, got {rows} x {cols}")
    if math.prod(shape) != rows * cols:
        raise ValueError(f"expected a shape of {rows * cols} elements for a {rows} x {cols} matrix, got {tuple(shape)}")
    if len(shape) == 2 and tuple(shape) != ((cols, rows) if transposed else (rows, cols)):
        raise ValueError(f"expected a two-dimensional shape to be the {rows} x {cols} matrix's, got {tuple(shape)}")
    if transposed and (len(shape) < 2 or shape[1] != rows):
        raise ValueError(f"expected a transposed shape [cols, rows, ...] with rows = {rows}, got {tuple(shape)}")
    if transposed and len(shape) == 2:
        left, right, rows, cols = right.transpose(0, 1), left.transpose(0, 1), cols, rows
        transposed = False
    return _assemble(left, right, tuple(shape), rows, cols, transposed, name, report)


def _assemble(
    left: Tensor,
    right: Tensor,
    shape: tuple[int, ...],
    rows: int,
    cols: int,
    folded_transposed: bool,
    name: str,
    report: Report | None,
) -> FactoredWeight:
    """Crop what one tile alone can crop, and attach the factors to a placeholder."""
    if left.shape[0] == 1 and left.shape[2] > rows:
        left = left[:, :, :rows]
    if left.shape[1] == 1 and right.shape[2] > cols:
        right = right[:, :, :cols]
    weight = new_lazy(FactoredWeight, shape, left.dtype, left.device, name, report)
    weight._left, weight._right = left, right
    weight._rows, weight._cols = rows, cols
    weight._folded_transposed = folded_transposed
    return weight


def stack_rows(weights: Sequence[FactoredWeight]) -> FactoredWeight:
    """Stack matrices [o, i] below each other, as attention packs its query, key and value: -> [sum of o, i].

    Args:
        weights: Two-dimensional factored weights with the same tile shape, rank and columns.

    Raises:
        ValueError: The tiles differ, or one but the last has rows that its tiles do not fill.
    """
    first = weights[0]
    tile = (first._left.shape[1:], first._right.shape[1:], first._cols)
    for position, weight in enumerate(weights):
        full = weight._left.shape[0] * weight._left.shape[2] == weight._rows or position == len(weights) - 1
        if (
            len(weight._shape) != 2
            or (weight._left.shape[1:], weight._right.shape[1:], weight._cols) != tile
            or not full
        ):
            raise ValueError(f"expected matrices with whole tiles like those of {first!r}, got {weight!r}")
    rows = sum(weight._rows for weight in weights)
    left = torch.cat([weight._left for weight in weights])
    right = torch.cat([weight._right for weight in weights])
    return _assemble(left, right, (rows, first._cols), rows, first._cols, False, first._name, first._report)
