"""The bytes that a layout of ranks stores and sends, from the costs of the blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gbfunc.costs import all_reduce_bytes
from gbfunc.parallel.chain import Chain, balanced_stages, crossing, find_blocks, trace_chain
from gbfunc.parallel.dry_run import Cell, DryRun, DryWire, RunLoss, factor_shapes, total
from gbfunc.parallel.mesh import Mesh
from gbfunc.parallel.pipeline import Parcel
from gbfunc.parallel.pipeline_order import SCHEDULES, in_flight, schedule_class, stage_ranks, stages_of
from gbfunc.parallel.placement import (
    PLACEMENTS,
    Placement,
    gather_bytes,
    operations,
    placement_cost,
    products,
    shares_of,
)
from gbfunc.parallel.styles import tensor_styles
from gbfunc.parallel.tensor import TensorParallel, resolve
from gbfunc.plan import DTYPES, Plan
from gbfunc.trees import n_rows, tree_map

_TRACED_ROWS = 2  # Rows by which blocks are found and balanced; batch norms refuse a single one
_SINES = 0.9  # Bytes of sines that a graph keeps, per byte of factors: codes that are sums need fewer


class RankLayout(NamedTuple):
    """The ranks and options of a step."""

    sizes: Mapping[str, int]  # Ranks along data, pipeline, gnets and tensor
    placement: Placement = "replicated"  # Of the genome
    schedule: str | None = None  # Of the pipeline, None without one
    microbatches: int = 1
    remat: str = "none"

    def __str__(self) -> str:
        """Options of `gbfunc train`, without the defaults."""
        split = self.sizes["gnets"] > 1
        sizes = {axis: n for axis, n in self.sizes.items() if n > 1 or (axis == "data" and split)} or {"data": 1}
        options = {
            "--mesh": ",".join(f"{axis}={n}" for axis, n in sizes.items()),
            "--placement": self.placement if split else "",
            "--pipeline": self.schedule,
            "--microbatches": self.microbatches if self.microbatches > 1 else "",
            "--remat": self.remat if self.remat != "none" else "",
        }
        return " ".join(f"{option} {value}" for option, value in options.items() if value)

    @property
    def order(self) -> str:
        return self.schedule or "1f1b"  # On one rank microbatches follow each other.

    @property
    def stages(self) -> list[list[int]]:
        return stages_of(self.order, self.sizes["pipeline"])


class Model:
    """A plan, its p-net and a global batch; the optimizer keeps `states` numbers for each number of the genome."""

    def __init__(
        self, plan: Plan, pnet: nn.Module, batch: Any, run: RunLoss, styles: Any, lazy: Any, states: int
    ) -> None:
        self.plan, self.pnet, self.batch, self.run, self.lazy, self.states = plan, pnet, batch, run, lazy, states
        self.rows = n_rows(batch) or 0
        if not self.rows:
            raise ValueError("the batch must have rows, the same in all tensors, got none")
        for name in ("dry", "cells", "made", "starts", "stages", "weights", "crossing", "genome", "why_not"):
            setattr(self, name, cache(getattr(self, name)))  # Many layouts ask for the same.
        self._styles = None if styles is None else resolve(pnet, styles)
        try:  # Blocks, if the p-net has a list of layers that run one after the other.
            self.blocks = find_blocks(pnet, 2)
            self._chain = trace_chain(pnet, self.blocks, run, self._batch(_TRACED_ROWS))
        except (RuntimeError, ValueError):  # Also if the loss function calls parts of the p-net.
            self.blocks = ()
            self._chain = Chain((), {name: frozenset({-1}) for t in plan.tensors for name in (t.name, *t.aliases)})
        # The cells that use each parameter.
        after = self._chain.places
        self._places = {t.name: frozenset(i + 1 for k in (t.name, *t.aliases) for i in after[k]) for t in plan.tensors}
        try:  # An error of the p-net shows here.
            self.cells(1, lazy is not False, self.rows)
        except RuntimeError as error:
            if "meta" not in str(error):
                raise
            words = "layouts are planned on the meta device, where tensors have no values"
            raise ValueError(f"{words}: {error}") from error

    def _batch(self, rows: int) -> Any:
        def some(x: Any) -> Any:
            shape = (rows, *x.shape[1:]) if isinstance(x, Tensor) and x.ndim else ()
            return torch.empty(shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x

        return tree_map(some, self.batch)

    def why_not(self, tensor: int, stages: int = 1, schedule: str | None = None) -> str:
        """Why layers cannot be split over so many tensor ranks, or the p-net into stages; empty if they can."""
        try:
            self.dry(tensor, self.lazy is not False)
            if schedule is None:
                return ""
            schedule_class(schedule)
            if not self.blocks:
                return "the p-net has no list of layers that run in their order"
            if stages > len(self.blocks):
                return f"{stages} stages of {len(self.blocks)} blocks"
            self.crossing(stages)
        except ValueError as error:
            return str(error)
        return ""

    def layouts(self, ranks: int, microbatches: int | None) -> Iterator[tuple[list[RankLayout], str]]:
        """Yields layouts that differ only in their microbatches, or one layout and the reason why it cannot run."""
        divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
        for tensor in divisors:
            of = {"data": 1, "pipeline": 1, "gnets": 1, "tensor": tensor}
            if tensor > 1 and (reason := self.why_not(tensor)):
                yield [RankLayout(of)], reason
                continue
            for shards in (d for d in reversed(divisors) if ranks // tensor % d == 0):
                rows, pipeline = self.rows / shards, ranks // tensor // shards
                of = of | {"data": shards, "pipeline": pipeline}
                for schedule in SCHEDULES if pipeline > 1 else (None,):
                    tried = [microbatches] if microbatches else [pipeline * 2**i for i in range(4 if schedule else 8)]
                    # Without a pipeline, ranks may have uneven microbatches; interleaved ones go in equal rounds.
                    uneven = schedule is None and ranks > 1
                    numbers = [m for m in tried if pipeline <= m <= rows and (uneven or rows % m == 0)]
                    numbers = [m for m in numbers if schedule != "interleaved" or m % (m // pipeline) == 0]
                    reason = "" if numbers else f"no number of microbatches from {pipeline} on divides {rows:.4g} rows"
                    if schedule:
                        reason = self.why_not(tensor, len(stage_ranks(schedule, pipeline)), schedule) or reason
                    reason = reason if rows >= 1 else f"{shards} shards of a batch of {self.rows} rows"
                    if reason:
                        yield [RankLayout(of, schedule=schedule)], reason
                        continue
                    yield from ((found, "") for found in self._placed(of, schedule, numbers))

    def _placed(self, of: dict[str, int], schedule: str | None, numbers: list[int]) -> Iterator[list[RankLayout]]:
        shards, lazy = of["data"], self.lazy is not False
        split = min(PLACEMENTS[1:], key=lambda p: placement_cost(self.plan, 1, shards, p, lazy).bytes), shards
        for placement, gnets in [(PLACEMENTS[0], 1), split][: 1 + (shards > 1)]:
            sizes = of | {"data": shards // gnets, "gnets": gnets}
            yield [RankLayout(sizes, placement, schedule, m) for m in numbers]
            # Weights are generated again only if they do not stay factors. On a split genome they are also gathered
            # again: one microbatch.
            some = [m for m in numbers if m == 1 or gnets == 1]
            if some and any(w.transient for w in self.made(1, lazy and gnets == 1, True, 1).values()):
                yield [RankLayout(sizes, placement, schedule, m, "layer") for m in some]

    def dry(self, tensor: int, factored: bool) -> DryRun:
        """The p-net as a tensor rank runs it; ValueError if it cannot be split."""
        parallel = None
        if tensor > 1:
            styles = resolve(self.pnet, tensor_styles(self.pnet)) if self._styles is None else self._styles
            parallel = TensorParallel(self.pnet, styles, Mesh({"tensor": tensor}), DryWire)
        return DryRun(self.plan, self.pnet, self.blocks, self.lazy if factored else False, parallel)

    def cells(self, tensor: int, factored: bool, rows: int) -> list[Cell]:
        return self.dry(tensor, factored)(self.run, self._batch(rows))

    def made(self, tensor: int, factored: bool, remat: bool, gnets: int) -> dict[str, Cell]:
        """Every generated parameter as a tensor rank keeps it."""
        dry, plan, made, flops = self.dry(tensor, factored), self.plan, dict[str, Cell](), dict[int, float]()
        for e in plan.ensembles:
            for span in e.spans:
                thin = plan.tensors[span.tensor].name in dry.forms
                each = (operations(e) - products(e) * thin) / e.n_tiles
                flops[span.tensor] = flops.get(span.tensor, 0.0) + span.slot.grid.n_tiles * each / gnets
        for i, t in ((i, t) for i, t in enumerate(plan.tensors) if t.slots):
            factors = float(plan.dtype.itemsize * sum(math.prod(x) for s in t.slots for x in factor_shapes(s)))
            if t.name in dry.forms:
                made[t.name] = Cell(weights=factors, graph=_SINES * factors / gnets, generation=flops[i])
                continue
            numel = math.prod(dry.shapes.get(t.name, t.shape))
            share = numel / max(1, t.numel)
            # A split genome gathers whole tiles. Graphs are counted for PyTorch's operators, as on a GPU; the compiled
            # loop of a CPU keeps only the leaves.
            kept = (t.numel if gnets > 1 and not remat else numel) * DTYPES[t.dtype].itemsize
            graph = 2 * _SINES * factors * (share if gnets == 1 else 1 / gnets)
            again = remat and t.is_formable(self.pnet)
            sizes = {"transient": kept + graph, "passing": kept + graph} if again else {"weights": kept, "graph": graph}
            made[t.name] = Cell(**sizes, generation=flops[i] * share)
        return made

    def starts(self, n: int) -> tuple[int, ...]:
        """The first blocks of n stages, and the number of blocks; (0, 0) without blocks."""
        return balanced_stages(self._chain.flops, n) if self.blocks else (0, 0)

    def crossing(self, n: int) -> list[float]:
        """Bytes per row that cross the starts of n stages, and the end; ValueError if they cannot be sent."""
        parcels = [Parcel(crossing(self._chain, self.starts(n), stage)) for stage in range(n)]
        return [*(parcel.like.nbytes / _TRACED_ROWS for parcel in parcels), 0.0]

    def stages(self, n: int) -> list[frozenset[int]]:
        """The cells of n stages; the first and last stage have the outermost cells too."""
        starts = [0, *(start + 1 for start in self.starts(n)[1:-1]), len(self.blocks) + 2]
        return [frozenset(range(a, b)) for a, b in pairwise(starts)]

    def weights(self, used: frozenset[int], *how: Any) -> Cell:
        """The generated parameters that some cells use."""
        return total(cell for name, cell in self.made(*how).items() if self._places[name] & used)

    def footprint(self, layout: RankLayout) -> tuple[dict[str, float], dict[str, float], list[Cell], float]:
        """The fullest rank's bytes by part, most bytes sent by axis, costs of a microbatch by stage, largest hop."""
        sizes, m, mine = layout.sizes, layout.microbatches, layout.stages
        p, t, gnets, remat = sizes["pipeline"], sizes["tensor"], sizes["gnets"], layout.remat == "layer"
        factored = self.lazy is not False and (gnets == 1 or (layout.placement == "factors" and not remat))
        n, rows = sum(map(len, mine)), math.ceil(self.rows / (sizes["data"] * gnets * m))
        cells, hidden, of_stage = self.cells(t, factored, rows), [rows * x for x in self.crossing(n)], self.stages(n)
        how = t, factored, remat, gnets
        stages = [total(cells[c] for c in of) for of in of_stage]
        parts, of_ranks = [], [frozenset().union(*(of_stage[s] for s in own)) for own in mine]
        for rank, (own, used) in enumerate(zip(mine, of_ranks, strict=True)):
            flights = [[*zip(of, own, strict=True)] for of in in_flight(layout.order, rank, p, m)]
            saved = max(sum(k * stages[s].saved for k, s in flight) for flight in flights)
            buffers = 2 * m * sum(hidden[s] + hidden[s + 1] for s in own) + max(stages[s].largest for s in own)
            parts.append(self._memory(layout, self.weights(used, *how), saved, buffers))
        split, replicated, _ = self.genome(gnets)
        ends = [sum(hidden[s + d] for s in own for d in (0, 1) if s + 2 * d - 1 not in own) for own in mine]
        # Running statistics are averaged too, and rows, norm and loss are summed.
        numbers = replicated + 3 + sum(math.prod(b.shape) for b in self.plan.averaged)
        world, item = math.prod(sizes.values()), self.plan.dtype.itemsize
        sent = {
            "tensor": m * max(sum(stages[s].sent + stages[s].sent_back for s in own) for own in mine),
            "pipeline": m * max(ends),
            "gnets": max(self._gathered(layout, used) for used in {*of_ranks}) if gnets > 1 else 0.0,
            "replicas": all_reduce_bytes(split * item, world // gnets),
            "world": all_reduce_bytes(numbers * item, world),
        }
        with_weights = [total([cell, self.weights(of, *how)]) for cell, of in zip(stages, of_stage, strict=True)]
        fullest = max(parts, key=lambda part: sum(part.values()))
        return fullest, {axis: n for axis, n in sent.items() if n}, with_weights, max(hidden)

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
        trained = sum(t.numel for t in self.plan.direct if self.pnet.get_parameter(t.name).requires_grad)
        return split, replicated + trained, sum(t.numel for t in self.plan.direct) - trained

    def _memory(self, layout: RankLayout, made: Cell, saved: float, buffers: float) -> dict[str, float]:
        item, (split, replicated, frozen) = self.plan.dtype.itemsize, self.genome(layout.sizes["gnets"])
        trained, weights = item * (split + replicated), made.weights + made.passing
        # Gradients that do not add up over microbatches take the place of activations, which backward frees.
        once = layout.microbatches == 1 and layout.schedule is None
        # Otherwise the genome's gradients come after the activations. Gradients of weights coexist with the most
        # activations in 1F1B and with plain microbatches, but not in schedules that peak before backward.
        gradients = weights if layout.order == "1f1b" else 0.0
        flat = trained if once and math.prod(layout.sizes.values()) > 1 else 0.0
        return {
            "weights": weights + made.graph,
            "genome": trained + item * frozen,
            "optimizer": self.states * trained,
            "gradients": trained + max(0.0, weights - saved) if once else max(gradients, trained),
            "activations": saved,
            "buffers": self.plan.buffer_bytes + flat + buffers,
        }

    def _gathered(self, layout: RankLayout, used: frozenset[int]) -> float:
        tensors = {i for i, t in enumerate(self.plan.tensors) if self._places[t.name] & used}
        names = {e.name for e in self.plan.ensembles if any(s.tensor in tensors for s in e.spans)}
        gathers = gather_bytes(self.plan, layout.sizes["gnets"], layout.placement, self.plan.dtype.itemsize, names)
        return max((2 if layout.remat == "layer" else 1) * out + back for out, back in gathers)

    def dense(self, ranks: int) -> tuple[dict[str, float], float]:
        """Bytes by part of a rank of FSDP on the dense p-net, and the bytes that it sends in a step."""
        cells = self.cells(1, False, -(-self.rows // ranks))
        n_bytes = {t.name: t.numel * DTYPES[t.dtype].itemsize for t in self.plan.tensors}
        blocks = [sum(n for name, n in n_bytes.items() if i in self._places[name]) for i in range(len(cells))]
        share = sum(n_bytes.values()) / ranks
        parts = {"weights": share, "gradients": share, "optimizer": self.states * share}
        parts |= {"gathered block": 2 * max(blocks) if ranks > 1 else 0.0}
        return parts | {"activations": sum(cell.saved for cell in cells)}, 3 * share * (ranks - 1)
