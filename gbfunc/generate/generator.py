"""From a genome to the p-net's weights, in one autograd graph, and in whatever form a layer takes them.

A *run* is what g-nets that are generated together are made of: leaves, codes, scales and noise.

    leaves + codes --vmap(apply)--> tiles [T, r, c] --join--> matrices [R, C] --fold--> weights      dense
                                    factors ([T, r, k], [T, c, k]) ------------------> layer         factored
    leaves -------------------------------------------------------------------------> layer         recomputed

Evaluated now it gives dense weights; stopped before the product, factors that a layer applies; closed over, a weight
that is made at each use and again in backward. Where ranks hold some tiles each, a gather comes in between. The forms
of the layers settle which it is for each weight when the generator is made.

Suffixes: T tiles, r rows and c columns of a tile, R and C of a matrix, k rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gbfunc.genome import Noise, check_genome, codes_of
from gbfunc.hypernets.ensemble import Run, dense_tiles
from gbfunc.layers import KINDS
from gbfunc.layers.forms import FactoredWeight, WeightForm, formable
from gbfunc.layers.recomputed import RecomputedWeight
from gbfunc.parallel import Gather, Layout, Sizes, no_tiles
from gbfunc.plan import DTYPES, Ensemble, Plan, TensorPlan
from gbfunc.tiling import Cut, Piece, TileGrid, cut_piece, join_all, join_tiles
from gbfunc.types import Factors, GenomeLike, GNets, Kernel, Params

_RUN_BYTES = 2**22
"""Tiles from which on slots are generated apart: fewer cost calls, more cost fresh memory (2 x 17 MB: 15 ms)."""


class GatheredRun(NamedTuple):
    """A run of which each rank holds some tiles; all ranks evaluate it together, and gather.

    Attributes:
        run: of this rank's tiles.
        stack: the ensemble that it is of.
        sizes: tiles of every rank.
    """

    run: Run
    stack: Stack
    sizes: Sizes

    def tiles(self) -> Tensor | Factors:
        """Scaled tiles [T, r, c] of all ranks, or their factors."""
        gather = self.stack.gather()
        assert gather is not None
        return gather.slot(self.stack.ensemble, self.stack.mine(self.run), self.sizes)


Part = Tensor | Factors | Run | GatheredRun
"""What one slot of a tensor is made of: its matrix, its factors, or what makes either."""


class Stack:
    """An ensemble with its constants at hand: from its leaves to what each of its slots is made of.

    Attributes:
        ensemble: the ensemble.
        layout: whose tiles are whose; None where all are this rank's.
        slots: numbers of those of its slots that are made: all, where they are spread over ranks.
        cuts: the tiles of each of them that are made.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        kernel: Kernel,
        layout: Layout | None,
        gather: Callable[[], Gather | None],
        cuts: Mapping[int, Cut],
    ) -> None:
        self.ensemble, self.layout, self.gather = ensemble, layout, gather
        self._kernel: Kernel = kernel
        grids = [p.slot.grid for p in ensemble.spans]
        if layout is not None:
            cuts = {i: cuts.get(i, Cut(grid)) for i, grid in enumerate(grids)}
        self.slots, self.cuts = [*cuts], [*cuts.values()]
        self.grids = [cut.grid for cut in self.cuts]
        self._counts = [grid.n_tiles for grid in self.grids]
        # Tiles of each slot that every rank has, and that this one has.
        self._sizes = [layout.sizes_of(ensemble, i) for i in range(len(self.grids))] if layout else None
        self._held = [s[layout.mesh.gnets_index] for s in self._sizes] if layout and self._sizes else self._counts
        hypernet, specs = ensemble.hypernet, ensemble.leaves
        self._shared = tuple(k for k, leaf in specs.items() if leaf.scope == "group")
        linear = hypernet.standardised and not hypernet.stochastic
        self._linear = tuple(k for k, leaf in specs.items() if linear and leaf.role == "linear")
        self._span: slice | Tensor = layout.span(ensemble) if layout and specs else slice(0, ensemble.n_tiles)
        self._some = len(cuts) < len(grids) or any(cut.tiles is not None for cut in self.cuts)
        if self._some:
            numbers = [(i, range(grids[i].n_tiles) if cut.tiles is None else cut.tiles) for i, cut in cuts.items()]
            tiles = [ensemble.spans[i].first + n for i, ns in numbers for n in ns]
            self._span = torch.tensor(tiles, dtype=torch.int64, device="cpu")
        self._built: dict[tuple[torch.dtype, torch.device], tuple[Run, Tensor, Tensor | None]] = {}

    def constants(self, dtype: torch.dtype, device: torch.device) -> tuple[Run, Tensor, Tensor | None]:
        """The run of this rank's tiles without leaves, the scale [T] of each, and its group [T] or None."""
        key = (dtype, device)
        if key not in self._built:
            e = self.ensemble
            row, col = codes_of(e, dtype, device)
            counts = torch.tensor([p.slot.grid.n_tiles for p in e.spans], device="cpu")
            scales = torch.tensor([p.slot.scale for p in e.spans], dtype=dtype, device="cpu")
            scale = scales.repeat_interleave(counts).to(device)
            groups = torch.from_numpy(e.groups).to(device)[self._span] if self._shared else None
            left = scale if e.hypernet.standardised and not self._linear else None
            whole = Run.bare(e.hypernet, e.dims, self._kernel, row, col, left)
            self._built[key] = (whole.of(self._span), scale[self._span], groups)
        return self._built[key]

    def run(self, leaves: Params, noise: Params | None, dtype: torch.dtype, device: torch.device) -> Run:
        """This rank's tiles, from its leaves and the noise of all tiles."""
        bare, scale, groups = self.constants(dtype, device)
        if self._some:
            leaves = {k: v if k in self._shared else v[self._span] for k, v in leaves.items()}
        leaves = {k: v[groups] if k in self._shared else v for k, v in leaves.items()}
        # The tile is linear in these leaves, which are small: scaling them spares a copy of every weight.
        leaves |= {k: leaves[k] * scale.reshape(-1, *(1,) * (leaves[k].ndim - 1)) for k in self._linear}
        return bare.filled(leaves, noise and {k: v[self._span] for k, v in noise.items()})

    def matrix(self, slot: int, leaves: Params, noise: Params | None) -> Tensor:
        """The matrix of one slot, from what this rank's tiles of it are made of."""
        like, first = next(iter(leaves.values())), sum(self._held[:slot])
        bare = self.constants(like.dtype, like.device)[0].of(slice(first, first + self._held[slot]))
        return matrix_of(self._of_all(bare.filled(leaves, noise), slot), self.cuts[slot])

    def _of_all(self, run: Run, slot: int) -> Run | GatheredRun:
        """What makes one slot on all ranks, of what makes this rank's tiles of it."""
        return run if self._sizes is None else GatheredRun(run, self, self._sizes[slot])

    def runs(self, run: Run) -> list[Part]:
        """What makes each slot."""
        return [self._of_all(part, slot) for slot, part in enumerate(run.split(self._held))]

    def mine(self, run: Run) -> Tensor | Factors:
        """This rank's tiles or factors, to be gathered; it may hold none."""
        return run.tiles() if run.n_tiles or not self.layout else no_tiles(self.layout, self.ensemble, run.leaves)

    def factors(self, run: Run) -> list[Part]:
        """The factors of each slot."""
        return self.parts(run.tiles())

    def matrices(self, run: Run) -> list[Tensor]:
        """The matrix of each slot; large ones one after the other, which spares memory and the time to get it."""
        dims = self.ensemble.dims
        spans = _spans([n * dims.rows * dims.cols * run.row.itemsize for n in self._counts])
        parts = run.split([sum(self._counts[span]) for span in spans])
        return [m for part, span in zip(parts, spans, strict=True) for m in part.matrices(self.grids[span])]

    def parts(self, tiles: Tensor | Factors) -> list[Part]:
        """The matrix or the factors of each slot, from all tiles."""
        if isinstance(tiles, Tensor):
            return list(join_all(tiles, self.grids))
        left, right = (x.split(self._counts) if len(self._counts) > 1 else (x,) for x in tiles)
        return [Factors(*both) for both in zip(left, right, strict=True)]


