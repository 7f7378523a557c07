"""From a genome to the p-net's parameters: ensembles -> tiles -> matrices -> tensors, in one autograd graph."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from gbfunc.ensemble import apply_tiles, dense_tiles, tile_leaves
from gbfunc.factored import FactoredWeight, factored_weight, remat_weight, stack_rows
from gbfunc.factored.interface import Report
from gbfunc.genome import Noise, check_genome, codes_of
from gbfunc.layers import KINDS
from gbfunc.plan import DTYPES, Ensemble, Plan, Slot, TensorPlan
from gbfunc.tiling import join_all, join_tiles
from gbfunc.types import Factors, GenomeLike, GNets, Kernel, Params

_FACTORED_KINDS = frozenset({"linear", "transposed_linear", "conv", "attention_in", "attention", "embedding", "matrix"})


class _Constants(NamedTuple):
    """What an ensemble needs beside its leaves, in the leaves' dtype and on their device.

    Attributes:
        row: row codes [U, r, p].
        col: column codes [U, c, q].
        groups: group of every tile [T], None where nothing is shared.
        scale: scale of every tile's slot [T].
    """

    row: Tensor
    col: Tensor
    groups: Tensor | None
    scale: Tensor

    def of(self, span: slice) -> _Constants:
        """The same for some of the tiles, whose leaves are there tile by tile."""
        row = self.row if len(self.row) == 1 else self.row[span]
        col = self.col if len(self.col) == 1 else self.col[span]
        return _Constants(row, col, None, self.scale[span])


def _constants(ensemble: Ensemble, dtype: torch.dtype, device: torch.device) -> _Constants:
    groups = torch.tensor(ensemble.groups, device=device) if ensemble.hypernet.shares else None
    scales = [p.slot.scale for p in ensemble.placements for _ in range(p.slot.grid.n_tiles)]
    return _Constants(*codes_of(ensemble, dtype, device), groups, torch.tensor(scales, dtype=dtype, device=device))


class Generator:
    """A plan with its constants (codes, groups, scales) at hand: `generator(gnets, direct) -> {name: weight}`.

    Constants are built once for each dtype and device. `generate` is the one-off form.

    Attributes:
        plan: the plan.
        kernel: implementation of ReLU g-nets.
        lazy_names: parameters that can be left as factors.
    """

    def __init__(self, plan: Plan, *, kernel: Kernel = "auto") -> None:
        self.plan = plan
        self.kernel: Kernel = kernel
        self.lazy_names = frozenset(t.name for t in plan.generated if _can_factor(plan, t))
        # A process's first sine or tanh in several threads can be off by 8e-5 (pytorch issue 188792): one goes ahead.
        torch.tanh(torch.sin(torch.zeros(1)))
        self._built: dict[tuple[torch.dtype, torch.device], dict[str, _Constants]] = {}

    def constants(self, dtype: torch.dtype, device: torch.device) -> dict[str, _Constants]:
        """The ensembles' constants, by name."""
        key = (dtype, device)
        if key not in self._built:
            self._built[key] = {e.name: _constants(e, dtype, device) for e in self.plan.ensembles}
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
    ) -> Params:
        """All parameters of the p-net by name, direct ones as they are.

        Args:
            gnets: leaves of the ensembles.
            direct: direct parameters.
            noise: noise of the stochastic ensembles, None for the mean.
            lazy: parameters to leave as factors, some of `lazy_names`.
            remat: other generated parameters are made for each use, and again in backward, and never kept.
            report: counts the operations that needed the dense form of a lazy weight, by (parameter, operation).
        """
        like = next((leaf for leaves in gnets.values() for leaf in leaves.values()), None)
        like = next(iter(direct.values()), None) if like is None else like
        dtype = self.plan.dtype if like is None or not like.is_floating_point() else like.dtype
        device = torch.device("cpu") if like is None else like.device
        constants = self.constants(dtype, device)
        # A caller's autocast is for the p-net.
        with torch.autocast(device.type, enabled=False):
            parts: dict[tuple[int, int], _Part] = {}
            for e in self.plan.ensembles:
                own_noise = None if noise is None else noise.get(e.name)
                parts |= self._parts(e, gnets.get(e.name, {}), own_noise, constants[e.name], lazy, remat)
            weights = {}
            for index, tensor in enumerate(self.plan.tensors):
                own = [parts[index, part] for part in range(len(tensor.slots))]
                factors = [p for p in own if isinstance(p, Factors)]
                recipes = [p for p in own if isinstance(p, _Recipe)]
                matrices = [p for p in own if isinstance(p, Tensor)]
                if factors:
                    weights[tensor.name] = _factored(tensor, factors, report)
                elif recipes:
                    weights[tensor.name] = _rematerialised(self, tensor, recipes, report)
                else:
                    weights[tensor.name] = _folded(self.plan, tensor, matrices) if own else direct[tensor.name]
            return weights

    def tiles(self, e: Ensemble, leaves: Params, noise: Params | None, constants: _Constants) -> Tensor | Factors:
        """Scaled tiles [T, r, c] of an ensemble, or their factors."""
        row, col, groups, scale = constants
        specs = e.leaves
        own = tile_leaves(leaves, specs, groups)
        scalable = e.hypernet.standardised and not e.hypernet.stochastic
        linear = [k for k in own if scalable and specs[k].role == "linear"]
        # The tile is linear in these leaves, which are small: scaling them spares a copy of every weight.
        own = own | {k: own[k] * scale.reshape(-1, *(1,) * (own[k].ndim - 1)) for k in linear}
        tiles = apply_tiles(e.hypernet, e.dims, own, row, col, noise=noise, kernel=self.kernel)
        if linear or not e.hypernet.standardised:
            return tiles
        return dense_tiles(tiles) * scale[:, None, None]

    def _parts(
        self,
        e: Ensemble,
        leaves: Params,
        noise: Params | None,
        constants: _Constants,
        lazy: Collection[str],
        remat: bool,
    ) -> dict[tuple[int, int], _Part]:
        """What each slot of an ensemble is made of, by (tensor, part)."""
        counts = [p.slot.grid.n_tiles for p in e.placements]
        places = [(p.tensor, p.part) for p in e.placements]
        names = [self.plan.tensors[p.tensor].name for p in e.placements]
        factored = e.hypernet.factorised and any(name in lazy for name in names)
        if leaves and remat and not all(name in lazy for name in names):
            own = tile_leaves(leaves, e.leaves, constants.groups)
            split = {k: v.split(counts) for k, v in own.items()}
            drawn = {k: v.split(counts) for k, v in (noise or {}).items()}
            parts: dict[tuple[int, int], _Part] = {}
            for i, (place, placement) in enumerate(zip(places, e.placements, strict=True)):
                span = slice(placement.first, placement.first + counts[i])
                some, eps = {k: v[i] for k, v in split.items()}, {k: v[i] for k, v in drawn.items()} or None
                own_constants = constants.of(span)
                if names[i] in lazy:
                    parts[place] = self.tiles(e, some, eps, own_constants)
                else:
                    parts[place] = _Recipe(e, placement.slot, some, eps, own_constants)
            return parts
        tiles = self.tiles(e, leaves, noise, constants)
        if not leaves:
            # All tiles are the same; there is one for all.
            grids = [p.slot.grid for p in e.placements]
            whole = [dense_tiles(tiles)[:1].expand(n, -1, -1) for n in counts]
            return {pl: join_tiles(t, grid) for pl, t, grid in zip(places, whole, grids, strict=True)}
        if factored and isinstance(tiles, Factors):
            lefts, rights = _split(tiles.left, counts), _split(tiles.right, counts)
            both = [Factors(left, right) for left, right in zip(lefts, rights, strict=True)]
            grids = [p.slot.grid for p in e.placements]
            return {
                place: f if name in lazy else join_tiles(dense_tiles(f), grid)
                for place, f, name, grid in zip(places, both, names, grids, strict=True)
            }
        return dict(zip(places, join_all(dense_tiles(tiles), [p.slot.grid for p in e.placements]), strict=True))


