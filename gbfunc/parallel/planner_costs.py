"""What a layout of ranks stores and sends: from the costs of blocks to those of the stages of every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gbfunc.costs import all_reduce_bytes
from gbfunc.parallel.chain import Chain, balanced_stages, crossing, find_blocks, shared_within, trace_chain
from gbfunc.parallel.dry_run import Cell, DryRun, DryWire, RunLoss, factor_shapes
from gbfunc.parallel.mesh import Mesh
from gbfunc.parallel.pipeline import Parcel
from gbfunc.parallel.pipeline_order import SCHEDULES, in_flight, schedule_class, stage_ranks
from gbfunc.parallel.placement import Placement, gather_bytes, operations, placement_cost, products, shares_of
from gbfunc.plan import DTYPES, Plan
from gbfunc.pnet import skeleton_of
from gbfunc.trees import tree_map

_NUMBERS = ("idx", "index", "id", "number")
"""Ends of the names of attributes that number a module among others."""

_TRACED_ROWS = 2
"""Rows of the batch by which blocks are found and balanced; batch norms refuse a single one."""

_SINES = 0.9
"""Of the bytes of factors, what graphs keep of the sines: codes that are sums of a place's and a block's take few."""


class RankLayout(NamedTuple):
    """Where and how a step runs."""

    sizes: Mapping[str, int]  # Ranks along data, pipeline, gnets and tensor
    placement: Placement  # Of the genome
    schedule: str | None  # Of the pipeline, None without one
    microbatches: int  # Of a step
    remat: str  # What is made again

    def __str__(self) -> str:
        """In words."""
        axes = " x ".join(f"{name} {n}" for name, n in self.sizes.items() if n > 1) or "one rank"
        words = [axes, self.placement if self.sizes["gnets"] > 1 else "", self.schedule or ""]
        words += [f"{self.microbatches} microbatches" if self.microbatches > 1 else ""]
        return ", ".join([w for w in words if w] + (["remat layer"] if self.remat == "layer" else []))

    @property
    def order(self) -> str:
        """Of microbatches: a rank alone takes them as in 1F1B."""
        return self.schedule or "1f1b"

    @property
    def stages(self) -> list[list[int]]:
        """Stages of every rank of the pipeline."""
        ranks = self.sizes["pipeline"]
        places = stage_ranks(self.order, ranks, SCHEDULES[self.order][1])
        return [[s for s, place in enumerate(places) if place == rank] for rank in range(ranks)]


class Footprint(NamedTuple):
    """What a layout stores and sends, and what its stages take."""

    memory: Mapping[str, float]  # Bytes of the fullest rank, by part
    sent: Mapping[str, float]  # Most bytes of a rank in a step, by axis
    cells: Sequence[Cell]  # Of each stage, its costs for a microbatch
    weights: Sequence[Weights]  # Of each stage
    hidden: float  # The most bytes between two stages, for a microbatch


class Weights(NamedTuple):
    """Generated parameters on a rank."""

    bytes: float = 0.0  # Of their weights or factors, where these are kept
    graph: float = 0.0  # Kept for backward through their generation: as many numbers again as the factors have
    transient: float = 0.0  # Bytes of weights and factors that are made for each use
    peak: float = 0.0  # The most of these that one parameter has
    operations: float = 0.0  # Of generation and its backward


_REMEMBERED = ("dry", "cells", "made", "weights", "stages", "crossing", "stage_costs", "genome")
_REMEMBERED += ("_gathers", "why_not_split")
"""Methods of a model that many layouts ask for the same."""


class Model:
    """A plan, its p-net and a global batch, with what is known of them so far.

    `run` calls the p-net as the loss function does; `styles` of tensor parallelism are None where they may be known;
    `states` are the numbers that the optimizer keeps for each of the genome.
    """

    def __init__(
        self,
        plan: Plan,
        pnet: nn.Module,
        batch: Any,
        rows: int,
        run: RunLoss,
        styles: Mapping[str, Any] | None = None,
        lazy: Any = "auto",
        states: int = 2,
    ) -> None:
        from gbfunc.parallel.styles import tensor_styles

        self.plan, self.pnet, self.batch, self.rows, self.run = plan, pnet, batch, rows, run
        self.lazy, self.states = lazy, states
        for name in _REMEMBERED:
            setattr(self, name, cache(getattr(self, name)))
        self._styles, self._no_styles = styles or {}, ""
        if styles is None:
            try:
                self._styles = tensor_styles(pnet)
            except ValueError as error:
                self._no_styles = str(error)
        try:  # The blocks, where the p-net has a list of layers that run one after the other.
            self.blocks = find_blocks(pnet, 2)
            self.kinds, few = self._find_kinds(), self._rows(_TRACED_ROWS)
            self._chain = trace_chain(pnet, self.blocks, lambda net: run(net, few))
        except (RuntimeError, ValueError):  # Also where the loss function calls parts of the p-net.
            self.blocks, self.kinds = (), {}
            everywhere = {name: frozenset({-1}) for t in plan.tensors for name in (t.name, *t.aliases)}
            self._chain = Chain((), (), everywhere)
        self._small, self._firsts = self._share_blocks()
        try:  # An error of the p-net shows here.
            self.cells(1, lazy is not False, rows)
        except RuntimeError as error:
            if "meta" not in str(error):
                raise
            raise ValueError(
                f"layouts are planned on the meta device, where tensors have no values: {error}"
            ) from error
        # In which cells each parameter is used, those after the last block in its cell.
        after = self._chain.places
        self._places = {t.name: frozenset(i + 1 for k in (t.name, *t.aliases) for i in after[k]) for t in plan.tensors}
        frozen = {name for name, p in pnet.named_parameters() if not p.requires_grad}
        self._trained = sum(t.numel for t in plan.direct if t.name not in frozen)

    def _find_kinds(self) -> dict[str, str]:
        """What is equal for equal blocks: modules, their attributes but numbers, styles, and tensors of the plan."""
        from gbfunc.parallel.tensor import resolve

        styles = resolve(self.pnet, self._styles)
        tensors = {name: t for t in self.plan.tensors for name in (t.name, *t.aliases)}
        kinds = {}
        for name in self.blocks:
            block, found = self.pnet.get_submodule(name), list[Any]()
            for key, module in block.named_modules():
                named = ((k, x) for k, x in vars(module).items() if not k.endswith(_NUMBERS))
                plain = sorted((k, x) for k, x in named if isinstance(x, int | float | str | tuple))
                found.append((key, type(module), plain, id(styles.get(f"{name}.{key}" if key else name))))
            for key, p in block.named_parameters(remove_duplicate=False):
                t = tensors[f"{name}.{key}"]
                slots = [(s.hypernet, s.grid) for s in t.slots]
                found.append((key, tuple(p.shape), p.dtype, p.requires_grad, t.kind, slots, len(t.aliases)))
            kinds[name] = repr(found)
        return kinds

    def _share_blocks(self) -> tuple[nn.Module, dict[str, str]]:
        """A skeleton of the p-net in which equal blocks are one module, and the name of the first of each block's kind.

        So what is done for each dry run, copies of the p-net among it, is done for few blocks.
        """
        small, first = skeleton_of(self.pnet), dict[str, str]()
        firsts = {name: first.setdefault(kind, name) for name, kind in self.kinds.items()}
        for name, same in firsts.items():
            parent, _, child = name.rpartition(".")
            small.get_submodule(parent)._modules[child] = small.get_submodule(same)
        return small, firsts

    def _first(self, name: str) -> str:
        """A parameter's name in the first of equal blocks."""
        depth = self.blocks[0].count(".") + 1 if self.blocks else 0
        block = ".".join(name.split(".")[:depth])
        return self._firsts.get(block, block) + name[len(block) :]

    def _rows(self, rows: int) -> Any:
        """So many rows of the batch, on the meta device."""

        def some(x: Any) -> Any:
            shape = (rows, *x.shape[1:]) if isinstance(x, Tensor) and x.ndim else ()
            return torch.empty(shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x

        return tree_map(some, self.batch)

    def why_not_split(self, tensor: int) -> str:
        """Why layers cannot be split over so many tensor ranks; empty where they can."""
        try:
            self.dry(tensor, self.lazy is not False)
        except ValueError as error:
            return str(error)
        return ""

    def why_not_staged(self, stages: int, schedule: str) -> str:
        """Why the p-net cannot be cut so; empty where it can."""
        if not self.blocks:
            return "the p-net has no list of layers that run in their order"
        if stages > len(self.blocks):
            return f"{stages} stages of {len(self.blocks)} blocks"
        try:
            schedule_class(schedule)
            self.crossing(stages)
        except ValueError as error:
            return str(error)
        shared = shared_within(self._chain, self.stages(stages)[0]) if schedule == "zbv" else []
        return f"several blocks of a stage use {shared[0]!r}, whose backward zbv cannot divide" if shared else ""

    def can_remat(self, placement: Placement) -> bool:
        """Whether there are weights that would be made again: those that do not stay factors."""
        factored = self.lazy is not False and placement == "replicated"
        return any(w.transient for _, w in self.made(1, factored, True, 1))

    def placements(self, shards: int) -> list[tuple[Placement, int]]:
        """Placements of the genome on the ranks that share out the batch, with the ranks along the g-net axis."""
        if shards == 1:
            return [("replicated", 1)]
        sharded: tuple[Placement, Placement] = ("sharded", "factors")
        split = min(sharded, key=lambda p: placement_cost(self.plan, 1, shards, p, self.lazy is not False).bytes)
        return [("replicated", 1), (split, shards)]

    def dry(self, tensor: int, factored: bool) -> DryRun:
        """The p-net as a tensor rank runs it; ValueError where it cannot be split so."""
        parallel = None
        if tensor > 1:
            from gbfunc.parallel.tensor import TensorParallel, resolve

            if self._no_styles:
                raise ValueError(self._no_styles)
            here = dict(self._small.named_modules())
            styles = {name: style for name, style in resolve(self.pnet, self._styles).items() if name in here}
            parallel = TensorParallel(self._small, styles, Mesh({"tensor": tensor}), DryWire)
        return DryRun(self.plan, self._small, self._firsts, lazy=self.lazy if factored else False, tensor=parallel)

    def cells(self, tensor: int, factored: bool, rows: int) -> list[Cell]:
        """Costs of a microbatch of so many rows."""
        return self.dry(tensor, factored)(self.run, self._rows(rows))

    def made(self, tensor: int, factored: bool, remat: bool, gnets: int) -> list[tuple[frozenset[int], Weights]]:
        """Every generated parameter as a tensor rank keeps it, with the cells that use it."""
        dry, plan, item = self.dry(tensor, factored), self.plan, self.plan.dtype.itemsize
        flops = dict.fromkeys(range(len(plan.tensors)), 0.0)
        for e in plan.ensembles:
            dense, product = operations(e), products(e)
            for span in e.spans:
                thin = self._first(plan.tensors[span.tensor].name) in dry.forms
                flops[span.tensor] += span.slot.grid.n_tiles / e.n_tiles * (dense - product * thin)
        made = []
        for i, t in enumerate(plan.tensors):
            if not t.slots:
                continue
            factors, share = 0.0, 1.0
            if t.slots[0].hypernet.factorised and len({(s.hypernet, s.grid) for s in t.slots}) == 1:
                factors = float(item * sum(map(math.prod, factor_shapes(t))))
            weights = Weights(factors, _SINES * factors / gnets)
            if self._first(t.name) not in dry.forms:
                numel = math.prod(dry.shapes.get(self._first(t.name), t.shape))
                share = numel / max(1, t.numel)
                # Tiles of a split genome are gathered whole, from those that this rank makes of its factors. Graphs are
                # those of PyTorch's operators, as on a GPU; the compiled loop of a CPU keeps the leaves alone.
                kept = (t.numel if gnets > 1 and not remat else numel) * DTYPES[t.dtype].itemsize
                graph = 2 * _SINES * factors / gnets * (share if gnets == 1 else 1.0)
                again = remat and t.is_formable(self.pnet)
                weights = Weights(transient=kept + graph) if again else Weights(kept, graph)
            made.append((self._places[t.name], weights._replace(operations=flops[i] * share / gnets)))
        return made

    def weights(self, cells: frozenset[int], *how: Any) -> Weights:
        """The parameters that some cells use, taken together; `how` they are kept as for `made`."""
        used = [w for places, w in self.made(*how) if places & cells]
        total = Weights(*map(sum, zip(*used, strict=True))) if used else Weights()
        return total._replace(peak=max((w.transient for w in used), default=0.0))

    def stages(self, n: int) -> tuple[tuple[int, ...], tuple[frozenset[int], ...]]:
        """First block of each stage and the number of blocks; cells of each stage, the ends' with the outermost."""
        starts = balanced_stages(self._chain.flops, n) if self.blocks else (0, 0)
        ends = [0, *starts[1:-1], len(self.blocks) + 1]
        return starts, tuple(frozenset(range(a + (a > 0), b + 1)) for a, b in pairwise(ends))

    def crossing(self, n: int) -> list[float]:
        """Bytes, for a row, that cross the start of each of n stages, and the end; ValueError for what cannot be sent.

        Those that the loss alone needs of earlier stages are left out.
        """
        starts = self.stages(n)[0]
        sent = [Parcel(crossing(self._chain, starts, stage)).n_bytes / _TRACED_ROWS for stage in range(n)]
        return [*sent, 0.0]

    def stage_costs(self, tensor: int, factored: bool, rows: int, stages: int) -> list[Cell]:
        """Costs of every stage for a microbatch."""
        cells = self.cells(tensor, factored, rows)

        def total(name: str, of: frozenset[int]) -> float:
            return (max if name == "largest" else sum)(getattr(cells[c], name) for c in of)

        return [Cell(**{name: total(name, of) for name in vars(Cell())}) for of in self.stages(stages)[1]]

    def footprint(self, layout: RankLayout) -> Footprint:
        """What a layout stores and sends."""
        sizes, m, mine = layout.sizes, layout.microbatches, layout.stages
        p, t, gnets = sizes["pipeline"], sizes["tensor"], sizes["gnets"]
        n, remat = sum(map(len, mine)), layout.remat == "layer"
        factored = self.lazy is not False and (gnets == 1 or (layout.placement == "factors" and not remat))
        how = t, factored, remat, gnets
        rows = math.ceil(self.rows / (sizes["data"] * gnets * m))
        of_stage, cells = self.stages(n)[1], self.stage_costs(t, factored, rows, n)
        hidden, parts = [rows * x for x in self.crossing(n)], []
        for rank, own in enumerate(mine):
            live = in_flight(layout.order, rank, p, m, n // p)
            flights = [list(zip(of, (cells[s] for s in own), strict=True)) for of in live]
            saved, formed = max((sum(k * c.saved for k, c in f), sum(k * c.formed for k, c in f)) for f in flights)
            ends = sum(hidden[s] + hidden[s + 1] for s in own)
            buffers = 2 * m * ends + max(cells[s].largest for s in own)
            used = self.weights(frozenset().union(*(of_stage[s] for s in own)), *how)
            parts.append(self._memory(layout, used.bytes + used.peak + formed, used.graph, saved, buffers))
        return Footprint(
            max(parts, key=lambda part: sum(part.values())),
            self._sent(layout, cells, hidden),
            cells,
            [self.weights(of, *how) for of in of_stage],
            max(hidden),
        )

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
        self, layout: RankLayout, weights: float, graph: float, saved: float, buffers: float
    ) -> dict[str, float]:
        item, (split, replicated, frozen) = self.plan.dtype.itemsize, self.genome(layout.sizes["gnets"])
        trained = item * (split + replicated)
        # Where gradients do not add up over microbatches, activations are freed as those of weights come.
        once = layout.microbatches == 1 and layout.schedule is None
        # Elsewhere the genome's come when activations have gone; with the most activations in flight, those of the
        # weights are there in 1F1B and with microbatches alone, not in schedules that peak before they go back.
        gradients = weights if layout.order == "1f1b" else 0.0
        flat = trained if once and math.prod(layout.sizes.values()) > 1 else 0.0
        return {
            "weights": weights + graph,
            "genome": trained + item * frozen,
            "optimizer": self.states * trained,
            "gradients": trained + max(0.0, weights - saved) if once else max(gradients, trained),
            "activations": saved,
            "buffers": self.plan.buffer_bytes + flat + buffers,
        }

    def _sent(self, layout: RankLayout, cells: Sequence[Cell], hidden: Sequence[float]) -> dict[str, float]:
        """Most bytes that a rank sends in a step, by axis."""
        sizes, m, item, mine = layout.sizes, layout.microbatches, self.plan.dtype.itemsize, layout.stages
        world, gnets = math.prod(sizes.values()), sizes["gnets"]
        split, replicated, _ = self.genome(gnets)
        ends = [sum(hidden[s + d] for s in own for d in (0, 1) if s + 2 * d - 1 not in own) for own in mine]
        # Gathers of tiles or factors, and of their gradients.
        _, of_stage = self.stages(len(cells))
        used = {frozenset().union(*(of_stage[s] for s in own)) for own in mine}
        gathers = [sent for cells in used for sent in self._gathers(gnets, layout.placement, cells)]
        times = 2 if layout.remat == "layer" else 1
        # Numbers that the loss function returns and running statistics are averaged too.
        statistics = sum(math.prod(b.shape) for b in self.plan.averaged)
        numbers = replicated + 3 + self.dry(1, self.lazy is not False).aux + statistics
        sent = {
            "tensor": m * max(sum(cells[s].sent + cells[s].sent_back for s in own) for own in mine),
            "pipeline": m * max(ends),
            "gnets": max(times * out + back for out, back in gathers),
            "replicas": all_reduce_bytes(split * item, world // gnets),
            "world": all_reduce_bytes(numbers * item, world),
        }
        return {axis: n for axis, n in sent.items() if n}

    def _gathers(self, gnets: int, placement: Placement, cells: frozenset[int]) -> list[tuple[int, int]]:
        """Bytes that each rank sends to gather what some cells use, and for their gradients."""
        tensors = self.plan.tensors
        names = {e.name for e in self.plan.ensembles for s in e.spans if self._places[tensors[s.tensor].name] & cells}
        return gather_bytes(self.plan, gnets, placement, self.plan.dtype.itemsize, names)

    def dense(self, ranks: int) -> tuple[dict[str, float], float]:
        """Bytes by part of a rank of FSDP on the dense p-net, and those that it sends in a step."""
        cells, total, by_cell = self.cells(1, False, -(-self.rows // ranks)), 0.0, [0.0] * (len(self.blocks) + 2)
        for t in self.plan.tensors:
            n_bytes = t.numel * DTYPES[t.dtype].itemsize
            total += n_bytes
            for c in self._places[t.name]:
                by_cell[c] += n_bytes
        parts = {
            "weights": total / ranks,
            "gradients": total / ranks,
            "optimizer": self.states * total / ranks,
            "gathered block": 2 * max(by_cell) if ranks > 1 else 0.0,
            "activations": sum(cell.saved for cell in cells),
        }
        return parts, 3 * total * (ranks - 1) / ranks
