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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from gbfunc.layers.install import layer_form
from gbfunc.pnet.describe import copy_of, skeleton_of
from gbfunc.trees import tree_leaves, tree_map

_ATEN = torch.ops.aten
_CONVS = (_ATEN.conv1d.default, _ATEN.conv2d.default, _ATEN.conv3d.default)
_LAYERS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys((_ATEN.linear.default, *_CONVS), ("input", "weight", "bias")),
    _ATEN.embedding.default: ("weight", "input"),
    _ATEN.addmm.default: ("bias", "input", "weight"),
}
"""Operators that are the forward of a layer, with their first arguments."""

_MODES = {"WrapWithSetGradEnabled": (torch.set_grad_enabled, 1), "WrapWithAutocast": (torch.autocast, 4)}
"""Modes of regions that torch records as calls of subgraphs, by class of the call, with their numbers of arguments."""


class Chain(NamedTuple):
    """The graph of a loss.

    Attributes:
        flops: operations in every block's cell; the first block also counts the operations before it.
        places: cells that use each parameter, by name.
        nodes: nodes of the graph. Their `meta` has the `cell`, the last cell that needs the value (`end`), whether an
            operator writes to its memory (`written`), and a constant or the number of a tensor of the batch (`given`).
        changes: for each buffer that changes, the node with the new value, and the first and last cell that use it.
        outputs: leaves of the loss function's output, nodes or plain values, and their structure.
    """

    flops: tuple[float, ...]
    places: Mapping[str, frozenset[int]]
    nodes: Sequence[fx.Node] = ()
    changes: Mapping[str, tuple[fx.Node, int, int]] = {}
    outputs: tuple[Sequence[Any], Any] = ((), None)


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
    """The stage of a cell; cell -1 is in the first stage."""
    return bisect_right(starts, max(cell, 0)) - 1


def shared_within(chain: Chain, starts: Sequence[int]) -> list[str]:
    """Parameters that several blocks of a stage use, apart from the first stage.

    Torch's zero-bubble schedule cannot divide their backward; the backward of the first stage is whole.
    """
    stages = {name: [stage_of(starts, cell) for cell in cells] for name, cells in chain.places.items()}
    return sorted(name for name, of in stages.items() if len({*of} - {0}) < len([s for s in of if s]))


