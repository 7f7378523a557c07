"""The planner: which layouts of ranks fit, what each of them stores and sends, and how long a step takes.

For every product data x g-nets x pipeline x tensor of the ranks, each schedule, weights kept or made again:

* memory: weights or factors, genome, optimizer, gradients, activations in flight and buffers of the fullest rank;
* bytes: what `mesh.traffic` counts, along each axis;
* seconds: operations / flops + bytes moved / bandwidth + bytes sent / link, calls of operators and messages, and the
  bubble of the simulator; backward takes twice what forward does, and nothing overlaps.

What a layer costs and sends comes from its code, run on the meta device (`gbfunc.parallel.dry_run`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch import Tensor, nn

from gbfunc.parallel.pipeline_order import SCHEDULES
from gbfunc.parallel.planner_report import report
from gbfunc.parallel.schedule import simulate
from gbfunc.parallel.training_schedule import ScheduleCosts, make_schedule
from gbfunc.plan import Plan
from gbfunc.trees import n_rows

if TYPE_CHECKING:
    from gbfunc.parallel.dry_run import RunLoss
    from gbfunc.parallel.planner_costs import Footprint, Model, RankLayout


@dataclass(frozen=True)
class DeviceSpec:
    """What one rank has; `gbfunc bench --calibrate` measures it. The defaults are some cores of a server.

    Attributes:
        flops: operations per second of a matrix product, multiplications and additions.
        bandwidth: bytes per second that a copy reads and writes.
        link: bytes per second that a rank sends to others (10 Gbit/s).
        memory: bytes.
        latency: seconds of a message without content.
        overhead: seconds of an operator without work.
    """

    flops: float = 50e9
    bandwidth: float = 10e9
    link: float = 1.25e9
    memory: float = 16e9
    latency: float = 1e-4
    overhead: float = 5e-6

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = "number >= 0" if name in ("latency", "overhead") else "number > 0"
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value < math.inf or (not value and least == "number > 0"):
                raise ValueError(f"{name} of a device must be a {least}, got {value!r}")

    def to_json(self) -> str:
        """As `gbfunc plan --device FILE` takes it."""
        return json.dumps(asdict(self), indent=2)

    @staticmethod
    def from_json(text: str) -> DeviceSpec:
        """Undo `to_json`; ValueError for anything else."""
        names = [field.name for field in fields(DeviceSpec)]
        try:
            values = json.loads(text)
        except ValueError:
            values = None
        if not isinstance(values, dict) or values.keys() - set(names):
            raise ValueError(f"a device must be a JSON object with {', '.join(names)}, got {text[:80]!r}")
        return DeviceSpec(**values)


class LayoutPlan(NamedTuple):
    """A layout and what it costs.

    Attributes:
        layout: ranks along each axis, placement, schedule, microbatches, what is made again.
        memory: bytes of the fullest rank, by part.
        sent: bytes of the rank that sends most in a step, by axis, as `mesh.traffic.by_axis` counts them.
        seconds: of a step.
        bubble: part of the ranks' time in which they wait for other stages.
    """

    layout: RankLayout
    memory: Mapping[str, float]
    sent: Mapping[str, float]
    seconds: float
    bubble: float

    @property
    def peak(self) -> float:
        """Bytes of the fullest rank."""
        return sum(self.memory.values())


class ParallelPlan(NamedTuple):
    """What `plan_parallel` found.

    Attributes:
        ranks: how many.
        device: what each has.
        fits: layouts that fit, the fastest first.
        refused: the others, each with the reason.
        smallest: fewest ranks (a divisor of `ranks`, or a multiple by a power of two) that some layout fits on, None
            for none.
        dense: bytes by part of a rank of FSDP that trains the dense p-net with the same optimizer on as many ranks.
        dense_sent: bytes that it sends in a step.
        rule_of_thumb: bytes in all, 12 GB per billion parameters.
    """

    ranks: int
    device: DeviceSpec
    fits: tuple[LayoutPlan, ...]
    refused: tuple[tuple[str, str], ...]
    smallest: int | None
    dense: Mapping[str, float]
    dense_sent: float
    rule_of_thumb: float

    def report(self, most: int = 20) -> str:
        """The fastest layouts as a table, why others do not fit, and what the dense p-net needs."""
        return report(self, most)


_SIMULATED, _EVENTS = 64, 6_000
"""The simulator runs for this many layouts at the head of the table, up to so many events: beyond, a closed form."""

_seconds = attrgetter("seconds")

_RULE_OF_THUMB = 12.0
"""Bytes per parameter: weights, gradients and one state of the optimizer in float32."""


def plan_parallel(
    plan: Plan,
    pnet: nn.Module,
    batch: Any,
    *,
    ranks: int,
    device: DeviceSpec | None = None,
    loss_fn: RunLoss | None = None,
    parallel: Mapping[str, Any] | None = None,
    microbatches: int | None = None,
    lazy: Any = "auto",
    optimizer_states: int = 2,
) -> ParallelPlan:
    """What every layout of some ranks would store, send and take, without running any.

    Args:
        plan: the plan.
        pnet: the p-net, on any device, the meta device too.
        batch: a global batch, on any device; only its shapes matter.
        ranks: how many.
        device: what each has, by default some cores of a server.
        loss_fn: as for `make_train_step`; None calls the p-net with the batch (of a tuple its first, of a mapping its
            items as keywords), and leaves the loss itself out.
        parallel: styles of the layers, as for `make_train_step`; None takes those of `tensor_styles`, where there
            are any.
        microbatches: of a step; None takes the fastest number for each layout.
        lazy: as for `make_train_step`.
        optimizer_states: numbers that the optimizer keeps for each of the genome (Adam: 2).

    Raises:
        ValueError: for ranks < 1, a batch without rows, or a plan with a base.
    """
    from gbfunc.parallel.planner_costs import Model  # Torch's counter of operations takes time to import.

    device = device or DeviceSpec()
    if plan.base is not None:
        raise ValueError("a p-net with a base is not split: plan_parallel is for plans without one")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks must be an int >= 1, got {ranks!r}")
    rows = n_rows(batch)
    if not rows:
        raise ValueError(f"the batch must have rows, the same in all tensors, got {rows}")
    model = Model(plan, pnet, batch, rows, loss_fn or _call, parallel, lazy, optimizer_states)
    refused = list[tuple[str, str]]()
    found = (_best(model, device, choices, refused) for choices in _layouts(model, ranks, microbatches, refused))
    fits = sorted(filter(None, found), key=_seconds)
    fits[:_SIMULATED] = [_simulated(model, device, p) for p in fits[:_SIMULATED]]
    fits.sort(key=_seconds)
    smallest = _smallest(model, device, ranks, microbatches, bool(fits))
    dense, sent = model.dense(ranks)
    thumb = _RULE_OF_THUMB * plan.pnet_params
    return ParallelPlan(ranks, device, tuple(fits), tuple(refused), smallest, dense, sent, thumb)


def _call(net: Callable[..., Any], batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return net(**batch)
    return net(batch if isinstance(batch, Tensor) else batch[0])


def _layouts(
    model: Model, ranks: int, microbatches: int | None, refused: list[tuple[str, str]]
) -> Iterator[list[RankLayout]]:
    """Choices of microbatches for each layout; those that cannot be get into `refused`, with the reason."""
    from gbfunc.parallel.planner_costs import RankLayout

    for tensor in _divisors(ranks):
        if tensor > 1 and (reason := model.why_not_split(tensor)):
            refused.append((f"tensor {tensor}", reason))
            continue
        for pipeline in _divisors(ranks // tensor):
            shards = ranks // tensor // pipeline
            name = f"data {shards} x pipeline {pipeline} x tensor {tensor}"
            rows = model.rows / shards
            if rows < 1:
                refused.append((name, f"the batch has {model.rows} rows"))
                continue
            for schedule in SCHEDULES if pipeline > 1 else (None,):
                numbers = _numbers(rows, ranks == 1, pipeline, schedule, microbatches)
                reason = "" if numbers else f"no number of microbatches from {pipeline} on divides {rows:.4g} rows"
                if schedule:
                    reason = model.why_not_staged(pipeline * SCHEDULES[schedule][1], schedule) or reason
                if reason:
                    refused.append((f"{name}, {schedule}" if schedule else name, reason))
                    continue
                for placement, gnets in model.placements(shards):
                    for remat in ("none", "layer") if model.can_remat(placement) else ("none",):
                        sizes = {"data": shards // gnets, "pipeline": pipeline, "gnets": gnets, "tensor": tensor}
                        # On a split genome weights that are made again are gathered again: one microbatch.
                        some = [1] if remat == "layer" and gnets > 1 else numbers
                        if some[0] in numbers:
                            yield [RankLayout(sizes, placement, schedule, m, remat) for m in some]


def _numbers(rows: float, alone: bool, pipeline: int, schedule: str | None, asked: int | None) -> list[int]:
    """Numbers of microbatches to try: powers of two times the stages; ranks without a pipeline may have uneven ones."""
    if schedule is None:
        tried = [asked] if asked else [2**i for i in range(8)]
        return [m for m in tried if m <= rows and not (alone and rows % m)]
    tried = [asked] if asked else [pipeline * 2**i for i in range(4)]
    # Interleaved ones go in equal rounds.
    rounds = schedule == "interleaved"
    return [m for m in tried if m >= pipeline and rows % m == 0 and not (rounds and m % (m // pipeline))]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _best(
    model: Model, device: DeviceSpec, choices: list[RankLayout], refused: list[tuple[str, str]]
) -> LayoutPlan | None:
    """The fastest of the choices that fit; where none does, `refused` gets the one that needs least."""
    found = [_costed(model, device, layout) for layout in choices]
    fitting = [p for p in found if p.peak <= device.memory]
    if fitting:
        return min(fitting, key=_seconds)
    least = min(found, key=lambda p: p.peak)
    parts = sorted(least.memory.items(), key=lambda item: -item[1])[:2]
    words = " and ".join(f"{name} {n / 1e9:,.3g} GB" for name, n in parts)
    reason = f"needs {least.peak / 1e9:,.3g} GB of {device.memory / 1e9:,.3g} GB ({words})"
    refused.append((str(least.layout), reason))
    return None


def _costed(model: Model, device: DeviceSpec, layout: RankLayout) -> LayoutPlan:
    """A layout with the closed form of the pipeline: all ranks as slow as the slowest, and its ramps."""
    cost = model.footprint(layout)
    forward, backward, generate = _stage_seconds(cost, device)
    p, m = layout.sizes["pipeline"], layout.microbatches
    busiest = max(sum(forward[s] + backward[s] for s in mine) for mine in layout.stages)
    ramp = 0.0 if layout.schedule == "zbv" else (p - 1) / (2 if layout.schedule == "interleaved" else 1)
    hops = 2 * (p - 1) * (cost.hidden / device.link + device.latency)
    times = 4 / 3 * m if layout.remat == "layer" else 1.0  # A third of generation, its forward, is there twice.
    work = m * busiest + times * max(sum(generate[s] for s in mine) for mine in layout.stages)
    seconds = work + ramp * busiest + hops + _tail(cost, device)
    return LayoutPlan(layout, cost.memory, cost.sent, seconds, (seconds - work) / seconds if p > 1 else 0.0)


def _simulated(model: Model, device: DeviceSpec, planned: LayoutPlan) -> LayoutPlan:
    """A layout with the pipeline simulated, unless it is too long."""
    layout, m = planned.layout, planned.layout.microbatches
    cost = model.footprint(layout)
    stages, kind = len(cost.cells), layout.schedule
    if kind is None or 6 * stages * m > _EVENTS:
        return planned
    forward, backward, generate = _stage_seconds(cost, device)
    costs = ScheduleCosts(
        forward=forward,
        backward=backward,
        backward_input=[b / 2 for b in backward],
        backward_weight=[b / 2 for b in backward],
        generate=[g / 3 for g in generate],
        generate_backward=[2 * g / 3 for g in generate],
        update=0.0,
        all_reduce=0.0,
        send=device.latency + cost.hidden / device.link,
        receive=0.0,
    )
    sizes: Any = {"layers": stages, "ranks": layout.sizes["pipeline"], "microbatches": m}
    weights = "remat" if layout.remat == "layer" else "generated"
    made = make_schedule(cast(Any, kind), weights=weights, costs=costs, **sizes)
    timeline = simulate(made)
    return planned._replace(seconds=timeline.duration + _tail(cost, device), bubble=timeline.bubble)


def _stage_seconds(cost: Footprint, device: DeviceSpec) -> tuple[list[float], list[float], list[float]]:
    """Of each stage: forward and backward of a microbatch, and one generation of its weights, both ways."""
    forward, backward, generate = list[float](), list[float](), list[float]()
    for cell, made in zip(cost.cells, cost.weights, strict=True):
        work = cell.flops / device.flops + cell.moved / device.bandwidth + cell.operators * device.overhead
        wait = cell.messages * device.latency / 2
        forward.append(work + cell.sent / device.link + wait)
        backward.append(2 * work + cell.sent_back / device.link + wait)
        moved = 6 * (made.bytes + made.transient)  # Weights are moved six times.
        generate.append(made.operations / device.flops + moved / device.bandwidth)
    return forward, backward, generate


def _tail(cost: Footprint, device: DeviceSpec) -> float:
    """Sums over ranks, gathers of a split genome, and the update."""
    axes = [n for axis, n in cost.sent.items() if axis not in ("tensor", "pipeline")]
    genome = cost.memory["genome"] + cost.memory["optimizer"]
    return sum(axes) / device.link + len(axes) * device.latency + 3 * genome / device.bandwidth


def _smallest(model: Model, device: DeviceSpec, ranks: int, microbatches: int | None, fits: bool) -> int | None:
    """The fewest ranks that some layout fits on."""
    more = [ranks] if fits else [ranks * 2**i for i in range(1, 7)]
    for n in [*_divisors(ranks)[:-1], *more]:
        # Of all numbers of microbatches, the largest keeps the least.
        last = (choices[-1] for choices in _layouts(model, n, microbatches, []))
        if n == ranks or any(sum(model.footprint(c).memory.values()) <= device.memory for c in last):
            return n
    return None
