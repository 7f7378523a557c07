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
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gbfunc.base import BaseTensors
from gbfunc.generate.stack import GatheredRun, Part, Stack, factors_of, matrix_of
from gbfunc.genome import Noise, check_genome, check_noise
from gbfunc.hypernets.ensemble import Run, is_exporting, with_factors
from gbfunc.layers import KINDS
from gbfunc.layers.delta import DeltaWeight, added
from gbfunc.layers.forms import FactoredWeight, WeightForm
from gbfunc.layers.install import formable, transposed
from gbfunc.layers.recomputed import RecomputedWeight
from gbfunc.parallel import Gather, Layout
from gbfunc.plan import DTYPES, Plan, TensorPlan
from gbfunc.tiling import Cut, Piece, TileGrid, cut_piece
from gbfunc.trees import DIRECT, GNET, flat_genome
from gbfunc.types import GenomeLike, Kernel, Params


class Generator:
    """A plan with its constants (codes, groups, scales) at hand: `generator(leaves) -> {name: tensor}`.

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
        base: what deltas belong to, where the plan has a base.

    Attributes:
        forms: the form of each weight that is not dense, by name of parameter, names of tied ones included.
        unchanged: names of the parameters of the base that have no delta.
        frozen: what it gives of the base, by name: those, and what deltas belong to.
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
        base: BaseTensors | None = None,
    ) -> None:
        if plan.base is not None and base is None:
            raise ValueError("the genome holds deltas of a base: give the pretrained p-net too (base=)")
        self._base = base
        changed = {t.name for t in plan.tensors}
        self.unchanged = [k for k in base.names if k not in changed] if base is not None else []
        self._layout = layout if layout is not None and layout.sharded else None
        self.gather = None if self._layout is None else Gather(self._layout)
        self._plan, self._dtype, self._pieces = plan, plan.dtype, pieces or {}
        # A process's first sine or tanh in several threads can be off by 8e-5 (pytorch issue 188792): one goes ahead.
        torch.tanh(torch.sin(torch.zeros(1, dtype=torch.float32, device="cpu")))
        self.forms: dict[str, WeightForm] = {}
        made = [t for t in plan.tensors if names is None or t.name in names]
        for tensor in made:
            named = (tensor.name, *tensor.aliases)
            if tensor.slots and pnet is not None and all(_formable(pnet, name, tensor.kind) for name in named):
                form = self._form(tensor, lazy, remat)
                self.forms |= {} if form is None else dict.fromkeys(named, form)
        deltas = {name for name, form in self.forms.items() if isinstance(form, DeltaWeight)}
        self.frozen = {*self.unchanged, *(f"{name}_form.base" for name in deltas)}
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
        write = {RecomputedWeight: self._recomputed, type(None): self._dense}
        for tensor in made:
            places = [self._place[tensor.name, part] for part in range(len(tensor.slots))]
            self._tensors.append((tensor, write.get(type(self.forms.get(tensor.name)), self._factored), places))
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
                thin = any(issubclass(kind, FactoredWeight) for kind in kinds)
                self._made.append(stack.factors if thin else stack.matrices)

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
            form = DeltaWeight if tensor.base else FactoredWeight
            return form(tensor.name, tensor.shape, grid, tensor.kind == "transposed_linear", auto=lazy == "auto")
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
        # By number: the names of two leaves may be equal but for what no attribute's name has.
        inputs = tuple(f"{what}_{number}" for number, (_, what, _) in enumerate(names))

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

    def __call__(self, leaves: Params, noise: Noise | None = None) -> Params:
        """What the p-net's skeleton takes: all its parameters by name, those with a form as the inputs of the form.

        Args:
            leaves: those of the genome, flat by name (`flat_genome`): of ensembles, this rank's rows of them where they
                are split, and direct parameters, which are returned as they are.
            noise: noise of all tiles of the stochastic ensembles, None for the mean.

        Raises:
            CollectiveError: if a rank is missing.
        """
        dtype, device = self._kind(leaves)
        noise = noise or {}
        # A caller's autocast is for the p-net; an exported graph has none, and should not hold that it is off.
        with nullcontext() if is_exporting() else torch.autocast(device.type, enabled=False):
            runs = [stack.run(leaves, noise.get(stack.ensemble.name), dtype, device) for stack in self._stacks]
            # Weights that are recomputed take leaves, all others what is made here.
            now = [i for i, make in enumerate(self._made) if make != self._stacks[i].runs]
            for i, run in zip(now, with_factors([runs[i] for i in now]), strict=True):
                runs[i] = run
            parts = self._gather(runs)
            parts |= {i: make(runs[i]) for i, make in enumerate(self._made) if make is not None}
            tensors: Params = {}
            if self._base is not None:
                params, _ = self._base.on(device)
                tensors |= {k: params[k] for k in self.unchanged}
            for tensor, write, places in self._tensors:
                if places:
                    tensors |= write(tensor, [(parts[number][i], self._stacks[number].cuts[i]) for number, i in places])
                else:
                    tensors[tensor.name] = self._direct(tensor, leaves[f"{DIRECT}{tensor.name}"])
            return tensors

    def prepare(self, leaves: Params) -> None:
        """Build the constants for these leaves, which a compiled call cannot do itself."""
        dtype, device = self._kind(leaves)
        if self._base is not None:
            self._base.on(device)
        for stack in self._stacks:
            stack.constants(dtype, device)

    def _kind(self, leaves: Params) -> tuple[torch.dtype, torch.device]:
        """Dtype and device of generation: those of the g-nets' leaves, where there are any."""
        like = next((x for k, x in leaves.items() if k.startswith(GNET)), next(iter(leaves.values()), None))
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
        if tensor.base:
            return added(self._of_base(tensor.name, weight.device), weight)
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
        factors = {f"{form}.left": left.unflatten(0, cut), f"{form}.right": right.unflatten(0, cut)}
        return factors | ({f"{form}.base": self._of_base(tensor.name, left.device)} if tensor.base else {})

    def _of_base(self, name: str, device: torch.device) -> Tensor:
        """The base's tensor of a delta."""
        assert self._base is not None
        return self._base.on(device)[0][name]

    def _recomputed(self, tensor: TensorPlan, parts: list[tuple[Part, Cut]]) -> Params:
        """What its g-nets are made of."""
        given: list[Tensor] = []
        for part, _ in parts:
            run = part.run if isinstance(part, GatheredRun) else part
            assert isinstance(run, Run)
            given += [*run.leaves.values(), *(run.noise or {}).values()]
        return {f"{tensor.name}_form.{k}": v for k, v in zip(self.forms[tensor.name].inputs, given, strict=True)}


