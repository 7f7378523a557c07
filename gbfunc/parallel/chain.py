"""The loss of a p-net as a chain of blocks, recorded by `torch.export` and cut into the stages of a pipeline.

A *cell* is a block with the operators that follow until the next block; cell -1 comes before the first block. An
operator runs once, in the stage of its cell. Operators on the batch only (positions, a mask) have no cell, and run in
each stage that needs them.
"""

from __future__ import annotations

import operator
import random
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from gbfunc.layers.install import layer_form
from gbfunc.pnet.describe import copy_with
from gbfunc.trees import tree_leaves, tree_map

_ATEN = torch.ops.aten
_CONVS = (_ATEN.conv1d.default, _ATEN.conv2d.default, _ATEN.conv3d.default)
_LAYERS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys((_ATEN.linear.default, *_CONVS), ("input", "weight", "bias")),
    _ATEN.embedding.default: ("weight", "input"),
    _ATEN.addmm.default: ("bias", "input", "weight"),
}
"""Operators that are the forward of a layer, with their first arguments."""


class Chain(NamedTuple):
    """The graph of a loss.

    The `meta` of a node has its `cell`, the last cell that needs the value (`end`), whether an operator writes to its
    memory (`written`), and for an input what it is (`given`): the name of a tensor of the p-net, the number of a tensor
    of the batch, or a constant.
    """

    flops: tuple[float, ...]  # Operations in every block's cell, in the first also those before the blocks
    places: Mapping[str, frozenset[int]]  # Cells that use each parameter, by name
    nodes: Sequence[fx.Node] = ()
    outputs: tuple[Sequence[Any], Any] = ((), None)  # Leaves of the loss function's output, and their structure


