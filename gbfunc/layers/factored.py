"""Weights as products of thin factors, `W = L R^T` for each tile, applied as `(x R) L^T` without forming `W`.

Suffixes: i, j row and column of a tile in a grid of nr x nc tiles; r rows, c columns, k rank of a tile; B batch rows.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gbfunc.costs import missing_ranks, thin_rows
from gbfunc.hypernets.ensemble import is_exporting
from gbfunc.layers.forms import Needs, Source, Use, Weight, WeightForm, added, outside_autocast
from gbfunc.tiling import TileGrid, join_tiles
from gbfunc.types import Params


class FactoredWeight(WeightForm):
    """A weight of T tiles `L[i, j] @ R[i, j].T`. The tensors `inputs` are left, [T, r, k], and right, [T, c, k].

    The matrix of all tiles, transposed if `transposed` (Hugging Face's `Conv1D`), is reshaped to the layer's `shape`.
    With `auto`, layers apply the factors to batches of fewer rows than `gbfunc.costs.thin_rows`, and form the weight
    for larger batches and in exported programs. Without `auto`, layers apply the factors whenever possible.
    """

    needs: Needs = "factors"
    more: ClassVar[tuple[str, ...]] = ()  # names of inputs in addition to left and right

    def __init__(
        self, name: str, shape: tuple[int, ...], grid: TileGrid, rank: int, transposed: bool, auto: bool
    ) -> None:
        super().__init__(name, ("left", "right", *self.more), transposed)
        self.shape, self.grid, self.auto = shape, grid, auto
        self.tiles = (grid.n_rows, grid.n_cols)
        self.rank = rank * grid.n_tiles  # rank of the matrix as a single product (`as_low_rank`)
        sizes = (grid.rows, grid.cols, rank, self.tiles, bool(self.more))
        # Use a dict, because torch.compile of torch 2.11 cannot index a list by a bool.
        self._thin_rows = {conv: thin_rows(*sizes, conv=conv) if auto else math.inf for conv in (False, True)}

    def of(self, sources: Sequence[Source]) -> Params:
        """Return `{key: tensor}`: the left and the right factors of the weight's only matrix, `sources[0]`."""
        return dict(zip(self.keys, sources[0].factors(), strict=False))

    def by_tile(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Arrange the factors in the grid of nr x nc tiles: left [nr, nc, r, k] and right [nr, nc, c, k]."""
        return inputs["left"].unflatten(0, self.tiles), inputs["right"].unflatten(0, self.tiles)

    def make(self, inputs: Params) -> Tensor:
        """Form the dense weight: multiply the factors of each tile, and join the tiles."""
        left, right = inputs["left"], inputs["right"]
        # For one tile, a matrix product is faster than a batched product.
        single = self.tiles == (1, 1)
        matrix = left.squeeze(0) @ right.squeeze(0).mT if single else join_tiles(left @ right.mT, self.grid)
        return (matrix.t() if self.transposed else matrix).reshape(self.shape)

    def apply(self, weight: Weight, use: Use, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the output with factors, or with the dense weight if `thin` returns None."""
        y = self.thin(weight, use, x, bias)
        return use.run(weight.dense(), x, bias) if y is None else y

    def thin(self, weight: Weight, use: Use, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """Compute the output with factors. Return None if the dense weight is faster, already formed, or required."""
        if use.operation == "embedding":
            return self._thin_embedding(weight, x, *use.options)
        return (self._thin_linear if use.operation == "linear" else self._thin_conv)(weight, x, bias, *use.options)

    def _pays(self, weight: Weight, batch_rows: int, conv: bool = False) -> bool:
        # An exported program cannot choose by the number of rows. With `auto`, exported programs use the dense weight.
        dense = self.auto if is_exporting() else not batch_rows < self._thin_rows[conv]
        if dense or (weight.formed is not None and not weight.applied):
            return False
        # A checkpoint calls the layer again in backward: use factors again, even if the weight was formed since.
        weight.applied = True
        return True

    def _thin_linear(self, weight: Weight, x: Tensor, bias: Tensor | None) -> Tensor | None:
        grid = self.grid
        # Use the dense weight for nested tensors, because the shape of a nested tensor has no number of rows.
        if x.is_nested or not self._pays(weight, math.prod(x.shape[:-1])):
            return None
        if x.shape[-1] != grid.cols:
            raise ValueError(f"expected an input with {grid.cols} features, got shape {tuple(x.shape)}")
        if self.tiles == (1, 1):
            return F.linear(x @ weight.inputs["right"].squeeze(0), weight.inputs["left"].squeeze(0), bias)
        left, right = self.by_tile(weight.inputs)
        # Make the output contiguous, as F.linear does: the mask of a later dropout depends on the memory order.
        y = from_thin(thin_product(x, right, (0, grid.cols)), left, ((0, grid.rows),)).contiguous()
        # Under autocast, products have the narrow dtype, as in F.linear, so cast the bias.
        return y if bias is None else y + bias.to(y.dtype)

    def _thin_conv(
        self, weight: Weight, x: Tensor, bias: Tensor | None, conv: Callable[..., Tensor], options: dict[str, Any]
    ) -> Tensor | None:
        """Convolve with the right factors (k filters per tile) and left factors (1x1). Return None as `thin` does."""
        positions = math.prod(self.shape[2:])
        fits = options["groups"] == 1 and self.grid.tile_cols % positions == 0
        if not fits or not self._pays(weight, _positions(x, self.shape[2:], options), conv=True):
            return None
        if x.ndim == len(self.shape) - 1:
            y = self._thin_conv(weight, x.unsqueeze(0), bias, conv, options)
            return None if y is None else y.squeeze(0).contiguous()
        channels, kernel = self.shape[1], self.shape[2:]
        if x.shape[1] != channels:
            raise ValueError(f"expected an input with {channels} channels, got shape {tuple(x.shape)}")
        # Would torch keep the channels-last memory format of x? On a CPU, conv2d keeps the format, conv3d does not.
        last = (x.ndim == 4 or (x.ndim > 3 and not x.is_cpu)) and x.stride(1) == 1 and x.stride(-1) >= channels
        left, right = self.by_tile(weight.inputs)
        nr, nc, r, k = left.shape
        if nc > 1 and x.is_cpu and (missing := missing_ranks(nr, k)):
            # On a CPU, a convolution whose filters per group are a multiple of 16 is up to three times as fast: pad k.
            left, right, k = F.pad(left, (0, missing)), F.pad(right, (0, missing)), k + missing
        width = self.grid.tile_cols // positions
        if nc * width != channels:
            x = F.pad(x, (0, 0) * len(kernel) + (0, nc * width - channels))
        filters = right.permute(1, 0, 3, 2).reshape(nc * nr * k, width, *kernel)
        thin = conv(x, filters, None, **options | {"groups": nc})
        if nc > 1 and nr > 1:
            thin = thin.unflatten(1, (nc, nr, k)).transpose(1, 2).flatten(1, 3)
        mix = left.transpose(1, 2).reshape(nr * r, nc * k, *(1,) * len(kernel))
        if nr * r == self.grid.rows:
            y = conv(thin, mix, bias, groups=nr)
        else:
            y = conv(thin, mix, None, groups=nr)[:, : self.grid.rows]
            y = y if bias is None else y + bias.to(y.dtype).reshape(-1, *(1,) * len(kernel))
        # Keep the input's memory format, as torch does: the mask of a later dropout depends on the memory order.
        return y.movedim(1, -1).contiguous().movedim(-1, 1) if last else y.contiguous()

    def _thin_embedding(self, weight: Weight, index: Tensor, padding_idx: int | None) -> Tensor | None:
        left, right = self.by_tile(weight.inputs)
        nr, nc, r, k = left.shape
        # With several rows of tiles, each token needs a copy of the right factors of its row of tiles. If these copies
        # are larger than the weight, return None to form the weight.
        many = nr > 1 and (is_exporting() or index.numel() * k > self.grid.rows)
        if many or index.is_nested or not self._pays(weight, index.numel()):
            return None
        flat = index.reshape(-1)
        table = left.transpose(1, 2).reshape(nr * r, nc * k)[: self.grid.rows]
        rows_Bjk = F.embedding(flat, table).reshape(flat.shape[0], nc, k)
        # Compute these products without autocast, because autocast does not change the dtype of `nn.Embedding`.
        with outside_autocast(index.device):
            if nr == 1:
                y_Bjc = (rows_Bjk.transpose(0, 1) @ right[0].mT).transpose(0, 1)
            else:
                y_Bjc = (rows_Bjk.unsqueeze(2) @ right[flat // r].mT).squeeze(2)
        y = y_Bjc.reshape(*index.shape, nc * self.grid.tile_cols)[..., : self.grid.cols].contiguous()
        if padding_idx is not None:
            y = torch.where((index == padding_idx % self.grid.rows).unsqueeze(-1), y.detach(), y)
        return y


class DeltaWeight(FactoredWeight):
    """A weight `base + delta` from the tensors left, right and base. The delta's tiles are `L[i, j] @ R[i, j].T`.

    The base is applied in the base's dtype, and the delta in the genome's dtype, as in PEFT's LoRA of a bfloat16 net.
    """

    more: ClassVar[tuple[str, ...]] = ("base",)

    def __init__(self, base: Callable[[torch.device], Tensor] | None, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._base_on, self.frozen = base, self.keys[-1:]

    def __getstate__(self) -> dict[str, Any]:
        # Omit `_base_on` from pickles: the pickled module for inference has the base's weight as a parameter.
        return self.__dict__ | {"_base_on": None}

    def of(self, sources: Sequence[Source]) -> Params:
        """Return `{key: tensor}`: the delta's factors from `sources`, and the base's weight on the same device."""
        assert self._base_on is not None
        factors = super().of(sources)
        return factors | {self.keys[-1]: self._base_on(next(iter(factors.values())).device)}

    def make(self, inputs: Params) -> Tensor:
        """Form the dense weight: multiply the factors, and add the base's weight."""
        return added(inputs["base"], super().make(inputs))

    def apply(self, weight: Weight, use: Use, x: Tensor, bias: Tensor | None) -> Tensor:
        """Add the outputs of the base and of the factors. If `thin` returns None, apply the dense sum of both."""
        left, right, base = (weight.inputs[k] for k in self.inputs)
        autocast = torch.is_autocast_enabled(x.device.type)
        single = left.dtype == base.dtype and (x.dtype == left.dtype or autocast) and not x.is_nested and x.ndim > 1
        single = single and use.operation == "linear" and self.tiles == (1, 1)
        if single and self._pays(weight, math.prod(x.shape[:-1])):
            # `addmm` adds y within the product, which saves a pass over y. With contiguous factors [k, r] and
            # [k, c], forward and backward are two to four times as fast as with [r, k] and [c, k].
            y = use.run(base, x, bias)
            thin = F.linear(x, right.squeeze(0).t().contiguous())
            return torch.addmm(y.flatten(0, -2), thin.flatten(0, -2), left.squeeze(0).t().contiguous()).reshape(y.shape)
        # Under autocast, do not cast the input: autocast chooses the dtype of the products.
        wide = x if autocast or use.operation == "embedding" else x.to(left.dtype)
        if (delta := self.thin(weight, use, wide, None)) is None:
            return use.run(weight.dense(), x, bias)
        y = use.run(base, x, bias)
        return y + delta.to(y.dtype)


def as_low_rank(left_ijrk: Tensor, right_ijck: Tensor, grid: TileGrid) -> tuple[Tensor, Tensor]:
    """Write a matrix of tiles `L[i, j] @ R[i, j].T` as one product `B A`. Return A [rank, cols] and B [rows, rank]."""
    b = torch.block_diag(*left_ijrk.transpose(1, 2).flatten(2))[: grid.rows]
    return torch.cat([torch.block_diag(*right_jck.mT) for right_jck in right_ijck])[:, : grid.cols], b


class RowFactors(WeightForm):
    """The weight of a linear layer with separate factors for each row b of a batch: `W[b] = base + L[b] M[b] R[b]^T`.

    The tensors are left L [B, rows, k], mix M [B, k, k] (of bilinear g-nets, otherwise the identity), right R
    [B, cols, k] and, with a base, base [rows, cols]. Factors that all rows of the batch share have no dimension B.
    """

    needs: Needs = "factors"

    def __init__(self, form: FactoredWeight, rank: int) -> None:
        super().__init__(form.name, ("left", "mix", "right", *form.more), form.transposed)
        self.frozen, self.sizes = form.frozen, ((form.grid.rows, rank), (rank, rank), (form.grid.cols, rank))

    @staticmethod
    def of_tiles(form: FactoredWeight, inputs: Params) -> tuple[Tensor, Tensor, Tensor]:
        """Convert left and right of a `FactoredWeight` to left, mix (the identity) and right for one batch row."""
        right, left = as_low_rank(*form.by_tile(inputs), form.grid)
        return left, torch.eye(len(right), dtype=left.dtype, device=left.device), right.t().contiguous()

    def make(self, inputs: Params) -> Tensor:
        """Form the weights of all rows of the batch, [B, ...], or one weight if all rows share the factors."""
        delta = inputs["left"] @ inputs["mix"] @ inputs["right"].mT
        delta = delta.mT if self.transposed else delta
        return added(inputs["base"], delta) if "base" in inputs else delta

    def apply(self, weight: Weight, use: Use, x: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the base to the batch, and one set of factors to each row. ValueError unless x has 1 or B rows."""
        inputs, left = weight.inputs, weight.inputs["left"]
        wide, size = x if torch.is_autocast_enabled(x.device.type) else x.to(left.dtype), x.shape[:-1]
        if left.ndim == 3:
            if x.ndim < 2 or len(x) not in (1, len(left)):
                words = f"{self.name!r} expects an input of 1 or {len(left)} rows"
                raise ValueError(f"{words} (one per set of factors), got shape {tuple(x.shape)}")
            wide, size = wide.reshape(len(x), -1, x.shape[-1]), (len(left), *x.shape[1:-1])
        delta = (wide @ inputs["right"] @ inputs["mix"].mT @ left.mT).reshape(*size, left.shape[-2])
        if "base" not in inputs:
            return delta if bias is None else delta + bias
        y = use.run(inputs["base"], x, bias)
        return y + delta.to(y.dtype)


def thin_product(x: Tensor, right: Tensor, cols: tuple[int, int]) -> Tensor:
    """Multiply x, columns `cols` of an input, by right factors [nr, nc, c, k]: [..., n] -> [..., nr * nc * k]."""
    nr, nc, c, k = right.shape
    if nr == nc == 1:
        return F.linear(x, right[0, 0, cols[0] : cols[1]].t())
    # The tiles in columns [first, last) of the grid overlap `cols`. If `cols` is empty, take one column of tiles.
    batch, first = math.prod(x.shape[:-1]), min(cols[0] // c, nc - 1)
    last = max(-(-cols[1] // c), first + 1)
    padded = F.pad(x.reshape(batch, x.shape[-1]), (cols[0] - first * c, last * c - cols[1]))
    right_jct = right[:, first:last].permute(1, 2, 0, 3).flatten(2)
    thin_jBt = padded.unflatten(1, (last - first, c)).transpose(0, 1) @ right_jct
    thin_Bijk = thin_jBt.unflatten(2, (nr, k)).permute(1, 2, 0, 3)
    return F.pad(thin_Bijk, (0, 0, first, nc - last)).reshape(*x.shape[:-1], nr * nc * k)


def from_thin(thin: Tensor, left: Tensor, ranges: tuple[tuple[int, int], ...]) -> Tensor:
    """Multiply a `thin_product` by left factors [nr, nc, r, k]. Return the outputs [..., n] of the rows in `ranges`."""
    nr, nc, r, k = left.shape
    lead, batch = thin.shape[:-1], math.prod(thin.shape[:-1])
    thin_iBt = thin.reshape(batch, nr, nc * k).transpose(0, 1)
    outputs = []
    for a, b in ranges:
        overlap = slice(a // r, max(-(-b // r), a // r + 1))
        # The product sums over t = (j, k): over the columns of the grid and over the rank.
        left_itr = left[overlap].transpose(2, 3).flatten(1, 2)
        y_Br = (thin_iBt[overlap] @ left_itr).transpose(0, 1).flatten(1)
        outputs.append(y_Br[:, a - overlap.start * r : b - overlap.start * r])
    y = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
    return y.reshape(*lead, y.shape[-1])


def _positions(x: Tensor, kernel: tuple[int, ...], options: Mapping[str, Any]) -> int:
    n, padding = len(kernel), options["padding"]
    batch = x.shape[0] if x.ndim == n + 2 else 1
    if padding == "same":
        return batch * math.prod(x.shape[-n:])
    padding = (0,) * n if padding == "valid" else padding
    # Use a loop, because torch.compile cannot trace a generator over dynamic sizes.
    for size, k, s, p, d in zip(x.shape[-n:], kernel, options["stride"], padding, options["dilation"], strict=True):
        batch *= (size + 2 * p - d * (k - 1) - 1) // s + 1
    return batch
