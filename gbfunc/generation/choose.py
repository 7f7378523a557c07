"""Generates weights or blocks of weights, and chooses how: dense, as factors, or recomputed for each use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gbfunc.base import BaseTensors
from gbfunc.generation.generator import Form, Generator, Stack
from gbfunc.genome import Noise, check_genome, check_noise
from gbfunc.layers import KINDS
from gbfunc.layers.forms import DenseWeight, Needs, Target, WeightForm
from gbfunc.layers.recomputed import RecomputedWeight
from gbfunc.plan import DTYPES, Ensemble, Plan, TensorPlan
from gbfunc.tiling import Cut, Piece, cut_piece
from gbfunc.trees import flat_genome
from gbfunc.types import GenomeLike, Kernel, Lazy, Params

if TYPE_CHECKING:
    from gbfunc.parallel import Layout

_NEEDS: tuple[Needs, ...] = ("leaves", "factors", "matrix")
"""If forms of an ensemble differ in `needs`, the first of these serves all: leaves give factors, factors matrices."""


def make_generator(
    plan: Plan,
    *,
    kernel: Kernel = "auto",
    layout: Layout | None = None,
    pnet: nn.Module | None = None,
    lazy: Lazy = False,
    remat: bool = False,
    names: Collection[str] | None = None,
    pieces: Mapping[str, Piece] | None = None,
    base: BaseTensors | None = None,
) -> Generator:
    """Make a function from the leaves of a genome to the p-net's weights. For a single use, call `generate`.

    With a `layout` of ranks, each rank generates some tiles, and gathers the other tiles from the other ranks. With
    `lazy`, layers of `pnet` that support factors get factors instead of dense weights. With `remat`, a weight is
    generated for each use and again in backward. `names` selects the parameters to generate. `pieces[name]` selects a
    block of a parameter's matrix; factors always describe the entire matrix. A plan with a base needs `base`.
    """
    if plan.base is not None and base is None:
        raise ValueError("the genome holds deltas of a base, but base is None: pass the pretrained p-net (base=)")
    layout = layout if layout is not None and layout.sharded else None
    of_base = {} if base is None else {k: partial(base.tensor, k) for k in base.params if names is None or k in names}
    # With several ranks, layers get factors only if the ranks gather factors, and gather once, not for each use.
    keeps_factors = layout is None or (layout.placement == "factors" and not remat)
    chooser = _Chooser(plan, kernel, layout, pnet, lazy if keeps_factors else False, remat, pieces or {}, of_base)
    selected = [t for t in plan.tensors if names is None or t.name in names]
    chosen = {t.name: chooser.form(t) for t in selected if t.slots}
    stacks = [stack for e in plan.ensembles if (stack := chooser.stack(e, chosen)) is not None]
    stacks.sort(key=lambda stack: stack.needs == "leaves")
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for n, stack in enumerate(stacks):
        spans = [stack.ensemble.spans[slot] for slot in stack.slots]
        found |= {(plan.tensors[span.tensor].name, span.matrix): (n, i) for i, span in enumerate(spans)}
    places, forms = [], dict[str, WeightForm]()
    for t in (t for t in selected if t.slots):
        form, of_tensor = chosen[t.name], [found[t.name, number] for number in range(len(t.slots))]
        places.append((form, of_tensor))
        if isinstance(form, WeightForm):
            forms |= dict.fromkeys((t.name, *t.aliases), form)
        chooser.recomputed.get(t.name, []).extend((stacks[n], i) for n, i in of_tensor)
    unchanged = {k: on for k, on in of_base.items() if k not in {t.name for t in plan.tensors}}
    keys = (chosen[t.name].keys if t.slots else (t.name,) for t in selected)
    order = [*unchanged, *(k for group in keys for k in group)]
    direct = [chooser.target(t) for t in selected if not t.slots]
    if layout is None:
        return Generator(stacks, places, forms, direct, unchanged, order, plan.dtype)
    # Import RankGenerator here, because a single process does not need `torch.distributed`.
    from gbfunc.generation.ranks import RankGenerator

    return RankGenerator(layout, stacks, places, forms, direct, unchanged, order, plan.dtype)


@dataclass
class _Chooser:
    """Chooses whether layers get a dense weight or a `WeightForm`, and makes the `Stack` that generates an ensemble."""

    plan: Plan
    kernel: Kernel
    layout: Layout | None
    pnet: nn.Module | None
    lazy: Lazy
    remat: bool
    pieces: Mapping[str, Piece]
    of_base: Mapping[str, Callable[[torch.device], Tensor]]
    # {weight that backward generates again: a (`Stack`, index in the `Stack`) per matrix}. `make_generator` fills it.
    recomputed: dict[str, list[tuple[Stack, int]]] = field(default_factory=dict)

    def target(self, tensor: TensorPlan) -> Target:
        kind, piece, narrow = KINDS[tensor.kind], self.pieces.get(tensor.name), DTYPES[tensor.dtype]
        shape = tensor.shape if piece is None else kind.block_shape(tensor.shape, piece.shape)
        # Weights are generated in the leaves' dtype, and cast if the p-net's dtype is narrower (bf16, fp16).
        cast = narrow if narrow.itemsize < self.plan.dtype.itemsize else None
        base = self.of_base.get(tensor.name) if tensor.base else None
        return Target(tensor.name, kind, shape, tuple(s.offset for s in tensor.slots), cast, base, piece)

    def form(self, tensor: TensorPlan) -> Form:
        target = self.target(tensor)
        if self.pnet is None or not tensor.is_formable(self.pnet):
            return DenseWeight(target)
        if (factored := tensor.factored_form(self.plan.dtype, self.lazy, target.base)) is not None:
            return factored
        if not self.remat:
            return DenseWeight(target)
        # A weight that can be recomputed is always a single matrix, so one ensemble generates the weight.
        e = next(e for e in self.plan.ensembles for p in e.spans if self.plan.tensors[p.tensor] is tensor)
        if not e.leaves:
            return DenseWeight(target)
        slots = self.recomputed.setdefault(tensor.name, [])

        def maker(*inputs: Tensor) -> Tensor:
            values = iter(inputs)
            return target.fold([stack.slot(number, values).matrix() for stack, number in slots])

        # With several ranks, the last input is a flag, which is 0 if this rank's gradients are discarded.
        n = len(e.leaves) + len(e.hypernet.noise_shapes(e.dims)) + int(self.layout is not None)
        # Inputs of a `WeightForm` become attributes of a layer: use numbers, as names of leaves may have dots.
        inputs, transposed = tuple(f"input_{i}" for i in range(n)), tensor.kind == "transposed_linear"
        return RecomputedWeight(tensor.name, inputs, maker, transposed, split=target.piece is not None)

    def stack(self, e: Ensemble, forms: Mapping[str, Form]) -> Stack | None:
        owners = [self.plan.tensors[p.tensor].name for p in e.spans]
        needed: set[Needs] = {"matrix", *(forms[name].needs for name in owners if name in forms)}
        needs: Needs = next(need for need in _NEEDS if need in needed)
        layout = self.layout if e.leaves else None
        cuts: dict[int, Cut] = {}
        for i, name in ((i, name) for i, name in enumerate(owners) if name in forms):
            # Factors are always generated for the entire matrix. The layer selects the rows and columns that it needs.
            piece = self.pieces.get(name) if forms[name].needs != "factors" else None
            # With several ranks, all tiles are gathered, and this rank's `piece` is then cut out of the matrix.
            grid = e.spans[i].slot.grid
            cuts[i] = Cut(grid, None, piece) if piece is None or layout is not None else cut_piece(grid, piece)
        if not cuts:
            return None
        if layout is None:
            return Stack(e, self.kernel, cuts, needs)
        from gbfunc.generation.ranks import RankStack

        return RankStack(layout, e, self.kernel, cuts, "leaves" if self.remat else needs)


def to_serve(plan: Plan, generator: Generator, tensors: Params) -> tuple[Params, dict[str, WeightForm], Params]:
    """Choose the weights that a module for inference stores as factors, because the factors are smaller.

    `tensors` is the output of a lazy generator. Returns three dicts: the dense weights by name, in the p-net's dtypes;
    the `WeightForm` of each weight that is stored as factors, by all tied names; and the factors by `WeightForm.keys`.
    """
    weights, forms, inputs = {k: tensors[k] for k in generator.unchanged}, dict[str, WeightForm](), Params()
    for t in plan.tensors:
        dtype, form = DTYPES[t.dtype], generator.forms.get(t.name)
        if form is None:
            weights[t.name] = tensors[t.name].detach().to(dtype)
            continue
        # The factors of a delta keep the genome's dtype. All other tensors get the p-net's dtype.
        of_form = {k: x.detach() if t.base else x.detach().to(dtype) for k, x in form.taken(tensors).items()}
        if t.kind == "beside" or sum(x.numel() for k, x in of_form.items() if k != "base") < t.numel:
            forms |= dict.fromkeys((t.name, *t.aliases), form)
            inputs |= zip(form.keys, of_form.values(), strict=True)
        else:
            weights[t.name] = form.make(of_form).to(dtype)
    return weights, forms, inputs


def generate(
    plan: Plan,
    genome: GenomeLike,
    *,
    noise: Noise | None = None,
    kernel: Kernel = "auto",
    base: nn.Module | BaseTensors | None = None,
) -> Params:
    """Generate all parameters of the p-net, including direct parameters: `{name: Tensor}`.

    The result is differentiable with respect to `genome.gnets` and `genome.direct`, also in `torch.func` transforms.

    Args:
        plan: the plan.
        genome: a `Genome` or `TrainState`. A genome that is split over ranks must be gathered first.
        noise: noise of stochastic g-nets (see `sample_noise`). Without noise, weights are mean weights.
        kernel: implementation of the g-nets (`gbfunc.types.Kernel`).
        base: the pretrained p-net, for a plan with a base. Parameters without a delta are returned unchanged. For many
            calls, and in `torch.func` transforms, pass `plan.base_tensors(pnet)`, which checks the p-net once.

    Raises:
        ValueError: if the genome, the noise or the base do not fit the plan, or if the kernel is unknown.

    >>> import gbfunc as gb
    >>> pnet = torch.nn.Linear(30, 20)
    >>> plan = gb.make_plan(pnet, gb.periodic(features=2))
    >>> {name: tuple(weight.shape) for name, weight in gb.generate(plan, gb.init_genome(plan, pnet)).items()}
    {'weight': (20, 30), 'bias': (20,)}
    """
    check_genome(plan, genome, buffers=False)
    check_noise(plan, noise)
    if base is not None and plan.base is None:
        raise ValueError("the plan has no base, but base was given: the genome generates all weights, so omit base=")
    tensors = plan.base_tensors(base) if isinstance(base, nn.Module) else base
    return make_generator(plan, kernel=kernel, base=tensors)(flat_genome(genome), noise)


def generate_piece(
    plan: Plan,
    genome: GenomeLike,
    name: str,
    rows: slice = slice(None),
    cols: slice = slice(None),
    *,
    noise: Noise | None = None,
    kernel: Kernel = "auto",
) -> Tensor:
    """Generate a block of one parameter's matrix. Only tiles that overlap the block are generated.

    The matrix has output channels as rows, and input channels times kernel positions as columns, even if the layer
    stores another layout. A vector is a matrix of one column. For a parameter of a base, the block is part of the
    delta. The result is differentiable.

    Args:
        plan: the plan.
        genome: a `Genome` or `TrainState`.
        name: the name of the parameter, which may be generated or direct.
        rows: a slice of rows, without a step. The three matrices of a packed q, k, v tensor are stacked along the rows.
        cols: a slice of columns, without a step.
        noise: noise of stochastic g-nets, as in `generate`.
        kernel: implementation of the g-nets, as in `generate`.

    Raises:
        ValueError: if the genome does not fit the plan, if the plan has no such parameter, or if a slice has a step.
    """
    check_genome(plan, genome, buffers=False)
    tensor = next((t for t in plan.tensors if name in (t.name, *t.aliases)), None)
    if tensor is None:
        raise ValueError(f"{name!r} is no parameter of the plan; it has {[t.name for t in plan.tensors]}")
    if any(s.step not in (None, 1) for s in (rows, cols)):
        raise ValueError(f"rows and cols must be slices without a step, got {rows} and {cols}")
    matrices = list(KINDS[tensor.kind].matrices(tensor.shape))
    (a, b, _), (c, d, _) = rows.indices(sum(m.rows for m in matrices)), cols.indices(matrices[0].cols)

    def block(index: int, piece: Piece) -> Tensor:
        if not tensor.slots:
            return piece.of(KINDS[tensor.kind].unfold(genome.direct[tensor.name])[index])
        slot, narrow = tensor.slots[index], DTYPES[tensor.dtype]
        e, number = next((e, i) for e in plan.ensembles for i, p in enumerate(e.spans) if p.slot is slot)
        stack = Stack(e, kernel, {number: cut_piece(slot.grid, piece)})
        like = next(iter(genome.gnets.get(e.name, {}).values()), torch.zeros((), dtype=plan.dtype, device="cpu"))
        evaluation = stack.evaluation(flat_genome(genome), (noise or {}).get(e.name), like.dtype, like.device)
        matrix = stack.split(evaluation)[0].matrix()
        matrix = matrix + slot.offset if slot.offset else matrix
        return matrix.to(narrow) if narrow.itemsize < plan.dtype.itemsize else matrix

    blocks, first = list[Tensor](), 0
    for i, m in enumerate(matrices):
        start, stop = (min(max(n - first, 0), m.rows) for n in (a, b))
        # Generate at least an (empty) block of the first matrix, which gives the dtype and the columns.
        if start < stop or not i:
            blocks.append(block(i, Piece(((start, max(start, stop)),), (c, max(c, d)))))
        first += m.rows
    return torch.cat(blocks)
