"""The blocks of a p-net, as stages of a pipeline are made of them: what each costs, gets, and needs of the others."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import accumulate
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gbfunc.parallel.absent import Absent, Provenance, Source, absent, hide, refuse
from gbfunc.pnet import RunnableNet, StopForward
from gbfunc.types import Params

SUBMODULE_CALL_ERROR = "in a pipeline, where each rank has some blocks of the p-net, parts of it cannot be called alone"
"""Why parts cannot be called."""


class Argument(NamedTuple):
    """A leaf of an output that is a leaf of the arguments."""

    index: int


class Output(NamedTuple):
    """A leaf of an output that is a tensor."""

    source: Source
    shape: tuple[int, ...]
    dtype: torch.dtype


class UnitCall(NamedTuple):
    """One call of a block, or of a layer of no block."""

    name: str  # Of the module
    cell: int  # The block that runs, or has run last; -1 before the first
    needs: frozenset[Source]  # What its operators read
    leaves: tuple[Any, ...]  # Of its output, each an `Argument`, an `Output`, or a constant
    spec: Any  # How the leaves make the output


class Chain(NamedTuple):
    """The blocks that a p-net is cut between."""

    names: tuple[str, ...]  # Of the blocks, in their order
    # Operations of each, with what follows it until the next; what comes before the first is in the first
    flops: tuple[float, ...]
    # After which block (-1: before the first) each parameter is used, by name
    places: Mapping[str, frozenset[int]]
    calls: tuple[UnitCall, ...] = ()  # Of the units, in the order of a forward
    end: frozenset[Source] = frozenset()  # What the loss is made of
    changed: frozenset[Source] = frozenset()  # Outputs that are changed in place, or may be


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
            raise ValueError(f"stages must name {stages - 1} blocks of one module, got {splits!r}")
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


def trace_chain(
    pnet: nn.Module,
    blocks: Sequence[str],
    run: Callable[[Any], Any],
    device: torch.device | None = None,
) -> Chain:
    """What blocks cost, get and need, by a run of the p-net on parameters without values.

    Args:
        pnet: the p-net.
        blocks: names of the blocks.
        run: calls what it is given as the loss function calls the p-net, on a microbatch.
        device: where the parameters are said to be. None: on the meta device, and the run ends with the p-net.

    Raises:
        ValueError: if the blocks do not run once each, in their order, or what happens depends on absent values.
    """
    net, marks, begun = RunnableNet(pnet), [], list[nn.Module]()
    net.submodule_call_error = SUBMODULE_CALL_ERROR
    skeleton, order, calls, mode = net.skeleton, [], [], Provenance()

    def unit(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def traced(*args: Any, **kwargs: Any) -> Any:
            if mode.inside is not None:
                return forward(*args, **kwargs)
            if not begun:
                raise RuntimeError(f"{SUBMODULE_CALL_ERROR}: call net(...), not its {name!r}")
            if name in blocks:
                x = next(iter((*args, *kwargs.values())), None)
                if not isinstance(x, Tensor):
                    raise ValueError(f"a block's first argument must be activations, got a {type(x).__name__}")
                order.append(blocks.index(name))
                marks.append(mode.flops)
            inside, flat = Source("inside", name, len(calls)), pytree.tree_leaves((args, kwargs))
            with mode.unit(inside):
                out = forward(*args, **kwargs)
            given = {id(x): i for i, x in enumerate(flat)}
            leaves, spec = pytree.tree_flatten(out)
            found: list[Any] = []
            for i, x in enumerate(leaves):
                changed = isinstance(x, Absent) and inside in x.sources
                if id(x) in given and not changed and not isinstance(x, int | str | None):
                    found.append(Argument(given[id(x)]))
                elif isinstance(x, Tensor):
                    source = Source("output", name, len(calls), i)
                    leaves[i] = hide(x, [source])
                    found.append(Output(source, tuple(x.shape), x.dtype))
                else:
                    found.append(x)
            calls.append(UnitCall(name, len(order) - 1, frozenset(mode.read - {inside}), tuple(found), spec))
            return pytree.tree_unflatten(leaves, spec)

        return traced

    def end(*_: Any) -> None:
        raise StopForward

    replace_units(skeleton, blocks, unit)
    skeleton.register_forward_pre_hook(lambda module, _: begun.append(module))
    if device is None:
        skeleton.register_forward_hook(end)
    place, last = device or torch.device("meta"), frozenset[Source]()
    weights = {k: absent(p.shape, p.dtype, place, [Source("parameter", k)]) for k, p in skeleton.named_parameters()}
    buffers: Params = {k: absent(b.shape, b.dtype, place, []) for k, b in skeleton.named_buffers()}
    with torch.random.fork_rng(devices=[]), torch.no_grad(), mode:
        try:
            out: Any = net.run(weights, buffers, run)
            last = frozenset().union(*(x.sources for x in pytree.tree_leaves(out) if isinstance(x, Absent)))
        except StopForward:
            pass
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            words = "in a pipeline a forward takes gradients by torch.func.grad, not torch.autograd.grad"
            raise ValueError(f"{words}, which has no graph in a trace") from error
    if order != list(range(len(blocks))):
        raise ValueError(f"the blocks {list(blocks)} must run once each in their order, they ran as {order}")
    marks[0] = 0
    flops = [b - a for a, b in zip(marks, [*marks[1:], mode.flops], strict=True)]
    places = _places(skeleton, blocks, [*((c.cell, c.needs) for c in calls), (len(blocks) - 1, last)])
    return Chain(tuple(blocks), tuple(map(float, flops)), places, tuple(calls), last, frozenset(mode.changed))


def replace_units(skeleton: nn.Module, blocks: Sequence[str], make: Callable[[str, Any], Any]) -> None:
    """Give blocks, and layers outside of them, the forward that `make(name, forward)` returns."""
    inside = tuple(f"{name}." for name in blocks)
    # Modules come by their first names, and a block may be listed elsewhere before.
    of_blocks = {id(skeleton.get_submodule(name)): name for name in reversed(blocks)}
    for first, module in skeleton.named_modules():
        name = of_blocks.get(id(module), first)
        outside = name and not name.startswith(inside) and not [*module.children()]
        if name in blocks or outside:
            module.__dict__["forward"] = make(name, module.forward)


def _places(
    skeleton: nn.Module, blocks: Sequence[str], reads: Sequence[tuple[int, frozenset[Source]]]
) -> dict[str, frozenset[int]]:
    """After which block each parameter is used: in its own block, if any, and wherever it was read."""
    found: dict[str, set[int]] = {}
    for cell, needs in reads:
        for source in needs:
            if source.kind == "parameter":
                found.setdefault(source.name, set()).add(cell)
    index, depth = {name: i for i, name in enumerate(blocks)}, blocks[0].count(".") + 1
    names = [name for name, _ in skeleton.named_parameters(remove_duplicate=False)]
    own = [index.get(".".join(name.split(".")[:depth])) for name in names]
    for i, (name, block) in enumerate(zip(names, own, strict=True)):
        if block is not None:
            found.setdefault(name, set()).add(block)
        elif name not in found:  # Read by nobody: with what the p-net has beside it.
            found[name] = {-1 if any(n is not None for n in own[i:]) else len(blocks) - 1}
    return {name: frozenset(cells) for name, cells in found.items()}


def balanced_stages(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """First block of each stage, and their number, so that the most expensive stage costs the least.

    >>> balanced_stages([1, 1, 1, 5], 2)
    (0, 3, 4)
    """
    n, sums = len(costs), [0.0, *accumulate(costs)]
    # Of the first blocks, up to each: the cost of the most expensive stage, and first blocks of the stages.
    best = {0: (0.0, (0,))}
    for _ in range(stages):
        best = {
            end: min(
                (max(worst, sums[end] - sums[start]), (*cuts, end))
                for start, (worst, cuts) in best.items()
                if start < end
            )
            for end in range(min(best) + 1, n + 1)
        }
    return best[n][1]


def stage_of(starts: Sequence[int], cell: int) -> int:
    """The stage of what runs after a block; what comes before the first block is in the first stage."""
    return bisect_right(starts, max(cell, 0)) - 1


def shared_within(chain: Chain, starts: Sequence[int]) -> list[str]:
    """Parameters that several blocks of a stage use, the first stage apart.

    Torch's zero-bubble schedule cannot divide the backward of what lies between; that of the first stage is whole.
    """
    stages = {name: [stage_of(starts, cell) for cell in cells] for name, cells in chain.places.items()}
    return sorted(name for name, of in stages.items() if len({*of} - {0}) < len([s for s in of if s]))


def crossing(chain: Chain, starts: Sequence[int], stage: int) -> list[Output]:
    """What is made before a stage and needed in it, or after; `starts` are as of `balanced_stages`.

    Raises:
        ValueError: for what is needed and cannot be sent.
    """
    calls, drawn, last = chain.calls, dict[Source, int](), len(starts) - 2
    reads = [*((stage_of(starts, c.cell), c.needs) for c in calls), (last, chain.end)]
    for name, leaves in ((c.name, c.leaves) for c in calls if stage_of(starts, c.cell) < last):
        for x in leaves:
            if x is not None and not isinstance(x, Argument) and known_of(x) is None:
                raise ValueError(
                    f"in a pipeline {name!r} must return tensors, which are sent, or plain values, got a "
                    f"{type(x).__name__}: other stages do not have it"
                )
    needed: set[Source] = set()
    for reader, needs in reads:
        for source in needs:
            if source.kind == "output" and reader >= stage > stage_of(starts, calls[source.call].cell):
                needed.add(source)
            elif source.kind == "inside" and stage_of(starts, calls[source.call].cell) != reader:
                raise refuse([source], "another stage needs a tensor that no module returns: return it")
            elif source.kind == "noise" and drawn.setdefault(source, reader) != reader:
                words = "random numbers that several stages use must be drawn by one module, where they are in the"
                raise refuse([source], f"{words} shape of activations, or of a torch.Generator")
    return [x for c in calls for x in c.leaves if isinstance(x, Output) and x.source in needed]


def known_of(x: Any) -> Any:
    """What a stage that does not run a unit takes for known of a leaf of its output: a plain value, or a shape."""
    if isinstance(x, Output | Tensor):
        return (*x.shape,), x.dtype
    return x if isinstance(x, Number | str | bytes | Enum | torch.dtype | torch.device) else None
