"""Pipeline parallelism: each rank generates and runs some of the p-net's blocks, on torch's own schedules.

    rank 0    embedding, blocks 0 .. i - 1    -- activations -->    rank 1    blocks i .., norm, head, loss

No rank runs another part of the p-net, and none has its weights; yet each calls the user's `loss_fn(net, batch)` as it
stands. A *unit* is a block, or a layer of no block. A trace (`gbfunc.parallel.absent`) finds of which units' outputs
and of which parameters each unit and the loss are made, through every operator between. Those that a later stage needs
are sent from stage to stage, integers and masks too. There, units of earlier stages give what was sent, or else an
absent tensor, which has no values and names its module if they are asked for. Operators between units run in every
stage. At the first unit of the next stage the call ends. So which ranks take inputs and which take targets needs no
configuration, and what cannot be sent is refused by name.

Schedules: `torch.distributed.pipelining` (GPipe: Huang et al., 2019; 1F1B and interleaved: Narayanan et al., 2021;
ZBV: Qi et al., 2024). Blocks are spread so that the largest stage has the fewest operations, counted by torch on the
meta device.
"""

from __future__ import annotations

import inspect
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gbfunc.parallel.absent import Absent, Source, absent, refuse
from gbfunc.parallel.chain import (
    SUBMODULE_CALL_ERROR,
    Chain,
    Constant,
    UnitCall,
    find_blocks,
    replace_units,
    spread,
    trace_chain,
)
from gbfunc.parallel.mesh import Mesh
from gbfunc.pnet import StopForward
from gbfunc.trees import tree_map
from gbfunc.types import Params

__all__ = ["SCHEDULES", "Chain", "Pipeline", "find_blocks", "spread", "trace_chain"]

SCHEDULES: Mapping[str, tuple[str, int]] = {
    "gpipe": ("ScheduleGPipe", 1),
    "1f1b": ("Schedule1F1B", 1),
    "interleaved": ("ScheduleInterleaved1F1B", 2),
    "zbv": ("ScheduleZBVZeroBubble", 2),
}
"""Torch's class of each schedule, and its stages per rank."""


class _Cut(StopForward):
    """The first unit of the next stage has been reached."""


class _Stage(nn.Module):
    """A stage as torch's schedules run it: activations in, activations or the loss out, microbatch by microbatch."""

    def __init__(self, pipeline: Pipeline, index: int) -> None:
        super().__init__()
        self.pipeline, self.index, self.calls = pipeline, index, 0

    def parameters(self, recurse: bool = True) -> Any:
        """What gradients are accumulated on."""
        return iter(self.pipeline.leaves.values())

    def forward(self, sent: Tensor) -> Tensor:
        """One microbatch."""
        pipeline, number = self.pipeline, self.calls
        self.calls += 1
        pipeline.stage, pipeline.position = self.index, 0
        pipeline.kept = {}
        pipeline.values = _unpack(sent, pipeline.live[self.index]) if self.index else {}
        try:
            loss = pipeline.call(number).reshape(1)
        except _Cut:
            pipeline.check_kept()
            return _pack(pipeline.values, pipeline.live[self.index + 1], sent.device)
        if self.index < pipeline.stages - 1:
            raise ValueError("in a pipeline the loss function must call the p-net once, as it did in the trace")
        if isinstance(loss, Absent):
            raise refuse(loss.sources, "the loss needs what its rank does not have")
        return loss


Value = tuple[Source, tuple[int, ...], torch.dtype]


def _wire_dtype(values: Sequence[Value]) -> torch.dtype:
    """In which values travel: the widest of those that are differentiable."""
    dtypes = [d for _, _, d in values if d.is_floating_point or d.is_complex]
    return reduce(torch.promote_types, dtypes) if dtypes else torch.float32


