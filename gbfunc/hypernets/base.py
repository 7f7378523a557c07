"""The interface of a type of g-net: an immutable description with pure functions `init` and `apply`.

Suffixes: T tiles, G groups (tiles that share parameters), r rows, c columns, p and q widths of their codes, H features.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from gbfunc.tiling import TileGrid
from gbfunc.types import Factors, Kernel, Params, TileDims


class Leaf(NamedTuple):
    """The description of one parameter (an array) of a g-net.

    Attributes:
        shape: shape for one g-net. In a genome, the leaf stacks the parameter: [tiles, *shape] or [groups, *shape].
        role: `"linear"` for leaves such as amplitudes: a tile doubles if all its linear leaves double. Otherwise
            `"code"`. Every type needs a linear leaf per tile, which `init_genome` scales, or sets to 0 for a delta.
        scope: `"tile"` if each tile has its own values, `"group"` if all tiles of a group have the same values.
        std: standard deviation of the normal distribution of the initial values.
        mean: mean of the normal distribution of the initial values.
        gain: name of a leaf [features], such as the amplitudes, that multiplies the features computed from this leaf.
            Only quantization (`rounding="auto"`) uses `gain`, `codes` and `period`.
        codes: `"row"` or `"col"` if codes of rows or of columns are multiplied by this leaf, otherwise None.
        period: if set, values that differ by this period give the same tile (2 pi for a phase).
    """

    shape: tuple[int, ...]
    role: Literal["code", "linear"]
    scope: Literal["tile", "group"] = "tile"
    std: float = 1.0
    gain: str | None = None
    codes: Literal["row", "col"] | None = None
    period: float | None = None
    mean: float = 0.0


@dataclass(frozen=True)
class Hypernet:
    """A type of g-net with its options: immutable, hashable, and convertible to JSON. `make_plan` can choose the size.

    A subclass is a frozen dataclass whose fields are numbers, strings, or tuples of numbers or strings. A subclass has
    its own `type`, and defines `leaves` and `apply` (or `tiles`). A `Sized` subclass has a field for its size. Genomes
    of a subclass can be saved and loaded after `gb.register`.
    """

    type: ClassVar[str]
    default_size: ClassVar[int] = 32  # the size if the user gives neither a size nor a target size of the genome
    sizable: ClassVar[bool] = True  # False for a type without a size
    stochastic: ClassVar[bool] = False  # True if tiles depend on noise
    factorised: ClassVar[bool] = False  # True if `apply` returns `Factors`
    standardised: ClassVar[bool] = True  # True if weights are scaled to the p-net's initial standard deviation
    rate: ClassVar[float] = 1e-2  # constant learning rate of Adam, chosen by validation on digits at 20x compression
    spreads: ClassVar[bool] = False  # True if many small tiles give a matrix a higher rank than a few large g-nets

    @property
    def size(self) -> int | None:
        """Number of features, hidden units or genes, or the rank; None if not chosen yet, 0 if the type has no size."""
        return None if self.sizable else 0

    def with_size(self, size: int) -> Hypernet:
        raise NotImplementedError(f"{type(self).__name__} must define size and with_size, or set sizable = False")

    def max_size(self, dims: TileDims) -> int | None:
        """Return the size above which a tile's rank does not increase, or None if there is no such size."""
        return None

    @property
    def factor_width(self) -> int:
        """Number of columns of the factors; 0 for a type without factors."""
        return self.size or 0 if self.factorised else 0

    @property
    def shares(self) -> bool:
        """True if tiles share some parameters: leaves with `scope="group"`, whose values are equal within a group."""
        return False

    def group(self, name: str, part: int, shape: tuple[int, int]) -> str:
        """Name the group of matrix number `part` of a tensor. Matrices with the same name share some parameters."""
        return ""

    def leaves(self, dims: TileDims) -> dict[str, Leaf]:
        """Describe the parameters of one g-net: `{name: Leaf}`."""
        raise NotImplementedError(f"{type(self).__name__} must define leaves(self, dims)")

    def init(self, dims: TileDims, n_tiles: int, n_groups: int, generator: torch.Generator) -> Params:
        """Draw initial leaves in float32 on the CPU: [tiles, *shape], or [groups, *shape] if tiles share the leaf."""
        return draw(self.leaves(dims), n_tiles, n_groups, generator)

    def apply(
        self, leaves: Params, row_rp: Tensor, col_cq: Tensor, *, noise: Params | None = None, kernel: Kernel = "auto"
    ) -> Tensor | Factors:
        """Generate the tile of one g-net, [rows, columns], or its factors, [rows, k] and [columns, k].

        Args:
            leaves: parameters of one g-net, by name.
            row_rp: codes of the rows: [rows, width of a row's code].
            col_cq: codes of the columns: [columns, width of a column's code].
            noise: standard normal numbers in the shapes of `noise_shapes`; None generates the mean.
            kernel: the implementation, if the type has several (`gbfunc.types.Kernel`).
        """
        raise NotImplementedError(f"{type(self).__name__} must define apply(self, leaves, row_rp, col_cq, **unused)")

    def tiles(
        self, leaves: Params, row_Urp: Tensor, col_Ucq: Tensor, noise: Params | None, kernel: Kernel
    ) -> Tensor | Factors:
        """Generate the tiles [tiles, rows, columns] of many g-nets, or their factors. By default, `vmap` calls `apply`.

        Leaves, noise and codes are those of `apply`, stacked: [tiles, ...], or [1, ...] for codes that all tiles share.
        """

        def apply(leaves: Params, row: Tensor, col: Tensor, noise: Params | None) -> Tensor | Factors:
            tile = self.apply(leaves, row, col, noise=noise, kernel=kernel)
            sides = (row.shape[0], self.factor_width), (col.shape[0], self.factor_width)
            expected = sides if self.factorised else (row.shape[0], col.shape[0])
            pair, shape = isinstance(tile, Factors), getattr(tile, "shape", ())
            if (got := tuple(tuple(x.shape) for x in tile) if pair else tuple(shape)) != expected:
                words = f"{type(self).__name__}.apply must return shape {expected}, got {got}"
                raise ValueError(f"{words}: rows come first, and Factors need factorised = True")
            return tile

        (row, row_dim), (col, col_dim) = ((x[0], None) if len(x) == 1 else (x, 0) for x in (row_Urp, col_Ucq))
        return torch.vmap(apply, (0, row_dim, col_dim, None if noise is None else 0))(leaves, row, col, noise)

    def matrix(self, leaves: Params, row_Urp: Tensor, col_Ucq: Tensor, grid: TileGrid, kernel: Kernel) -> Tensor | None:
        """Generate an entire matrix [rows, columns] without noise. Return None if the type has only `tiles`."""
        return None

    def noise_shapes(self, dims: TileDims) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the noise that one g-net uses, by name."""
        return {}

    def to_json(self) -> dict[str, Any]:
        """Return a description for JSON: the type, and the options that differ from the defaults."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {"type": self.type, **values}


