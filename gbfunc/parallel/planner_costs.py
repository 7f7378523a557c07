"""Computes the bytes that the ranks of a layout store and send, from the costs of the p-net's blocks."""

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
from gbfunc.parallel.placement import PLACEMENTS, Placement, flops_of, gather_bytes, placement_cost, products, shares_of
from gbfunc.parallel.styles import tensor_styles
from gbfunc.parallel.tensor import TensorParallel, resolve
from gbfunc.plan import DTYPES, Plan
from gbfunc.trees import n_rows, tree_map

_TRACED_ROWS = 2  # Number of rows with which the p-net is traced; batch norms refuse a single row
_SINES = 0.9  # Bytes that autograd saves per byte of the factors that periodic g-nets generate


class RankLayout(NamedTuple):
    """The sizes of a mesh's axes, and the options of a training step."""

    sizes: Mapping[str, int]  # Number of ranks along data, pipeline, gnets and tensor
    placement: Placement = "replicated"  # Placement of the genome
    schedule: str | None = None  # Schedule of the pipeline; None if the p-net is not divided into stages
    microbatches: int = 1
    remat: str = "none"

    def __str__(self) -> str:
        """Return the layout as options of `gbfunc train`; omit defaults."""
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
        return self.schedule or "1f1b"  # Without a pipeline, each forward is followed by its backward, as in 1F1B

    @property
    def stages(self) -> list[list[int]]:
        return stages_of(self.order, self.sizes["pipeline"])


