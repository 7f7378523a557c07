"""The planner: estimates the memory, the bytes sent and the time of a step for every layout of ranks.

The time is the sum of operations / `flops`, bytes read and written / `bandwidth`, bytes sent / `link`, a constant per
operator, a constant per message, and the idle time of the pipeline. Backward has twice the operations of forward.
Computations and messages do not overlap. `DeviceSpec` has the speeds, and a `DryRun` counts the costs of every block.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from gbfunc.plan import Plan

if TYPE_CHECKING:
    from gbfunc.parallel.dry_run import RunLoss
    from gbfunc.parallel.planner_costs import Model, RankLayout


@dataclass(frozen=True)
class DeviceSpec:
    """A rank's speed and memory. The defaults fit a few server cores. `gbfunc bench --calibrate` measures a machine.

    Attributes:
        flops: multiplications and additions per second in a matrix product.
        bandwidth: bytes per second that a copy reads and writes.
        link: bytes per second that a rank sends to other ranks; the default is 10 Gbit/s.
        memory: bytes that a step may use.
        latency: seconds that an empty message takes.
        overhead: seconds per call of an operator on an empty tensor.
    """

    flops: float = 50e9
    bandwidth: float = 10e9
    link: float = 1.25e9
    memory: float = 16e9
    latency: float = 1e-4
    overhead: float = 5e-6

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least, number = ">=" if name in ("latency", "overhead") else ">", type(value) in (int, float)
            if not number or not 0 <= value < math.inf or (not value and least == ">"):
                raise ValueError(f"{name} of a device must be a number {least} 0, got {value!r}")

    def to_json(self) -> str:
        """Write the JSON that `gbfunc plan --device FILE` reads."""
        return json.dumps(asdict(self), indent=2)

    @staticmethod
    def from_json(text: str) -> DeviceSpec:
        """Undo `to_json`; raise ValueError for any other text."""
        try:
            return DeviceSpec(**json.loads(text))
        except (TypeError, json.JSONDecodeError) as error:
            names = ", ".join(field.name for field in fields(DeviceSpec))
            raise ValueError(f"a device must be a JSON object with {names}, got {text[:80]!r}") from error


class LayoutPlan(NamedTuple):
    """The estimated costs of a layout: sizes of the mesh's axes, and options of the training step."""

    layout: RankLayout
    memory: Mapping[str, float]  # {use, such as "activations": bytes}, on the rank that needs most memory
    sent: Mapping[str, float]  # {axis: the most bytes that a rank sends in a step}
    seconds: float  # Duration of a step
    bubble: float  # Fraction of the step in which ranks wait for another stage

    @property
    def peak(self) -> float:
        return sum(self.memory.values())


class ParallelPlan(NamedTuple):
    """The possible layouts of `ranks` ranks and, for comparison, the costs of training the dense p-net with FSDP."""

    ranks: int
    device: DeviceSpec
    fits: tuple[LayoutPlan, ...]  # Layouts that fit into the memory, the fastest first
    refused: tuple[tuple[str, str], ...]  # Layouts that cannot run or do not fit: (layout, reason)
    dense: Mapping[str, float]  # {use: bytes} on a rank that trains the dense p-net with FSDP and the same optimizer
    dense_sent: float  # Bytes that a rank sends in a step with FSDP

    def report(self, most: int = 20) -> str:
        """Return a table of the `most` fastest layouts (options of `gbfunc train`), refused layouts, FSDP's costs."""
        lines = [f"{'seconds':>9}{'bubble':>8}{'memory':>9}{'sent':>9}  options"] if self.fits else []
        for p in self.fits[:most]:
            sizes = f"{_size(p.peak):>9}{_size(sum(p.sent.values())):>9}"
            lines.append(f"{p.seconds:>9.4g}{p.bubble:>8.0%}{sizes}  {p.layout}")
        if len(self.fits) > most:
            lines.append(f"and {len(self.fits) - most} more that fit")
        for p in self.fits[:1]:
            lines += ["", f"the fastest    memory {_listed(p.memory)}", f"               sent {_listed(p.sent)}"]
        ranks = f"{self.ranks:,} rank{'s' * (self.ranks > 1)}"
        lines.append(f"\n{len(self.fits)} layouts of {ranks} fit, {len(self.refused)} do not:")
        lines += [f"  {layout}: {reason}" for layout, reason in self.refused[:most]]
        if len(self.refused) > most:
            lines.append(f"  and {len(self.refused) - most} more")
        lines.append(f"\ndense, FSDP    {_size(sum(self.dense.values()))} a rank ({_listed(self.dense)})")
        lines.append(f"               {_size(self.dense_sent)} sent per step and rank")
        return "\n".join(lines)


