"""Pipeline parallelism: each rank generates and runs some of the p-net's blocks, on torch's own schedules.

    rank 0    embedding, blocks 0 .. i - 1    -- activations -->    rank 1    blocks i .., norm, head, loss

No rank runs another part of the p-net, and none has its weights; yet each calls the user's `loss_fn(net, batch)` as it
stands. On a later stage what comes before its blocks runs on parameters that are not a number (nan), blocks of other
stages give nan too, and the first block of the stage gets what the rank before has sent; at the first block of the
next stage the call ends. So which ranks take inputs and which take targets needs no configuration, and whatever would
enter a stage by other ways than its first block makes the loss nan, never silently wrong.

Schedules: `torch.distributed.pipelining` (GPipe: Huang et al., 2019; 1F1B and interleaved: Narayanan et al., 2021;
ZBV: Qi et al., 2024). Blocks are spread so that the largest stage has the fewest operations, counted by torch on the
meta device.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gbfunc.parallel.mesh import Mesh
from gbfunc.pnet import PureNet, StopForward, skeleton_of
from gbfunc.trees import tree_map
from gbfunc.types import Params

SCHEDULES: Mapping[str, tuple[str, int]] = {
    "gpipe": ("ScheduleGPipe", 1),
    "1f1b": ("Schedule1F1B", 1),
    "interleaved": ("ScheduleInterleaved1F1B", 2),
    "zbv": ("ScheduleZBVZeroBubble", 2),
}
"""Torch's class of each schedule, and its stages per rank."""
_WHOLE = "in a pipeline, where each rank has some blocks of the p-net, parts of it cannot be called alone"


class Chain(NamedTuple):
    """The blocks that a p-net is cut between.

    Attributes:
        names: of the blocks, in their order.
        flops: operations of each, with what follows it until the next; what comes before the first is in the first.
        inputs: shape and dtype of what each block gets, for one microbatch.
        places: after which block (-1: before the first) a parameter of no block is used, by name.
    """

    names: tuple[str, ...]
    flops: tuple[float, ...]
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    places: Mapping[str, frozenset[int]]


def find_blocks(pnet: nn.Module, stages: int, splits: Sequence[str] | None = None) -> tuple[str, ...]:
    """The blocks of a p-net: the children of its list of layers with the most parameters, or those that splits are of.

    Args:
        pnet: the p-net.
        stages: how many there are to be; a list of fewer layers is no choice.
        splits: names of blocks that begin a stage.

    Raises:
        ValueError: if there are none, or splits that are not children of one module.
    """
    if splits is not None:
        parents = {name.rpartition(".")[0] for name in splits}
        if len(splits) != stages - 1 or len(parents) != 1:
            raise ValueError(f"stages must name {stages - 1} blocks of one module, got {list(splits)}")
        parent = parents.pop()
    else:
        lists = {
            name: sum(p.numel() for p in module.parameters())
            for name, module in pnet.named_modules()
            if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) >= stages
        }
        if not lists:
            raise ValueError(f"a {type(pnet).__name__} has no list of {stages} layers or more: name blocks by stages=")
        parent = max(lists, key=lambda name: lists[name])
    names = tuple(f"{parent}.{n}" if parent else n for n, _ in pnet.get_submodule(parent).named_children())
    if splits is not None and not set(splits) <= set(names):
        raise ValueError(f"stages must be among {list(names)}, got {list(splits)}")
    return names


def trace_chain(pnet: nn.Module, blocks: Sequence[str], run: Callable[[Any], Any]) -> Chain:
    """What blocks cost and get, by a run of the p-net on the meta device.

    Args:
        pnet: the p-net.
        blocks: names of the blocks.
        run: calls what it is given as the loss function calls the p-net, on a microbatch of the meta device.

    Raises:
        ValueError: if the blocks do not run once each, in their order.
    """
    net, order, inputs = PureNet(pnet, whole=_WHOLE), [], []
    skeleton = net.skeleton
    marks: list[int] = []
    places: dict[str, set[int]] = {}
    index = {skeleton.get_submodule(name): i for i, name in enumerate(blocks)}

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        i = index.get(module)
        if i is not None:
            order.append(i)
            marks.append(counter.get_total_flops())
            x = _hidden(args, kwargs)
            inputs.append((tuple(x.shape), x.dtype))
        elif not inside:
            for key in (*module._parameters, *module._buffers):
                places.setdefault(f"{id(module)}.{key}", set()).add(len(order) - 1)
        if i is not None:
            inside.append(i)

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        if module in index:
            inside.pop()

    inside: list[int] = []
    for module in skeleton.modules():
        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)

    def end(*_: Any) -> None:
        raise StopForward

    skeleton.register_forward_hook(end)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        try:
            net.run(dict(skeleton.named_parameters()), dict(skeleton.named_buffers()), run)
        except StopForward:
            pass
    if order != list(range(len(blocks))):
        raise ValueError(f"the blocks {list(blocks)} must run once each in their order, they ran as {order}")
    marks[0] = 0
    flops = [b - a for a, b in zip(marks, [*marks[1:], counter.get_total_flops()], strict=True)]
    return Chain(tuple(blocks), tuple(map(float, flops)), tuple(inputs), _places(skeleton, blocks, places))


