"""Counts the operations and the stored and sent bytes of one rank in a p-net's forward, per block, on the meta device.

All layers run as in training, but a `DryWire` counts the bytes that tensor-parallel layers would send, and sends
nothing. Cell 0 is before the first block, cell i is block i (counted from 1), the last cell is after the last block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from gbfunc.layers.factored import FactoredWeight
from gbfunc.parallel.activations import MOVES, Activation, Move, Wire
from gbfunc.parallel.collectives import Sizes, sent_bytes
from gbfunc.parallel.tensor import TensorParallel
from gbfunc.plan import DTYPES, Plan, Slot
from gbfunc.pnet.pure import PureNet
from gbfunc.trees import tree_leaves

RunLoss = Callable[[Callable[..., Any], Any], Any]
"""A function `(net, batch)` that calls the p-net as the loss function does."""


@dataclass
class Cell:
    """The costs of a cell (a block, or all layers before or after the blocks) in the forward of one microbatch."""

    flops: float = 0.0  # Number of multiplications and additions
    moved: float = 0.0  # Bytes that operations read and write
    saved: float = 0.0  # Bytes of activations saved for backward, and of weights that a layer computes from factors
    sent: float = 0.0  # Bytes that a rank sends along the tensor axis in forward
    sent_back: float = 0.0  # Bytes that a rank sends along the tensor axis in backward
    messages: float = 0.0  # Number of collectives in forward and backward
    operators: float = 0.0  # Calls of torch's operators in forward
    largest: float = 0.0  # Bytes of the largest saved tensor
    weights: float = 0.0  # Bytes of generated weights or factors that are stored until the end of the step
    graph: float = 0.0  # Bytes that autograd saves when the stored weights are generated
    transient: float = 0.0  # Bytes of weights that each use generates again (`remat`), and of tensors saved for them
    passing: float = 0.0  # Bytes of `transient` for the largest weight; only one weight at a time is in memory
    generation: float = 0.0  # Operations to generate weights, in forward and backward


def total(cells: Iterable[Cell]) -> Cell:
    found = [vars(Cell()), *map(vars, cells)]
    return Cell(**{k: (max if k in ("largest", "passing") else sum)(x[k] for x in found) for k in found[0]})


class _FusedAttention(TorchFunctionMode):
    """Runs attention as one operator, as real devices do. On the meta device, torch would compute all scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            q, k, v = (*args, *(kwargs or {}).values())[:3]
            if q.ndim == 4 and q.shape[-1] == v.shape[-1]:
                return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]
        return func(*args, **(kwargs or {}))


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        return x.new_empty(shape)


class DryWire(Wire):
    """A `Wire` for meta tensors that sends nothing. Moves call `sent` with the bytes of their forward and backward."""

    sent: Callable[[float, float], None]

    def sizes_of(self, n: int) -> Sizes:
        return (n,) * self.axis.size

    def joined(self, x: Tensor, placement: Any, sizes: Sizes = ()) -> Tensor:
        """Return the plain tensor, because a DTensor needs a process group."""
        return x

    def move(self, x: Tensor, start: Activation, end: Activation, dim: int = 0, sizes: Sizes = ()) -> Tensor:
        (there, back), shape = MOVES[start, end], list(x.shape)
        if there not in ("keep", "all_reduce"):
            shape[dim] = sum(sizes) if there == "gather" else sizes[self.axis.rank]
        moved: Any = x.view_as(x) if there == "keep" else _Sent.apply(x, tuple(shape))
        self.sent(self._bytes(x, there, sizes), self._bytes(moved, back, sizes) if x.requires_grad else 0.0)
        return moved

    def _bytes(self, x: Tensor, move: Move, sizes: Sizes) -> float:
        if move in ("keep", "slice"):
            return 0.0
        # All-reduces send half precision as float32.
        dtype = torch.promote_types(x.dtype, torch.float32) if move == "all_reduce" else x.dtype
        return float(sent_bytes(move, x.numel() * dtype.itemsize, self.axis, sizes))


def factor_shapes(slot: Slot) -> tuple[tuple[int, ...], tuple[int, ...]]:
    grid, k = slot.grid, slot.hypernet.factor_width
    return (grid.n_tiles, grid.tile_rows, k), (grid.n_tiles, grid.tile_cols, k)


