"""The plan of one tensor of the p-net, which is generated, direct, or a buffer. A plan contains no tensors."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gbfunc.encoding import Encoding
from gbfunc.formats.layout import LIMITS
from gbfunc.hypernets import Hypernet, new_rows
from gbfunc.layers import KINDS
from gbfunc.layers.factored import DeltaWeight, FactoredWeight
from gbfunc.layers.install import formable, transposed
from gbfunc.tiling import TileGrid
from gbfunc.types import DTYPES, Lazy, MatrixDims, TileDims


def check_stored(name: str, dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"{name} must have a dtype of genome files ({', '.join(DTYPES)}), got {dtype}")


# Kinds of layers that can apply factors instead of a dense weight
_FACTORED_KINDS = frozenset({"linear", "transposed_linear", "conv", "beside", "embedding"})


def tile_dims(grid: TileGrid, row_code: Encoding, col_code: Encoding) -> TileDims:
    p, q = row_code.tile_width(grid.rows, grid.tile_rows), col_code.tile_width(grid.cols, grid.tile_cols)
    return TileDims(grid.tile_rows, grid.tile_cols, p, q)


@dataclass(frozen=True)
class Slot:
    """One matrix of a tensor, generated as `offset + scale * g`, where g is the output of the g-nets.

    `scale` is the standard deviation of the p-net's initial weights. The `offset` of a vector is the mean of the
    weights, otherwise 0. In slots of equal `group`, the g-nets of tiles with the same index share some parameters.
    """

    hypernet: Hypernet
    grid: TileGrid
    row_code: Encoding
    col_code: Encoding
    scale: float
    offset: float = 0.0
    group: str = ""

    def __post_init__(self) -> None:
        g = self.grid
        for code, length, tile in ((self.row_code, g.rows, g.tile_rows), (self.col_code, g.cols, g.tile_cols)):
            code.check(length)
            if code.local:
                code.check(tile)
        most = LIMITS["mostScale"]
        if not (abs(self.scale) <= most and abs(self.offset) <= most):
            raise ValueError(f"scale and offset must be at most {most:g}, got {self.scale} and {self.offset}")
        if self.hypernet.size is None:
            raise ValueError(f"a slot's hypernetwork must have a size, got {self.hypernet}")

    @property
    def dims(self) -> TileDims:
        return tile_dims(self.grid, self.row_code, self.col_code)


@dataclass(frozen=True)
class TensorPlan:
    """The plan of one parameter. `kind` is its kind of layer (`gbfunc.layers.KINDS`), `dtype` a name (`"float32"`).

    `slots` are the matrices of a generated parameter, `()` for a direct parameter. `aliases` are further names of a
    tied parameter. `note` says why the parameter has its role, or is "". If `base` is True, the slots generate a delta.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    slots: tuple[Slot, ...] = ()
    aliases: tuple[str, ...] = ()
    note: str = ""
    base: bool = False

    def __post_init__(self) -> None:
        check_stored(self.name, self.dtype)
        sizes = [(s.grid.rows, s.grid.cols) for s in self.slots]
        # Compare totals, too: three matrices of 2 rows would leave out one row of a tensor of 7 rows.
        fits = sizes == [m[:2] for m in self.matrices] and sum(r * c for r, c in sizes) == self.numel
        if sizes and not fits:
            raise ValueError(f"{self.name}: slots of {sizes} do not fold to a {self.kind} of shape {self.shape}")
        if self.base and not sizes:
            raise ValueError(f"{self.name}: a tensor of the base must have slots for its delta, got none")

    def can_factor(self, dtype: torch.dtype) -> bool:
        """Return whether layers can apply factors of the weight, generated in `dtype`, instead of the weight."""
        wide = self.base or DTYPES[self.dtype].itemsize >= dtype.itemsize
        return self.slots[0].hypernet.factorised and self.kind in _FACTORED_KINDS and wide

    def is_formable(self, pnet: nn.Module) -> bool:
        """Return True if the parameter is generated, and all its layers can use a `WeightForm`, such as factors."""
        names = [name.rpartition(".") for name in (self.name, *self.aliases)]
        layers = [(pnet.get_submodule(prefix), attribute) for prefix, _, attribute in names]
        flipped = self.kind == "transposed_linear"
        return bool(self.slots) and all(formable(m, attribute) and transposed(m) == flipped for m, attribute in layers)

    def factored_form(
        self, dtype: torch.dtype, lazy: Lazy, base: Callable[[torch.device], Tensor] | None = None
    ) -> FactoredWeight | None:
        """Return the form in which layers apply factors of the weight. None means that the weight is dense.

        With `lazy="auto"`, the layer uses factors or the dense weight, whichever is faster for the batch. `base`
        returns the frozen tensor to which a delta is added; without `base`, a form only describes names and shapes.
        """
        beside = self.kind == "beside"
        if not (lazy or beside) or not self.can_factor(dtype):
            return None
        grid, rank = self.slots[0].grid, self.slots[0].hypernet.factor_width
        # The kind "beside", a layer that hides its weight, adds the delta's output to its own: never form the delta.
        options = (self.name, self.shape, grid, rank, self.kind == "transposed_linear", lazy == "auto" and not beside)
        return DeltaWeight(base, *options) if self.base and not beside else FactoredWeight(*options)

    @property
    def matrices(self) -> tuple[MatrixDims, ...]:
        return KINDS[self.kind].matrices(self.shape)

    @property
    def role(self) -> Literal["generated", "delta", "direct"]:
        """The role: "generated", "delta" (a generated change of the base) or "direct"."""
        return "direct" if not self.slots else "delta" if self.base else "generated"

    @property
    def new_rows(self) -> int:
        """Number of rows at the end of each matrix that are trained and no part of the base (type `new_rows`), or 0."""
        found = (slot.hypernet.rows for slot in self.slots if isinstance(slot.hypernet, new_rows))
        return max(found, default=0) if self.base else 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def old_rows(tensor: TensorPlan, new: int) -> Callable[[Tensor], Tensor]:
    """Return a function that copies a tensor, with zeros in the last `new` rows of matrices (g-net `new_rows`)."""
    kind = KINDS[tensor.kind]
    return lambda x: kind.fold([F.pad(m[:-new], (0, 0, 0, new)) for m in kind.unfold(x)], tensor.shape)


class BufferPlan(NamedTuple):
    """A buffer of the p-net. Genomes contain all buffers; the dense state dict contains only persistent buffers."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    persistent: bool = True