def crossing(chain: Chain, starts: Sequence[int], stage: int) -> list[fx.Node]:
    """Values that are computed before a stage and needed in the stage or after; `starts` come from `balanced_stages`.

    Raises:
        ValueError: for values that cannot be sent, and for a buffer that a stage uses and a later stage changes.
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
    """The graph of a stage, and its inputs after the received values: constants, or numbers of tensors of the batch."""
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
    return f"{node.target} of {_modules_of(node)[-1] or 'the loss function'!r}"


def _modules_of(node: fx.Node) -> list[str]:
    """The names of the modules that compute a node, the innermost last."""
    stack = (node.meta.get("nn_module_stack") or {"": ("",)}).values()
    return [path.removeprefix("net").removeprefix(".") for path, *_ in stack]


class _Loss(nn.Module):
    """A loss function that takes and returns tensors only; the buffers that the p-net assigns come first."""

    def __init__(self, net: nn.Module, run: Callable[[Any, Any], Any], batch: Any, found: list[Any]) -> None:
        super().__init__()
        self.net, self._rest = net, lambda: (run, batch, found)

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        (run, batch, found), given = self._rest(), iter(tensors)
        before = dict(self.net.named_buffers())
        out = run(self.net, tree_map(lambda x: next(given) if isinstance(x, Tensor) else x, batch))
        assigned = {k: b for k, b in self.net.named_buffers() if b is not before[k]}
        leaves, structure = pytree.tree_flatten(out)
        found[:] = [*assigned], [Tensor if isinstance(x, Tensor) else x for x in leaves], structure
        return [*assigned.values(), *(x for x in leaves if isinstance(x, Tensor))]


def trace_chain(
    pnet: nn.Module,
    blocks: Sequence[str],
    run: Callable[[Any, Any], Any],
    batch: Any,
    device: torch.device | None = None,
    adapt: Callable[[nn.Module], Any] = lambda net: None,
) -> Chain:
    """Records the loss of a microbatch, `run(net, batch)`, without computing anything.

    Args:
        pnet: the p-net.
        blocks: names of the blocks.
        run: the loss function.
        batch: a microbatch. The shapes of its tensors, and all other values, are fixed in the graph.
        device: device of the tensors; None takes the device of the p-net.
        adapt: changes the copy of the p-net that is recorded.

    Raises:
        ValueError: for code that torch cannot record, and for blocks that do not run in their order.
    """
    place, found, states = device or next(pnet.parameters()).device, list[Any](), _states()
    skeleton = skeleton_of(pnet)
    adapt(skeleton)

    def fake(x: Tensor) -> Tensor:
        y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=place)
        return nn.Parameter(y, x.requires_grad) if isinstance(x, nn.Parameter) else y

    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = {id(x): fake(x) for x in (*skeleton.parameters(), *skeleton.buffers())}
        inputs = tuple(fake(x) for _, x in tree_leaves(batch) if isinstance(x, Tensor))
    net = copy_of(skeleton, fakes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(_Loss(net, run, batch, found), inputs, strict=False)
        except Exception as error:
            words = next(filter(None, str(error).splitlines()), "")
            raise ValueError(
                "in a pipeline torch.export records the loss function and the p-net, which failed (it takes no values "
                f"of tensors, as by .item() or if, and no gradients): {type(error).__name__}: {words}"
            ) from error
    if _states() != states:
        raise ValueError("in a pipeline random numbers must be torch's: those of Python or NumPy would be recorded")
    return _Recorder(net, blocks, program).chain(*found)


def _states() -> str:
    return repr((random.getstate(), [*np.random.get_state()]))


class _Recorder:
    """Makes a chain of an exported program."""

    def __init__(self, net: nn.Module, blocks: Sequence[str], program: Any) -> None:
        self._blocks, self._program, self._graph = blocks, program, fx.Graph()
        self._modules: dict[str, Any] = dict(net.named_modules(remove_duplicate=False))
        self._trained = dict(net.named_parameters(remove_duplicate=False))
        named = self._trained | dict(net.named_buffers(remove_duplicate=False))
        first: dict[Tensor, str] = {}
        self._firsts = {name: first.setdefault(x, name) for name, x in named.items()}
        self._state: dict[str, fx.Node] = {}
        self._writers: dict[fx.Node, list[fx.Node]] = {}

    def chain(self, assigned: list[str], leaves: list[Any], structure: Any) -> Chain:
        """The chain. `assigned` are buffers, whose values come first; in `leaves` the class stands for a tensor."""
        outputs = self._copy(self._program.graph_module, self._inputs(), ())
        values = iter(outputs)
        changed = {self._firsts[name]: next(values) for name in assigned}
        flops, places = self._find_cells(changed)
        returned = [next(values) if x is Tensor else x for x in leaves]
        for node in returned:
            if isinstance(node, fx.Node):
                node.meta["end"] = len(self._blocks) - 1
        written = {k: (x, self._writers[x]) for k, x in self._state.items() if x in self._writers}
        changes = {}
        for name, (value, writers) in (written | {k: (x, [x]) for k, x in changed.items()}).items():
            cells = [x.meta["cell"] for x in (self._state.get(name, value), *writers)]
            first, *last = (-1 if cell is None else cell for cell in cells)
            changes[name] = value, first, max(last)
        return Chain(flops, places, [*self._graph.nodes], changes, (returned, structure))

    def _inputs(self) -> list[fx.Node]:
        """A node for each input of the program, one for each tied tensor."""
        nodes, batch = list[fx.Node](), 0
        old = (n for n in self._program.graph.nodes if n.op == "placeholder")
        for spec, placeholder in zip(self._program.graph_signature.input_specs, old, strict=True):
            given, name = None, self._firsts.get((spec.target or "").removeprefix("net."))
            if name is not None:
                node = self._state[name] = self._state.get(name) or self._graph.get_attr(name)
            else:
                node = self._graph.placeholder(placeholder.name)
                given, batch = (batch, batch + 1) if spec.target is None else (self._constant(spec.target), batch)
            node.meta = {**placeholder.meta, "given": given}
            nodes.append(node)
        return nodes

    def _constant(self, name: str) -> Tensor:
        value = self._program.constants[name]
        if not isinstance(value, Tensor) or value.requires_grad:
            raise ValueError(
                "in a pipeline torch's tracer makes constants of a torch.Generator, and of a trained tensor that "
                "comes neither from net nor from the batch (of another module, or of torch.autograd.grad in a forward)"
            )
        return value

    def _copy(self, module: Any, inputs: Sequence[Any], modes: tuple[Any, ...]) -> list[Any]:
        """Copy a graph, with its subgraphs in place; returns its outputs."""
        values, given = dict[fx.Node, Any](), iter(inputs)
        for node in module.graph.nodes:
            mode, n = _MODES.get(type(node.target).__name__, (None, 0))
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "output":
                return [*map_arg(node.args[0], values.__getitem__)]
            elif node.op == "get_attr":
                values[node] = getattr(module, node.target)
            elif mode is not None:
                region, *rest = (values[x] if isinstance(x, fx.Node) else x for x in node.args[n:])
                values[node] = self._copy(region, rest, (*modes, (mode, node.args[:n])))
            elif node.target is operator.getitem and isinstance(values[node.args[0]], list):
                values[node] = values[node.args[0]][node.args[1]]
            elif any(isinstance(values[x], nn.Module) for x in node.all_input_nodes):
                raise ValueError(f"in a pipeline torch's tracer cannot cut the subgraph of {described(node)}")
            else:
                values[node] = self._operator(self._graph.node_copy(node, values.__getitem__), modes)
        return []

    def _operator(self, node: fx.Node, modes: tuple[Any, ...]) -> Any:
        """Return a call of the layer for a stock layer's operator, and for one in place the tensor that changes."""
        node.meta |= {"modes": modes, "flops": _flops(node), "reads": ()}
        if getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            changed: Any = node.args[0]
            self._writers.setdefault(_memory(changed), []).append(node)
            return changed
        path = _modules_of(node)[-1]
        # A slice of a list of layers also has a path, which the net does not know.
        layer, given = self._modules.get(path), dict(zip(_LAYERS.get(node.target, ()), node.args, strict=False))
        own = [self._firsts.get(f"{path}.{name}") for name in ("weight", "bias")]
        if (
            not given
            or layer is None
            or layer_form(layer) is None
            or [getattr(given.get(name), "target", None) for name in ("weight", "bias")] != own
            or layer._forward_hooks
            or layer._forward_pre_hooks
            or getattr(layer, "padding_mode", "zeros") != "zeros"
        ):
            return node
        call = self._graph.call_module(path, (given["input"],))
        call.meta = {**node.meta, "reads": [name for name in own if name is not None]}
        self._graph.erase_node(node)
        return call

    def _find_cells(self, changed: dict[str, fx.Node]) -> tuple[tuple[float, ...], dict[str, frozenset[int]]]:
        """Give nodes their cells; returns operations and places. `changed` are the values of assigned buffers."""
        index = {id(self._modules[name]): i for i, name in enumerate(self._blocks)}
        flops, places, cell = [0.0] * len(self._blocks), dict[str, set[int]](), -1
        fixed = {*changed.values(), *(self._state[k] for k in changed if k in self._state)}
        for node in self._graph.nodes:
            written = _memory(node) in self._writers
            node.meta |= {"cell": None, "end": None, "written": written}
            if node.op in ("get_attr", "placeholder"):
                # Buffers and inputs that change are values of the stage that uses them first.
                fixed |= {node} if written else set()
                continue
            for path in _modules_of(node):
                block = index.get(id(self._modules.get(path)), -1)
                if block > cell + 1:
                    raise ValueError(f"the blocks {[*self._blocks]} must run in their order")
                cell = max(cell, block)
            reads = [*node.meta["reads"], *(x.target for x in node.all_input_nodes if x.target in self._trained)]
            for name in reads:
                places.setdefault(name, set()).add(cell)
            flops[max(cell, 0)] += node.meta["flops"]
            for x in node.all_input_nodes:
                x.meta["cell"] = cell if x in fixed and x.meta["cell"] is None else x.meta["cell"]
            sources = [x for x in node.all_input_nodes if x.meta["cell"] is not None]
            draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if sources or reads or written or draws or node in fixed:
                node.meta["cell"] = cell
                for x in sources:
                    x.meta["end"] = cell
        if cell < len(self._blocks) - 1:
            raise ValueError(f"the blocks {[*self._blocks]} must run in their order, each of them")
        return tuple(flops), {k: frozenset(places.get(self._firsts[k], {-1})) for k in self._trained}


def _memory(node: fx.Node) -> fx.Node:
    """The node whose memory a node shares."""
    while True:
        returns = getattr(getattr(node.target, "_schema", None), "returns", ())
        if not any(r.alias_info for r in returns) and node.target is not operator.getitem:
            return node
        (node, *_) = node.all_input_nodes


def _flops(node: fx.Node) -> int:
    def meta(x: fx.Node) -> Any:
        return pytree.tree_map_only(Tensor, lambda v: torch.empty(v.shape, dtype=v.dtype, device="meta"), x.meta["val"])

    if len(node.all_input_nodes) < 2:
        return 0
    # Some operators need values.
    with FlopCounterMode(display=False) as counter, suppress(RuntimeError, NotImplementedError):
        target: Any = node.target
        target(*map_arg(node.args, meta), **map_arg(node.kwargs, meta))
    return counter.get_total_flops()