def find_blocks(pnet: nn.Module, stages: int, splits: Sequence[str] | None = None) -> tuple[str, ...]:
    """The blocks of a p-net: the children of its largest list of at least `stages` layers, or the siblings of `splits`.

    Raises:
        ValueError: if there are none, or if `splits` does not name a block for every stage after the first.
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
    """Returns every stage's first block, and the number of blocks, so that the largest cost of a stage is minimal.

    >>> balanced_stages([1, 1, 1, 5], 2)
    (0, 3, 4)
    """
    n, sums = len(costs), [0.0, *accumulate(costs)]
    # By number of first blocks: the largest cost of a stage, and the first blocks of the stages.
    best = {0: (0.0, (0,))}
    for _ in range(stages):
        best = {
            end: min((max(worst, sums[end] - sums[i]), (*cuts, end)) for i, (worst, cuts) in best.items() if i < end)
            for end in range(min(best) + 1, n + 1)
        }
    return best[n][1]


def stage_of(starts: Sequence[int], cell: int) -> int:
    return bisect_right(starts, max(cell, 0)) - 1


def crossing(chain: Chain, starts: Sequence[int], stage: int) -> list[fx.Node]:
    """Values that are computed before a stage and needed in the stage or after; `starts` come from `balanced_stages`.

    Raises:
        ValueError: for values that cannot be sent, and for a buffer that changes and that several stages use.
    """
    found = []
    for node in chain.nodes:
        cell, end = node.meta["cell"], node.meta["end"]
        if "given" in node.meta and node.meta["written"]:
            if len({stage_of(starts, user.meta["cell"]) for user in node.users}) > 1:
                name = node.meta["given"]
                raise ValueError(f"in a pipeline one stage changes the buffer {name!r} and another one uses it")
        elif cell is not None and end is not None and stage_of(starts, cell) < stage <= stage_of(starts, end):
            value = node.meta["val"]
            if not isinstance(value, Tensor) or not all(isinstance(n, int) for n in value.shape):
                what = f"{node.target} of {_modules_of(node)[-1]!r}"
                raise ValueError(f"in a pipeline stages send tensors of known shapes, which {what} is not")
            found.append(node)
    return found


def stage_graph(
    chain: Chain, starts: Sequence[int], stage: int, received: Iterable[fx.Node], sent: Iterable[fx.Node]
) -> tuple[fx.Graph, list[Any]]:
    """The graph of a stage, and its inputs after the received values: constants, or numbers of tensors of the batch."""
    here = {n for n in chain.nodes if n.meta["cell"] is not None and stage_of(starts, n.meta["cell"]) == stage}
    here |= {n for n in sent if n.meta["cell"] is None}
    for node in reversed(chain.nodes):
        here |= {x for x in node.all_input_nodes if x.meta["cell"] is None} if node in here else set()
    graph, given = fx.Graph(), list[Any]()
    copies = {node: graph.placeholder(node.name) for node in received}
    for node in (n for n in chain.nodes if n in here):
        value = node.meta.get("given")
        if value is None:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        elif isinstance(value, str):
            copies[node] = graph.get_attr(value)
        else:
            copies[node] = graph.placeholder(node.name)
            given.append(value)
    graph.output([copies[node] for node in sent])
    return graph, given


def _modules_of(node: fx.Node) -> list[str]:
    stack = (node.meta.get("nn_module_stack") or {"": ("",)}).values()
    return [path.removeprefix("net").removeprefix(".") for path, *_ in stack]


class _Loss(nn.Module):
    def __init__(self, net: nn.Module, loss_of: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.loss_of = net, loss_of

    def forward(self, *tensors: Tensor) -> Any:
        before = dict(self.net.named_buffers())
        out = self.loss_of(self.net, iter(tensors))
        assigned = [name for name, buffer in self.net.named_buffers() if buffer is not before[name]]
        if assigned:
            raise ValueError(f"a forward must change buffers in place, and assigns {', '.join(assigned)}")
        return out


def trace_chain(
    pnet: nn.Module,
    blocks: Sequence[str],
    run: Callable[[Any, Any], Any],
    batch: Any,
    device: torch.device | None = None,
    adapt: Callable[[nn.Module], Any] = lambda net: None,
) -> Chain:
    """Records the loss of a microbatch, `run(net, batch)`, on fake tensors of a device.

    The shapes of the batch's tensors, and all other values, are fixed in the graph. `adapt` changes the copy of the
    p-net that is recorded.

    Raises:
        ValueError: for code that torch cannot record, and for blocks that do not run in their order.
    """
    place, mode = device or next(pnet.parameters()).device, FakeTensorMode(allow_non_fake_inputs=True)
    states = _states()

    def fake(name: str, x: Tensor) -> Tensor:
        with mode:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=place)

    def loss_of(net: nn.Module, given: Iterator[Tensor]) -> Any:
        return run(net, tree_map(lambda x: next(given) if isinstance(x, Tensor) else x, batch))

    net = copy_with(pnet, fake)
    adapt(net)
    inputs = tuple(fake(name, x) for name, x in tree_leaves(batch) if isinstance(x, Tensor))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(_Loss(net, loss_of), inputs, strict=False)
        except Exception as error:
            words = next(filter(None, str(error).splitlines()), "")
            raise ValueError(
                "in a pipeline torch.export records the loss function and the p-net, which failed (it takes no values "
                f"of tensors, as by .item() or if, and no gradients): {type(error).__name__}: {words}"
            ) from error
    if _states() != states:
        raise ValueError("in a pipeline random numbers must be torch's: those of Python or NumPy would be recorded")
    return _chain_of(program, net, blocks)


def _states() -> str:
    return repr((random.getstate(), [*np.random.get_state()]))


def _chain_of(program: Any, net: nn.Module, blocks: Sequence[str]) -> Chain:
    """Makes a chain of an exported program, whose graph changes: calls of layers replace their operators."""
    trained = dict(net.named_parameters(remove_duplicate=False))
    named, ties = trained | dict(net.named_buffers(remove_duplicate=False)), dict[Tensor, str]()
    firsts = {name: ties.setdefault(x, name) for name, x in named.items()}
    _name_inputs(program, firsts)
    graph, modules = program.graph_module.graph, dict(net.named_modules(remove_duplicate=False))
    for node in (n for n in graph.nodes if n.op == "call_function"):
        names = {x.meta.get("given") for x in node.all_input_nodes}
        node.meta |= {"flops": _flops(node), "reads": [name for name in names if name in trained]}
        _call_layer(node, modules, firsts)
    *nodes, output = graph.nodes
    written = {x for node in nodes for x in _written_by(node)}
    if any(isinstance(x.meta.get("given"), int) for x in written):
        raise ValueError("in a pipeline a forward must not change the batch in place: clone the tensor")
    index: dict[Any, int] = {modules[name]: i for i, name in enumerate(blocks)}
    flops, places, cell = [0.0] * len(blocks), dict[str, set[int]](), -1
    for node in nodes:
        root = _memory(node)
        node.meta |= {"cell": None, "end": None, "written": root in written}
        if "given" in node.meta:
            continue
        for path in _modules_of(node):
            block = index.get(modules.get(path), -1)
            if block > cell + 1:
                raise ValueError(f"the blocks {[*blocks]} must run in their order")
            cell = max(cell, block)
        flops[max(cell, 0)] += node.meta["flops"]
        for name in node.meta["reads"]:
            places.setdefault(name, set()).add(cell)
        sources = [x for x in node.all_input_nodes if x.meta["cell"] is not None]
        draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if sources or node.meta["reads"] or draws or written & {root, *node.all_input_nodes}:
            node.meta["cell"] = cell
            for x in sources:
                x.meta["end"] = cell
    if cell < len(blocks) - 1:
        raise ValueError(f"the blocks {[*blocks]} must run in their order, each of them (and none under autocast)")
    output.meta["cell"], leaves = cell, [*output.args[0]]
    for node in leaves:
        if isinstance(node, fx.Node):
            node.meta["end"] = len(blocks) - 1
    of = {name: frozenset(places.get(firsts[name], {-1})) for name in trained}
    return Chain(tuple(flops), of, nodes, (leaves, program.call_spec.out_spec))


def _name_inputs(program: Any, firsts: Mapping[str, str]) -> None:
    """Sets what the inputs of a graph are; tied tensors have their first name."""
    module, numbers = program.graph_module, count()
    specs = iter(program.graph_signature.input_specs)
    for node in module.graph.nodes:
        if node.op == "get_attr":
            node.meta["given"] = getattr(module, node.target)
        elif node.op == "placeholder":
            target = next(specs).target
            value = next(numbers) if target is None else firsts.get(target.removeprefix("net."))
            value = program.constants[target] if value is None else value
            if isinstance(value, Tensor) and value.requires_grad or not isinstance(value, Tensor | int | str):
                raise ValueError(
                    "in a pipeline torch's tracer makes constants of a torch.Generator, and of a trained tensor that "
                    "comes neither from net nor from the batch (of another module, or of torch.autograd.grad in a "
                    "forward)"
                )
            node.meta["given"] = value


def _call_layer(node: fx.Node, modules: Mapping[str, nn.Module], firsts: Mapping[str, str]) -> None:
    """Replaces the operator of a stock layer by a call of the layer, which takes any form of its weight."""
    path = _modules_of(node)[-1]
    # A slice of a list of layers also has a path, which the net does not know.
    layer, given = modules.get(path), dict(zip(_LAYERS.get(node.target, ()), node.args, strict=False))
    if not given or layer is None or layer_form(layer) is None or layer._forward_hooks or layer._forward_pre_hooks:
        return
    tensors = [getattr(given.get(key), "meta", {}).get("given") for key in ("weight", "bias")]
    own = [firsts.get(f"{path}.{key}") for key in ("weight", "bias")]
    if tensors == own and getattr(layer, "padding_mode", "zeros") == "zeros":
        with node.graph.inserting_before(node):
            call = node.graph.create_node("call_module", path, (given["input"],))
        call.meta = node.meta
        node.replace_all_uses_with(call)
        node.graph.erase_node(node)


def _written_by(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory an operator, or a region of another mode, changes."""
    if getattr(getattr(node.target, "_schema", None), "is_mutable", False):
        return [_memory(node.args[0])]  # pyright: ignore[reportArgumentType]
    found = []
    for i, x in enumerate(node.args):
        region = x.meta.get("given") if isinstance(x, fx.Node) else None
        if isinstance(region, fx.GraphModule):
            given: Any = dict(zip(region.graph.find_nodes(op="placeholder"), node.args[i + 1 :], strict=False))
            found += [_memory(given[y]) for n in region.graph.nodes for y in _written_by(n) if y in given]
    return found


def _memory(node: fx.Node) -> fx.Node:
    """The node whose memory a node shares."""
    while True:
        returns = getattr(getattr(node.target, "_schema", None), "returns", ())
        if not any(r.alias_info for r in returns) and node.target is not operator.getitem:
            return node
        (node, *_) = node.all_input_nodes


def _flops(node: fx.Node) -> int:
    if len(node.all_input_nodes) < 2 or not hasattr(node.target, "_schema"):
        return 0
    # Some operators need values.
    with FlopCounterMode(display=False) as counter, suppress(RuntimeError, NotImplementedError):
        target: Any = node.target
        target(*map_arg(node.args, _on_meta), **map_arg(node.kwargs, _on_meta))
    return counter.get_total_flops()


def _on_meta(node: fx.Node) -> Any:
    return tree_map_only(Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), node.meta["val"])
