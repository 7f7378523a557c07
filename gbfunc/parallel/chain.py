"""Traces the computation of a p-net's loss as a graph, with `torch.export`, and cuts the graph into pipeline stages.

A *block* is a layer in a list of layers. A *cell* is a block and all operators between this block and the next. Cell -1
has the operators before the first block. An operator in a cell runs once, in the stage that contains the cell. An
operator that depends only on the batch (positions, masks) is in no cell, and runs in every stage that uses its result.
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
"""Operators that compute the forward of a layer, with the names of their first arguments."""


class Chain(NamedTuple):
    """The traced graph of a loss. A cell is a block of the p-net and all operators between this block and the next.

    The dict `meta` of a node has the node's `cell`, the last cell that needs the node's value (`end`), and whether an
    operator writes to the memory of the value (`written`). For an input of the graph, `meta["origin"]` is the name of a
    tensor of the p-net, the index of a tensor of the batch, or a constant.
    """

    flops: tuple[float, ...]  # Operations in the cell of every block; the first number includes cell -1
    places: Mapping[str, frozenset[int]]  # {name of a parameter: the cells that use the parameter}
    nodes: Sequence[fx.Node] = ()
    outputs: tuple[Sequence[Any], Any] = ((), None)  # Leaves of the loss function's output, and their tree structure


def find_blocks(pnet: nn.Module, stages: int, splits: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the names of the blocks: the layers of the list with most parameters, among lists of >= `stages` layers.

    If `splits` names the first block of every stage except the first stage, the blocks are all children of the module
    that contains the named blocks. Raises ValueError if `splits` is wrong, or if the p-net has no such list.
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
            kind = type(pnet).__name__
            raise ValueError(f"expected a list of >= {stages} layers, got a {kind}: name blocks in stages=")
        parent = max(lists, key=lambda name: lists[name])
    names = tuple(f"{parent}.{n}" if parent else n for n, _ in pnet.get_submodule(parent).named_children())
    if splits is not None and not set(splits) <= set(names):
        raise ValueError(f"stages must be among {list(names)}, got {list(splits)}")
    return names


def balanced_stages(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return the first block of each stage, and the number of blocks. The largest cost of all stages is minimal.

    >>> balanced_stages([1, 1, 1, 5], 2)
    (0, 3, 4)
    """
    n, sums = len(costs), [0.0, *accumulate(costs)]
    # `best[n]` is the best division of the first n blocks into the stages so far: (largest cost, first blocks and n).
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
    """Return the nodes whose values a stage receives: values of earlier stages that this stage or a later stage needs.

    `starts` is a result of `balanced_stages`. Raises ValueError if a value is not a tensor or has an unknown shape, or
    if several stages use a buffer that the forward changes.
    """
    found = []
    for node in chain.nodes:
        cell, end = node.meta["cell"], node.meta["end"]
        if "origin" in node.meta and node.meta["written"]:
            if len({stage_of(starts, user.meta["cell"]) for user in node.users}) > 1:
                name = node.meta["origin"]
                raise ValueError(f"in a pipeline one stage changes the buffer {name!r} and another one uses it")
        elif cell is not None and end is not None and stage_of(starts, cell) < stage <= stage_of(starts, end):
            value = node.meta["val"]
            if not isinstance(value, Tensor) or not all(isinstance(n, int) for n in value.shape):
                what = f"{node.target} of {_modules_of(node)[-1]!r}"
                raise ValueError(f"in a pipeline values between stages must be tensors of known shapes, got {what}")
            found.append(node)
    return found


