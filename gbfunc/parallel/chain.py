"""The loss of a p-net as a chain of blocks, and the stages into which a pipeline cuts the chain.

A *cell* is a block with the operators that follow until the next block; cell -1 comes before the first. An operator
runs once, in the stage of its cell. Operators on the batch only (positions, a mask) have no cell: each stage runs those
that it needs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor, fx, nn


class Chain(NamedTuple):
    """The graph of a loss (`gbfunc.parallel.tracing`).

    Attributes:
        names: of the blocks, in their order.
        flops: operations in each block's cell; those before the first block count for the first.
        places: cells in which each parameter is used, by name.
        nodes: of the graph. Their `meta` has the `cell`, the last cell that needs the value (`end`), whether its memory
            is written to (`written`), and the value of a constant or the number of a tensor of the batch (`given`).
        changes: for each buffer that changes, the node with the new value, and the first and last cell that use it.
        outputs: leaves of the loss function's output, nodes or plain values, and their structure.
    """

    names: tuple[str, ...]
    flops: tuple[float, ...]
    places: Mapping[str, frozenset[int]]
    nodes: Sequence[fx.Node] = ()
    changes: Mapping[str, tuple[fx.Node, int, int]] = {}
    outputs: tuple[Sequence[Any], Any] = ((), None)


def find_blocks(pnet: nn.Module, stages: int, splits: Sequence[str] | None = None) -> tuple[str, ...]:
    """The blocks of a p-net: the children of its list of layers with the most parameters, or those that splits are of.

    Args:
        pnet: the p-net.
        stages: the least number of blocks.
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


def balanced_stages(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """First block of each stage, and the number of blocks, such that the most expensive stage costs the least.

    >>> balanced_stages([1, 1, 1, 5], 2)
    (0, 3, 4)
    """
    n, sums = len(costs), [0.0, *accumulate(costs)]
    # For the first blocks, up to each: the cost of the most expensive stage, and first blocks of the stages.
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
    """The stage of a cell; what comes before the first block is in the first stage."""
    return bisect_right(starts, max(cell, 0)) - 1


def shared_within(chain: Chain, starts: Sequence[int]) -> list[str]:
    """Parameters that several blocks of a stage use, the first stage apart.

    Torch's zero-bubble schedule cannot divide the backward between the blocks; that of the first stage is whole.
    """
    stages = {name: [stage_of(starts, cell) for cell in cells] for name, cells in chain.places.items()}
    return sorted(name for name, of in stages.items() if len({*of} - {0}) < len([s for s in of if s]))


def crossing(chain: Chain, starts: Sequence[int], stage: int) -> list[fx.Node]:
    """Values that are computed before a stage and needed in the stage or after; `starts` are from `balanced_stages`.

    Raises:
        ValueError: for values that cannot be sent, and for a buffer that a stage uses and a later one changes.
    """
    for name, (_, first, last) in chain.changes.items():
        if stage_of(starts, first) != stage_of(starts, last):
            raise ValueError(f"in a pipeline one stage uses the buffer {name!r} before a later one changes it")
    found = []
    for node in chain.nodes:
        cell, end = node.meta["cell"], node.meta["end"]
        if cell is not None and end is not None and stage_of(starts, cell) < stage <= stage_of(starts, end):
            value = node.meta["val"]
            if not isinstance(value, Tensor) or not all(isinstance(n, int) for n in value.shape):
                raise ValueError(f"in a pipeline stages send tensors of known shapes, which {described(node)} is not")
            found.append(node)
    return found


def stage_graph(
    chain: Chain, starts: Sequence[int], stage: int, received: Iterable[fx.Node], sent: Iterable[fx.Node]
) -> tuple[fx.Graph, list[Any]]:
    """The graph of a stage, and the constants and numbers of tensors of the batch that follow the received values."""
    here = {n for n in chain.nodes if n.meta["cell"] is not None and stage_of(starts, n.meta["cell"]) == stage}
    here |= {n for n in sent if n.meta["cell"] is None}
    for node in reversed(chain.nodes):
        here |= {x for x in node.all_input_nodes if x.meta["cell"] is None} if node in here else set()
    graph, given = fx.Graph(), list[Any]()
    copies = {node: graph.placeholder(node.name) for node in received}
    for node in (n for n in chain.nodes if n in here):
        copies[node] = graph.node_copy(node, copies.__getitem__)
        given += [node.meta["given"]] if node.op == "placeholder" else []
    graph.output([copies[node] for node in sent])
    return graph, given


def described(node: fx.Node) -> str:
    """An operator and its module, in words."""
    return f"{node.target} of {module_of(node) or 'the loss function'!r}"


def module_of(node: fx.Node) -> str:
    """The name of the innermost module that computes a node; empty outside of the p-net."""
    path = next(reversed([*(node.meta.get("nn_module_stack") or {"": ("",)}).values()]))[0]
    return path.removeprefix("net").removeprefix(".")