class Model:
    """Computes the costs of a step on a global batch. The optimizer stores `states` numbers for each trained number."""

    def __init__(
        self, plan: Plan, pnet: nn.Module, batch: Any, run: RunLoss, styles: Any, lazy: Any, states: int
    ) -> None:
        self.plan, self.pnet, self.batch, self.run, self.lazy, self.states = plan, pnet, batch, run, lazy, states
        self.rows = n_rows(batch) or 0
        if not self.rows:
            raise ValueError("the batch must have rows, equally many in all tensors, got none")
        for name in ("dry", "cells", "generated", "starts", "stages", "weights", "crossing", "genome", "why_not"):
            setattr(self, name, cache(getattr(self, name)))  # Many layouts need the same results
        self._styles = None if styles is None else resolve(pnet, styles)
        try:  # Find a list of layers that run one after another
            self.blocks = find_blocks(pnet, 2)
            self._chain = trace_chain(pnet, self.blocks, run, self._batch(_TRACED_ROWS))
        except (RuntimeError, ValueError):  # There is no list, or the loss function calls modules inside the p-net
            self.blocks = ()
            self._chain = Chain((), {name: frozenset({-1}) for t in plan.tensors for name in (t.name, *t.aliases)})
        # {parameter: cells that use the parameter}. Cells count from 0 here, but from -1 in `Chain`.
        after = self._chain.places
        self._places = {t.name: frozenset(i + 1 for k in (t.name, *t.aliases) for i in after[k]) for t in plan.tensors}
        try:  # Run the p-net once, so that its errors are raised before the search.
            self.cells(1, lazy is not False, self.rows)
        except RuntimeError as error:
            if "meta" not in str(error):
                raise
            words = "plan_parallel expects a forward that runs on the meta device, where tensors have no values, got"
            raise ValueError(f"{words}: {error}") from error

    def _batch(self, rows: int) -> Any:
        def some(x: Any) -> Any:
            shape = (rows, *x.shape[1:]) if isinstance(x, Tensor) and x.ndim else ()
            return torch.empty(shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x

        return tree_map(some, self.batch)

    def why_not(self, tensor: int, stages: int = 1, schedule: str | None = None) -> str:
        """Return why the layers cannot be split over `tensor` ranks, or the p-net into stages; "" if they can."""
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
        """Yield (layouts that differ only in the number of microbatches, the reason why they cannot run or "")."""
        divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
        for tensor in divisors:
            sizes = {"data": 1, "pipeline": 1, "gnets": 1, "tensor": tensor}
            if tensor > 1 and (reason := self.why_not(tensor)):
                yield [RankLayout(sizes)], reason
                continue
            for shards in (d for d in reversed(divisors) if ranks // tensor % d == 0):
                rows, pipeline = self.rows / shards, ranks // tensor // shards
                sizes = sizes | {"data": shards, "pipeline": pipeline}
                for schedule in SCHEDULES if pipeline > 1 else (None,):
                    tried = [microbatches] if microbatches else [pipeline * 2**i for i in range(4 if schedule else 8)]
                    # Without a pipeline, microbatches may differ in size. In "interleaved", rounds have equal lengths.
                    uneven = schedule is None and ranks > 1
                    numbers = [m for m in tried if pipeline <= m <= rows and (uneven or rows % m == 0)]
                    numbers = [m for m in numbers if schedule != "interleaved" or m % (m // pipeline) == 0]
                    reason = "" if numbers else f"no number of microbatches from {pipeline} on divides {rows:.4g} rows"
                    if schedule:
                        reason = self.why_not(tensor, len(stage_ranks(schedule, pipeline)), schedule) or reason
                    reason = reason if rows >= 1 else f"{shards} shards of a batch of {self.rows} rows"
                    if reason:
                        yield [RankLayout(sizes, schedule=schedule)], reason
                        continue
                    yield from ((found, "") for found in self._placed(sizes, schedule, numbers))

    def _placed(self, sizes: dict[str, int], schedule: str | None, numbers: list[int]) -> Iterator[list[RankLayout]]:
        shards, lazy = sizes["data"], self.lazy is not False
        split = min(PLACEMENTS[1:], key=lambda p: placement_cost(self.plan, 1, shards, p, lazy).bytes), shards
        for placement, gnets in [(PLACEMENTS[0], 1), split][: 1 + (shards > 1)]:
            sizes = sizes | {"data": shards // gnets, "gnets": gnets}
            yield [RankLayout(sizes, placement, schedule, m) for m in numbers]
            # Recomputation (`remat`) changes the costs only if some weights are formed. With a split genome, every
            # microbatch would gather the tiles of formed weights again, so only one microbatch is tried.
            some = [m for m in numbers if m == 1 or gnets == 1]
            if some and any(w.transient for w in self.generated(1, lazy and gnets == 1, True, 1).values()):
                yield [RankLayout(sizes, placement, schedule, m, "layer") for m in some]

    def dry(self, tensor: int, factored: bool) -> DryRun:
        """Return a rank's `DryRun` with layers split over `tensor` ranks, or raise ValueError if this is impossible."""
        parallel = None
        if tensor > 1:
            styles = resolve(self.pnet, tensor_styles(self.pnet)) if self._styles is None else self._styles
            parallel = TensorParallel(self.pnet, styles, Mesh({"tensor": tensor}), DryWire)
        return DryRun(self.plan, self.pnet, self.blocks, self.lazy if factored else False, parallel)

    def cells(self, tensor: int, factored: bool, rows: int) -> list[Cell]:
        return self.dry(tensor, factored)(self.run, self._batch(rows))

    def generated(self, tensor: int, factored: bool, remat: bool, gnets: int) -> dict[str, Cell]:
        """Return {generated parameter: costs on a rank}, with layers split over `tensor` ranks, g-nets over `gnets`."""
        dry, plan, costs, flops = self.dry(tensor, factored), self.plan, dict[str, Cell](), dict[int, float]()
        for e in plan.ensembles:
            for span in e.spans:
                thin = plan.tensors[span.tensor].name in dry.forms
                each = (flops_of(e) - products(e) * thin) / e.n_tiles
                flops[span.tensor] = flops.get(span.tensor, 0.0) + span.slot.grid.n_tiles * each / gnets
        for i, t in ((i, t) for i, t in enumerate(plan.tensors) if t.slots):
            factors = float(plan.dtype.itemsize * sum(math.prod(x) for s in t.slots for x in factor_shapes(s)))
            if t.name in dry.forms:
                costs[t.name] = Cell(weights=factors, graph=_SINES * factors / gnets, generation=flops[i])
                continue
            numel = math.prod(dry.shapes.get(t.name, t.shape))
            share = numel / max(1, t.numel)
            # With a split genome, a rank stores all gathered tiles, although it uses only a piece of a split weight.
            # `graph` has the bytes that torch's operators save for backward. Compiled kernels on a CPU save fewer.
            kept = (t.numel if gnets > 1 and not remat else numel) * DTYPES[t.dtype].itemsize
            graph = 2 * _SINES * factors * (share if gnets == 1 else 1 / gnets)
            transient = dict.fromkeys(("transient", "passing"), kept + graph)
            sizes = transient if remat and t.is_formable(self.pnet) else {"weights": kept, "graph": graph}
            costs[t.name] = Cell(**sizes, generation=flops[i] * share)
        return costs

    def starts(self, n: int) -> tuple[int, ...]:
        """Return the index of each stage's first block, and then the number of blocks; (0, 0) without blocks."""
        return balanced_stages(self._chain.flops, n) if self.blocks else (0, 0)

    def crossing(self, n: int) -> list[float]:
        """Return the bytes per row that each of `n` stages receives, then 0, because no stage receives the loss."""
        parcels = [Parcel(crossing(self._chain, self.starts(n), stage)) for stage in range(n)]
        return [*(parcel.like.nbytes / _TRACED_ROWS for parcel in parcels), 0.0]

    def stages(self, n: int) -> list[frozenset[int]]:
        """Return the cells of each of `n` stages, by index. The ends of the p-net are in the first and last stage."""
        starts = [0, *(start + 1 for start in self.starts(n)[1:-1]), len(self.blocks) + 2]
        return [frozenset(range(a, b)) for a, b in pairwise(starts)]

    def weights(self, used: frozenset[int], *options: Any) -> Cell:
        """Return the total costs of generated parameters that the cells `used` need, with `options` of `generated`."""
        return total(cell for name, cell in self.generated(*options).items() if self._places[name] & used)

    def footprint(self, layout: RankLayout) -> tuple[dict[str, float], dict[str, float], list[Cell], float]:
        """Return {use: bytes} on the fullest rank, {axis: most bytes sent}, costs of stages, the largest message."""
        sizes, m, mine = layout.sizes, layout.microbatches, layout.stages
        p, t, gnets, remat = sizes["pipeline"], sizes["tensor"], sizes["gnets"], layout.remat == "layer"
        factored = self.lazy is not False and (gnets == 1 or (layout.placement == "factors" and not remat))
        n, rows = sum(map(len, mine)), math.ceil(self.rows / (sizes["data"] * gnets * m))
        cells, hidden, of_stage = self.cells(t, factored, rows), [rows * x for x in self.crossing(n)], self.stages(n)
        options = t, factored, remat, gnets
        stages = [total(cells[c] for c in used) for used in of_stage]
        stored, of_ranks = [], [frozenset().union(*(of_stage[s] for s in own)) for own in mine]
        for rank, (own, used) in enumerate(zip(mine, of_ranks, strict=True)):
            flights = [[*zip(counts, own, strict=True)] for counts in in_flight(layout.order, rank, p, m)]
            saved = max(sum(k * stages[s].saved for k, s in flight) for flight in flights)
            buffers = 2 * m * sum(hidden[s] + hidden[s + 1] for s in own) + max(stages[s].largest for s in own)
            stored.append(self._memory(layout, self.weights(used, *options), saved, buffers))
        split, replicated, _ = self.genome(gnets)
        ends = [sum(hidden[s + d] for s in own for d in (0, 1) if s + 2 * d - 1 not in own) for own in mine]
        # The all-reduce also sums running statistics and 3 numbers: the number of rows, the norm and the loss.
        numbers = replicated + 3 + sum(math.prod(b.shape) for b in self.plan.averaged)
        world, item = math.prod(sizes.values()), self.plan.dtype.itemsize
        sent = {
            "tensor": m * max(sum(stages[s].sent + stages[s].sent_back for s in own) for own in mine),
            "pipeline": m * max(ends),
            "gnets": max(self._gathered(layout, used) for used in {*of_ranks}) if gnets > 1 else 0.0,
            "replicas": all_reduce_bytes(split * item, world // gnets),
            "world": all_reduce_bytes(numbers * item, world),
        }
        with_weights = [total([cell, self.weights(own, *options)]) for cell, own in zip(stages, of_stage, strict=True)]
        fullest = max(stored, key=lambda memory: sum(memory.values()))
        return fullest, {axis: n for axis, n in sent.items() if n}, with_weights, max(hidden)

    def genome(self, gnets: int) -> tuple[float, float, float]:
        """Count a rank's numbers in split leaves, in other trained tensors, and in frozen tensors."""
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

    def _memory(self, layout: RankLayout, generated: Cell, saved: float, buffers: float) -> dict[str, float]:
        item, (split, replicated, frozen) = self.plan.dtype.itemsize, self.genome(layout.sizes["gnets"])
        trained, weights = item * (split + replicated), generated.weights + generated.passing
        # With one microbatch, gradients of weights use the memory of activations that backward has freed.
        once = layout.microbatches == 1 and layout.schedule is None
        # With several microbatches, gradients of weights are stored while most activations are stored. Schedules other
        # than 1F1B store most activations before the first backward, so gradients do not add to the largest memory.
        gradients = weights if layout.order == "1f1b" else 0.0
        flat = trained if once and math.prod(layout.sizes.values()) > 1 else 0.0
        return {
            "weights": weights + generated.graph,
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
        """Return {use: bytes} on a rank if FSDP trains the dense p-net, and the bytes that a rank sends per step."""
        cells = self.cells(1, False, -(-self.rows // ranks))
        n_bytes = {t.name: t.numel * DTYPES[t.dtype].itemsize for t in self.plan.tensors}
        blocks = [sum(n for name, n in n_bytes.items() if i in self._places[name]) for i in range(len(cells))]
        share = sum(n_bytes.values()) / ranks
        memory = {"weights": share, "gradients": share, "optimizer": self.states * share}
        memory |= {"gathered block": 2 * max(blocks) if ranks > 1 else 0.0}
        return memory | {"activations": sum(cell.saved for cell in cells)}, 3 * share * (ranks - 1)
