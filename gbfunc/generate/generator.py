"""From a genome to the p-net's parameters: ensembles -> tiles -> matrices -> tensors, in one autograd graph."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from gbfunc.factored.interface import Report
from gbfunc.generate.constants import Constants, make_constants
from gbfunc.generate.weights import Part, Recipe, can_factor, factored_tensor, folded_tensor, rematerialised_tensor
from gbfunc.genome import Noise, check_genome
from gbfunc.hypernets.ensemble import apply_matrix, apply_tiles, dense_tiles, tile_leaves
from gbfunc.parallel import Layout, Sizes, gather_outputs, gather_slot, no_tiles
from gbfunc.plan import Ensemble, Plan
from gbfunc.tiling import TileGrid, join_all, join_tiles
from gbfunc.types import Factors, GenomeLike, GNets, Kernel, Params

_RUN_BYTES = 2**22
"""Tiles from which on slots are generated apart: fewer would cost calls, more cost fresh memory, which a CPU pays for
page by page (2 x 17 MB at once took 15 ms longer than one after the other)."""


class Generator:
    """A plan with its constants (codes, groups, scales) at hand: `generator(gnets, direct) -> {name: weight}`.

    Constants are built once for each dtype and device. `generate` is the one-off form. With the layout of a genome that
    is split over ranks, each rank makes its own tiles, and all are gathered.

    Attributes:
        plan: the plan.
        kernel: implementation of ReLU g-nets.
        layout: which tiles are this rank's, None where all are.
        lazy_names: parameters that can be left as factors.
    """

    def __init__(self, plan: Plan, *, kernel: Kernel = "auto", layout: Layout | None = None) -> None:
        self.plan = plan
        self.kernel: Kernel = kernel
        self.layout = layout if layout is not None and layout.sharded else None
        names = (t.name for t in plan.generated if can_factor(plan, t))
        self.lazy_names = frozenset(() if self.layout and self.layout.placement != "factors" else names)
        # A process's first sine or tanh in several threads can be off by 8e-5 (pytorch issue 188792): one goes ahead.
        torch.tanh(torch.sin(torch.zeros(1)))
        self._built: dict[tuple[torch.dtype, torch.device], dict[str, Constants]] = {}

    def constants(self, dtype: torch.dtype, device: torch.device) -> dict[str, Constants]:
        """The ensembles' constants, by name; of this rank's own tiles."""
        key = (dtype, device)
        if key not in self._built:
            built = {e.name: make_constants(e, dtype, device) for e in self.plan.ensembles}
            if self.layout:
                own = {e.name: self.layout.own(e) for e in self.plan.ensembles if e.leaves}
                built |= {name: built[name].of(span) for name, span in own.items()}
            self._built[key] = built
        return self._built[key]

    def __call__(
        self,
        gnets: GNets,
        direct: Params,
        noise: Noise | None = None,
        *,
        lazy: Collection[str] = (),
        remat: bool = False,
        report: Report | None = None,
        mute: bool = False,
    ) -> Params:
        """All parameters of the p-net by name, direct ones as they are.

        Args:
            gnets: leaves of the ensembles, this rank's rows of them where they are split.
            direct: direct parameters.
            noise: noise of all tiles of the stochastic ensembles, None for the mean.
            lazy: parameters to leave as factors, some of `lazy_names`.
            remat: other generated parameters are made for each use, and again in backward, and never kept.
            report: counts the operations that needed the dense form of a lazy weight, by (parameter, operation).
            mute: this rank's gradients count for nothing where they are summed over ranks.

        Raises:
            CollectiveError: if a rank is missing.
        """
        like = next((leaf for leaves in gnets.values() for leaf in leaves.values()), None)
        like = next(iter(direct.values()), None) if like is None else like
        dtype = self.plan.dtype if like is None or not like.is_floating_point() else like.dtype
        device = torch.device("cpu") if like is None else like.device
        constants = self.constants(dtype, device)
        noise = noise or {}
        # A caller's autocast is for the p-net.
        with torch.autocast(device.type, enabled=False):
            parts: dict[tuple[int, int], Part] = {}
            made: dict[str, Tensor | Factors] = {}
            for e in self.plan.ensembles:
                leaves, own_noise = gnets.get(e.name, {}), noise.get(e.name)
                if leaves and remat and self.layout:
                    # None stays factors: "auto" may choose otherwise on a rank with fewer rows, and all must gather.
                    parts |= self._shared_recipes(self.layout, e, leaves, own_noise, constants[e.name], mute)
                elif leaves and remat and not all(name in lazy for name in self._names(e)):
                    parts |= self._recipes(e, leaves, own_noise, constants[e.name], lazy)
                elif leaves and self.layout:
                    made[e.name] = self._own_tiles(self.layout, e, leaves, own_noise, constants[e.name])
                elif leaves and not (e.hypernet.factorised and any(name in lazy for name in self._names(e))):
                    matrices = self._matrices(e, leaves, own_noise, constants[e.name])
                    parts |= {(p.tensor, p.part): m for p, m in zip(e.spans, matrices, strict=True)}
                else:
                    parts |= self._parts(e, self.tiles(e, leaves, own_noise, constants[e.name]), lazy)
            if self.layout:
                # Outside vmap, all at once: collectives have no batching rule, and each costs its latency.
                whole = gather_outputs(self.layout, made, mute=mute)
                for e in self.plan.ensembles:
                    parts |= self._parts(e, whole[e.name], lazy) if e.name in whole else {}
            return self._weights(parts, direct, report)

    def tiles(
        self, e: Ensemble, leaves: Params, noise: Params | None, constants: Constants, grid: TileGrid | None = None
    ) -> Tensor | Factors:
        """Scaled tiles [T, r, c] of an ensemble, or their factors; with a grid, the matrix [R, C] that they make."""
        row, col, groups, scale = constants
        specs = e.leaves
        own = tile_leaves(leaves, specs, groups)
        scalable = e.hypernet.standardised and not e.hypernet.stochastic
        linear = [k for k in own if scalable and specs[k].role == "linear"]
        # The tile is linear in these leaves, which are small: scaling them spares a copy of every weight.
        own = own | {k: own[k] * scale.reshape(-1, *(1,) * (own[k].ndim - 1)) for k in linear}
        if grid is not None and linear:
            return apply_matrix(e.hypernet, e.dims, own, row, col, grid, noise=noise, kernel=self.kernel)
        tiles = apply_tiles(e.hypernet, e.dims, own, row, col, noise=noise, kernel=self.kernel)
        if not linear and e.hypernet.standardised:
            tiles = dense_tiles(tiles) * scale[:, None, None]
        return tiles if grid is None else join_tiles(dense_tiles(tiles), grid)

    def _matrices(self, e: Ensemble, leaves: Params, noise: Params | None, constants: Constants) -> tuple[Tensor, ...]:
        """The matrix of every slot; large ones one after the other, which spares memory and the time to get it."""
        grids = [p.slot.grid for p in e.spans]
        runs = _runs([grid.n_tiles * e.dims.rows * e.dims.cols * constants.row.itemsize for grid in grids])
        if len(runs) == 1 and len(grids) > 1:
            return join_all(dense_tiles(self.tiles(e, leaves, noise, constants)), grids)
        counts = [sum(grid.n_tiles for grid in grids[run]) for run in runs]
        own = {k: _split(v, counts) for k, v in tile_leaves(leaves, e.leaves, constants.groups).items()}
        drawn = {k: _split(v, counts) for k, v in (noise or {}).items()}
        matrices: tuple[Tensor, ...] = ()
        for i, run in enumerate(runs):
            first = e.spans[run.start].first
            # Leaves of groups are there tile by tile.
            some_constants = constants.of(slice(first, first + counts[i]))._replace(groups=None)
            some, eps = {k: v[i] for k, v in own.items()}, {k: v[i] for k, v in drawn.items()} or None
            if run.stop - run.start == 1:
                matrices += (dense_tiles(self.tiles(e, some, eps, some_constants, grids[run.start])),)
            else:
                matrices += join_all(dense_tiles(self.tiles(e, some, eps, some_constants)), grids[run])
        return matrices

    def _own_tiles(
        self, layout: Layout, e: Ensemble, leaves: Params, noise: Params | None, constants: Constants
    ) -> Tensor | Factors:
        """This rank's tiles, or their factors, from its rows of the leaves and the noise of all tiles."""
        span = layout.own(e)
        if span.start == span.stop:
            return no_tiles(layout, e, leaves)
        return self.tiles(e, leaves, noise and {k: v[span] for k, v in noise.items()}, constants)

    def _names(self, e: Ensemble) -> list[str]:
        """The tensor that each slot of an ensemble is part of."""
        return [self.plan.tensors[p.tensor].name for p in e.spans]

    def _recipes(
        self, e: Ensemble, leaves: Params, noise: Params | None, constants: Constants, lazy: Collection[str]
    ) -> dict[tuple[int, int], Part]:
        """How each slot of an ensemble is made, by (tensor, part); factors where the tensor is lazy."""
        counts = [p.slot.grid.n_tiles for p in e.spans]
        own = tile_leaves(leaves, e.leaves, constants.groups)
        split = {k: v.split(counts) for k, v in own.items()}
        drawn = {k: v.split(counts) for k, v in (noise or {}).items()}
        parts: dict[tuple[int, int], Part] = {}
        for i, (placement, name) in enumerate(zip(e.spans, self._names(e), strict=True)):
            span = slice(placement.first, placement.first + counts[i])
            some, eps = {k: v[i] for k, v in split.items()}, {k: v[i] for k, v in drawn.items()} or None
            # Leaves of groups are there tile by tile.
            own_constants = constants.of(span)._replace(groups=None)
            if name in lazy:
                part = self.tiles(e, some, eps, own_constants)
            else:
                part = Recipe(placement.slot, some, eps, partial(self.tiles, e, constants=own_constants))
            parts[placement.tensor, placement.part] = part
        return parts

    def _shared_recipes(
        self, layout: Layout, e: Ensemble, leaves: Params, noise: Params | None, constants: Constants, mute: bool
    ) -> dict[tuple[int, int], Part]:
        """The same on ranks: each makes its own tiles of a slot, and all are gathered, for each use and in backward."""
        span, index = layout.own(e), layout.mesh.gnets_index
        own = tile_leaves(leaves, e.leaves, constants.groups)
        parts: dict[tuple[int, int], Part] = {}
        first = 0
        for i, placement in enumerate(e.spans):
            sizes = layout.sizes_of(e, i)
            rows = slice(first, first + sizes[index])
            first = rows.stop
            some = {k: v[rows] for k, v in own.items()}
            eps = {k: v[span][rows] for k, v in (noise or {}).items()} or None
            own_constants = constants.of(rows)._replace(groups=None)

            def tiles(
                leaves: Params, noise: Params | None, sizes: Sizes = sizes, constants: Constants = own_constants
            ) -> Tensor | Factors:
                empty = not sizes[index]
                out = no_tiles(layout, e, leaves) if empty else self.tiles(e, leaves, noise, constants)
                return gather_slot(layout, e, out, sizes, mute=mute)

            parts[placement.tensor, placement.part] = Recipe(placement.slot, some, eps, tiles)
        return parts

    def _parts(self, e: Ensemble, tiles: Tensor | Factors, lazy: Collection[str]) -> dict[tuple[int, int], Part]:
        """The matrix or the factors of each slot of an ensemble, by (tensor, part), from all its tiles."""
        grids = [p.slot.grid for p in e.spans]
        counts = [grid.n_tiles for grid in grids]
        places = [(p.tensor, p.part) for p in e.spans]
        names = self._names(e)
        if not e.leaves:
            # All tiles are the same; there is one for all.
            whole = [dense_tiles(tiles)[:1].expand(n, -1, -1) for n in counts]
            return {pl: join_tiles(t, grid) for pl, t, grid in zip(places, whole, grids, strict=True)}
        if isinstance(tiles, Factors) and any(name in lazy for name in names):
            lefts, rights = _split(tiles.left, counts), _split(tiles.right, counts)
            both = [Factors(left, right) for left, right in zip(lefts, rights, strict=True)]
            return {
                place: f if name in lazy else join_tiles(dense_tiles(f), grid)
                for place, f, name, grid in zip(places, both, names, grids, strict=True)
            }
        return dict(zip(places, join_all(dense_tiles(tiles), grids), strict=True))

    def _weights(self, parts: dict[tuple[int, int], Part], direct: Params, report: Report | None) -> Params:
        """Every tensor from its parts, or as it is."""
        weights = {}
        for index, tensor in enumerate(self.plan.tensors):
            own = [parts[index, part] for part in range(len(tensor.slots))]
            factors = [p for p in own if isinstance(p, Factors)]
            recipes = [p for p in own if isinstance(p, Recipe)]
            matrices = [p for p in own if isinstance(p, Tensor)]
            if factors:
                weights[tensor.name] = factored_tensor(tensor, factors, report)
            elif recipes:
                weights[tensor.name] = rematerialised_tensor(self.plan, tensor, recipes, report)
            else:
                weights[tensor.name] = folded_tensor(self.plan, tensor, matrices) if own else direct[tensor.name]
        return weights


