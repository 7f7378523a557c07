"""A rank's share of a p-net's forward on the meta device: operations, saved activations and bytes sent, by block.

It runs the layers' own code, tensor-parallel ones included, with a wire that counts and sends nothing; so what the
planner says of a layer is what the layer does.

A *cell* is a block, or what comes before the first one (cell 0), or after the last one (the last cell). Of equal
blocks the first one runs, and the others cost the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from gbfunc.layers.factored import FactoredWeight
from gbfunc.parallel.activations import Move, Wire
from gbfunc.parallel.collectives import Sizes
from gbfunc.plan import DTYPES, Plan, TensorPlan, factored_form, is_formable
from gbfunc.pnet import PureNet
from gbfunc.trees import tree_leaves

if TYPE_CHECKING:
    from gbfunc.parallel.tensor import TensorParallel

RunLoss = Callable[[Callable[..., Any], Any], Any]
"""`(net, batch)`: calls the p-net as the loss function does."""


@dataclass
class Cell:
    """What a part of the p-net costs for one microbatch, forward (backward takes the same operations twice).

    Attributes:
        flops: multiplications and additions.
        moved: bytes that operations read and write.
        saved: bytes kept for backward, weights left out.
        formed: bytes of dense weights that layers form from factors, and keep for backward.
        sent: bytes that a rank sends along the tensor axis in forward.
        sent_back: the same in backward.
        messages: collectives, forward and backward.
        operators: calls of torch's operators in forward.
        largest: bytes of the largest tensor that is kept.
    """

    flops: float = 0.0
    moved: float = 0.0
    saved: float = 0.0
    formed: float = 0.0
    sent: float = 0.0
    sent_back: float = 0.0
    messages: float = 0
    operators: float = 0
    largest: float = 0.0


class _Fused(torch.autograd.Function):
    """Attention as a fused kernel computes it: it keeps its inputs, its output, and a number per query."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        total = q.new_empty(q.shape[:-1], dtype=torch.float32)
        # The heads of a position next to each other, as the kernel of the CPU leaves them.
        lead, heads, length = q.shape[:-3], q.shape[-3], q.shape[-2]
        out = q.new_empty(*lead, length, heads, v.shape[-1]).transpose(-2, -3)
        ctx.save_for_backward(q, k, v, out, total)
        return out


class _Sent(torch.autograd.Function):
    """A tensor as it is after a collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        return x.new_empty(shape)


class _Meter(TorchDispatchMode):
    """Counts operations and saved tensors into the cell of the block that runs."""

    def __init__(self, n_blocks: int) -> None:
        super().__init__()
        self.cells = [Cell() for _ in range(n_blocks + 2)]
        self.at = 0
        # Of every kind of block that has run, its cell and its output.
        self.seen: dict[Any, tuple[int, Any]] = {}
        self.same = list(range(n_blocks + 2))
        # Storages stay alive, so that no other gets their address.
        self.kept: dict[int, tuple[Any, int]] = {}

    @property
    def cell(self) -> Cell:
        """Of what runs now."""
        return self.cells[self.at]

    def keep(self, x: Tensor, at: int) -> None:
        """A tensor is kept for backward; in no cell (-1) are weights, buffers and the batch."""
        storage = x.untyped_storage()
        self.kept.setdefault(storage._cdata, (storage, at))

    def finish(self, formed: set[int]) -> list[Cell]:
        """The cells, saved storages counted, those of `formed` weights apart."""
        for key, (storage, at) in self.kept.items():
            if at >= 0:
                cell, n = self.cells[at], storage.nbytes()
                if key in formed:
                    cell.formed += n
                else:
                    cell.saved, cell.largest = cell.saved + n, max(cell.largest, n)
        return [self.cells[i] for i in self.same]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.cell.operators += 1
        flops = flop_registry.get(func._overloadpacket)
        if flops is not None:
            self.cell.flops += flops(*args, **kwargs, out_val=out)
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        made = [x for x in (out if isinstance(out, list | tuple) else (out,)) if isinstance(x, Tensor)]
        places = {x.untyped_storage()._cdata for x in given}
        if any(x.untyped_storage()._cdata not in places for x in made):  # Views move nothing.
            self.cell.moved += sum(x.nbytes for x in (*given, *made))
        return out


class _Attention(TorchFunctionMode):
    """Fused attention in the place of the products that the meta device has for it."""

    def __init__(self, meter: _Meter) -> None:
        super().__init__()
        self.meter = meter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function."""
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, k, v = (*args, *(kwargs or {}).values())[:3]
        self.meter.cell.flops += 2 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])
        out: Any = _Fused.apply(q, k, v)
        return out


