"""What a layout stores and sends: from the costs of blocks to those of the stages of every rank."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gbfunc.costs import all_reduce_bytes
from gbfunc.parallel.dry_run import Cell, DryRun, RunLoss, factor_shapes
from gbfunc.parallel.mesh import Mesh
from gbfunc.parallel.pipeline import SCHEDULES, Chain, find_blocks, spread, trace_chain
from gbfunc.parallel.pipeline_order import schedule_class, stage_ranks
from gbfunc.parallel.placement import gather_bytes, operations, placement_cost, products, shares_of
from gbfunc.parallel.planner_stages import Footprint, Made, RankLayout, between, in_flight, together, total_of
from gbfunc.plan import DTYPES, Plan, is_formable
from gbfunc.trees import tree_map

_EXACT_ROWS = 32
"""Rows of a microbatch up to which each number is run; beyond, powers of two."""

_KEPT = ("saved", "formed")

_NUMBERS = ("idx", "index", "id", "number")
"""Ends of the names of attributes that number a module among others."""

_TRACED_ROWS = 2
"""Rows of the batch by which blocks are found and balanced; batch norms refuse a single one."""


_REMEMBERED = (
    "why_not_split",
    "dry",
    "cells",
    "made",
    "_by_stage",
    "_of_stage",
    "_starts",
    "_stages",
    "genome",
    "_gathered",
)
"""Methods whose results are kept, by their arguments."""


@dataclass(eq=False)
class Model:
    """A plan, its p-net and a batch, with what is known of them so far.

    Attributes:
        plan: the plan.
        pnet: the p-net.
        batch: a global batch.
        rows: of it.
        run: calls the p-net as the loss function does.
        styles: of tensor parallelism; None where they may be known.
        lazy: whether weights stay factors.
        states: numbers that the optimizer keeps for each of the genome.
    """

    plan: Plan
    pnet: nn.Module
    batch: Any
    rows: int
    run: RunLoss
    styles: Mapping[str, Any] | None
    lazy: Any
    states: int

    def __post_init__(self) -> None:
        plan = self.plan
        for name in _REMEMBERED:
            setattr(self, name, cache(getattr(self, name)))
        self.blocks, self._chain = self._find_chain()
        self._styles, self._no_styles = self._known_styles(self.styles)
        self._kinds = self._find_kinds()
        self.cells(1, self.lazy is not False, self.rows)  # An error of the p-net shows here.
        self._places = self._find_places()
        tensors = {e.name: [plan.tensors[span.tensor].name for span in e.spans] for e in plan.ensembles}
        self._used = {e: frozenset().union(*(self._places[t] for t in of)) for e, of in tensors.items()}
        frozen = {name for name, p in self.pnet.named_parameters() if not p.requires_grad}
        self._trained = sum(t.numel for t in plan.direct if t.name not in frozen)

    def _find_chain(self) -> tuple[tuple[str, ...], Chain | None]:
        """The blocks, where the p-net has a list of layers that run one after the other."""
        try:
            blocks = find_blocks(self.pnet, 2)
            return blocks, trace_chain(self.pnet, blocks, lambda net: self.run(net, self._rows(_TRACED_ROWS)))
        except (RuntimeError, ValueError):  # Also where the loss function calls parts of the p-net.
            return (), None

    def _known_styles(self, styles: Mapping[str, Any] | None) -> tuple[Mapping[str, Any], str]:
        """Styles of the p-net's layers, and the reason where there are none."""
        from gbfunc.parallel.styles import tensor_styles

        try:
            return tensor_styles(self.pnet) if styles is None else styles, ""
        except ValueError as error:
            return {}, str(error)

    def _find_kinds(self) -> dict[str, str]:
        """What is equal for equal blocks: modules, their attributes but numbers, styles, and tensors of the plan."""
        from gbfunc.parallel.tensor import resolve

        styles = resolve(self.pnet, self._styles)
        tensors = {name: t for t in self.plan.tensors for name in (t.name, *t.aliases)}
        kinds = {}
        for name in self.blocks:
            block, found = self.pnet.get_submodule(name), list[Any]()
            for key, module in block.named_modules():
                plain = [(k, x) for k, x in vars(module).items() if isinstance(x, int | float | str | tuple)]
                plain = sorted((k, x) for k, x in plain if not k.endswith(_NUMBERS))
                found.append((key, type(module), plain, id(styles.get(f"{name}.{key}" if key else name))))
            for key, p in block.named_parameters(remove_duplicate=False):
                t = tensors[f"{name}.{key}"]
                slots = [(s.hypernet, s.grid) for s in t.slots]
                found.append((key, tuple(p.shape), p.dtype, p.requires_grad, t.kind, slots, len(t.aliases)))
            kinds[name] = repr(found)
        return kinds

    def _rows(self, rows: int) -> Any:
        """So many rows of the batch, on the meta device."""
        return tree_map(
            lambda x: (
                torch.empty((rows, *x.shape[1:]) if x.ndim else (), dtype=x.dtype, device="meta")
                if isinstance(x, Tensor)
                else x
            ),
            self.batch,
        )

    def _find_places(self) -> dict[str, frozenset[int]]:
        """In which cells each parameter is used, those after the last block in its cell."""
        if self._chain is None:
            return {t.name: frozenset({0}) for t in self.plan.tensors}
        places, depth = self._chain.places, self.blocks[0].count(".") + 1
        index = {name: i for i, name in enumerate(self.blocks)}

        def cells(name: str) -> set[int]:
            block = ".".join(name.split(".")[:depth])
            return {i + 1 for i in places.get(name, {index.get(block, -1)})}

        names = {t.name: (t.name, *t.aliases) for t in self.plan.tensors}
        return {name: frozenset().union(*map(cells, same)) for name, same in names.items()}

    def why_not_split(self, tensor: int) -> str:
        """Why layers cannot be split over so many tensor ranks; empty where they can."""
        try:
            self.dry(tensor, self.lazy is not False)
        except ValueError as error:
            return str(error)
        return ""

    def why_not_staged(self, stages: int, schedule: str) -> str:
        """Why the p-net cannot be cut so; empty where it can."""
        if self._chain is None:
            return "the p-net has no list of layers that run in their order"
        try:
            schedule_class(SCHEDULES[schedule][0])
        except ValueError as error:
            return str(error)
        return "" if stages <= len(self.blocks) else f"{stages} stages of {len(self.blocks)} blocks"

    def can_remat(self, placement: str) -> bool:
        """Whether there are weights that would be made again: those that do not stay factors."""
        factored = self.lazy is not False and placement == "replicated"
        return any(w.passing for w in self.made(1, factored, True, 1))

    def placements(self, shards: int) -> list[tuple[str, int]]:
        """Placements of the genome on the ranks that share out the batch, with the ranks along the g-net axis."""
        if shards == 1:
            return [("replicated", 1)]
        split = min(
            ("sharded", "factors"), key=lambda p: placement_cost(self.plan, 1, shards, p, self.lazy is not False).bytes
        )
        return [("replicated", 1), (split, shards)]

    def dry(self, tensor: int, factored: bool) -> DryRun:
        """The p-net as a tensor rank runs it; ValueError where it cannot be split so."""
        parallel = None
        if tensor > 1:
            from gbfunc.parallel.tensor import TensorParallel

            if self._no_styles:
                raise ValueError(self._no_styles)
            mesh = Mesh({"tensor": tensor}, 0, torch.device("cpu"), 0.0, None, False)
            parallel = TensorParallel(self.pnet, self._styles, mesh)
        lazy = self.lazy if factored else False
        return DryRun(self.plan, self.pnet, self._kinds, lazy=lazy, tensor=parallel)

    def cells(self, tensor: int, factored: bool, rows: int) -> list[Cell]:
        """Costs of a microbatch of so many rows."""
        if rows > _EXACT_ROWS and rows & (rows - 1):
            # Between powers of two costs are linear, but where a layer's form changes.
            below = 1 << (rows.bit_length() - 1)
            both = (self.cells(tensor, factored, n) for n in (below, 2 * below))
            return [between(a, b, rows / below - 1) for a, b in zip(*both, strict=True)]
        return self.dry(tensor, factored)(self.run, self._rows(rows))

    def made(self, tensor: int, factored: bool, remat: bool, gnets: int) -> list[Made]:
        """Every generated parameter as a tensor rank keeps it."""
        dry, plan, item = self.dry(tensor, factored), self.plan, self.plan.dtype.itemsize
        flops = dict.fromkeys(range(len(plan.tensors)), 0.0)
        for e in plan.ensembles:
            dense, product = operations(e), products(e)
            for span in e.spans:
                thin = plan.tensors[span.tensor].name in dry.forms
                flops[span.tensor] += span.slot.grid.n_tiles / e.n_tiles * (dense - product * thin)
        made = []
        for i, t in enumerate(plan.tensors):
            if not t.slots:
                continue
            factors = 0.0
            if t.slots[0].hypernet.factorised and len({(s.hypernet, s.grid) for s in t.slots}) == 1:
                factors = float(item * sum(map(math.prod, factor_shapes(t))))
            if t.name in dry.forms:
                made.append(Made(self._places[t.name], factors, factors / gnets, 0.0, flops[i]))
                continue
            numel = math.prod(dry.shapes.get(t.name, t.shape))
            share = numel / max(1, t.numel)
            # Tiles of a split genome are gathered whole, from those that this rank makes of its factors. Graphs are
            # those of PyTorch's operators, as on a GPU; the compiled loop of a CPU keeps the leaves alone.
            kept = (t.numel if gnets > 1 and not remat else numel) * DTYPES[t.dtype].itemsize
            graph = 2 * factors / gnets * (share if gnets == 1 else 1.0)
            again = (0.0, 0.0, kept + graph) if remat and is_formable(t, self.pnet) else (kept, graph, 0.0)
            made.append(Made(self._places[t.name], *again, flops[i] * share, again[2]))
        return made

    def _by_stage(self, key: Any, of_stage: tuple[frozenset[int], ...]) -> tuple[list[Made], list[Made]]:
        """What each stage alone has, taken together; and, one by one, what several have (tied tensors)."""
        of_cell = {c: s for s, cells in enumerate(of_stage) for c in cells}
        parts: list[list[Made]] = [[] for _ in of_stage]
        shared = []
        for w in self.made(*key):
            stages = {of_cell[c] for c in w.cells}
            (parts[stages.pop()] if len(stages) == 1 else shared).append(w)
        return [together(part) for part in parts], shared

    def _of_stage(self, stages: int) -> tuple[frozenset[int], ...]:
        """Cells of each stage: those before the first block are the first stage's, those after the last the last's."""
        last = len(self.blocks) + 1
        ends = [0, *self._starts(stages)[1:-1], last]
        return tuple(frozenset(range(a + (a > 0), b + 1)) for a, b in pairwise(ends))

    def _starts(self, stages: int) -> tuple[int, ...]:
        """First block of each stage, and the number of blocks."""
        return (0, len(self.blocks)) if self._chain is None else spread(self._chain.flops, stages)

    def _stages(self, tensor: int, factored: bool, rows: int, stages: int) -> list[Cell]:
        """Costs of every stage for a microbatch."""
        cells = self.cells(tensor, factored, rows)
        return [total_of([cells[c] for c in of]) for of in self._of_stage(stages)]

    def footprint(self, layout: RankLayout) -> Footprint:
        """What a layout stores and sends."""
        sizes, m = layout.sizes, layout.microbatches
        p, t, remat = sizes["pipeline"], sizes["tensor"], layout.remat == "layer"
        split = sizes["gnets"] > 1
        factored = self.lazy is not False and (not split or (layout.placement == "factors" and not remat))
        rows = math.ceil(math.ceil(self.rows / (sizes["data"] * sizes["gnets"])) / m)
        each = 2 if layout.schedule in ("interleaved", "zbv") else 1
        of_stage = self._of_stage(p * each)
        order: Any = layout.schedule or "gpipe"
        mine = [[s for s, r in enumerate(stage_ranks(order, p, each)) if r == rank] for rank in range(p)]
        stages = self._stages(t, factored, rows, p * each)
        own_weights, shared = self._by_stage((t, factored, remat, sizes["gnets"]), of_stage)
        hidden = self._hidden(rows, p * each)
        parts = []
        for rank, own in enumerate(mine):
            used = set().union(*(of_stage[s] for s in own))
            weights = [*(own_weights[s] for s in own), *(w for w in shared if w.cells & used)]
            live = in_flight(order, rank, p, m, each) if layout.schedule else ((1,),)
            saved, formed = max(
                tuple(sum(n * getattr(stages[s], what) for n, s in zip(at, own, strict=True)) for what in _KEPT)
                for at in live
            )
            passing = max((w.passing for w in weights), default=0.0)
            kept, graph = sum(w.bytes for w in weights) + passing, sum(w.graph for w in weights)
            ends = sum((s > 0) + (s < p * each - 1) for s in own) if p > 1 else 0
            largest = max(stages[s].largest for s in own)
            parts.append(self._memory(layout, kept + formed, graph, saved, 2 * m * ends * hidden + largest))
        memory = max(parts, key=lambda part: sum(part.values()))
        generation, made = [0.0] * len(stages), [0.0] * len(stages)
        for s, of in enumerate(of_stage):
            for w in (own_weights[s], *(w for w in shared if w.cells & of)):
                generation[s] += w.operations / sizes["gnets"]
                made[s] += w.bytes + w.passing_bytes
        sent = self._sent(layout, mine, of_stage, stages, hidden)
        return Footprint(memory, sent, mine, stages, generation, made, hidden)

    def _hidden(self, rows: int, stages: int) -> float:
        """Most bytes between two stages, for a microbatch."""
        inputs = [self._chain.inputs[start] for start in self._starts(stages)[1:-1]] if self._chain is not None else []
        return max((math.prod(s) * dtype.itemsize * rows / _TRACED_ROWS for s, dtype in inputs), default=0.0)

    def genome(self, gnets: int) -> tuple[float, float, float]:
        """Numbers of the genome on a rank: of split leaves, of other trained ones, and of frozen ones."""
        split = replicated = 0.0
        for e in self.plan.ensembles:
            share = shares_of(e.n_tiles, gnets, 0)[0] / e.n_tiles
            for k, shape in e.shapes.items():
                if gnets > 1 and e.leaves[k].scope == "tile":
                    split += share * math.prod(shape)
                else:
                    replicated += math.prod(shape)
        return split, replicated + self._trained, sum(t.numel for t in self.plan.direct) - self._trained

    def _memory(
        self, layout: RankLayout, weights: float, graph: float, saved: float, passing: float
    ) -> dict[str, float]:
        item, (split, replicated, frozen) = self.plan.dtype.itemsize, self.genome(layout.sizes["gnets"])
        trained = item * (split + replicated)
        flat = trained if math.prod(layout.sizes.values()) > 1 else 0.0
        # Where gradients do not add up over microbatches, activations are freed as those of weights come.
        once = layout.microbatches == 1 and layout.schedule is None
        # Elsewhere the genome's come when activations have gone; with the most activations in flight, those of the
        # weights are there in 1F1B and with microbatches alone, not in schedules that peak before they go back.
        gradients = weights if layout.schedule in (None, "1f1b") else 0.0
        flat = flat if once else 0.0
        return {
            "weights": weights + graph,
            "genome": trained + item * frozen,
            "optimizer": self.states * trained,
            "gradients": trained + max(0.0, weights - saved) if once else max(gradients, trained),
            "activations": saved,
            "buffers": self.plan.buffer_bytes + flat + passing,
        }

    def _sent(
        self,
        layout: RankLayout,
        mine: Sequence[Sequence[int]],
        of_stage: Sequence[Collection[int]],
        stages: Sequence[Cell],
        hidden: float,
    ) -> dict[str, float]:
        """Most bytes that a rank sends in a step, by axis."""
        sizes, m, item = layout.sizes, layout.microbatches, self.plan.dtype.itemsize
        world, n = math.prod(sizes.values()), len(stages)
        sent: dict[str, float] = {}
        if sizes["tensor"] > 1:
            sent["tensor"] = m * max(sum(stages[s].sent + stages[s].sent_back for s in own) for own in mine)
        if sizes["pipeline"] > 1:
            ends = [sum((s + d not in own) and 0 <= s + d < n for s in own for d in (-1, 1)) for own in mine]
            sent["pipeline"] = m * hidden * max(ends)
        split, replicated, _ = self.genome(layout.sizes["gnets"])
        replicas = world // sizes["gnets"]
        if sizes["gnets"] > 1:
            used = [set().union(*(of_stage[s] for s in own)) for own in mine]
            names = [frozenset(e for e, cells in self._used.items() if cells & own) for own in used]
            sent["gnets"] = max(self._gathered(sizes["gnets"], layout.placement, layout.remat, n) for n in names)
            sent["replicas"] = all_reduce_bytes(split * item, replicas)
        if world > 1:
            aux = self.dry(1, self.lazy is not False).aux
            # Buffers are averaged too.
            kept = [b for b in self.plan.buffers if b.persistent and DTYPES[b.dtype].is_floating_point]
            numbers = replicated + 3 + aux + sum(math.prod(b.shape) for b in kept)
            sent["world"] = all_reduce_bytes(numbers * item, world)
        return {axis: n for axis, n in sent.items() if n}

    def _gathered(self, gnets: int, placement: Any, remat: str, names: frozenset[str]) -> float:
        """Most bytes that a rank sends to gather tiles or factors, and for their gradients."""
        sent = gather_bytes(self.plan, gnets, placement, self.plan.dtype.itemsize, names)
        return max((2 if remat == "layer" else 1) * out + back for out, back in sent)

    def dense(self, ranks: int) -> tuple[dict[str, float], float]:
        """Bytes by part of a rank of FSDP on the dense p-net, and those that it sends in a step."""
        rows = -(-self.rows // ranks)
        cells, plan = self.cells(1, False, rows), self.plan
        total = float(sum(t.numel * DTYPES[t.dtype].itemsize for t in plan.tensors))
        by_cell: dict[int, float] = {}
        for t in plan.tensors:
            for c in self._places[t.name]:
                by_cell[c] = by_cell.get(c, 0.0) + t.numel * DTYPES[t.dtype].itemsize
        parts = {
            "weights": total / ranks,
            "gradients": total / ranks,
            "optimizer": self.states * total / ranks,
            "gathered block": 2 * max(by_cell.values()) if ranks > 1 else 0.0,
            "activations": sum(cell.saved for cell in cells),
        }
        return parts, 3 * total * (ranks - 1) / ranks