def _spans(sizes: list[int]) -> list[slice]:
    """Cut a sequence of slots into spans of at least `_RUN_BYTES`, the last one maybe smaller."""
    ends, total = [0], 0
    for i, size in enumerate(sizes, 1):
        total += size
        if total >= _RUN_BYTES or i == len(sizes):
            ends.append(i)
            total = 0
    return [slice(a, b) for a, b in pairwise(ends)]


def matrix_of(part: Part, cut: Cut) -> Tensor:
    """The matrix [R, C] of a slot, or the block of it that is cut out."""
    if isinstance(part, Run):
        part = part.matrix(cut.grid)
    elif not isinstance(part, Tensor):
        part = join_tiles(dense_tiles(part if isinstance(part, Factors) else part.tiles()), cut.grid)
    return cut.crop(part)


def factors_of(part: Part) -> Factors:
    """The factors of a slot, whose type has some."""
    made = part if isinstance(part, Tensor | Factors) else part.tiles()
    assert isinstance(made, Factors)
    return made


class Generator:
    """A plan with its constants (codes, groups, scales) at hand: `generator(gnets, direct) -> {name: tensor}`.

    Constants are built once for each dtype and device. `generate` is the one-off form.

    Args:
        plan: the plan.
        kernel: implementation of ReLU g-nets.
        layout: of a genome that is split over ranks: each makes its tiles, and all are gathered.
        pnet: where its layers are looked at, weights can have other forms than dense.
        lazy: whether they stay factors: True wherever they can, `"auto"` where it pays (see `FactoredWeight`).
        remat: whether the others are made for each use and again in backward.
        names: the parameters to make; None is all.
        pieces: which block to make of the matrix of a parameter, by name; of factors all are made.

    Attributes:
        forms: the form of each weight that is not dense, by name of parameter, names of tied ones included.
        gather: from each rank's outputs to everyone's, where the genome is split.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        kernel: Kernel = "auto",
        layout: Layout | None = None,
        pnet: nn.Module | None = None,
        lazy: Any = False,
        remat: bool = False,
        names: Collection[str] | None = None,
        pieces: Mapping[str, Piece] | None = None,
    ) -> None:
        self._layout = layout if layout is not None and layout.sharded else None
        self.gather = None if self._layout is None else Gather(self._layout)
        self._plan, self._dtype, self._pieces = plan, plan.dtype, pieces or {}
        # A process's first sine or tanh in several threads can be off by 8e-5 (pytorch issue 188792): one goes ahead.
        torch.tanh(torch.sin(torch.zeros(1, dtype=torch.float32, device="cpu")))
        self.forms: dict[str, WeightForm] = {}
        made = [t for t in plan.tensors if names is None or t.name in names]
        for tensor in made:
            named = (tensor.name, *tensor.aliases)
            if tensor.slots and pnet is not None and all(_formable(pnet, name) for name in named):
                form = self._form(tensor, lazy, remat)
                self.forms |= {} if form is None else dict.fromkeys(named, form)
        wanted = {t.name for t in made}
        self._stacks = []
        # Where each slot is: its stack, and its place there.
        self._place: dict[tuple[str, int], tuple[int, int]] = {}
        for e in plan.ensembles:
            spread = self._layout is not None and bool(e.leaves)
            cuts = {i: self._cut_of(plan.tensors[p.tensor], p.slot.grid, spread) for i, p in enumerate(e.spans)}
            cuts = {i: cut for i, cut in cuts.items() if plan.tensors[e.spans[i].tensor].name in wanted}
            if cuts:
                stack = Stack(e, kernel, self._layout if e.leaves else None, lambda: self.gather, cuts)
                spans = [(plan.tensors[e.spans[i].tensor].name, e.spans[i].part) for i in stack.slots]
                self._place |= {span: (len(self._stacks), i) for i, span in enumerate(spans)}
                self._stacks.append(stack)
        self._tensors: list[tuple[TensorPlan, Callable[..., Params], list[tuple[int, int]]]] = []
        write = {FactoredWeight: self._factored, RecomputedWeight: self._recomputed, type(None): self._dense}
        for tensor in made:
            places = [self._place[tensor.name, part] for part in range(len(tensor.slots))]
            self._tensors.append((tensor, write[type(self.forms.get(tensor.name))], places))
        # Gathered are the outputs of whole ensembles, or of each slot where they are not to be kept.
        gathered = self._layout is not None and not remat
        self._made: list[Callable[[Run], Sequence[Part]] | None] = []
        for stack in self._stacks:
            kinds = {type(self.forms.get(plan.tensors[p.tensor].name)) for p in stack.ensemble.spans}
            if stack.layout is not None:
                self._made.append(None if gathered else stack.runs)
            elif RecomputedWeight in kinds:
                self._made.append(stack.runs)
            else:
                self._made.append(stack.factors if FactoredWeight in kinds else stack.matrices)

    def _cut_of(self, tensor: TensorPlan, grid: TileGrid, spread: bool) -> Cut:
        """The tiles to make of a matrix: all where they are spread over ranks, and the block is cut out after."""
        piece = self._pieces.get(tensor.name)
        if piece is None or isinstance(self.forms.get(tensor.name), FactoredWeight):
            return Cut(grid)
        return Cut(grid, None, piece) if spread else cut_piece(grid, piece)

    def _form(self, tensor: TensorPlan, lazy: Any, remat: bool) -> WeightForm | None:
        """The form of a tensor whose layers can have one, None for dense."""
        layout = self._layout
        # With a gather for each use none stays factors, nor where it is tiles that are gathered.
        thin = lazy and (layout is None or (layout.placement == "factors" and not remat))
        if thin and tensor.can_factor(self._plan.dtype):
            first = tensor.slots[0].grid
            grid = TileGrid(len(tensor.slots) * first.rows, first.cols, first.tile_rows, first.tile_cols)
            return FactoredWeight(
                tensor.name, tensor.shape, grid, tensor.kind == "transposed_linear", auto=lazy == "auto"
            )
        index = next(i for i, t in enumerate(self._plan.tensors) if t is tensor)
        spans = sorted((p.part, e.name) for e in self._plan.ensembles for p in e.spans if p.tensor == index)
        by_name = {e.name: e for e in self._plan.ensembles}
        ensembles = [by_name[name] for _, name in spans]
        if not remat or not all(e.leaves for e in ensembles):
            return None
        names: list[tuple[int, str, str]] = []
        for part, e in enumerate(ensembles):
            names += [(part, "leaf", k) for k in e.leaves]
            names += [(part, "noise", k) for k in e.hypernet.noise_shapes(e.dims)]
        inputs = tuple(f"{what}_{part}_{k.replace('.', '_')}" for part, what, k in names)

        def maker(*given: Tensor) -> Tensor:
            values: list[dict[str, Params]] = [{"leaf": {}, "noise": {}} for _ in ensembles]
            for (part, what, k), x in zip(names, given, strict=True):
                values[part][what][k] = x
            found = [self._place[tensor.name, part] for part in range(len(ensembles))]
            matrices = [
                self._stacks[number].matrix(slot, of["leaf"], of["noise"] or None)
                for (number, slot), of in zip(found, values, strict=True)
            ]
            return self._folded(tensor, matrices)

        piece = tensor.name in self._pieces
        return RecomputedWeight(tensor.name, inputs, maker, tensor.kind == "transposed_linear", piece)

    def __call__(self, gnets: GNets, direct: Params, noise: Noise | None = None) -> Params:
        """What the p-net's skeleton takes: all its parameters by name, those with a form as the inputs of the form.

        Args:
            gnets: leaves of the ensembles, this rank's rows of them where they are split.
            direct: direct parameters, which are returned as they are.
            noise: noise of all tiles of the stochastic ensembles, None for the mean.

        Raises:
            CollectiveError: if a rank is missing.
        """
        dtype, device = self._kind(gnets, direct)
        noise = noise or {}
        # A caller's autocast is for the p-net.
        with torch.autocast(device.type, enabled=False):
            named = [(stack, stack.ensemble.name) for stack in self._stacks]
            runs = [stack.run(gnets.get(name, {}), noise.get(name), dtype, device) for stack, name in named]
            parts = self._gather(runs)
            parts |= {i: make(runs[i]) for i, make in enumerate(self._made) if make is not None}
            tensors: Params = {}
            for tensor, write, places in self._tensors:
                if places:
                    tensors |= write(tensor, [(parts[number][i], self._stacks[number].cuts[i]) for number, i in places])
                else:
                    tensors[tensor.name] = self._direct(tensor, direct[tensor.name])
            return tensors

    def prepare(self, gnets: GNets, direct: Params) -> None:
        """Build the constants for these leaves, which a compiled call cannot do itself."""
        for stack in self._stacks:
            stack.constants(*self._kind(gnets, direct))

    def _kind(self, gnets: GNets, direct: Params) -> tuple[torch.dtype, torch.device]:
        """Dtype and device of generation: those of the leaves."""
        like = next((leaf for leaves in gnets.values() for leaf in leaves.values()), None)
        like = next(iter(direct.values()), None) if like is None else like
        dtype = self._dtype if like is None or not like.is_floating_point() else like.dtype
        return dtype, torch.device("cpu") if like is None else like.device

    def _gather(self, runs: list[Run]) -> dict[int, list[Part]]:
        """Every slot of the ensembles that are gathered whole, from each rank's tiles."""
        gathered = {i: self._stacks[i] for i, make in enumerate(self._made) if make is None}
        if self.gather is None or not gathered:
            return {}
        # Outside vmap, all at once: collectives have no batching rule, and each costs its latency.
        whole = self.gather.outputs({stack.ensemble.name: stack.mine(runs[i]) for i, stack in gathered.items()})
        return {i: stack.parts(whole[stack.ensemble.name]) for i, stack in gathered.items()}

    def _direct(self, tensor: TensorPlan, x: Tensor) -> Tensor:
        """A direct parameter, or its block."""
        piece = self._pieces.get(tensor.name)
        if piece is None:
            return x
        kind = KINDS[tensor.kind]
        return kind.fold([piece.of(kind.unfold(x)[0])], kind.block_shape(tensor.shape, piece.shape))

    def _dense(self, tensor: TensorPlan, parts: list[tuple[Part, Cut]]) -> Params:
        """The tensor itself."""
        return {tensor.name: self._folded(tensor, [matrix_of(part, cut) for part, cut in parts])}

    def _folded(self, tensor: TensorPlan, matrices: list[Tensor]) -> Tensor:
        """The tensor, or its block, from the matrices of its slots."""
        matrices = [m + slot.offset if slot.offset else m for m, slot in zip(matrices, tensor.slots, strict=True)]
        kind, piece = KINDS[tensor.kind], self._pieces.get(tensor.name)
        weight = kind.fold(matrices, tensor.shape if piece is None else kind.block_shape(tensor.shape, piece.shape))
        # Generation runs in the leaves' dtype; only a narrower p-net (bf16, fp16) is cast to.
        narrow = DTYPES[tensor.dtype]
        return weight.to(narrow) if narrow.itemsize < self._plan.dtype.itemsize else weight

    def _factored(self, tensor: TensorPlan, parts: list[tuple[Part, Cut]]) -> Params:
        """Its factors: [nr, nc, r, k] and [nr, nc, c, k], the matrices of several slots below each other."""
        grid = tensor.slots[0].grid
        factors = [factors_of(part) for part, _ in parts]
        left, right = (torch.cat(x) if len(factors) > 1 else x[0] for x in zip(*factors, strict=True))
        cut = (len(parts) * grid.n_rows, grid.n_cols)
        form = f"{tensor.name}_form"
        return {f"{form}.left": left.unflatten(0, cut), f"{form}.right": right.unflatten(0, cut)}

    def _recomputed(self, tensor: TensorPlan, parts: list[tuple[Part, Cut]]) -> Params:
        """What its g-nets are made of."""
        given: list[Tensor] = []
        for part, _ in parts:
            run = part.run if isinstance(part, GatheredRun) else part
            assert isinstance(run, Run)
            given += [*run.leaves.values(), *(run.noise or {}).values()]
        return {f"{tensor.name}_form.{k}": v for k, v in zip(self.forms[tensor.name].inputs, given, strict=True)}


