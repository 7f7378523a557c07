"""Divides a target number of parameters among slots (generated matrices), and cuts each slot into tiles.

A slot has at least one feature. The share of a slot is a number of features, proportional to the cube root of its
number of weights. Rounding to whole features leaves parameters over, which go to the slots furthest below their shares.
A slot starts as one tile. While a tile has more features than half the length of its shorter side, its longer side is
halved. For ReLU MLPs and low rank (`Hypernet.spreads`), tiles are small squares, and the share of a slot is a number of
parameters, proportional to the square root of its number of weights.
"""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations, product

from gbfunc.encoding import Encoding
from gbfunc.hypernets import Hypernet, ensemble_params
from gbfunc.plan.slots import tile_dims
from gbfunc.tiling import MaxTile, TileGrid, tile_grid
from gbfunc.types import MatrixDims, TileDims

_TOLERANCE = 0.02  # If a larger fraction of the target is unused, slots of equal shape may get g-nets of two sizes
_THIN = 64  # A matrix with a side below 64 and at most 32 features stays one tile: smaller tiles would save no time
_NEAR = 8  # `_exchange` tries the 8 `Unit`s with the most parameters, and changes the size of g-nets by at most 8
_LEAST_SIDE = 16  # Shortest side of a tile for types with `Hypernet.spreads`: smaller tiles take too much time


