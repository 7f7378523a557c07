"""What a layout stores and sends: from the costs of blocks to those of the stages of every rank."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gbfunc.parallel.dry_run import Cell, DryRun, RunLoss, factor_shapes, is_formable
from gbfunc.parallel.mesh import Mesh
from gbfunc.parallel.pipeline import Chain, find_blocks, spread, trace_chain
from gbfunc.parallel.pipeline_order import stage_ranks
from gbfunc.parallel.placement import _operations, _products, _tile_bytes, placement_cost, shares_of
from gbfunc.parallel.planner_stages import Footprint, RankLayout, cells_of, in_flight, total_of
from gbfunc.plan import DTYPES, Plan
from gbfunc.trees import tree_map

_KEPT = ("saved", "formed")

_TRACED_ROWS = 2
"""Rows of the batch by which blocks are found and balanced; batch norms refuse a single one."""


class _Made(NamedTuple):
    """One generated parameter on a rank.

    Attributes:
        cells: where it is used.
        bytes: of its weight or factors, where these are kept.
        graph: kept for backward through its generation: as many numbers again as the factors have.
        passing: bytes of the weight and its factors where they are made for each use.
        operations: of generation and its backward.
    """

    cells: frozenset[int]
    bytes: float
    graph: float
    passing: float
    operations: float


class Model:
    """A plan, its p-net and a batch, with what is known of them so far.

    Args:
        plan: the plan.
        pnet: the p-net.
        batch: a global batch.
        rows: of it.
        run: calls the p-net as the loss function does.
        styles: of tensor parallelism; None where they may be known.
        lazy: whether weights stay factors.
        states: numbers that the optimizer keeps for each of the genome.
    """

    def __init__(
        self,
        plan: Plan,
        pnet: nn.Module,
        batch: Any,
        rows: int,
        run: RunLoss,
        styles: Mapping[str, Any] | None,
        lazy: Any,
        states: int,
    ) -> None:
        self.plan, self.pnet, self.batch, self.rows, self.run = plan, pnet, batch, rows, run
        self.styles, self.lazy, self.states = styles, lazy, states
        self.blocks = self._find_blocks()
        self._dry: dict[tuple[int, bool], DryRun] = {}
        self._cells: dict[tuple[int, bool, int], list[Cell]] = {}
        self._made: dict[tuple[int, bool, bool, int], list[_Made]] = {}
        self._starts: dict[int, tuple[int, ...]] = {}
        self._reasons: dict[int, str] = {}
        self._footprints: dict[Any, Footprint] = {}
        self._chain: Chain | None = None
        if self.blocks:
            self._chain = trace_chain(pnet, self.blocks, lambda net: run(net, self._rows(_TRACED_ROWS)))
        self.cells(1, lazy is not False, rows)  # An error of the p-net shows here.
        self._places = self._find_places()
        frozen = {name for name, p in pnet.named_parameters() if not p.requires_grad}
        self.trained = [t for t in plan.direct if t.name not in frozen]

    def _find_blocks(self) -> tuple[str, ...]:
        try:
            return find_blocks(self.pnet, 2)
        except ValueError:
            return ()

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
        places: dict[str, frozenset[int]] = {}
        index = {name: i for i, name in enumerate(self.blocks)}
        parent = self.blocks[0].rpartition(".")[0]
        depth = parent.count(".") + 2 if parent else 1
        for t in self.plan.tensors:
            cells: set[int] = set()
            for name in (t.name, *t.aliases):
                block = ".".join(name.split(".")[:depth])
                cells |= {i + 1 for i in self._chain.places.get(name, {index[block]} if block in index else {-1})}
            places[t.name] = frozenset(cells)
        return places

    def why_not_split(self, tensor: int) -> str:
        """Why layers cannot be split over so many tensor ranks; empty where they can."""
        if tensor not in self._reasons:
            try:
                self.dry(tensor, self.lazy is not False)
                self._reasons[tensor] = ""
            except ValueError as error:
                self._reasons[tensor] = str(error)
        return self._reasons[tensor]

    def why_not_staged(self, stages: int) -> str:
        """Why the p-net cannot be cut so; empty where it can."""
        if self._chain is None:
            return "the p-net has no list of layers to cut"
        return "" if stages <= len(self.blocks) else f"{stages} stages of {len(self.blocks)} blocks"

    def can_remat(self, placement: str) -> bool:
        """Whether weights can be made again at all."""
        return any(t.slots for t in self.plan.tensors)

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
        key = tensor, factored
        if key not in self._dry:
            parallel = None
            if tensor > 1:
                from gbfunc.parallel.styles import tensor_styles
                from gbfunc.parallel.tensor import TensorParallel

                mesh = Mesh({"tensor": tensor}, 0, torch.device("cpu"), 0.0, None, False)
                styles = tensor_styles(self.pnet) if self.styles is None else self.styles
                parallel = TensorParallel(self.pnet, styles, mesh)
            lazy = self.lazy if factored else False
            self._dry[key] = DryRun(self.plan, self.pnet, self.blocks, lazy=lazy, tensor=parallel)
        return self._dry[key]

    def cells(self, tensor: int, factored: bool, rows: int) -> list[Cell]:
        """Costs of a microbatch of so many rows."""
        key = tensor, factored, rows
        if key not in self._cells:
            self._cells[key] = self.dry(tensor, factored)(self.run, self._rows(rows))
        return self._cells[key]

    def made(self, tensor: int, factored: bool, remat: bool, gnets: int) -> list[_Made]:
        """Every generated parameter as a tensor rank keeps it."""
        key = tensor, factored, remat, gnets
        if key in self._made:
            return self._made[key]
        dry, plan, item = self.dry(tensor, factored), self.plan, self.plan.dtype.itemsize
        operations: dict[int, float] = {}
        for e in plan.ensembles:
            dense, product = _operations(e), _products(e) if e.hypernet.factorised else 0.0
            for span in e.spans:
                thin = plan.tensors[span.tensor].name in dry.forms
                share = span.slot.grid.n_tiles / e.n_tiles
                operations[span.tensor] = operations.get(span.tensor, 0.0) + share * (dense - product * thin)
        made = []
        for i, t in enumerate(plan.tensors):
            if not t.slots:
                continue
            factors = 0.0
            if t.slots[0].hypernet.factorised and len({(s.hypernet, s.grid) for s in t.slots}) == 1:
                factors = float(item * sum(map(math.prod, factor_shapes(t))))
            if t.name in dry.forms:
                made.append(_Made(self._places[t.name], factors, factors / gnets, 0.0, operations[i]))
                continue
            numel = math.prod(dry.shapes.get(t.name, t.shape))
            share = numel / max(1, t.numel)
            # Tiles of a split genome are gathered whole, from those that this rank makes of its factors.
            kept = (t.numel if gnets > 1 and not remat else numel) * DTYPES[t.dtype].itemsize
            graph = 2 * factors / gnets * (share if gnets == 1 else 1.0)
            cells, work = self._places[t.name], operations[i] * share
            if remat and is_formable(self.pnet, t):
                made.append(_Made(cells, 0.0, 0.0, kept + graph, work))
            else:
                made.append(_Made(cells, kept, graph, 0.0, work))
        self._made[key] = made
        return made

    def starts(self, stages: int) -> tuple[int, ...]:
        """First block of each stage, and the number of blocks."""
        if stages not in self._starts:
            assert self._chain is not None
            self._starts[stages] = spread(self._chain.flops, stages)
        return self._starts[stages]

    def footprint(self, layout: RankLayout) -> Footprint:
        """What a layout stores and sends."""
        key = (tuple(layout.sizes.values()), *layout[1:])
        if key not in self._footprints:
            self._footprints[key] = self._footprint(layout)
        return self._footprints[key]

    def _footprint(self, layout: RankLayout) -> Footprint:
        sizes, m = layout.sizes, layout.microbatches
        p, t, remat = sizes["pipeline"], sizes["tensor"], layout.remat == "layer"
        split = sizes["gnets"] > 1
        factored = self.lazy is not False and (not split or (layout.placement == "factors" and not remat))
        rows = math.ceil(math.ceil(self.rows / (sizes["data"] * sizes["gnets"])) / m)
        cells = self.cells(t, factored, rows)
        each = 2 if layout.schedule in ("interleaved", "zbv") else 1
        of_stage = cells_of(self.starts(p * each) if layout.schedule else None, len(cells))
        order: Any = layout.schedule or "gpipe"
        mine = [[s for s, r in enumerate(stage_ranks(order, p, each)) if r == rank] for rank in range(p)]
        stages = [total_of([cells[c] for c in of]) for of in of_stage]
        if len(stages) > 1:
            # What comes before the blocks runs on every later stage, on weights that are no numbers and never factors.
            again = self.cells(t, False, rows)[0]
            stages = [replace(s, sent=s.sent + again.sent * (i > 0)) for i, s in enumerate(stages)]
        made = self.made(t, factored, remat, sizes["gnets"])
        hidden = self._hidden(layout, rows, p * each)
        parts = []
        for rank, own in enumerate(mine):
            used = set().union(*(of_stage[s] for s in own))
            weights = [w for w in made if w.cells & used]
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
        generation, held = [0.0] * len(stages), [0.0] * len(stages)
        for w in made:
            for s, of in enumerate(of_stage):
                if w.cells & of:
                    generation[s] += w.operations / (sizes["gnets"] if split else 1)
                    held[s] += w.bytes + w.passing
        sent = self._sent(layout, mine, of_stage, stages, hidden)
        return Footprint(memory, sent, mine, stages, generation, held, hidden)

    def _hidden(self, layout: RankLayout, rows: int, stages: int) -> float:
        """Most bytes between two stages, for a microbatch."""
        if not layout.schedule or self._chain is None:
            return 0.0
        inputs = [self._chain.inputs[start] for start in self.starts(stages)[1:-1]]
        return max(math.prod(shape) * dtype.itemsize * rows / _TRACED_ROWS for shape, dtype in inputs)

    def _genome(self, layout: RankLayout) -> tuple[float, float, float]:
        """Numbers of the genome on a rank: of split leaves, of other trained ones, and of frozen ones."""
        gnets = layout.sizes["gnets"]
        split = whole = 0.0
        for e in self.plan.ensembles:
            share = shares_of(e.n_tiles, gnets, 0)[0] / e.n_tiles if gnets > 1 else 1.0
            for k, shape in e.shapes.items():
                if gnets > 1 and e.leaves[k].scope == "tile":
                    split += share * math.prod(shape)
                else:
                    whole += math.prod(shape)
        direct = sum(t.numel for t in self.plan.direct)
        trained = sum(t.numel for t in self.trained)
        return split, whole + trained, direct - trained

    def _memory(
        self, layout: RankLayout, weights: float, graph: float, saved: float, passing: float
    ) -> dict[str, float]:
        item, (split, whole, frozen) = self.plan.dtype.itemsize, self._genome(layout)
        trained = item * (split + whole)
        flat = trained if math.prod(layout.sizes.values()) > 1 else 0.0
        return {
            "weights": weights + graph,
            "genome": trained + item * frozen,
            "optimizer": self.states * trained,
            "gradients": trained + weights,
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
        split, whole, _ = self._genome(layout)
        replicas = world // sizes["gnets"]
        if sizes["gnets"] > 1:
            used = [set().union(*(of_stage[s] for s in own)) for own in mine]
            sent["gnets"] = max(self._gathered(layout, cells) for cells in used)
            sent["replicas"] = 2 * split * item * (replicas - 1) / replicas
        if world > 1:
            aux, averaged = self.dry(1, self.lazy is not False).aux, self._averaged()
            sent["world"] = 2 * (whole + 3 + aux + averaged) * item * (world - 1) / world
        return {axis: n for axis, n in sent.items() if n}

    def _averaged(self) -> int:
        """Numbers of the buffers that ranks average."""
        kept = [b for b in self.plan.buffers if b.persistent and DTYPES[b.dtype].is_floating_point]
        return sum(math.prod(b.shape) for b in kept)

    def _gathered(self, layout: RankLayout, cells: set[int]) -> float:
        """Most bytes that a rank sends to gather tiles or factors, and for their gradients."""
        gnets, mine, total, turn = layout.sizes["gnets"], [0.0] * layout.sizes["gnets"], 0.0, 0
        again = 2 if layout.remat == "layer" else 1
        for e in self.plan.ensembles:
            if not e.leaves:
                continue
            sizes = shares_of(e.n_tiles, gnets, turn)
            turn = (turn + e.n_tiles) % gnets
            if any(self._places[self.plan.tensors[span.tensor].name] & cells for span in e.spans):
                factors = layout.placement == "factors" and e.hypernet.factorised
                tile = _tile_bytes(self.plan, e, factors, self.plan.dtype.itemsize)
                mine = [a + tile * b for a, b in zip(mine, sizes, strict=True)]
                total += tile * e.n_tiles
        return max(again * x * (gnets - 1) + total - x for x in mine)

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