def _formable(pnet: nn.Module, name: str, kind: str) -> bool:
    """Whether the layer that has a tensor by this name can have it in another form, and reads it as its kind says."""
    prefix, _, attribute = name.rpartition(".")
    layer = pnet.get_submodule(prefix)
    return formable(layer, attribute) and transposed(layer) == (kind == "transposed_linear")


def generate(
    plan: Plan,
    genome: GenomeLike,
    *,
    noise: Noise | None = None,
    kernel: Kernel = "auto",
    base: nn.Module | BaseTensors | None = None,
) -> Params:
    """All parameters of the p-net by name, direct ones included: `{name: Tensor}`.

    Differentiable with respect to `genome.gnets` and `genome.direct`, also under `torch.func` transforms.

    Args:
        plan: the plan.
        genome: a `Genome` or `TrainState`; one that is split over ranks must be gathered first.
        noise: noise of stochastic g-nets (see `sample_noise`); None gives the mean weights.
        kernel: implementation of ReLU g-nets.
        base: the pretrained p-net that the genome changes, where the plan has a base: what has no delta is its tensor.
            For many calls, and inside of `torch.func` transforms, `plan.base_tensors(pnet)`, which is checked once.

    Raises:
        ValueError: if the genome's leaves or the noise are not those of the plan, or the base is not the plan's.

    >>> import gbfunc as gb
    >>> pnet = torch.nn.Linear(30, 20)
    >>> plan = gb.make_plan(pnet, gb.periodic(features=2))
    >>> {name: tuple(weight.shape) for name, weight in gb.generate(plan, gb.init_genome(plan, pnet)).items()}
    {'weight': (20, 30), 'bias': (20,)}
    """
    check_genome(plan, genome, buffers=False)
    check_noise(plan, noise)
    if base is not None and plan.base is None:
        raise ValueError("the plan has no base: the genome holds all of the p-net")
    tensors = plan.base_tensors(base) if isinstance(base, nn.Module) else base
    return Generator(plan, kernel=kernel, base=tensors)(flat_genome(genome), noise)