def stage_graph(
    chain: Chain, starts: Sequence[int], stage: int, received: Iterable[fx.Node], sent: Iterable[fx.Node]
) -> tuple[fx.Graph, list[Any]]:
    """Return a stage's graph, and the graph's inputs after `received`: constants, and indices of batch tensors."""
    here = {n for n in chain.nodes if n.meta["cell"] is not None and stage_of(starts, n.meta["cell"]) == stage}
    here |= {n for n in sent if n.meta["cell"] is None}
    for node in reversed(chain.nodes):
        here |= {x for x in node.all_input_nodes if x.meta["cell"] is None} if node in here else set()
    graph, inputs = fx.Graph(), list[Any]()
    copies = {node: graph.placeholder(node.name) for node in received}
    for node in (n for n in chain.nodes if n in here):
        value = node.meta.get("origin")
        if value is None:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        elif isinstance(value, str):
            copies[node] = graph.get_attr(value)
        else:
            copies[node] = graph.placeholder(node.name)
            inputs.append(value)
    graph.output([copies[node] for node in sent])
    return graph, inputs


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
            raise ValueError(f"a forward must change buffers in place, got new tensors for {', '.join(assigned)}")
        return out


def trace_chain(
    pnet: nn.Module,
    blocks: Sequence[str],
    run: Callable[[Any, Any], Any],
    batch: Any,
    device: torch.device | None = None,
    adapt: Callable[[nn.Module], Any] = lambda net: None,
) -> Chain:
    """Trace the loss of a microbatch, `run(net, batch)`, as a graph. Fake tensors on `device` replace all tensors.

    The graph is valid for all batches with the shapes of `batch`, and with its values that are not tensors. `net` is a
    copy of the p-net, which `adapt` may change before the trace.

    Raises ValueError if `torch.export` cannot trace `run`, or if the blocks do not run in the order of `blocks`.
    """
    place, mode = device or next(pnet.parameters()).device, FakeTensorMode(allow_non_fake_inputs=True)
    states = _states()

    def fake(name: str, x: Tensor) -> Tensor:
        with mode:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=place)

    def loss_of(net: nn.Module, tensors: Iterator[Tensor]) -> Any:
        return run(net, tree_map(lambda x: next(tensors) if isinstance(x, Tensor) else x, batch))

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
                "in a pipeline the loss function and the p-net must be code that torch.export can record, without "
                f".item(), if on values of tensors, or gradients, got {type(error).__name__}: {words}"
            ) from error
    if _states() != states:
        raise ValueError("in a pipeline random numbers must be torch's, got numbers of Python or NumPy: use torch.rand")
    return _chain_of(program, net, blocks)


def _states() -> str:
    return repr((random.getstate(), [*np.random.get_state()]))


def _chain_of(program: Any, net: nn.Module, blocks: Sequence[str]) -> Chain:
    trained = dict(net.named_parameters(remove_duplicate=False))
    named, ties = trained | dict(net.named_buffers(remove_duplicate=False)), dict[Tensor, str]()
    firsts = {name: ties.setdefault(x, name) for name, x in named.items()}
    _name_inputs(program, firsts)
    graph, modules = program.graph_module.graph, dict(net.named_modules(remove_duplicate=False))
    for node in (n for n in graph.nodes if n.op == "call_function"):
        names = {x.meta.get("origin") for x in node.all_input_nodes}
        node.meta |= {"flops": _flops(node), "reads": [name for name in names if name in trained]}
        _call_layer(node, modules, firsts)
    *nodes, output = graph.nodes
    written = {x for node in nodes for x in _written_by(node)}
    if any(isinstance(x.meta.get("origin"), int) for x in written):
        raise ValueError("in a pipeline a forward must not change the batch in place: clone the tensor")
    index: dict[Any, int] = {modules[name]: i for i, name in enumerate(blocks)}
    flops, places, cell = [0.0] * len(blocks), dict[str, set[int]](), -1
    for node in nodes:
        root = _memory(node)
        node.meta |= {"cell": None, "end": None, "written": root in written}
        if "origin" in node.meta:
            continue
        for path in _modules_of(node):
            block = index.get(modules.get(path), -1)
            if block > cell + 1:
                raise ValueError(f"the blocks {[*blocks]} must run in their order: sort stages=")
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
        raise ValueError(f"the blocks {[*blocks]} must all run, in their order, and outside autocast regions")
    output.meta["cell"], leaves = cell, [*output.args[0]]
    for node in leaves:
        if isinstance(node, fx.Node):
            node.meta["end"] = len(blocks) - 1
    cells = {name: frozenset(places.get(firsts[name], {-1})) for name in trained}
    return Chain(tuple(flops), cells, nodes, (leaves, program.call_spec.out_spec))


