"""The contract of a hypernetwork: a static description with a pure `init` and a pure `apply`.

Suffixes: T tiles, G groups of tiles, r rows and c columns of a tile, p and q widths of their codes, H features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from gbfunc.tiling import TileGrid
from gbfunc.types import Factors, Kernel, Params, TileDims


class Leaf(NamedTuple):
    """One array of a g-net's parameters."""

    shape: tuple[int, ...]  # for ONE g-net
    role: Literal["code", "linear"]  # "linear" where the tile is (jointly) linear in it, so that `init` may rescale it
    scope: Literal["tile", "group"] = "tile"  # each tile has one, or the tiles of a group share it
    std: float = 1.0  # deviation that it is drawn with
    gain: str | None = None  # the leaf [H] of the same scope that multiplies what this one [..., H] makes
    codes: Literal["row", "col"] | None = None  # whose codes its rows [p, H] multiply
    period: float | None = None  # numbers that differ by it are the same
    mean: float = 0.0  # that it is drawn with


@dataclass(frozen=True)
class Hypernet:
    """A type of g-net with its options: static, hashable, JSON-able; its size is None until a plan chooses it.

    A subclass is a frozen dataclass whose fields are numbers, texts and tuples of them. It has a `type` of its own,
    `leaves`, `apply` (or `tiles`, which is called in its place), and what else differs from here; `Sized` is one whose
    size is a field. `gb.register` lets genomes of it be saved and loaded.
    """

    type: ClassVar[str]
    default_size: ClassVar[int] = 32
    """The size where the user gives neither a size nor a target for the whole genome."""
    sizable: ClassVar[bool] = True
    """False where there is nothing to choose."""
    stochastic: ClassVar[bool] = False
    """True where tiles take noise."""
    factorised: ClassVar[bool] = False
    """True where tiles are `Factors`."""
    standardised: ClassVar[bool] = True
    """True where a tile is scaled to the p-net's initial deviation; False where it is the weight as it stands."""
    rate: ClassVar[float] = 1e-2
    """Constant learning rate of Adam at which it learns, chosen on validation images of digits at 20x."""
    spreads: ClassVar[bool] = False
    """True where more tiles give a matrix more rank than a larger size does, for as many parameters: a plan with a size
    target then takes tiles as small as it can."""

    @property
    def size(self) -> int | None:
        """Features, hidden width, rank or genes; 0 where there is nothing to choose."""
        return None if self.sizable else 0

    def with_size(self, size: int) -> Hypernet:
        """A copy with another size."""
        raise NotImplementedError

    def max_size(self, dims: TileDims) -> int | None:
        """The size from which on a larger one adds nothing, or None."""
        return None

    @property
    def factor_width(self) -> int:
        """Columns of its factors; 0 where it is not factorised."""
        return self.size or 0 if self.factorised else 0

    @property
    def shares(self) -> bool:
        """Whether groups of tiles share leaves."""
        return False

    def group(self, name: str, part: int, shape: tuple[int, int]) -> str:
        """The group of matrices whose tiles share leaves, where any do, by the tensor, part and shape of one."""
        return ""

    def leaves(self, dims: TileDims) -> dict[str, Leaf]:
        """The g-net's leaves, by name."""
        raise NotImplementedError

    def init(self, dims: TileDims, n_tiles: int, n_groups: int, generator: torch.Generator) -> Params:
        """Draw the leaves of all g-nets of an ensemble: `{leaf: [T or G, *shape]}` in float32 on the CPU."""
        return draw(self.leaves(dims), n_tiles, n_groups, generator)

    def apply(
        self, leaves: Params, row_rp: Tensor, col_cq: Tensor, *, noise: Params | None = None, kernel: Kernel = "auto"
    ) -> Tensor | Factors:
        """One g-net's tile: [r, c], or its factors ([r, k], [c, k]).

        Args:
            leaves: leaves of ONE g-net.
            row_rp: codes of the rows: [r, p].
            col_cq: codes of the columns: [c, q].
            noise: what `noise_shapes` asked for, or None for the mean.
            kernel: implementation, where the type has several (`gbfunc.types.Kernel`).
        """
        raise NotImplementedError

    def tiles(
        self, leaves: Params, row_Urp: Tensor, col_Ucq: Tensor, noise: Params | None, kernel: Kernel
    ) -> Tensor | Factors:
        """The tiles of many g-nets, [T, r, c] or factors: `apply` under `vmap`, unless a type knows a shorter way.

        Leaves and noise are `{name: [T, ...]}`; codes are those of U = 1 or T tiles.
        """

        def apply(leaves: Params, row: Tensor, col: Tensor, noise: Params | None) -> Tensor | Factors:
            return self.apply(leaves, row, col, noise=noise, kernel=kernel)

        (row, row_dim), (col, col_dim) = ((x[0], None) if len(x) == 1 else (x, 0) for x in (row_Urp, col_Ucq))
        return torch.vmap(apply, (0, row_dim, col_dim, None if noise is None else 0))(leaves, row, col, noise)

    def matrix(self, leaves: Params, row_Urp: Tensor, col_Ucq: Tensor, grid: TileGrid, kernel: Kernel) -> Tensor | None:
        """The one matrix [R, C] that the tiles make, at their mean; None where a type knows no shorter way."""
        return None

    def noise_shapes(self, dims: TileDims) -> dict[str, tuple[int, ...]]:
        """Shapes of the standard normal noise that one g-net takes, by name."""
        return {}

    def to_json(self) -> dict[str, Any]:
        """A JSON-able description, without what is at its default."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {"type": self.type, **values}


def ensemble_params(hypernet: Hypernet, dims: TileDims, n_tiles: int, n_groups: int) -> int:
    """Parameters of `n_tiles` g-nets in `n_groups` groups, everything counted."""
    leaves = hypernet.leaves(dims).values()
    return sum((n_tiles if leaf.scope == "tile" else n_groups) * math.prod(leaf.shape) for leaf in leaves)


def normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Standard normal numbers, in float32 on the CPU whatever torch's defaults: a seed's genome depends on them."""
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