class DryRun(TorchDispatchMode):
    """Runs a p-net's forward as one rank does. A call with a microbatch returns the costs of every cell.

    `blocks` are the names of the blocks, in order. `tensor` splits layers over ranks with a `DryWire`. The attribute
    `forms` has the weights that layers apply as factors, `shapes` the shape of this rank's piece of each split weight.
    """

    def __init__(
        self, plan: Plan, pnet: nn.Module, blocks: Sequence[str], lazy: Any, tensor: TensorParallel | None = None
    ) -> None:
        super().__init__()
        self.forms: dict[str, FactoredWeight] = {}
        self.shapes = {} if tensor is None else tensor.shapes
        self._blocks, self._tensor = blocks, tensor
        if tensor is not None:
            wire: Any = tensor.wire
            wire.sent = self._send
        self._weights: dict[str, Tensor] = {}
        for t in plan.tensors:
            form = t.factored_form(plan.dtype, lazy) if t.is_formable(pnet) else None
            if form is None:
                dtype, shape = DTYPES[t.dtype], self.shapes.get(t.name, t.shape)
                grad = dtype.is_floating_point and (bool(t.slots) or pnet.get_parameter(t.name).requires_grad)
                self._weights[t.name] = torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)
                continue
            self.forms |= dict.fromkeys((t.name, *t.aliases), form)
            for key, (tiles, n, k) in zip(form.keys, factor_shapes(t.slots[0]), strict=False):
                # Rows are the last dimension in memory, as in factors of periodic g-nets. Another order adds copies.
                shape = len(t.slots) * tiles, k, n
                factor = torch.empty(shape, dtype=plan.dtype, device="meta").transpose(-1, -2)
                self._weights[key] = factor.requires_grad_()
        self._net = PureNet(pnet, self.forms, self._adapt)
        self._buffers = {n: torch.empty_like(b, device="meta") for n, b in pnet.named_buffers()}

    def __call__(self, run: RunLoss, batch: Any) -> list[Cell]:
        self._cells, self._at = [Cell() for _ in range(len(self._blocks) + 2)], 0
        inputs = [x for _, x in tree_leaves(batch) if isinstance(x, Tensor)]
        counted = {x.untyped_storage() for x in (*self._weights.values(), *self._buffers.values(), *inputs)}

        def pack(x: Tensor) -> Tensor:
            storage, cell = x.untyped_storage(), self._cells[self._at]
            n_bytes = 0 if storage in counted else storage.nbytes()
            counted.add(storage)
            cell.saved, cell.largest = cell.saved + n_bytes, max(cell.largest, n_bytes)
            return x

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
        with torch.enable_grad(), _FusedAttention(), hooks, self:
            self._net.run(self._weights, dict(self._buffers), run, batch)
        return self._cells

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out, flops = func(*args, **kwargs), flop_registry.get(func._overloadpacket)
        cell = self._cells[self._at]
        # Do not use torch's `FlopCounterMode`: its module hooks do not support a forward that calls `autograd.grad`.
        cell.flops += flops(*args, **kwargs, out_val=out) if flops else 0
        both: Any = (args, kwargs), out
        inputs, outputs = ([x for x in optree.tree_leaves(xs) if isinstance(x, Tensor)] for xs in both)
        if not {x.untyped_storage() for x in outputs} <= {x.untyped_storage() for x in inputs}:  # Not a view
            cell.moved += sum(x.nbytes for x in (*inputs, *outputs))
        cell.operators += 1
        return out

    def _adapt(self, net: nn.Module) -> Collection[str]:
        changed: Collection[str] = () if self._tensor is None else self._tensor.adapt(net)
        for i, name in enumerate(self._blocks, 1):
            block, after = net.get_submodule(name), len(self._blocks) + 1
            block.register_forward_pre_hook(lambda *_, i=i: setattr(self, "_at", i))
            block.register_forward_hook(lambda *_, after=after: setattr(self, "_at", after))
        return changed

    def _send(self, forward: float, backward: float) -> None:
        cell = self._cells[self._at]
        cell.sent += forward
        cell.sent_back += backward
        cell.messages += (forward > 0) + (backward > 0)