@dataclass
class Unit:
    """`count` slots of equal shape, codes and type of g-net. The first `larger` slots have g-nets of `size + 1`."""

    matrix: MatrixDims
    hypernet: Hypernet
    codes: tuple[Encoding, Encoding]
    max_tile: MaxTile
    group: str = ""
    spreads: bool = False
    count: int = 0
    # Number of tiles along rows and columns; (1, 1) if the user gave the size of g-nets. Unused if `max_tile` is given.
    cut: tuple[int, int] = (1, 1)
    size: int = 1  # Size of a g-net: number of features or hidden units, or rank
    larger: int = 0
    _tilings: dict[tuple[int, int], tuple[TileGrid, TileDims]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.fixed = self.hypernet.size is not None
        # A user who gives the size of the g-nets expects one tile per matrix, as documented: cut no small tiles.
        self.spreads &= self.max_tile is None and not (self.fixed and self.hypernet.sizable)
        self.numel = self.matrix.rows * self.matrix.cols
        # Cut tiles only between channels, so that the kernel positions of a channel stay together.
        self._kernel = math.prod(self.matrix.kernel)
        self._channels = self.matrix.cols // self._kernel

    @property
    def cost(self) -> int:
        return self.cost_of(self.cut, self.size)

    def tiling(self, cut: tuple[int, int]) -> tuple[TileGrid, TileDims]:
        if cut not in self._tilings:
            if self.max_tile is None:
                rows, cols = -(-self.matrix.rows // cut[0]), self._kernel * -(-self._channels // cut[1])
                grid = TileGrid(self.matrix.rows, self.matrix.cols, rows, cols)
            else:
                grid = tile_grid(self.matrix, self.max_tile)
            self._tilings[cut] = grid, tile_dims(grid, *self.codes)
        return self._tilings[cut]

    def cost_of(self, cut: tuple[int, int], size: int) -> int:
        grid, dims = self.tiling(cut)
        a_tile, a_group = _costs(self.hypernet, None if self.fixed else size, dims)
        return grid.n_tiles * (self.count * a_tile + (1 if self.hypernet.shares else self.count) * a_group)

    def largest(self, cut: tuple[int, int], budget: float) -> int:
        """Return the largest g-net size that `budget` and `max_size` allow for slots cut into `cut` tiles, or 1."""
        if self.fixed:
            return 1
        limit = self.hypernet.max_size(self.tiling(cut)[1]) or self.numel
        budget = min(budget, self.numel * self.count)
        sizes = range(1, limit + 1)
        return max(1, bisect_right(sizes, budget, key=lambda size: self.cost_of(cut, size)))

    def step(self) -> int:
        """Return how many parameters all slots gain with g-nets of `size + 1`, or 0 if this size is not allowed."""
        size = self.size + 1
        most = self.hypernet.max_size(self.tiling(self.cut)[1]) or size
        if self.fixed or size > most or not self.fits(self.cut, size):
            return 0
        return self.cost_of(self.cut, size) - self.cost

    def fits(self, cut: tuple[int, int], size: int) -> bool:
        """Return whether g-nets of this size may generate a grid of `cut` tiles. True if the user gave `max_tile`."""
        if self.spreads:
            finest = self._square(_LEAST_SIDE)
            # Sizes above 1 need the finest tiles, or a single tile, for which the budget has no two tiles of size 1.
            return size == 1 or cut == (1, 1) or (cut[0] >= finest[0] and cut[1] >= finest[1])
        dims = self.tiling(cut)[1]
        thin = min(self.matrix.rows, self.matrix.cols) < _THIN and 2 * size <= _THIN
        return self.max_tile is not None or thin or 2 * size <= min(dims.rows, dims.cols)

    def _halved(self, cut: tuple[int, int]) -> tuple[int, int] | None:
        dims = self.tiling(cut)[1]
        taller = min(2 * cut[0], self.matrix.rows), cut[1]
        if dims.rows >= dims.cols and dims.rows > 1:
            return taller
        if dims.cols > self._kernel:
            return cut[0], min(2 * cut[1], self._channels)
        return taller if dims.rows > 1 else None

    def set_budget(self, budget: float) -> None:
        """Choose the tiles, then the largest g-nets for which all slots together have at most `budget` parameters."""
        if self.fixed and not self.spreads:
            return
        if self.spreads:
            most = min(budget, self.numel * self.count)
            sides = range(_LEAST_SIDE, max(_LEAST_SIDE + 1, *self.matrix[:2]))
            # Smaller tiles need more parameters in total. Take the shortest side for which the budget suffices.
            side = bisect_left(sides, True, key=lambda side: self.cost_of(self._square(side), 1) <= most)
            self.cut = self._square(_LEAST_SIDE + side)
            size = self.largest(self.cut, budget)
            self.size = size if self.fits(self.cut, size) else 1
            return
        self.cut, self.size = (1, 1), self.largest((1, 1), budget)
        while not self.fits(self.cut, self.size):
            finer = self._halved(self.cut)
            if finer is None or self.cost_of(finer, 1) > min(budget, self.numel * self.count):
                return
            self.cut, self.size = finer, self.largest(finer, budget)

    def _square(self, side: int) -> tuple[int, int]:
        return -(-self.matrix.rows // side), min(-(-self.matrix.cols // side), self._channels)

    def refine(self, budget: int) -> None:
        """Cut more tiles, as few as possible, to use the part of `budget` that is too small for larger g-nets."""
        if (self.fixed and not self.spreads) or self.max_tile is not None or self.cut == (1, 1):
            return
        options = [(self.cost, self.cut, self.size)]
        for cut in product(_cuts(self.matrix.rows, self.cut[0]), _cuts(self._channels, self.cut[1])):
            size = self.largest(cut, budget)
            cost = self.cost_of(cut, size)
            if cost <= budget and self.fits(cut, size):
                options.append((cost, cut, size))
        enough = min((1 - _TOLERANCE / 2) * budget, max(options)[0])
        near = (option for option in options if option[0] >= enough)
        _, self.cut, self.size = min(near, key=lambda option: (math.prod(option[1]), -option[0]))

    def nearby(self) -> list[tuple[int, tuple[int, int], int]]:
        if self.fixed or self.spreads:
            return [(self.cost, self.cut, self.size)]
        # `refine` never cuts a matrix that is a single tile: try 2 and 4 tiles here. Other matrices keep their tiles.
        one_tile = self.max_tile is None and self.cut == (1, 1)
        cuts = product(_cuts(self.matrix.rows, 1), _cuts(self._channels, 1)) if one_tile else [self.cut]
        least, most = max(1, self.size // 2, self.size - _NEAR), min(2 * self.size, self.size + _NEAR)
        pairs = ((c, s) for c in cuts for s in range(least, 1 + min(most, self.largest(c, math.inf))))
        return [(self.cost_of(*pair), *pair) for pair in pairs if self.fits(*pair)]


def _cuts(length: int, n: int) -> list[int]:
    return sorted({-(-length // pieces): pieces for pieces in range(min(2 * n, length), n - 1, -1)}.values())


@lru_cache(maxsize=1 << 16)
def _costs(hypernet: Hypernet, size: int | None, dims: TileDims) -> tuple[int, int]:
    sized = hypernet if size is None else hypernet.with_size(size)
    return ensemble_params(sized, dims, 1, 0), ensemble_params(sized, dims, 0, 1)


def spend(units: list[Unit], level: float) -> int:
    """Choose tiles and g-nets for at most `_share(unit, level)` parameters per unit. Return all units' parameters."""
    for unit in units:
        unit.set_budget(_share(unit, level))
    return sum(unit.cost for unit in units)


def allocate(units: list[Unit], budget: int) -> None:
    """Choose tiles and g-net sizes that use nearly all of `budget` parameters, but not more."""
    low, high = 0.0, 1.0
    while spend(units, high) <= budget and high < 1e9:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if spend(units, middle) <= budget else (low, middle)
    left = _fill(units, low, budget - spend(units, low))
    for unit in sorted(units, key=lambda u: -u.numel):
        if left > 0:
            before = unit.cost
            unit.refine(before + left)
            left -= unit.cost - before
    for unit in units:
        step = 0 if unit.hypernet.shares else unit.step() // unit.count
        if step and left > _TOLERANCE * budget:
            unit.larger = min(unit.count - 1, left // step)
            left -= unit.larger * step
    if left > _TOLERANCE * budget:
        costly = sorted((unit for unit in units if not unit.larger), key=lambda u: -u.cost)
        _exchange(costly[:_NEAR], left, _TOLERANCE * budget)


def _exchange(units: list[Unit], left: int, enough: float) -> None:
    # Change tiles and g-net sizes of one pair of units, so that at most `enough` parameters, or the fewest, are unused.
    nearby = {id(unit): unit.nearby() for unit in units}
    least: tuple[float, ...] = (left,)
    best: list[tuple[Unit, tuple[int, int], int]] = []
    for one, other in combinations(units, 2):
        free = left + one.cost + other.cost
        for first, second in product(nearby[id(one)], nearby[id(other)]):
            if (unused := free - first[0] - second[0]) < 0 or max(unused, enough) > least[0]:
                continue
            changes = [(one, *first[1:]), (other, *second[1:])]
            tiles = sum(unit.count * math.prod(cut) for unit, cut, _ in changes)
            changed = sum(abs(math.log(size / unit.size)) for unit, _, size in changes)
            if (badness := (max(unused, enough), tiles, changed)) < least:
                least, best = badness, changes
    for unit, cut, size in best:
        unit.cut, unit.size = cut, size


def _share(unit: Unit, level: float) -> float:
    # Return parameters: of level * numel^(1/3) features a slot or, with `spreads`, level * numel^(1/2) per slot.
    if unit.spreads:
        return level * unit.count * math.sqrt(unit.numel)
    first = unit.cost_of((1, 1), 1)
    a_feature = max(1, unit.cost_of((1, 1), 2) - first) if unit.max_tile is None else first
    return level * unit.numel ** (1 / 3) * a_feature


def _fill(units: list[Unit], level: float, left: int) -> int:
    while True:
        steps = [(unit.step(), unit) for unit in units]
        steps = [(step, unit) for step, unit in steps if 0 < step <= min(left, unit.numel * unit.count - unit.cost)]
        if not steps:
            return left
        step, unit = max(steps, key=lambda s: (_share(s[1], level) - s[1].cost) / s[0])
        unit.size += 1
        left -= step