def ensemble_params(hypernet: Hypernet, dims: TileDims, n_tiles: int, n_groups: int) -> int:
    """Count the parameters of the g-nets of `n_tiles` tiles, which share parameters in `n_groups` groups of tiles."""
    leaves = hypernet.leaves(dims).values()
    return sum((n_tiles if leaf.scope == "tile" else n_groups) * math.prod(leaf.shape) for leaf in leaves)


def normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw standard normal numbers in float32 on the CPU, whatever torch's default dtype and device are."""
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


def uniform(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw uniform numbers in [0, 1) in float32 on the CPU."""
    return torch.rand(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


def draw(leaves: Mapping[str, Leaf], n_tiles: int, n_groups: int, generator: torch.Generator) -> Params:
    """Draw the leaves of all g-nets with one random generator: [tiles, *shape], or [groups, *shape] if shared."""
    # Draw numbers even for a leaf with std 0. Otherwise, setting a std to 0 would change all leaves drawn later.
    counts = {"tile": n_tiles, "group": n_groups}
    return {k: normal((counts[x.scope], *x.shape), generator) * x.std + x.mean for k, x in leaves.items()}


def project(codes_np: Tensor, weight_pH: Tensor) -> Tensor:
    """Return `codes_np @ weight_pH`, or zeros for codes of width 0: the compiler IREE rejects empty matrices."""
    if codes_np.shape[-1]:
        return codes_np @ weight_pH
    return codes_np.new_zeros((*weight_pH.shape[:-2], codes_np.shape[-2], weight_pH.shape[-1]))


def check_size(name: str, size: Any) -> None:
    """Raise ValueError unless `size` is None or an int from 1 to 2**31."""
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= 2**31):
        raise ValueError(f"{name} must be an int >= 1 (at most 2**31) or None (chosen by the plan), got {size!r}")


@dataclass(frozen=True)
class Sized(Hypernet):
    """A type of g-net whose size is one field of type int. The name of the field is `size_field`."""

    size_field: ClassVar[str]

    def __post_init__(self) -> None:
        if (name := getattr(self, "size_field", None)) not in (names := [f.name for f in fields(self)]):
            cure = "@dataclass(frozen=True), and size_field: ClassVar[str] = the name of a field"
            raise TypeError(f"{type(self).__name__} needs {cure}; its fields are {names}, its size_field {name!r}")
        check_size(self.size_field, self.size)

    @property
    def size(self) -> int | None:
        return getattr(self, self.size_field)

    def with_size(self, size: int) -> Hypernet:
        return replace(self, **{self.size_field: size})

    @property
    def known_size(self) -> int:
        """The size; raises ValueError if the size is None, because no plan has chosen it yet."""
        if self.size is None:
            raise ValueError(f"{self.type} has no size yet: give {self.size_field}, or let make_plan choose it")
        return self.size


Share = Literal["none", "layers", "shapes"]


class Sharing(Sized):
    """Base class of types with a field `share`, which selects the matrices whose g-nets share some parameters."""

    share: Share

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share not in ("none", "layers", "shapes"):
            raise ValueError(f"share must be 'none', 'layers' or 'shapes', got {self.share!r}")

    @property
    def shares(self) -> bool:
        return self.share != "none"

    def group(self, name: str, part: int, shape: tuple[int, int]) -> str:
        """Name a matrix's group: `"8x8"` for `share="shapes"`; for "layers", name, `part` and shape: `"fc.*:0:8x8"`."""
        size, kind = f"{shape[0]}x{shape[1]}", re.sub("[0-9]+", "*", name)
        return {"none": "", "layers": f"{kind}:{part}:{size}", "shapes": size}[self.share]
