"""A rank's share of a p-net's forward on the meta device: operations, saved activations and bytes sent, by block.

The layers' own code runs, tensor-parallel ones included, with a wire that counts and sends nothing; so what the
planner says of a layer is what the layer does. A *cell* is a block, or what comes before the first one (cell 0) or
after the last one (the last cell). Of equal blocks the first one runs, and the others cost the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gbfunc.layers.factored import FactoredWeight
from gbfunc.parallel.absent import flops_of
from gbfunc.parallel.activations import MOVES, Activation, Move, Wire
from gbfunc.parallel.collectives import Sizes, sent_bytes
from gbfunc.plan import DTYPES, Plan, TensorPlan
from gbfunc.pnet import RunnableNet
from gbfunc.trees import tree_leaves

if TYPE_CHECKING:
    from gbfunc.parallel.tensor import TensorParallel

RunLoss = Callable[[Callable[..., Any], Any], Any]
"""`(net, batch)`: calls the p-net as the loss function does."""


@dataclass
class Cell:
    """What a part of the p-net costs for one microbatch, forward (backward takes the same operations twice)."""

    flops: float = 0.0  # Multiplications and additions
    moved: float = 0.0  # Bytes that operations read and write
    saved: float = 0.0  # Bytes kept for backward, weights left out
    formed: float = 0.0  # Bytes of dense weights that layers form from factors, and keep for backward
    sent: float = 0.0  # Bytes that a rank sends along the tensor axis in forward
    sent_back: float = 0.0  # The same in backward
    messages: float = 0  # Collectives, forward and backward
    operators: float = 0  # Calls of torch's operators in forward
    largest: float = 0.0  # Bytes of the largest tensor that is kept


class _FusedAttention(TorchFunctionMode):
    """Attention by the fused operator, in the place of the products that the meta device has for it."""

    def __init__(self, count: Callable[[int], None]) -> None:
        super().__init__()
        self._count = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            q, k, v = (*args, *(kwargs or {}).values())[:3]
            if q.ndim == 4 and q.shape[-1] == v.shape[-1]:
                self._count(4 * q.numel() * k.shape[-2])
                return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]
        return func(*args, **(kwargs or {}))


class _Sent(torch.autograd.Function):
    """A tensor as it is after a collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        return x.new_empty(shape)


class DryWire(Wire):
    """Activations between ranks of the meta device: `sent(forward, backward)` gets the bytes, and nothing is sent."""

    sent: Callable[[float, float], None]

    def sizes_of(self, n: int) -> Sizes:
        """How long a tensor is on each rank, all alike."""
        return (n,) * self.axis.size

    def joined(self, x: Tensor, placement: Any, sizes: Sizes = ()) -> Tensor:
        """A plain tensor: a DTensor needs a process group."""
        return x

    def move(self, x: Tensor, start: Activation, end: Activation, dim: int = 0, sizes: Sizes = ()) -> Tensor:
        """A tensor as it is after a move."""
        (there, back), shape = MOVES[start, end], list(x.shape)
        if there not in ("keep", "all_reduce"):
            shape[dim] = sum(sizes) if there == "gather" else sizes[self.axis.rank]
        moved: Any = x.view_as(x) if there == "keep" else _Sent.apply(x, tuple(shape))
        self.sent(self._bytes(x, there, sizes), self._bytes(moved, back, sizes) if x.requires_grad else 0.0)
        return moved

    def _bytes(self, x: Tensor, move: Move, sizes: Sizes) -> float:
        """Bytes that a rank sends, of narrow numbers that are summed those of wide ones."""
        if move in ("keep", "slice"):
            return 0.0
        wide = torch.promote_types(x.dtype, torch.float32) if move == "all_reduce" else x.dtype
        return float(sent_bytes(move, x.numel() * wide.itemsize, self.axis, sizes))