def _size(n: float) -> str:
    units = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}
    return next((f"{n / scale:.3g} {unit}" for unit, scale in units.items() if n >= scale), f"{n:.0f} B")


def _listed(named: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_size(n)}" for name, n in named.items()) or "-"


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
    """Estimate the memory, the bytes sent and the time of a step for every layout of `ranks` ranks.

    Args:
        plan: the plan.
        pnet: the p-net, on any device, also the meta device.
        batch: a global batch, on any device; only its shapes matter.
        ranks: number of ranks.
        device: speed and memory of a rank; the default is a few cores of a server.
        loss_fn: as in `make_train_step`. If None, the p-net is called with the batch, with the first entry of a tuple,
            or with the items of a mapping as keywords. The cost of the loss itself is then not counted.
        parallel: styles of the layers, as in `make_train_step`; None: the styles from `tensor_styles`, if any.
        microbatches: number of microbatches of a step; None: the fastest number for each layout.
        lazy: as in `make_train_step`.
        optimizer_states: how many numbers the optimizer stores for each number of the genome (Adam: 2).

    Raises:
        ValueError: for ranks < 1, a batch without rows, or a plan with a base.
    """
    from gbfunc.parallel.planner_costs import Model  # Imported here, because the import is slow

    device = device or DeviceSpec()
    if plan.base is not None:
        raise ValueError("plan_parallel expects a plan without a base, got one with a base: its p-net is not split")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks must be an int >= 1, got {ranks!r}")
    model = Model(plan, pnet, batch, loss_fn or _call, parallel, lazy, optimizer_states)
    fits, refused = list[LayoutPlan](), list[tuple[str, str]]()
    for layouts, reason in model.layouts(ranks, microbatches):
        if reason:
            refused.append((str(layouts[0]), reason))
            continue
        found = [_costed(model, device, layout) for layout in layouts]
        if fitting := [p for p in found if p.peak <= device.memory]:
            fits.append(min(fitting, key=lambda p: p.seconds))
            continue
        least = min(found, key=lambda p: p.peak)
        named = dict(sorted(least.memory.items(), key=lambda item: -item[1])[:2])
        reason = f"needs {_size(least.peak)} of {_size(device.memory)} ({_listed(named)})"
        refused.append((str(least.layout), reason))
    dense, sent = model.dense(ranks)
    fits.sort(key=lambda p: p.seconds)
    return ParallelPlan(ranks, device, tuple(fits), tuple(refused), dense, sent)


def _call(net: Callable[..., Any], batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return net(**batch)
    return net(batch if isinstance(batch, Tensor) else batch[0])


def _costed(model: Model, device: DeviceSpec, layout: RankLayout) -> LayoutPlan:
    (memory, all_sent, stages, hidden), p, m = model.footprint(layout), layout.sizes["pipeline"], layout.microbatches
    compute, generate = list[float](), list[float]()  # Seconds of each stage per microbatch; of its g-nets per step
    for cell in stages:
        work = cell.flops / device.flops + cell.moved / device.bandwidth + cell.operators * device.overhead
        sent = (cell.sent + cell.sent_back) / device.link + cell.messages * device.latency
        compute.append(3 * work + sent)
        moved = 6 * (cell.weights + cell.transient)  # A step reads or writes each weight six times
        repeats = 4 / 3 * m if layout.remat == "layer" else 1.0  # Per microbatch, forward (1/3 of the work) runs twice
        generate.append(repeats * (cell.generation / device.flops + moved / device.bandwidth))
    busy = [m * sum(compute[s] for s in mine) + sum(generate[s] for s in mine) for mine in layout.stages]
    # `waits` is the idle time of a pipeline, in units of the busiest rank's time for one microbatch. `hops` is the time
    # of messages between stages, in both directions.
    waits = {"interleaved": 1 / 2, "zbv": 1 / 6 if m >= 2 * p else 1 / 3}.get(layout.order, 1.0) * (p - 1)
    hops = 2 * (p - 1) * (device.latency + hidden / device.link)
    duration = max(busy) + waits * max(sum(compute[s] for s in mine) for mine in layout.stages) + hops
    # `tail` is the time after the pipeline: sums over ranks, gathers of a split genome, and the optimizer's update.
    axes = [n for axis, n in all_sent.items() if axis not in ("tensor", "pipeline")]
    genome = memory["genome"] + memory["optimizer"]
    tail = sum(axes) / device.link + len(axes) * device.latency + 3 * genome / device.bandwidth
    return LayoutPlan(layout, memory, all_sent, duration + tail, 1 - sum(busy) / len(busy) / duration)
