"""The loss of a p-net as one graph of operators, recorded by `torch.export` as for `torch.distributed.pipelining`."""

from __future__ import annotations

import operator
import random
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from gbfunc.layers.install import layer_form
from gbfunc.parallel.chain import Chain, described, module_of
from gbfunc.pnet import copy_of, skeleton_of
from gbfunc.trees import tree_leaves, tree_map

_ATEN = torch.ops.aten
_LAYERS: dict[Any, tuple[int, int, int | None]] = {
    _ATEN.linear.default: (0, 1, 2),
    _ATEN.conv1d.default: (0, 1, 2),
    _ATEN.conv2d.default: (0, 1, 2),
    _ATEN.conv3d.default: (0, 1, 2),
    _ATEN.embedding.default: (1, 0, None),
    _ATEN.addmm.default: (1, 2, 0),
}
"""Operators that are the forward of a layer: where their input, weight and bias stand."""

_MODES: dict[str, tuple[Any, int]] = {
    "WrapWithSetGradEnabled": (torch.set_grad_enabled, 1),
    "WrapWithAutocast": (torch.autocast, 4),
}
"""Calls of a subgraph, by class, that torch records for a region in a mode: the mode, and how many arguments it has."""


class _Loss(nn.Module):
    """A loss function that takes and returns tensors only: first the buffers that the p-net assigns."""

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
    """Record the loss of a microbatch, `run(net, batch)`, without computing anything.

    Args:
        pnet: the p-net.
        blocks: names of the blocks.
        run: the loss function.
        batch: a microbatch. The shapes of its tensors, and all other values, are fixed in the graph.
        device: where the tensors are to be; None for that of the p-net.
        adapt: changes the copy of the p-net that is recorded.

    Raises:
        ValueError: for what cannot be recorded, and for blocks that do not run in their order.
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
        self._net, self._blocks, self._program, self._graph = net, blocks, program, fx.Graph()
        first: dict[Tensor, str] = {}
        named = (*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False))
        self._firsts = {name: first.setdefault(x, name) for name, x in named}
        self._state: dict[str, fx.Node] = {}
        self._writers: dict[fx.Node, list[fx.Node]] = {}

    def chain(self, assigned: list[str], leaves: list[Any], structure: Any) -> Chain:
        """The chain. `assigned` are buffers, whose values come first; in `leaves` the class stands for a tensor."""
        specs = self._program.graph_signature.output_specs
        outputs = self._copy(self._program.graph_module, self._inputs(), ())
        # Before torch 2.7, new values of buffers that change in place are outputs with the name of the buffer.
        changed = {self._firsts[s.target[4:]]: x for s, x in zip(specs, outputs, strict=True) if s.target is not None}
        values = (x for s, x in zip(specs, outputs, strict=True) if s.target is None)
        changed |= {self._firsts[name]: next(values) for name in assigned}
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
        return Chain((*self._blocks,), flops, places, [*self._graph.nodes], changes, (returned, structure))

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
        path, layer = module_of(node), self._module(module_of(node))
        if node.target not in _LAYERS or layer is None or layer_form(layer) is None:
            return node
        x, *places = _LAYERS[node.target]
        own = [self._firsts.get(f"{path}.{name}") for name in ("weight", "bias")]
        given = [node.args[i] if i is not None and i < len(node.args) else None for i in places]
        hooked = layer._forward_hooks or layer._forward_pre_hooks
        if (
            [getattr(g, "target", g) for g in given] != own
            or hooked
            or getattr(layer, "padding_mode", "zeros") != "zeros"
        ):
            return node
        call = self._graph.call_module(path, (node.args[x],))
        call.meta = {**node.meta, "reads": [name for name in own if name is not None]}
        self._graph.erase_node(node)
        return call

    def _module(self, path: str) -> Any:
        """A module of the net; None for a path that the net does not know, such as a slice of a list."""
        with suppress(AttributeError):
            return self._net.get_submodule(path)
        return None

    def _find_cells(self, changed: dict[str, fx.Node]) -> tuple[tuple[float, ...], dict[str, frozenset[int]]]:
        """Give nodes their cells; returns operations and places. `changed` are the values of assigned buffers."""
        index = {id(self._net.get_submodule(name)): i for i, name in enumerate(self._blocks)}
        parameters = dict(self._net.named_parameters(remove_duplicate=False))
        flops, places, cell = [0.0] * len(self._blocks), dict[str, set[int]](), -1
        fixed = {*changed.values(), *(self._state[k] for k in changed if k in self._state)}
        for node in self._graph.nodes:
            written = _memory(node) in self._writers
            node.meta |= {"cell": None, "end": None, "written": written}
            if node.op in ("get_attr", "placeholder"):
                # Buffers and inputs that change are values of the stage that uses them first.
                fixed |= {node} if written else set()
                continue
            for path, *_ in (node.meta.get("nn_module_stack") or {}).values():
                block = index.get(id(self._module(path.removeprefix("net").removeprefix("."))), -1)
                if block > cell + 1:
                    raise ValueError(f"the blocks {[*self._blocks]} must run in their order")
                cell = max(cell, block)
            reads = [*node.meta["reads"], *(x.target for x in node.all_input_nodes if x.target in parameters)]
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
        return tuple(flops), {k: frozenset(places.get(self._firsts[k], {-1})) for k in parameters}


def _memory(node: fx.Node) -> fx.Node:
    """The node whose memory a node shares."""
    while True:
        returns = getattr(getattr(node.target, "_schema", None), "returns", ())
        if not any(r.alias_info for r in returns) and node.target is not operator.getitem:
            return node
        (node, *_) = node.all_input_nodes


def _flops(node: fx.Node) -> int:
    """Multiplications and additions of an operator, as torch counts them."""

    def meta(x: fx.Node) -> Any:
        return pytree.tree_map_only(Tensor, lambda v: torch.empty(v.shape, dtype=v.dtype, device="meta"), x.meta["val"])

    if len(node.all_input_nodes) < 2:
        return 0
    # Some operators need values.
    with FlopCounterMode(display=False) as counter, suppress(RuntimeError, NotImplementedError):
        target: Any = node.target
        target(*map_arg(node.args, meta), **map_arg(node.kwargs, meta))
    return counter.get_total_flops()