def factor_shapes(tensor: TensorPlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of a tensor's left and right factors."""
    grid, k = tensor.slots[0].grid, tensor.slots[0].hypernet.factor_width
    tiles = len(tensor.slots) * grid.n_tiles
    return (tiles, grid.tile_rows, k), (tiles, grid.tile_cols, k)


class DryRun(TorchDispatchMode):
    """A rank's share of a p-net's forward: called with a microbatch, it gives what that costs, by cell.

    `blocks` has the names of the p-net's blocks, in their order, with the first of each kind, which is there for all of
    it; `tensor` the pieces of the layers, on a `DryWire`. Known are then the `forms` of weights that stay factors, the
    `shapes` of pieces, and `aux`, how many numbers the loss function returned beside the loss.
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
        super().__init__()
        self.forms: dict[str, FactoredWeight] = {}
        self.shapes = {} if tensor is None else tensor.shapes
        self.aux, self._blocks, self._tensor = 0, blocks, tensor
        self._weights: dict[str, Tensor] = {}
        trained = {name: p.requires_grad for name, p in pnet.named_parameters()}
        for t in plan.tensors:
            if t.name not in trained:
                continue
            form = t.factored_form(plan.dtype, lazy) if t.is_formable(pnet) else None
            if form is None:
                dtype, shape = DTYPES[t.dtype], self.shapes.get(t.name, t.shape)
                grad = dtype.is_floating_point and (bool(t.slots) or trained[t.name])
                self._weights[t.name] = torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)
            else:
                self.forms |= dict.fromkeys((t.name, *t.aliases), form)
                for key, (*lead, n, k) in zip(form.keys, factor_shapes(t), strict=False):
                    # Rows last in memory, as sines are made: layers' products then read views of them.
                    factor = torch.empty((*lead, k, n), dtype=plan.dtype, device="meta").transpose(-1, -2)
                    self._weights[key] = factor.requires_grad_()
        self._net = RunnableNet(pnet, self.forms, self._adapt)
        # What a first call checks, training checks.
        self._net.compiled = True
        self._buffers = {n: torch.empty_like(b, device="meta") for n, b in pnet.named_buffers()}

    def __call__(self, run: RunLoss, batch: Any) -> list[Cell]:
        """Costs of a microbatch on the meta device; `run` calls the p-net as the loss function does."""
        n = len(self._blocks) + 2
        self._cells, self._same, self._at, self._blocks_run = [Cell() for _ in range(n)], list(range(n)), 0, 0
        # Of every kind of block that has run, its cell and its output.
        self._seen: dict[Any, tuple[int, Any]] = {}
        # Storages with their cells, alive so that no other gets their address. Weights, buffers, batch are in none.
        inputs = [x for _, x in tree_leaves(batch) if isinstance(x, Tensor)]
        known = {x.untyped_storage()._cdata for x in (*self._weights.values(), *self._buffers.values(), *inputs)}
        kept: dict[int, tuple[Any, int]] = {}
        formed: dict[str, Tensor] = {}
        call = next(iter(self.forms.values())).call if self.forms else None

        def pack(x: Tensor) -> Tensor:
            formed.update(call.cache or {} if call is not None else {})
            storage = x.untyped_storage()
            if storage._cdata not in known:
                kept.setdefault(storage._cdata, (storage, self._at))
            return x

        def count(flops: int) -> None:
            self._cells[self._at].flops += flops

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
        with torch.enable_grad(), _FusedAttention(count), hooks, self:
            out = self._net.run(self._weights, dict(self._buffers), run, batch)
        pair = isinstance(out, tuple) and len(out) == 2
        self.aux = sum(isinstance(x, Tensor | int | float) for _, x in tree_leaves(out[1])) if pair else 0
        weights = {x.untyped_storage()._cdata for x in formed.values()}
        for key, (storage, at) in kept.items():
            cell, n_bytes = self._cells[at], storage.nbytes()
            if key in weights:
                cell.formed += n_bytes
            else:
                cell.saved, cell.largest = cell.saved + n_bytes, max(cell.largest, n_bytes)
        return [self._cells[i] for i in self._same]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count it."""
        cell, kwargs = self._cells[self._at], kwargs or {}
        out = func(*args, **kwargs)
        cell.operators += 1
        cell.flops += flops_of(func, args, kwargs, out)
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        made = [x for x in (out if isinstance(out, list | tuple) else (out,)) if isinstance(x, Tensor)]
        places = {x.untyped_storage()._cdata for x in given}
        if any(x.untyped_storage()._cdata not in places for x in made):  # Views move nothing.
            cell.moved += sum(x.nbytes for x in (*given, *made))
        return out

    def _adapt(self, net: nn.Module) -> Collection[str]:
        changed: Collection[str] = ()
        if self._tensor is not None:
            wire: Any = self._tensor.wire
            wire.sent = self._sent
            changed = self._tensor.adapt(net)
        for name in {*self._blocks.values()}:
            block = net.get_submodule(name)
            block.__dict__["forward"] = self._in_cell(name, block.forward)
        return changed

    def _sent(self, forward: float, backward: float) -> None:
        cell = self._cells[self._at]
        cell.sent, cell.sent_back = cell.sent + forward, cell.sent_back + backward
        cell.messages += (forward > 0) + (backward > 0)

    def _in_cell(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A block's forward, in its cell; the output of an equal block where there was one."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._blocks_run += 1  # They run in their order, each once.
            at, given = self._blocks_run, [x for _, x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            key = name, *((tuple(x.shape), x.dtype) for x in given)
            if key not in self._seen:
                self._at = at
                self._seen[key] = at, forward(*args, **kwargs)
            self._same[at], out = self._seen[key]
            self._at = len(self._blocks) + 1
            return out

        return run
