"""From a genome to the p-net's weights, in one autograd graph.

    leaves + codes --vmap(apply)--> tiles [T, r, c], or factors [T, r, k] and [T, c, k]     `Stack`, one an ensemble
    slots ----form.of----> what the layer takes: the weight, its factors, or its leaves    `layers.forms`, one a tensor

Where ranks hold some tiles each, a gather comes in between. Which form a weight gets is chosen when the generator is
made (`Chooser`); a call is two loops, over ensembles and over tensors.

Suffixes: T tiles, r rows and c columns of a tile, k rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from gbfunc.base import BaseTensors
from gbfunc.generate.choose import Chooser, Form, Lazy
from gbfunc.generate.stack import RankStack, Slot, Stack
from gbfunc.genome import Noise, check_genome, check_noise
from gbfunc.hypernets.ensemble import Run, is_exporting, with_factors
from gbfunc.layers.factored import DeltaWeight, FactoredWeight
from gbfunc.layers.forms import Needs, WeightForm
from gbfunc.parallel import Gather, Layout
from gbfunc.plan import Plan, TensorPlan
from gbfunc.tiling import Cut, Piece, TileGrid, cut_piece
from gbfunc.trees import DIRECT, GNET, flat_genome
from gbfunc.types import GenomeLike, Kernel, Params


class Generator:
    """A plan with its constants (codes, groups, scales) at hand: `generator(leaves) -> {name: tensor}`.

    Constants are built once for each dtype and device. `generate` is the one-off form.

    Args:
        plan: the plan.
        kernel: implementation of the g-nets (`gbfunc.types.Kernel`).
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
    """

    def __init__(
        self,
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
    ) -> None:
        if plan.base is not None and base is None:
            raise ValueError("the genome holds deltas of a base: give the pretrained p-net too (base=)")
        # A process's first sine or tanh in several threads can be off by 8e-5 (pytorch issue 188792): one goes ahead.
        torch.tanh(torch.sin(torch.zeros(1, dtype=torch.float32, device="cpu")))
        self._dtype, self._base, self._pieces = plan.dtype, base, pieces or {}
        layout = layout if layout is not None and layout.sharded else None
        self._layout, self._gather = layout, None if layout is None else Gather(layout)
        chooser = Chooser(plan, pnet, layout, lazy, remat, self._pieces, base, self._remade)
        made = [t for t in plan.tensors if names is None or t.name in names]
        generated = [t for t in made if t.slots]
        self._direct = {t.name: chooser.target(t) for t in made if not t.slots}
        chosen = {t.name: chooser(t) for t in generated}
        layer_forms = {k: form for k, form in chosen.items() if isinstance(form, WeightForm)}
        self.forms: dict[str, WeightForm] = {
            name: layer_forms[t.name] for t in generated if t.name in layer_forms for name in (t.name, *t.aliases)
        }
        changed = {t.name for t in plan.tensors}
        self.unchanged = [k for k in (base.names if base is not None else ()) if k not in changed]
        deltas = {form.keys[-1] for form in self.forms.values() if isinstance(form, DeltaWeight)}
        self.frozen = {*self.unchanged, *deltas}
        self._stacks: list[Stack] = []
        # Where each slot is: its stack, and its place there.
        self._place: dict[tuple[str, int], tuple[int, int]] = {}
        for e in plan.ensembles:
            owners = [plan.tensors[p.tensor] for p in e.spans]
            needed = {chosen[t.name].needs for t in owners if t.name in chosen}
            needs: Needs = next(need for need in _NEEDS if need in {*needed, "matrix"})
            over_ranks = layout is not None and bool(e.leaves)
            cuts = {
                i: self._cut(chosen[t.name], t, p.slot.grid, over_ranks)
                for i, (t, p) in enumerate(zip(owners, e.spans, strict=True))
                if t.name in chosen
            }
            if cuts and layout is not None and e.leaves:
                stack = RankStack(layout, self._now, e, kernel, cuts, "leaves" if remat else needs)
            elif cuts:
                stack = Stack(e, kernel, cuts, needs)
            else:
                continue
            for i, slot in enumerate(stack.slots):
                self._place[owners[slot].name, e.spans[slot].part] = len(self._stacks), i
            self._stacks.append(stack)
        # Gathered are the outputs of whole ensembles, or of each slot where they are not to be kept.
        self._at_once = [i for i, s in enumerate(self._stacks) if isinstance(s, RankStack) and not remat]
        # Weights that are recomputed take leaves, all others what is made in a call.
        self._evaluated = [i for i, s in enumerate(self._stacks) if s.needs != "leaves"]
        self._forms: list[tuple[Form, list[tuple[int, int]]]] = [
            (chosen[t.name], [self._place[t.name, part] for part in range(len(t.slots))]) for t in generated
        ]

        # The plan's order: that of the p-net's parameters.
        keys = {t.name: chosen[t.name].keys if t.slots else (t.name,) for t in made}
        self._order = [*self.unchanged, *(k for of in keys.values() for k in of)]

    def _cut(self, form: Form, tensor: TensorPlan, grid: TileGrid, over_ranks: bool) -> Cut:
        """The tiles to make of a matrix: all where they are those of many ranks, and the block is cut out after."""
        piece = self._pieces.get(tensor.name)
        if piece is None or isinstance(form, FactoredWeight):
            return Cut(grid)
        return Cut(grid, None, piece) if over_ranks else cut_piece(grid, piece)

    def __call__(self, leaves: Params, noise: Noise | None = None, *, counts: bool = True) -> Params:
        """What the p-net's skeleton takes: all its parameters by name, those with a form as the inputs of the form.

        Args:
            leaves: those of the genome, flat by name (`flat_genome`): of ensembles, this rank's rows of them where they
                are split, and direct parameters, which are returned as they are.
            noise: noise of all tiles of the stochastic ensembles, None for the mean.
            counts: whether gradients of this rank count, where the genome is split (see `Gather`).

        Raises:
            CollectiveError: if a rank is missing.
        """
        dtype, device = self._kind(leaves)
        noise = noise or {}
        if self._layout is not None:
            self._gather = Gather(self._layout, counts)
        # A caller's autocast is for the p-net; an exported graph has none, and should not hold that it is off.
        with nullcontext() if is_exporting() else torch.autocast(device.type, enabled=False):
            runs = [stack.run(leaves, noise.get(stack.ensemble.name), dtype, device) for stack in self._stacks]
            for i, run in zip(self._evaluated, with_factors([runs[i] for i in self._evaluated]), strict=True):
                runs[i] = run
            slots = self._gathered(runs) if self._at_once else {}
            of = [slots[i] if i in slots else s.split(runs[i]) for i, s in enumerate(self._stacks)]
            tensors = self._unchanged(device)
            for form, places in self._forms:
                tensors |= form.of([of[stack][slot] for stack, slot in places])
            for name, target in self._direct.items():
                x = leaves[f"{DIRECT}{name}"]
                if target.piece is not None:
                    x = target.kind.fold([target.piece.of(target.kind.unfold(x)[0])], target.shape)
                tensors[name] = x
            return {k: tensors[k] for k in self._order}

    def prepare(self, leaves: Params) -> None:
        """Build the constants for these leaves, which a compiled call cannot do itself."""
        dtype, device = self._kind(leaves)
        self._unchanged(device)
        for stack in self._stacks:
            stack.constants(dtype, device)

    def _kind(self, leaves: Params) -> tuple[torch.dtype, torch.device]:
        """Dtype and device of generation: those of the g-nets' leaves, where there are any."""
        like = next((x for k, x in leaves.items() if k.startswith(GNET)), next(iter(leaves.values()), None))
        dtype = self._dtype if like is None or not like.is_floating_point() else like.dtype
        return dtype, torch.device("cpu") if like is None else like.device

    def _unchanged(self, device: torch.device) -> Params:
        """Parameters of the base that have no delta."""
        if self._base is None:
            return {}
        params, _ = self._base.on(device)
        return {k: params[k] for k in self.unchanged}

    def _now(self) -> Gather:
        """The gather of the last call."""
        assert self._gather is not None
        return self._gather

    def _gathered(self, runs: list[Run]) -> dict[int, Sequence[Slot]]:
        """Every slot of the ensembles that are gathered as they are, from each rank's tiles."""
        stacks = {i: s for i in self._at_once if isinstance(s := self._stacks[i], RankStack)}
        # Outside vmap, all at once: collectives have no batching rule, and each costs its latency.
        tiles = self._now().outputs({s.ensemble.name: s.tiles(runs[i]) for i, s in stacks.items()})
        return {i: s.of_all(tiles[s.ensemble.name]) for i, s in stacks.items()}

    def _remade(self, tensor: TensorPlan, parts: list[tuple[Params, Params]]) -> list[Tensor]:
        """The matrices of a tensor, from the leaves and the noise of each."""
        places = [self._place[tensor.name, part] for part in range(len(parts))]
        slots = [
            self._stacks[stack].slot(slot, leaves, noise or None)
            for (stack, slot), (leaves, noise) in zip(places, parts, strict=True)
        ]
        return [slot.matrix() for slot in slots]


_NEEDS: tuple[Needs, ...] = ("leaves", "factors", "matrix")
"""What forms need, what serves most first: leaves give factors, and factors give matrices."""


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
        kernel: implementation of the g-nets (`gbfunc.types.Kernel`).
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