def _formable(pnet: nn.Module, name: str) -> bool:
    prefix, _, attribute = name.rpartition(".")
    return formable(pnet.get_submodule(prefix), attribute)


def generate(plan: Plan, genome: GenomeLike, *, noise: Noise | None = None, kernel: Kernel = "auto") -> Params:
    """All parameters of the p-net by name, direct ones included: `{name: Tensor}`.

    Differentiable with respect to `genome.gnets` and `genome.direct`, also under `torch.func` transforms.

    Args:
        plan: the plan.
        genome: a `Genome` or `TrainState`; one that is split over ranks must be gathered first.
        noise: noise of stochastic g-nets (see `sample_noise`); None gives the mean weights.
        kernel: implementation of ReLU g-nets.

    Raises:
        ValueError: if the genome's leaves are not those of the plan.

    >>> import gbfunc as gb
    >>> pnet = torch.nn.Linear(30, 20)
    >>> plan = gb.make_plan(pnet, gb.periodic(features=2))
    >>> {name: tuple(weight.shape) for name, weight in gb.generate(plan, gb.init_genome(plan, pnet)).items()}
    {'weight': (20, 30), 'bias': (20,)}
    """
    check_genome(plan, genome, buffers=False)
    return Generator(plan, kernel=kernel)(genome.gnets, genome.direct, noise)