class DryWire(Wire):
    """Activations between ranks of the meta device: bytes are counted, and nothing is sent."""

    count: Callable[[float, float], None]

    def sizes_of(self, n: int) -> Sizes:
        """How long a tensor is on each rank, all alike."""
        return (n,) * self.axis.size

    def move(self, x: Tensor, there: Move, back: Move, dim: int = 0, sizes: Sizes = ()) -> Tensor:
        """A tensor as it is after a move."""
        shape = list(x.shape)
        if there not in ("keep", "all_reduce"):
            shape[dim] = sum(sizes) if there == "gather" else sizes[self.axis.rank]
        moved: Any = x.view_as(x) if there == "keep" else _Sent.apply(x, tuple(shape))
        mine = sizes[self.axis.rank] / max(1, sum(sizes)) if sizes else 0.0
        self.count(self._bytes(x, there, mine), self._bytes(moved, back, mine) if x.requires_grad else 0.0)
        return moved

    def _bytes(self, x: Tensor, move: Move, mine: float) -> float:
        """Bytes that a rank sends, with this part of the tensor on it."""
        if move == "all_reduce":
            wide = torch.promote_types(x.dtype, torch.float32).itemsize
            return float(2 * x.numel() * wide * (self.axis.size - 1) // self.axis.size)
        return x.nbytes * {"gather": self.axis.size - 1.0, "reduce_scatter": 1 - mine}.get(move, 0.0)


def factor_shapes(tensor: TensorPlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of a tensor's left and right factors."""
    grid, k = tensor.slots[0].grid, tensor.slots[0].hypernet.factor_width
    lead = (len(tensor.slots) * grid.n_rows, grid.n_cols)
    return (*lead, grid.tile_rows, k), (*lead, grid.tile_cols, k)


def _meta(shape: tuple[int, ...], dtype: torch.dtype, trained: bool) -> Tensor:
    x: Any = torch.empty(shape, dtype=dtype, device="meta", requires_grad=trained)
    x.to_local = lambda: x  # What a layer asks of a DTensor.
    return x


class DryRun:
    """A rank's share of a p-net's forward: called with a microbatch, it gives what that costs, by cell.

    Args:
        plan: the plan.
        pnet: the p-net, on any device.
        blocks: names of the p-net's blocks, in their order, with their kinds: what is equal for equal blocks.
        lazy: as for `make_train_step`.
        tensor: the pieces of the layers, of a mesh without process group.

    Attributes:
        forms: of the weights that stay factors, by name.
        shapes: of pieces of parameters.
        aux: numbers that the loss function returned beside the loss.
    """

    def __init__(
        self,
        plan: Plan,
        pnet: nn.Module,
        blocks: Mapping[str, Any],
        *,
        lazy: Any = "auto",
        tensor: TensorParallel | None = None,
    ) -> None:
        self.forms: dict[str, FactoredWeight] = {}
        self.shapes = tensor.shapes if tensor is not None else {}
        self.aux = 0
        self._blocks, self._tensor, self._meter = blocks, tensor, _Meter(len(blocks))
        self._weights: dict[str, Tensor] = {}
        trained = {name: p.requires_grad for name, p in pnet.named_parameters()}
        for t in plan.tensors:
            form = factored_form(t, plan.dtype, lazy) if is_formable(t, pnet) else None
            if form is not None:
                self.forms |= dict.fromkeys((t.name, *t.aliases), form)
                sides = zip(form.keys, factor_shapes(t), strict=False)
                self._weights |= {key: _meta(shape, plan.dtype, True) for key, shape in sides}
            else:
                dtype = DTYPES[t.dtype]
                grad = dtype.is_floating_point and (bool(t.slots) or trained[t.name])
                self._weights[t.name] = _meta(self.shapes.get(t.name, t.shape), dtype, grad)
        self._net = PureNet(pnet, self.forms, self._adapt)
        self._buffers = {n: torch.empty_like(b, device="meta") for n, b in pnet.named_buffers()}

    def __call__(self, run: RunLoss, batch: Any) -> list[Cell]:
        """Costs of a microbatch on the meta device; `run` calls the p-net as the loss function does."""
        meter = self._meter = _Meter(len(self._blocks))
        inputs = [x for _, x in tree_leaves(batch) if isinstance(x, Tensor)]
        for x in (*self._weights.values(), *self._buffers.values(), *inputs):
            meter.keep(x, -1)
        call = next(iter(self.forms.values())).call if self.forms else None
        formed: dict[str, Tensor] = {}

        def pack(x: Tensor) -> Tensor:
            formed.update(call.cache or {} if call is not None else {})
            meter.keep(x, meter.at)
            return x

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
        with torch.enable_grad(), _Attention(meter), hooks, meter:
            out = self._net.run(self._weights, dict(self._buffers), run, batch)
        pair = isinstance(out, tuple) and len(out) == 2
        self.aux = sum(isinstance(x, Tensor | int | float) for _, x in tree_leaves(out[1])) if pair else 0
        return meter.finish({x.untyped_storage()._cdata for x in formed.values()})

    def _adapt(self, net: nn.Module) -> frozenset[str]:
        changed: frozenset[str] = frozenset()
        if self._tensor is not None:
            wire = DryWire(*self._tensor.wire)
            wire.count = self._count
            splits = self._tensor._splits
            splits.update({name: split._replace(wire=wire, local=True) for name, split in splits.items()})
            changed = self._tensor.adapt(net)
        for i, name in enumerate(self._blocks):
            block = net.get_submodule(name)
            block.__dict__["forward"] = self._staged(i, block.forward)
        return changed

    def _count(self, forward: float, backward: float) -> None:
        cell = self._meter.cell
        cell.sent, cell.sent_back = cell.sent + forward, cell.sent_back + backward
        cell.messages += (forward > 0) + (backward > 0)

    def _staged(self, i: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A block's forward, in its cell; the output of an equal block where there was one."""
        kind = [*self._blocks.values()][i]

        def staged(*args: Any, **kwargs: Any) -> Any:
            meter, given = self._meter, [x for _, x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            key = kind, *((tuple(x.shape), x.dtype) for x in given)
            if key not in meter.seen:
                meter.at = i + 1
                meter.seen[key] = meter.at, forward(*args, **kwargs)
            meter.same[i + 1], out = meter.seen[key]
            meter.at = len(self._blocks) + 1
            return out

        return staged