def _places(skeleton: nn.Module, blocks: Sequence[str], seen: Mapping[str, set[int]]) -> dict[str, frozenset[int]]:
    """After which block each parameter of no block is used: as its module ran, or by where it stands."""
    found: dict[str, frozenset[int]] = {}
    for members in (skeleton.named_parameters, skeleton.named_buffers):
        names = [name for name, _ in members(remove_duplicate=False)]
        of_blocks = [name.startswith(tuple(f"{b}." for b in blocks)) for name in names]
        for i, name in enumerate(names):
            if not of_blocks[i]:
                prefix, _, key = name.rpartition(".")
                where = seen.get(f"{id(skeleton.get_submodule(prefix))}.{key}")
                found[name] = frozenset(where or {-1 if any(of_blocks[i:]) else len(blocks) - 1})
    return found


def _hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The activations that a block gets: its first argument."""
    first = args[0] if args else next(iter(kwargs.values()), None)
    if not isinstance(first, Tensor):
        raise ValueError(f"a block's first argument must be a tensor of activations, got a {type(first).__name__}")
    return first


def spread(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """First block of each stage, and their number, so that the most expensive stage costs the least.

    >>> spread([1, 1, 1, 5], 2)
    (0, 3, 4)
    """
    n, sums = len(costs), [0.0, *accumulate(costs)]
    best = [[math.inf] * (n + 1) for _ in range(stages + 1)]
    cut = [[0] * (n + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for s in range(1, stages + 1):
        for end in range(s, n + 1):
            for start in range(s - 1, end):
                worst = max(best[s - 1][start], sums[end] - sums[start])
                if worst < best[s][end]:
                    best[s][end], cut[s][end] = worst, start
    ends = [n]
    for s in range(stages, 0, -1):
        ends.append(cut[s][ends[-1]])
    return tuple(reversed(ends))


class _Cut(StopForward):
    """The first block of the next stage has been reached, with these activations."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _Stage(nn.Module):
    """A stage as torch's schedules run it: activations in, activations or the loss out, microbatch by microbatch."""

    def __init__(self, pipeline: Pipeline, index: int) -> None:
        super().__init__()
        self.pipeline, self.index, self.calls = pipeline, index, 0

    def parameters(self, recurse: bool = True) -> Any:
        """What gradients are accumulated on."""
        return iter(self.pipeline.leaves.values())

    def forward(self, hidden: Tensor) -> Tensor:
        """One microbatch."""
        pipeline, number = self.pipeline, self.calls
        self.calls += 1
        pipeline.stage, pipeline.received, pipeline.entered = self.index, hidden if self.index else None, 0
        try:
            return pipeline.call(number).reshape(1)
        except _Cut as cut:
            expected, dtype = pipeline.chain.inputs[pipeline.starts[self.index + 1]]
            if tuple(cut.hidden.shape) != expected or cut.hidden.dtype != dtype:
                raise ValueError(
                    f"a stage must end with activations {expected} of {dtype}, got {tuple(cut.hidden.shape)} of "
                    f"{cut.hidden.dtype}: they must be whole on every tensor rank, and of one dtype"
                ) from None
            return cut.hidden


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

    whole = _WHOLE

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
        self.rank, self.ran = self._axis.rank, False
        rank, ranks = self.rank, self.ranks
        self.mine = [rank] if each == 1 else [rank, 2 * ranks - 1 - rank if schedule == "zbv" else rank + ranks]
        if microbatches < ranks:
            raise ValueError(f"a pipeline of {ranks} ranks needs at least as many microbatches, got {microbatches}")
        self.stage, self.entered = 0, 0
        self.received: Tensor | None = None
        self.leaves: Params = {}
        self.call: Callable[[int], Tensor] = lambda number: torch.zeros(())
        self._built: dict[Any, Any] = {}

    def prepare(self, run: Callable[[Any, Any], Any], microbatch: Any) -> None:
        """Settle stages and shapes for microbatches of this form: `run(net, microbatch)` is the loss function."""
        key = tuple((tuple(x.shape), x.dtype) for x in _tensors(microbatch))
        if key in self._built:
            self.chain, self._schedule = self._built[key]
            return
        meta = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, microbatch)
        self.chain = trace_chain(self._pnet, self._blocks, lambda net: run(net, meta))
        if not self._built:
            begins = [] if self._splits is None else [self._blocks.index(name) for name in self._splits]
            self.starts = (
                spread(self.chain.flops, self.stages) if self._splits is None else (0, *begins, len(self._blocks))
            )
            self.names, self.buffers = self._needed(self._pnet.named_parameters), self._needed(self._pnet.named_buffers)
        self._schedule = self._make_schedule()
        self._built[key] = self.chain, self._schedule

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
            shape, dtype = self.chain.inputs[self.starts[stage]]
            return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

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
        """Give the blocks of a skeleton the forward that stages need."""
        shadow = skeleton_of(self._pnet)
        for i, name in enumerate(self._blocks):
            block = skeleton.get_submodule(name)
            block.__dict__["forward"] = self._forward(i, block.forward, _Nowhere(shadow.get_submodule(name)))
        inside = tuple(f"{name}." for name in self._blocks)
        for name, plain in shadow.named_modules():
            names = [f"{name}.{key}" if name else key for key in plain._parameters]
            if names and not [*plain.children()] and not f"{name}.".startswith(inside):
                module = skeleton.get_submodule(name)
                module.__dict__["forward"] = self._elsewhere(names, module.forward, _Nowhere(plain))
        return ()

    def _elsewhere(self, names: list[str], forward: Callable[..., Any], nowhere: _Nowhere) -> Callable[..., Any]:
        """The forward of a layer of no block, which is skipped in stages that use none of its parameters."""
        runs = [any(self._runs(stage, name) for name in names) for stage in range(self.stages)]

        def staged(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs) if runs[self.stage] else nowhere(args, kwargs)

        return staged

    def _forward(self, i: int, forward: Callable[..., Any], nowhere: _Nowhere) -> Callable[..., Any]:
        """A block's forward: skipped before the stage, on what was received at its start, and the end after it."""

        def staged(*args: Any, **kwargs: Any) -> Any:
            first, last = self.starts[self.stage : self.stage + 2]
            if i < first:
                return nowhere(args, kwargs)
            if i == last:
                raise _Cut(_hidden(args, kwargs))
            if i == first:
                self.entered += 1
                if self.entered > 1:
                    raise ValueError("in a pipeline the loss function must call the p-net once")
            if i == first and self.received is not None:
                args, kwargs = (
                    ((self.received, *args[1:]), kwargs) if args else ((), kwargs | {next(iter(kwargs)): self.received})
                )
            return forward(*args, **kwargs)

        return staged

    def fill(self, weights: Params, shapes: Mapping[str, tuple[int, ...]]) -> Params:
        """The weights of this rank, and for all other parameters tensors of nan that take no memory.

        Args:
            weights: those of this rank's stages.
            shapes: of parameters that are not whole here.
        """
        device = next((w.device for w in weights.values()), self._mesh.device)
        made = {name.rpartition("_form.")[0] or name for name in weights}
        others = {n: p for n, p in self._pnet.named_parameters() if n not in made}
        return {n: _nan(shapes.get(n, p.shape), p.dtype, device) for n, p in others.items()} | weights

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
                    shape, dtype = self.chain.inputs[self.starts[start]]
                    sent += math.prod(shape) * dtype.itemsize
        self._mesh.traffic.add("p2p", sent * self._microbatches, "pipeline")


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map(lambda x: found.append(x) if isinstance(x, Tensor) else None, tree)
    return found


def _nan(shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of one number that is none, in any shape."""
    number = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), number, dtype=dtype, device=device).expand(shape)


class _Nowhere:
    """What a module would return, as numbers that are none: its form is found on the meta device, once for a form."""

    def __init__(self, shadow: nn.Module) -> None:
        self._shadow, self._seen = shadow, dict[Any, Any]()

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = (args, dict(kwargs))
        tensors = _tensors(given)
        key = tuple((tuple(x.shape), x.dtype) for x in tensors)
        if key not in self._seen:
            args, kwargs = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, given)
            with torch.no_grad():
                self._seen[key] = self._shadow(*args, **kwargs)
        device = tensors[0].device
        return tree_map(lambda x: _nan(x.shape, x.dtype, device) if isinstance(x, Tensor) else x, self._seen[key])