def _runs(sizes: list[int]) -> list[slice]:
    """Cut a sequence of slots into runs of at least `_RUN_BYTES`, the last one maybe smaller."""
    ends, total = [0], 0
    for i, size in enumerate(sizes, 1):
        total += size
        if total >= _RUN_BYTES or i == len(sizes):
            ends.append(i)
            total = 0
    return [slice(a, b) for a, b in pairwise(ends)]


def _split(tiles: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
    # One split node has one backward; slices would each fill a gradient of all tiles.
    return (tiles,) if len(counts) == 1 else tiles.split(counts)


def generate(
    plan: Plan, genome: GenomeLike, *, noise: Noise | None = None, lazy: bool = False, kernel: Kernel = "auto"
) -> Params:
    """All parameters of the p-net by name, direct ones included: `{name: Tensor}`.

    Differentiable with respect to `genome.gnets` and `genome.direct`, also under `torch.func` transforms.

    Args:
        plan: the plan.
        genome: a `Genome` or `TrainState`; one that is split over ranks must be gathered first.
        noise: noise of stochastic g-nets (see `sample_noise`); None gives the mean weights.
        lazy: leave weights as factors where they have them: linear layers, convolutions and embeddings apply those
            without forming the weight, any other operation sees the dense tensor.
        kernel: implementation of ReLU g-nets.

    Raises:
        ValueError: if the genome's leaves are not those of the plan.
    """
    check_genome(plan, genome, buffers=False)
    generator = Generator(plan, kernel=kernel)
    return generator(genome.gnets, genome.direct, noise, lazy=generator.lazy_names if lazy else ())