def _wire_size(value: Value, wire: torch.dtype) -> int:
    """Numbers that a value takes on its way."""
    _, shape, dtype = value
    n = math.prod(shape)
    return n if dtype.is_floating_point or dtype.is_complex else -(-n * dtype.itemsize // wire.itemsize)


def _pack(values: Mapping[Source, Tensor], live: Sequence[Value], device: torch.device) -> Tensor:
    """All values as one tensor [n], which has their gradients; the bytes of integers and masks are sent as they are."""
    wire, parts = _wire_dtype(live), []
    for value in live:
        source, shape, dtype = value
        x = values.get(source)
        if x is None or isinstance(x, Absent):
            raise refuse([source], "a later stage needs what this one does not have")
        if tuple(x.shape) != shape or x.dtype != dtype:
            raise ValueError(
                f"a stage must give {source} as {shape} of {dtype}, got {tuple(x.shape)} of {x.dtype}: activations "
                "must be whole on every tensor rank, and of one dtype"
            )
        if not (dtype.is_floating_point or dtype.is_complex):
            data = x.detach().reshape(-1).contiguous().view(torch.uint8)
            room = torch.zeros(_wire_size(value, wire) * wire.itemsize, dtype=torch.uint8, device=x.device)
            room[: data.numel()] = data
            x = room.view(wire)
        if len(live) == 1 and dtype == wire:  # As it is, without another copy: what is kept is one.
            return x if x.requires_grad else x.detach().requires_grad_()
        parts.append(x.reshape(-1).to(wire))
    # Of one part too: torch's zero-bubble schedule detaches what is sent in place, which a view refuses.
    sent = torch.cat(parts)
    # A stage without trained tensors sends what nothing comes back to; torch's schedules ask for its gradient.
    return sent if sent.requires_grad else sent.detach().requires_grad_()


def _unpack(sent: Tensor, live: Sequence[Value]) -> dict[Source, Tensor]:
    """The values again."""
    if len(live) == 1 and live[0][2] == sent.dtype:
        return {live[0][0]: sent}
    sizes = [_wire_size(value, sent.dtype) for value in live]
    found, start = {}, 0
    for (source, shape, dtype), n in zip(live, sizes, strict=True):
        x, start = sent.narrow(0, start, n), start + n
        if dtype.is_floating_point or dtype.is_complex:
            # A copy, since a module may change it in place.
            found[source] = x.clone().reshape(shape).to(dtype)
        else:
            data = x.detach().clone().view(torch.uint8)[: math.prod(shape) * dtype.itemsize]
            found[source] = data.clone().view(dtype).reshape(shape)
    return found


class Pipeline:
    """The pipeline axis of a mesh: which blocks are this rank's, and how microbatches go through them.

    Args:
        pnet: the p-net.
        schedule: a name of `SCHEDULES`.
        mesh: the ranks.
        microbatches: how many.
        splits: names of the blocks that begin a stage; None spreads them by operations.

    Attributes:
        names: parameters that this rank needs.
        buffers: buffers that it updates.
        rank, ranks: this one along the axis, and how many there are.
        ran: whether a step has been made.
        stage: the stage that runs now.

    Raises:
        ValueError: for a schedule that is none, or a p-net without blocks.
    """

    submodule_call_error = SUBMODULE_CALL_ERROR

    def __init__(
        self, pnet: nn.Module, schedule: str, mesh: Mesh, microbatches: int, splits: Sequence[str] | None = None
    ) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"pipeline must be one of {tuple(SCHEDULES)}, got {schedule!r}")
        self._pnet, self._mesh, self._microbatches, self._splits = pnet, mesh, microbatches, splits
        self._axis = mesh.axis("pipeline")
        self._class, each = SCHEDULES[schedule]
        self.ranks, self.stages = self._axis.size, each * self._axis.size
        self._blocks = find_blocks(pnet, self.stages, splits)
        self.rank = self._axis.rank
        rank, ranks = self.rank, self.ranks
        self.mine = [rank] if each == 1 else [rank, 2 * ranks - 1 - rank if schedule == "zbv" else rank + ranks]
        if microbatches < ranks:
            raise ValueError(f"a pipeline of {ranks} ranks needs at least as many microbatches, got {microbatches}")
        self.stage, self.position, self._inside = 0, 0, False
        self.values: dict[Source, Tensor] = {}
        # Outputs that were kept in this call, with their counts of changes; and which were changed in the first ones.
        self.kept: dict[Source, tuple[Tensor, int]] = {}
        self._changes: dict[Source, bool] = {}
        self.live: list[list[Value]] = []
        self.leaves: Params = {}
        self.call: Callable[[int], Tensor] = lambda number: torch.zeros(())
        self._built: dict[Any, Any] = {}

    def prepare(self, run: Callable[[Any, Any], Any], microbatch: Any) -> None:
        """Settle stages and shapes for microbatches of this form: `run(net, microbatch)` is the loss function."""
        key = tuple((tuple(x.shape), x.dtype) for x in _tensors(microbatch))
        if key in self._built:
            self.chain, self.live, self._schedule = self._built[key]
            return
        device = next((x.device for x in _tensors(microbatch)), self._mesh.device)
        self.chain = trace_chain(self._pnet, self._blocks, lambda net: run(net, tree_map(_copied, microbatch)), device)
        if not self._built:
            begins = [] if self._splits is None else [self._blocks.index(name) for name in self._splits]
            self.starts = (
                spread(self.chain.flops, self.stages) if self._splits is None else (0, *begins, len(self._blocks))
            )
            self.names, self.buffers = self._needed(self._pnet.named_parameters), self._needed(self._pnet.named_buffers)
        self.live = [self._find_live(stage) for stage in range(self.stages)]
        self._schedule = self._make_schedule()
        self._built[key] = self.chain, self.live, self._schedule

    def _stage_of(self, cell: int) -> int:
        return bisect_right(self.starts, max(cell, 0)) - 1

    def _find_live(self, stage: int) -> list[Value]:
        """What is made before a stage and needed in it, or after; raises for what is needed and cannot be sent."""
        calls, drawn = self.chain.calls, dict[Source, int]()
        reads = [*((self._stage_of(c.cell), c.needs) for c in calls), (self.stages - 1, self.chain.end)]
        needed: set[Source] = set()
        for reader, needs in reads:
            for source in needs:
                if source.kind == "output" and reader >= stage > self._stage_of(calls[source.call].cell):
                    needed.add(source)
                elif source.kind == "inside" and self._stage_of(calls[source.call].cell) != reader:
                    raise refuse([source], "a tensor reaches another stage by other ways than a module's output")
                elif source.kind == "random" and drawn.setdefault(source, reader) != reader:
                    raise refuse([source], "random numbers that several stages use must be drawn by one module")
        values = (x for c in calls for x in c.leaves if isinstance(x, tuple) and not isinstance(x, Constant))
        return [value for value in values if value[0] in needed]

    def _needed(self, members: Callable[..., Any]) -> frozenset[str]:
        """Parameters or buffers of this rank's stages, tied ones by their first name."""
        names: dict[int, str] = {}
        needed: set[str] = set()
        for name, tensor in members(remove_duplicate=False):
            first = names.setdefault(id(tensor), name)
            if any(self._runs(stage, name) for stage in self.mine):
                needed.add(first)
        return frozenset(needed)

    def _runs(self, stage: int, name: str) -> bool:
        """Whether a stage uses a parameter or buffer."""
        first, last = self.starts[stage : stage + 2]
        place = self.chain.places.get(name)
        if place is None:
            return name.startswith(tuple(f"{b}." for b in self._blocks[first:last]))
        return bool(place & (set(range(first, last)) | ({-1} if stage == 0 else set())))

    def _make_schedule(self) -> Any:
        from torch.distributed import pipelining

        def like(stage: int) -> Tensor:
            wire = _wire_dtype(self.live[stage])
            n = sum(_wire_size(value, wire) for value in self.live[stage])
            single = len(self.live[stage]) == 1 and self.live[stage][0][2] == wire
            return torch.empty(self.live[stage][0][1] if single else n, dtype=wire, device="meta", requires_grad=True)

        number = torch.empty(1, device="meta")
        loss = torch.empty(1, dtype=self._loss_dtype(), device="meta", requires_grad=True)
        stages = []
        for index in self.mine:
            given = like(index) if index else number
            out = like(index + 1) if index < self.stages - 1 else loss
            module, device, group = _Stage(self, index), self._mesh.device, self._axis.group
            stages.append(pipelining.PipelineStage(module, index, self.stages, device, given, out, group=group))
        make: Any = getattr(pipelining, self._class, None)
        if make is None or "scale_grads" not in inspect.signature(make).parameters:
            raise ValueError(f"torch {torch.__version__} has no {self._class} that this pipeline can use: 2.7 has")
        single = len(stages) == 1
        return make(
            stages[0] if single else stages, self._microbatches, loss_fn=lambda out, _: out.sum(), scale_grads=False
        ), [stage.submod for stage in stages]

    def _loss_dtype(self) -> torch.dtype:
        return next((p.dtype for p in self._pnet.parameters() if p.is_floating_point()), torch.float32)

    def adapt(self, skeleton: nn.Module) -> tuple[str, ...]:
        """Give the units of a skeleton the forward that stages need."""
        replace_units(skeleton, self._blocks, self._forward)
        return ()

    def _forward(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A unit's forward: what was sent of it before its stage, and the end of the call after it."""

        def staged(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return forward(*args, **kwargs)
            number, calls = self.position, self.chain.calls
            self.position += 1
            if number >= len(calls) or calls[number].name != name:
                raise ValueError(
                    f"in a pipeline the p-net must call its modules as in the trace: {name!r} ran in the place of "
                    f"{calls[number].name if number < len(calls) else 'nothing'!r}"
                )
            call = calls[number]
            stage = self._stage_of(call.cell)
            if stage > self.stage:
                raise _Cut
            if stage < self.stage:
                return self._skip(call, args, kwargs)
            self._inside = True
            try:
                out = forward(*args, **kwargs)
            finally:
                self._inside = False
            self._keep(call, out)
            return out

        return staged

    def _skip(self, call: UnitCall, args: Any, kwargs: Any) -> Any:
        """The output of a unit of an earlier stage."""
        given, leaves = pytree.tree_leaves((args, kwargs)), []
        for leaf in call.leaves:
            if isinstance(leaf, int):
                leaves.append(given[leaf])
            elif isinstance(leaf, Constant):
                leaves.append(leaf.value)
            else:
                source, shape, dtype = leaf
                x = self.values.get(source)
                leaves.append(absent(shape, dtype, self._mesh.device, [source]) if x is None else x)
        return pytree.tree_unflatten(leaves, call.spec)

    def _keep(self, call: UnitCall, out: Any) -> None:
        """Keep what later stages need of an output."""
        leaves, spec = pytree.tree_flatten(out)
        if spec != call.spec:
            raise ValueError(
                f"in a pipeline {call.name!r} must return what it did in the trace, {call.spec}: got {spec}"
            )
        needed = {value[0] for value in self.live[self.stage + 1]} if self.stage < self.stages - 1 else set()
        for leaf, x in zip(call.leaves, leaves, strict=True):
            if isinstance(x, Absent) and not isinstance(leaf, int):
                raise refuse(x.sources, f"{call.name!r} needs what its rank does not have")
            if isinstance(leaf, tuple) and leaf[0] in needed:
                # Operators after the module may change it in place, there and here: then a copy is sent. Nor is a view.
                copied = self._changes.get(leaf[0], True) or x._is_view()
                self.values[leaf[0]] = x.clone() if copied else x
                self.kept[leaf[0]] = x, x._version

    def check_kept(self) -> None:
        """Find which outputs were changed in place after they were kept, of which copies are sent from then on."""
        kept, self.kept = self.kept, {}
        for source, (x, version) in kept.items():
            changed = x._version != version
            if not self._changes.setdefault(source, changed) and changed:
                raise refuse([source], "it is changed in place, which it was not in the first microbatch")

    def fill(self, weights: Params, shapes: Mapping[str, tuple[int, ...]]) -> Params:
        """The weights of this rank, and for all other parameters absent tensors.

        Args:
            weights: those of this rank's stages.
            shapes: of parameters that are not whole here.
        """
        device = next((w.device for w in weights.values()), self._mesh.device)
        made = {name.rpartition("_form.")[0] or name for name in weights}
        others = {n: p for n, p in self._pnet.named_parameters() if n not in made}
        made_of = {
            n: absent(shapes.get(n, p.shape), p.dtype, device, [Source("parameter", n)]) for n, p in others.items()
        }
        return made_of | weights

    def run(self, call: Callable[[int], Tensor], leaves: Params) -> dict[str, Tensor]:
        """Send microbatches through the stages: gradients of the leaves, summed over microbatches.

        Args:
            call: the weighted loss of a microbatch by number, through the p-net.
            leaves: tensors that gradients are wanted of.
        """
        schedule, modules = self._schedule
        self.call, self.leaves = call, leaves
        for module in modules:
            module.calls = 0
        self._count()
        numbers = torch.arange(self._microbatches, dtype=torch.float32, device=self._mesh.device)
        try:
            with self._mesh.faults.named("a pipelined step"):
                schedule.step(numbers, target=numbers)
        except RuntimeError as error:
            # Torch's words are about itself; what failed inside is the cause.
            if error.__cause__ is None or isinstance(error, ConnectionError):
                raise
            raise error.__cause__ from None
        finally:
            self.call, self.leaves = lambda number: torch.zeros(()), {}
        return {k: x.grad for k, x in leaves.items() if x.grad is not None}

    def _count(self) -> None:
        """Count what this rank sends: activations forward, their gradients back."""
        sent = 0
        for stage in self.mine:
            for other, start in ((stage + 1, stage + 1), (stage - 1, stage)):
                if 0 <= other < self.stages and other not in self.mine:
                    wire = _wire_dtype(self.live[start])
                    sent += sum(_wire_size(value, wire) for value in self.live[start]) * wire.itemsize
        self._mesh.traffic.add("p2p", sent * self._microbatches, "pipeline")


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map(lambda x: found.append(x) if isinstance(x, Tensor) else None, tree)
    return found


def _copied(x: Any) -> Any:
    """A leaf of a batch that a trace may change."""
    return x.clone() if isinstance(x, Tensor) else x
