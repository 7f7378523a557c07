"""Pipeline parallelism: each rank generates and runs some of the p-net's blocks, on torch's own schedules.

    rank 0    embedding, blocks 0 .. i - 1    -- activations -->    rank 1    blocks i .., norm, head, loss

No rank runs another part of the p-net, and none has its weights; yet each calls the user's `loss_fn(net, batch)` as it
stands. A *unit* is a block, or a layer of no block. A trace (`gbfunc.parallel.absent`) finds of which units' outputs
and of which parameters each unit and the loss are made, through every operator between. Those that a later stage needs
are sent from stage to stage, integers and masks too. There, units of earlier stages give what was sent, or else an
absent tensor, which has no values and names its module if they are asked for. Operators between units run in every
stage. At the first unit of the next stage the call ends. So which ranks take inputs and which take targets needs no
configuration, and what cannot be sent is refused by name. What no trace shows, a Python attribute that a block sets and
a later one reads, the first step finds (`gbfunc.train.gradients.proof`).

Schedules: `torch.distributed.pipelining` (GPipe: Huang et al., 2019; 1F1B and interleaved: Narayanan et al., 2021;
ZBV: Qi et al., 2024). Blocks are spread so that the largest stage has the fewest operations, counted by torch on the
meta device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gbfunc.parallel.absent import Absent, Source, absent, refuse
from gbfunc.parallel.chain import (
    SUBMODULE_CALL_ERROR,
    Argument,
    Output,
    UnitCall,
    balanced_stages,
    crossing,
    find_blocks,
    known_of,
    replace_units,
    shared_within,
    stage_of,
    trace_chain,
)
from gbfunc.parallel.mesh import Mesh
from gbfunc.parallel.pipeline_order import SCHEDULES, schedule_class, stage_ranks
from gbfunc.pnet import StopForward
from gbfunc.trees import differentiable, tree_leaves, tree_map
from gbfunc.types import Params


class _StageEnd(StopForward):
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
        pipeline, number = self.pipeline, self.calls
        self.calls += 1
        pipeline.stage, pipeline.microbatch, pipeline.position = self.index, number, 0
        pipeline.draw_alike(number, 0)
        pipeline.values = pipeline.parcels[self.index].unpack(sent) if self.index else {}
        try:
            loss = pipeline.call(number).reshape(1)
        except _StageEnd:
            return pipeline.joined(pipeline.parcels[self.index + 1].pack(pipeline.values), sent)
        if self.index < pipeline.stages - 1:
            raise ValueError("in a pipeline the loss function must call the p-net once, as it did in the trace")
        if isinstance(loss, Absent):
            raise refuse(loss.sources, "the loss needs what its rank does not have")
        return pipeline.joined(loss, sent)


class _Joined(torch.autograd.Function):
    """A copy of a stage's output, whose graph comes to the input too, and brings no gradient there."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, sent: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class Parcel:
    """What a stage gets of the ones before it, as one tensor [n], which has the gradients of all.

    Its dtype is the widest of the differentiable ones; the bytes of integers and masks are sent as they are. A single
    value is sent in its own shape, without another copy.

    Args:
        values: outputs of units.
    """

    def __init__(self, values: Sequence[Output]) -> None:
        self.values = values
        self.sources = {value.source for value in values}
        dtypes = [value.dtype for value in values if differentiable(value.dtype)]
        self.dtype = reduce(torch.promote_types, dtypes) if dtypes else torch.float32
        self.single = len(values) == 1 and dtypes == [self.dtype]
        # Numbers that each takes.
        item = self.dtype.itemsize
        numbers = [(math.prod(shape), dtype) for _, shape, dtype in values]
        self.sizes = [n if differentiable(dtype) else -(-n * dtype.itemsize // item) for n, dtype in numbers]

    @property
    def n_bytes(self) -> int:
        """Its size."""
        return sum(self.sizes) * self.dtype.itemsize

    @property
    def like(self) -> Tensor:
        """The tensor on the meta device."""
        shape = self.values[0].shape if self.single else (sum(self.sizes),)
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)

    def pack(self, given: Mapping[Source, Tensor]) -> Tensor:
        """The tensor of these values; ValueError for one that this rank does not have, or of another form."""
        parts = []
        for (source, shape, dtype), n in zip(self.values, self.sizes, strict=True):
            x = given.get(source)
            if x is None or isinstance(x, Absent):
                raise refuse([source], "a later stage needs what this one does not have")
            if tuple(x.shape) != shape or x.dtype != dtype:
                raise ValueError(
                    f"a stage must give {source} as {shape} of {dtype}, got {tuple(x.shape)} of {x.dtype}: activations "
                    "must be whole on every tensor rank, and of one dtype"
                )
            if not differentiable(dtype):
                data = x.detach().reshape(-1).contiguous().view(torch.uint8)
                x = F.pad(data, (0, n * self.dtype.itemsize - len(data))).view(self.dtype)
            parts.append(x if self.single else x.reshape(-1).to(self.dtype))
        sent = parts[0].contiguous() if self.single else torch.cat(parts)
        # Torch's zero-bubble schedule detaches what is sent in place, which a view refuses.
        sent = sent.clone() if sent._is_view() else sent
        # A stage without trained tensors sends what nothing comes back to; torch's schedules ask for its gradient.
        return sent if sent.requires_grad else sent.detach().requires_grad_()

    def unpack(self, sent: Tensor) -> dict[Source, Tensor]:
        """The values again, some of them views."""
        if self.single:
            received = sent.view_as(sent)
            # The gradient, which is sent back: torch's zero-bubble schedule needs it so.
            received.register_hook(Tensor.contiguous)
            return {self.values[0].source: received}
        found = {}
        for (source, shape, dtype), x in zip(self.values, sent.split(self.sizes), strict=True):
            if differentiable(dtype):
                x = x.real if x.is_complex() and not dtype.is_complex else x
                found[source] = x.reshape(shape).to(dtype)
            else:
                data = x.detach().view(torch.uint8)[: math.prod(shape) * dtype.itemsize]
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
        mine: its stages.
        rank, ranks: this one along the axis, and how many there are.
        parcels: what each stage gets of the ones before it.
        stage, microbatch, position: the stage that runs now, on which microbatch, and how many units this call has
            come to.
        values: outputs of units that are sent, or were.

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
        self._order, (_, each) = schedule, SCHEDULES[schedule]
        self.rank, self.ranks, self.stages = self._axis.rank, self._axis.size, each * self._axis.size
        self._blocks = find_blocks(pnet, self.stages, splits)
        self.mine = [s for s, rank in enumerate(stage_ranks(schedule, self.ranks, each)) if rank == self.rank]
        if microbatches < self.ranks:
            raise ValueError(
                f"a pipeline of {self.ranks} ranks needs at least {self.ranks} microbatches, got {microbatches}"
            )
        self.stage, self.microbatch, self.position, self._inside = 0, 0, 0, False
        self.values: dict[Source, Tensor] = {}
        self.parcels: list[Parcel] = []
        self.leaves: Params = {}
        self.call: Callable[[int], Tensor] = lambda number: torch.zeros(())
        self.draw_alike: Callable[[int, int], None] = lambda microbatch, position: None
        self._built: dict[Any, Any] = {}

    def prepare(self, run: Callable[[Any, Any], Any], microbatch: Any) -> None:
        """Settle stages and shapes for microbatches of this form: `run(net, microbatch)` is the loss function."""
        leaves = tree_leaves(microbatch)
        tensors = [x for _, x in leaves if isinstance(x, Tensor)]
        autocast = torch.is_autocast_enabled(self._mesh.device.type)
        # Flags decide what the loss function does, and so what stages need.
        key = autocast, *((path, (x.shape, x.dtype) if isinstance(x, Tensor) else x) for path, x in leaves)
        if key not in self._built:
            device = tensors[0].device if tensors else self._mesh.device
            # The trace may change the batch.
            copied = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, microbatch)
            chain = self.chain = trace_chain(self._pnet, self._blocks, lambda net: run(net, copied), device)
            if not self._built:
                begins = [self._blocks.index(name) for name in self._splits or ()]
                even = balanced_stages(chain.flops, self.stages)
                self._starts = even if self._splits is None else (0, *begins, len(self._blocks))
                self.names = self._needed()
            self.parcels = [Parcel(crossing(chain, self._starts, stage)) for stage in range(self.stages)]
            if not all(parcel.values for parcel in self.parcels[1:]):
                raise ValueError("in a pipeline each stage must need a tensor of the ones before it: take fewer ranks")
            self._built[key] = chain, self.parcels, self._make_schedule()
        self.chain, self.parcels, self._schedule = self._built[key]

    def _needed(self) -> frozenset[str]:
        """Parameters of this rank's stages, tied ones by their first name."""
        names: dict[int, str] = {}
        parameters = self._pnet.named_parameters(remove_duplicate=False)
        named = [(names.setdefault(id(x), name), name) for name, x in parameters]
        stages = {name: {stage_of(self._starts, cell) for cell in self.chain.places[name]} for _, name in named}
        return frozenset(first for first, name in named if stages[name] & {*self.mine})

    def _make_schedule(self) -> Any:
        """Torch's schedule, and its stages on this rank."""
        from torch.distributed.pipelining import PipelineStage

        dtype = next((p.dtype for p in self._pnet.parameters() if p.is_floating_point()), torch.float32)
        number, loss = (torch.empty(1, dtype=d, device="meta", requires_grad=True) for d in (torch.float32, dtype))
        # The first stage gets the number of the microbatch, the last one gives the loss.
        passed = [number.detach(), *(parcel.like for parcel in self.parcels[1:]), loss]
        modules = [_Stage(self, i) for i in self.mine]
        device, group = self._mesh.device, self._axis.group
        stages = [
            PipelineStage(m, m.index, self.stages, device, passed[m.index], passed[m.index + 1], group=group)
            for m in modules
        ]
        options: Any = {"loss_fn": lambda out, _: out.sum(), "scale_grads": False}
        make = schedule_class(self._order)
        return make(stages[0] if len(stages) == 1 else stages, self._microbatches, **options), modules

    def adapt(self, skeleton: nn.Module) -> tuple[str, ...]:
        """Give the units of a skeleton the forward that stages need."""
        replace_units(skeleton, self._blocks, self._forward)
        return ()

    def _forward(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A unit's forward: what was sent of it before its stage, and the end of the call after it."""

        def staged(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return forward(*args, **kwargs)
            calls = self.chain.calls[self.position : self.position + 1]
            self.position += 1
            if not calls or calls[0].name != name:
                traced = calls[0].name if calls else "nothing"
                raise ValueError(
                    f"in a pipeline the p-net must call its modules as in the trace: {name!r} ran in the place of "
                    f"{traced!r}"
                )
            stage = stage_of(self._starts, calls[0].cell)
            if stage > self.stage:
                raise _StageEnd
            if stage < self.stage:
                out = self._skip(calls[0], args, kwargs)
                self.draw_alike(self.microbatch, self.position)
                return out
            given = pytree.tree_leaves((args, kwargs))
            versions = [x._version if isinstance(x, Tensor) else 0 for x in given]
            self._inside = True
            try:
                out = forward(*args, **kwargs)
            finally:
                self._inside = False
            self._keep(calls[0], given, versions, out)
            self.draw_alike(self.microbatch, self.position)
            return out

        return staged

    def _skip(self, call: UnitCall, args: Any, kwargs: Any) -> Any:
        """The output of a unit of an earlier stage."""
        given, leaves = pytree.tree_leaves((args, kwargs)), []
        for leaf in call.leaves:
            if isinstance(leaf, Argument):
                leaves.append(given[leaf.index])
            elif isinstance(leaf, Output):
                if (x := self.values.get(leaf.source)) is None:
                    leaves.append(absent(leaf.shape, leaf.dtype, self._mesh.device, [leaf.source]))
                else:
                    leaves.append(self._kept(leaf.source, x))
            else:
                leaves.append(leaf)
        return pytree.tree_unflatten(leaves, call.spec)

    def _keep(self, call: UnitCall, given: list[Any], versions: list[int], out: Any) -> None:
        """Keep what later stages need of an output, and check what they know of it from the trace."""
        leaves, spec = pytree.tree_flatten(out)
        if spec != call.spec:
            raise ValueError(f"in a pipeline {call.name!r} must return {call.spec} as in the trace, got {spec}")
        needed = self.parcels[self.stage + 1].sources if self.stage < self.stages - 1 else ()
        for leaf, x in zip(call.leaves, leaves, strict=True):
            if isinstance(x, Absent) and not isinstance(leaf, Argument):
                raise refuse(x.sources, f"{call.name!r} needs what its rank does not have")
            known = known_of(given[leaf.index] if isinstance(leaf, Argument) else leaf)
            if isinstance(leaf, Argument) and isinstance(x, Tensor):
                if x is not given[leaf.index] or x._version != versions[leaf.index]:
                    known = "its argument, as it came"
            if known != known_of(x):
                raise ValueError(
                    f"in a pipeline {call.name!r} must return in every microbatch what it did in the trace, from which "
                    f"alone other stages know it: {known}, got {known_of(x)}"
                )
            if isinstance(leaf, Output) and leaf.source in needed:
                self.values[leaf.source] = self._kept(leaf.source, x)

    def _kept(self, source: Source, x: Tensor) -> Tensor:
        """An output, or a copy where it is changed in place: every stage changes it, and sends it as it was."""
        return x.clone() if source in self.chain.changed else x

    def fill(self, weights: Params, shapes: Mapping[str, tuple[int, ...]]) -> Params:
        """The weights of this rank's stages, and for all other parameters absent tensors, of `shapes` if not whole."""
        device = next((w.device for w in weights.values()), self._mesh.device)
        made = {name.rpartition("_form.")[0] or name for name in weights}
        named = ((n, p, shapes.get(n, p.shape)) for n, p in self._pnet.named_parameters() if n not in made)
        return {n: absent(shape, p.dtype, device, [Source("parameter", n)]) for n, p, shape in named} | weights

    def joined(self, out: Tensor, sent: Tensor) -> Tensor:
        """A stage's output, as its schedule takes it."""
        # Torch's zero-bubble schedule leaves out what is trained in a stage whose graph does not come to the input.
        joined: Any = _Joined.apply(out, sent) if self._order == "zbv" and out.grad_fn is not None else out
        return joined

    def run(
        self, call: Callable[[int], Tensor], leaves: Params, draw_alike: Callable[[int, int], None]
    ) -> dict[str, Tensor]:
        """Send microbatches through the stages: gradients of the leaves, summed over microbatches.

        Args:
            call: the weighted loss of a microbatch by number, through the p-net.
            leaves: tensors that gradients are wanted of.
            draw_alike: seeds what is drawn by a microbatch's number and that of the unit which comes next, before the
                first and after each: stages, which all run what is between units, draw the same there.
        """
        schedule, modules = self._schedule
        self.call, self.leaves, self.draw_alike = call, leaves, draw_alike
        for module in modules:
            module.calls = 0
        self._count()
        numbers = torch.arange(self._microbatches, dtype=torch.float32, device=self._mesh.device)
        try:
            with self._mesh.faults.named("a pipelined step"):
                schedule.step(numbers, target=numbers)
        except RuntimeError as error:
            if self._order == "zbv" and "the graph a second time" in str(error):
                names = ", ".join(map(repr, shared_within(self.chain, self._starts)))
                why = f"several blocks of a stage use {names}" if names else "a recurrent layer, or one used twice?"
                words = f"torch's zero-bubble schedule cannot divide the backward of this p-net ({why})"
                raise ValueError(f"{words}: take another pipeline= than 'zbv'") from error
            # Torch's words are about itself; what failed inside is the cause.
            if error.__cause__ is None or isinstance(error, ConnectionError):
                raise
            raise error.__cause__ from None
        finally:
            self.call, self.leaves = lambda number: torch.zeros(()), {}
            self.draw_alike = lambda microbatch, position: None
            gradients = {k: x.grad for k, x in leaves.items() if x.grad is not None}
            # Some are leaves of the genome, for which the next run would add to them.
            for x in leaves.values():
                x.grad = None
        return gradients

    def _count(self) -> None:
        """Count what this rank sends: activations forward, their gradients back."""
        crossed = [(s + 1, s + 1) for s in self.mine] + [(s - 1, s) for s in self.mine]
        sent = [self.parcels[i] for other, i in crossed if 0 <= other < self.stages and other not in self.mine]
        n_bytes = sum(parcel.n_bytes for parcel in sent)
        self._mesh.traffic.add("p2p", n_bytes * self._microbatches, "pipeline")