def uniform(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Uniform numbers in [0, 1), likewise."""
    return torch.rand(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


def draw(
    leaves: Mapping[str, Leaf], n_tiles: int, n_groups: int, generator: torch.Generator, stds: Mapping[str, float] = {}
) -> Params:
    """Draw normal leaves, tile by tile from one generator, of deviation `stds[name]` or otherwise their `std`."""
    # Drawn even where the deviation is 0, so that a leaf's values do not depend on the others' deviations.
    counts = {"tile": n_tiles, "group": n_groups}
    drawn = {name: normal((counts[leaf.scope], *leaf.shape), generator) for name, leaf in leaves.items()}
    return {name: drawn[name] * stds.get(name, leaf.std) + leaf.mean for name, leaf in leaves.items()}


def project(codes_np: Tensor, weight_pH: Tensor) -> Tensor:
    """Codes times code weights, [..., n, p] @ [..., p, H]; zeros for codes of width 0, whose product no IREE takes."""
    if codes_np.shape[-1]:
        return codes_np @ weight_pH
    return codes_np.new_zeros((*weight_pH.shape[:-2], codes_np.shape[-2], weight_pH.shape[-1]))


def check_size(name: str, size: Any) -> None:
    """Raise `ValueError` unless `size` is None or an int >= 1."""
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(f"{name} must be an int >= 1 or None (chosen by the plan), got {size!r}")


@dataclass(frozen=True)
class Sized(Hypernet):
    """A hypernetwork whose size is one int field, named by `size_field`."""

    size_field: ClassVar[str]

    def __post_init__(self) -> None:
        check_size(self.size_field, self.size)

    @property
    def size(self) -> int | None:
        """The int field."""
        return getattr(self, self.size_field)

    def with_size(self, size: int) -> Hypernet:
        """A copy with another size."""
        return replace(self, **{self.size_field: size})

    @property
    def known_size(self) -> int:
        """The size, which a plan has chosen by now."""
        if self.size is None:
            raise ValueError(f"{self.type} has no size yet: a plan chooses it")
        return self.size