def _name_inputs(program: Any, firsts: Mapping[str, str]) -> None:
    module, numbers = program.graph_module, count()
    specs = iter(program.graph_signature.input_specs)
    for node in module.graph.nodes:
        if node.op == "get_attr":
            node.meta["origin"] = getattr(module, node.target)
        elif node.op == "placeholder":
            target = next(specs).target
            value = next(numbers) if target is None else firsts.get(target.removeprefix("net."))
            value = program.constants[target] if value is None else value
            if isinstance(value, Tensor) and value.requires_grad or not isinstance(value, Tensor | int | str):
                raise ValueError(
                    "in a pipeline the loss function must use only tensors of net and of the batch, got a "
                    "torch.Generator or a trained tensor from elsewhere (another module, or torch.autograd.grad in a "
                    "forward), which torch's tracer would make a constant"
                )
            node.meta["origin"] = value


def _call_layer(node: fx.Node, modules: Mapping[str, nn.Module], firsts: Mapping[str, str]) -> None:
    path = _modules_of(node)[-1]
    # If a forward runs a slice of a list, `path` names no module: keep the operator instead of a call of the layer.
    layer, args = modules.get(path), dict(zip(_LAYERS.get(node.target, ()), node.args, strict=False))
    if not args or layer is None or layer_form(layer) is None or layer._forward_hooks or layer._forward_pre_hooks:
        return
    tensors = [getattr(args.get(key), "meta", {}).get("origin") for key in ("weight", "bias")]
    own = [firsts.get(f"{path}.{key}") for key in ("weight", "bias")]
    if tensors == own and getattr(layer, "padding_mode", "zeros") == "zeros":
        with node.graph.inserting_before(node):
            call = node.graph.create_node("call_module", path, (args["input"],))
        call.meta = node.meta
        node.replace_all_uses_with(call)
        node.graph.erase_node(node)


def _written_by(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose memory `node` changes. A `torch.no_grad` block is one node, with a graph of its own."""
    if getattr(getattr(node.target, "_schema", None), "is_mutable", False):
        return [_memory(node.args[0])]  # pyright: ignore[reportArgumentType]
    found = []
    for i, x in enumerate(node.args):
        region = x.meta.get("origin") if isinstance(x, fx.Node) else None
        if isinstance(region, fx.GraphModule):
            inputs: Any = dict(zip(region.graph.find_nodes(op="placeholder"), node.args[i + 1 :], strict=False))
            found += [_memory(inputs[y]) for n in region.graph.nodes for y in _written_by(n) if y in inputs]
    return found


def _memory(node: fx.Node) -> fx.Node:
    """Return the node whose output owns the memory of `node`'s value, which may be a view of that output."""
    while True:
        returns = getattr(getattr(node.target, "_schema", None), "returns", ())
        if not any(r.alias_info for r in returns) and node.target is not operator.getitem:
            return node
        (node, *_) = node.all_input_nodes


def _flops(node: fx.Node) -> int:
    if len(node.all_input_nodes) < 2 or not hasattr(node.target, "_schema"):
        return 0
    # Operators that need the values of tensors fail on the meta device, and are not counted.
    with FlopCounterMode(display=False) as counter, suppress(RuntimeError, NotImplementedError):
        target: Any = node.target
        target(*map_arg(node.args, _on_meta), **map_arg(node.kwargs, _on_meta))
    return counter.get_total_flops()


def _on_meta(node: fx.Node) -> Any:
    return tree_map_only(Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), node.meta["val"])