class _Recipe(NamedTuple):
    """How one slot's tiles are made, without making them."""

    ensemble: Ensemble
    slot: Slot
    leaves: Params
    noise: Params | None
    constants: _Constants


_Part = Tensor | Factors | _Recipe


def _split(tiles: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
    # One split node has one backward; slices would each fill a gradient of all tiles.
    return (tiles,) if len(counts) == 1 else tiles.split(counts)


def _can_factor(plan: Plan, tensor: TensorPlan) -> bool:
    """Whether a tensor can be left as factors: factorised g-nets, of one tiling where it has several matrices."""
    first = tensor.slots[0]
    alike = all((s.hypernet, s.grid) == (first.hypernet, first.grid) for s in tensor.slots)
    whole = len(tensor.slots) == 1 or first.grid.rows % first.grid.tile_rows == 0
    wide = DTYPES[tensor.dtype].itemsize >= plan.dtype.itemsize
    return first.hypernet.factorised and tensor.kind in _FACTORED_KINDS and alike and whole and wide


def _factored(tensor: TensorPlan, parts: list[Factors], report: Report | None) -> Tensor:
    """The tensor as a lazy weight from the factors of its slots."""
    weights: list[FactoredWeight] = []
    transposed = tensor.kind == "transposed_linear"
    for slot, factors in zip(tensor.slots, parts, strict=True):
        grid = slot.grid
        shape = tensor.shape if len(parts) == 1 else (grid.rows, grid.cols)
        cut = (grid.n_rows, grid.n_cols)
        left, right = factors.left.unflatten(0, cut), factors.right.unflatten(0, cut)
        size = {"rows": grid.rows, "cols": grid.cols}
        weights.append(
            factored_weight(left, right, shape, **size, transposed=transposed, name=tensor.name, report=report)
        )
    return weights[0] if len(weights) == 1 else stack_rows(weights)


def _folded(plan: Plan, tensor: TensorPlan, matrices: list[Tensor]) -> Tensor:
    """The tensor from the matrices of its slots."""
    matrices = [m + slot.offset if slot.offset else m for m, slot in zip(matrices, tensor.slots, strict=True)]
    weight = KINDS[tensor.kind].fold(matrices, tensor.shape)
    own_dtype = DTYPES[tensor.dtype]
    # Generation runs in the leaves' dtype; only a narrower p-net (bf16, fp16) is cast to.
    return weight.to(own_dtype) if own_dtype.itemsize < plan.dtype.itemsize else weight


def _rematerialised(generator: Generator, tensor: TensorPlan, recipes: list[_Recipe], report: Report | None) -> Tensor:
    """The tensor as a lazy weight that is made for each use, and made again in backward."""
    inputs: list[Tensor] = []
    names: list[list[tuple[str, bool]]] = []
    for recipe in recipes:
        noise = recipe.noise or {}
        names.append([(k, False) for k in recipe.leaves] + [(k, True) for k in noise])
        inputs += [*recipe.leaves.values(), *noise.values()]

    def make(*flat: Tensor) -> Tensor:
        given = iter(flat)
        matrices = []
        for recipe, own in zip(recipes, names, strict=True):
            values = [(k, drawn, next(given)) for k, drawn in own]
            leaves = {k: v for k, drawn, v in values if not drawn}
            noise = {k: v for k, drawn, v in values if drawn} or None
            tiles = dense_tiles(generator.tiles(recipe.ensemble, leaves, noise, recipe.constants))
            matrices.append(join_tiles(tiles, recipe.slot.grid))
        return _folded(generator.plan, tensor, matrices)

    first = inputs[0]
    own_dtype = DTYPES[tensor.dtype]
    dtype = own_dtype if own_dtype.itemsize < generator.plan.dtype.itemsize else first.dtype
    return remat_weight(make, tuple(inputs), tensor.shape, dtype, first.device, name=tensor.name, report=report)


def generate(
    plan: Plan, genome: GenomeLike, *, noise: Noise | None = None, lazy: bool = False, kernel: Kernel = "auto"
) -> Params:
    """All parameters of the p-net by name, direct ones included: `{name: Tensor}`.

    Differentiable with respect to `genome.gnets` and `genome.direct`, also under `torch.func` transforms.

    Args:
        plan: the plan.
        genome: a `Genome` or `TrainState`.
        noise: noise of stochastic g-nets (see `sample_noise`); None gives the mean weights.
        lazy: leave weights as factors where they have them: linear layers, convolutions and embeddings apply those
            without forming the weight, any other operation sees the dense tensor.
        kernel: implementation of ReLU g-nets.

    Raises:
        ValueError: if the genome's leaves are not those of the plan.
    """
    check_genome(plan, genome)
    generator = Generator(plan, kernel=kernel)
    return generator(genome.gnets, genome.direct, noise, lazy=generator.lazy_names if lazy else ())
